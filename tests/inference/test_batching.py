"""The queue in front of the model: what is computed together, for whom, and what happens if something fails."""

import queue
import threading
import time
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax.inference.serving.batching import ROUND, Batcher, QueueFullError


class Model:
    """Computes task + item; `gate` holds it, `rounds` records what it got. The item "wrong" fails."""

    def __init__(self):
        self.rounds, self.gate, self.entered = [], threading.Event(), threading.Event()
        self.gate.set()

    def compute(self, task, items):
        self.rounds.append((task, list(items)))
        self.entered.set()
        self.gate.wait(20)
        for i in reversed(range(len(items))):
            if items[i] == "wrong":
                raise ValueError("wrong")
            if items[i] != "nothing":
                yield i, f"{task}{items[i]}"


@pytest.fixture
def model():
    return Model()


@pytest.fixture
def batcher(model):
    batcher = Batcher(model.compute, 0.0, 1000)
    yield batcher
    model.gate.set()
    batcher.close()


def submit(batcher, task, items):
    results = queue.Queue()
    request = batcher.submit(task, items, lambda i, result: results.put((i, result)))
    return request, results


def received(results, number):
    return dict(results.get(timeout=20) for _ in range(number))


def busy(batcher, model):
    """Hold the thread in a round, so that what follows waits."""
    model.gate.clear()
    model.entered.clear()
    submit(batcher, "busy", ["x"])
    assert model.entered.wait(20)


REQUESTS = st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.sampled_from(["1", "2", "wrong", "nothing"]))))


@given(REQUESTS)
def test_every_item_gets_its_result_once(requests):
    batcher = Batcher(Model().compute, 0.0, 10_000)
    waiting = [(task, items, submit(batcher, task, items)[1]) for task, items in requests]
    batcher.close()
    for task, items, results in waiting:
        assert results.qsize() == len(items)
        for i, result in received(results, len(items)).items():
            expected = {"wrong": "wrong", "nothing": "None"}.get(items[i], f"{task}{items[i]}")
            assert str(result) == expected


def test_requests_that_wait_are_computed_together_by_task(batcher, model):
    busy(batcher, model)
    first, other, second = (submit(batcher, task, items)[1] for task, items in (("a", "12"), ("b", "3"), ("a", "4")))
    model.gate.set()
    assert received(first, 2) == {0: "a1", 1: "a2"}
    assert received(other, 1) == {0: "b3"}
    assert received(second, 1) == {0: "a4"}
    assert [(task, sorted(items)) for task, items in model.rounds[1:]] == [("a", ["1", "2", "4"]), ("b", ["3"])]


def test_a_long_request_does_not_delay_a_short_one(batcher, model):
    busy(batcher, model)
    submit(batcher, "a", [str(i) for i in range(4 * ROUND)])
    _, short = submit(batcher, "a", ["short"])
    _, other = submit(batcher, "b", ["other"])
    model.gate.set()
    received(short, 1)
    received(other, 1)
    names = [("short" in items, "other" in items) for _, items in model.rounds[1:]]
    assert names.index((True, False)) == 0
    assert names.index((False, True)) == 1
    assert all(len(items) <= ROUND for _, items in model.rounds)


def test_an_idle_thread_waits_for_others(model):
    batcher = Batcher(model.compute, 0.5, 100)
    begin = time.monotonic()
    results = [submit(batcher, "a", [name])[1] for name in "123"]
    assert [*map(len, (received(result, 1) for result in results))] == [1, 1, 1]
    assert 0.4 < time.monotonic() - begin < 10
    assert Counter(len(items) for _, items in model.rounds) == {3: 1}
    batcher.close()


def test_a_full_queue_refuses(batcher, model):
    busy(batcher, model)
    submit(batcher, "a", ["x"] * 1000)
    with pytest.raises(QueueFullError) as refused:
        submit(batcher, "a", ["x"])
    assert refused.value.seconds > 0
    assert batcher.waiting == 1000


def test_what_is_cancelled_is_not_computed(batcher, model):
    busy(batcher, model)
    cancelled, results = submit(batcher, "a", ["x"] * 100)
    _, others = submit(batcher, "a", ["1"])
    batcher.cancel(cancelled)
    assert batcher.waiting == 1
    model.gate.set()
    assert received(others, 1) == {0: "a1"}
    assert results.empty()
    assert model.rounds[1:] == [("a", ["1"])]


def test_a_round_that_nobody_waits_for_ends(model):
    computed = []

    def compute(task, items):
        for i in range(len(items)):
            computed.append(i)
            yield i, i

    batcher = Batcher(compute, 0.0, 100)
    requests = []

    def deliver(i, result):
        batcher.cancel(requests[0])

    with batcher._changed:  # so that the request is known before it is computed
        requests.append(batcher.submit("a", range(50), deliver))
    batcher.close()
    assert computed == [0]
