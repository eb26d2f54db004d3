"""A queue of requests, and the thread that computes what they ask for, in batches of several requests."""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

ROUND = 128  # items per round: a request waits at most for one round of others before some of its items are computed

# (task, items) -> (index, result) of each item, in any order; an item may have no result
Compute = Callable[[Any, Sequence[Any]], Iterator[tuple[int, Any]]]
Deliver = Callable[[int, Any], None]  # receives (index of an item, its result or exception), on the thread


class QueueFullError(Exception):
    """More items wait than the queue may hold; `seconds` estimates when it is empty."""

    def __init__(self, seconds: float):
        super().__init__("too many sentences wait; try again later")
        self.seconds = seconds


@dataclass(eq=False)
class Request:
    """Items of one task, whose results are delivered one by one."""

    task: Hashable
    items: Sequence[Any]
    deliver: Deliver
    started: int = 0  # items that are computed, or were
    cancelled: bool = False

    @property
    def waiting(self) -> int:
        """Items that are not started."""
        return len(self.items) - self.started


@dataclass
class Batcher:
    """Computes the items of requests on a thread of its own.

    A round has at most `ROUND` items of one task. It takes one item of each waiting request in turn, so that a long
    request does not delay short ones. If it would have fewer, the thread waits `window` seconds first: clients whose
    items the last round finished often come back at once.
    """

    compute: Compute
    window: float
    capacity: int  # items that may wait
    observe: Callable[[int, float], None] = lambda size, seconds: None  # (items, seconds) of each round
    _requests: deque[Request] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False
    _rate: float = 10.0  # items per second of late

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Items that are not started."""
        return sum(request.waiting for request in self._requests)

    def submit(self, task: Hashable, items: Sequence[Any], deliver: Deliver) -> Request:
        """Queue a request. Raises: QueueFullError."""
        request = Request(task, items, deliver)
        with self._changed:
            if self.waiting + len(items) > self.capacity:
                raise QueueFullError(self.waiting / self._rate)
            if items:
                self._requests.append(request)
                self._changed.notify()
        return request

    def cancel(self, request: Request) -> None:
        """Drop the items of a request that are not started, and deliver nothing more."""
        with self._changed:
            request.cancelled = True
            if request in self._requests:
                self._requests.remove(request)

    def close(self) -> None:
        """Compute what waits, then end the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._requests or self._closed)
                self._changed.wait_for(lambda: self._closed or self.waiting >= ROUND, self.window)
                if not self._requests and self._closed:
                    return
                chosen = self._next_round()
            if chosen:
                begin = time.monotonic()
                self._compute_round(chosen)
                seconds = max(time.monotonic() - begin, 1e-3)
                self._rate += 0.2 * (len(chosen) / seconds - self._rate)
                self.observe(len(chosen), seconds)

    def _next_round(self) -> list[tuple[Request, int]]:
        """(request, index of the item) of the next round: the task that has waited longest."""
        chosen: list[tuple[Request, int]] = []
        if not self._requests:
            return chosen
        same = [request for request in self._requests if request.task == self._requests[0].task]
        while same and len(chosen) < ROUND:
            for request in same[: ROUND - len(chosen)]:
                chosen.append((request, request.started))
                request.started += 1
            same = [request for request in same if request.waiting]
        served = {id(request) for request, _ in chosen}
        rest = [request for request in self._requests if request.waiting]
        self._requests = deque(sorted(rest, key=lambda request: id(request) in served))
        return chosen

    def _compute_round(self, chosen: list[tuple[Request, int]]) -> None:
        missing = dict(enumerate(chosen))
        try:
            for i, result in self.compute(chosen[0][0].task, [request.items[index] for request, index in chosen]):
                _deliver(*missing.pop(i), result)
                if all(request.cancelled for request, _ in missing.values()):
                    return
        except Exception as error:
            if len(chosen) == 1:
                _deliver(*chosen[0], error)
                return
            for request, index in missing.values():  # alone, so that one wrong item fails alone
                if not request.cancelled:
                    self._compute_round([(request, index)])
            return
        for request, index in missing.values():
            _deliver(request, index, None)


def _deliver(request: Request, index: int, result: Any) -> None:
    if not request.cancelled:
        request.deliver(index, result)
