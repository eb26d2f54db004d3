"""The server beside process 0, to which the supervisors of all processes are connected.

It lets a run begin when all processes are there and of one version, passes a barrier when all have reached it with the
same value, and ends the run if one process fails, is silent, or falls behind the others. Messages are lines of JSON.
"""

import asyncio
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

HEARTBEAT = 5.0  # seconds between the messages that each side sends in any case
SILENCE = 25.0  # seconds without a message after which a process counts as lost
UNRESPONSIVE = 40.0  # seconds in which a process must show that its threads run
BEHIND = 40.0  # seconds that a process may need for a piece of work that another has finished
GATHERING = 300.0  # seconds in which all processes must connect
PATIENCE = 3.0  # seconds until a line says who is waited for
_TOGETHER = 2.0  # seconds to wait for failures that follow from the first
_HIDDEN = 15.0  # seconds to wait for the cause of a communication error: gloo times out before a hang is detected

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """The message as a line."""
    return json.dumps(message).encode() + b"\n"


@dataclass(order=True)
class Failure:
    """Why a run ends. The first of the smallest rank is the cause of the others."""

    rank: int  # 0: on its own; 1: an error in communication, which another process may have caused
    time: float
    line: str = field(compare=False)
    culprit: int = field(compare=False)  # process id; -1: no single one


@dataclass
class _Member:
    """A process that is connected."""

    id: int
    host: str
    pid: int
    writer: asyncio.StreamWriter
    heard: float  # time of the last message of its supervisor
    ran: float  # time of its own last message
    position: int = 0  # number of the pieces of work that it has begun
    since: float = 0.0  # time when it began the last one
    work: str = "starting"
    failed: bool = False
    ended: bool = False  # whether it has finished, or failed for a reason of its own


class Hub:
    """The state of all processes of a run."""

    def __init__(self, count: int, versions: Mapping[str, str], say: Any):
        self.count, self.versions, self._say = count, versions, say
        self.members: dict[int, _Member] = {}
        self.finished = asyncio.Event()  # all processes have ended, well or not
        self._failures: list[Failure] = []
        self._values: dict[str, dict[int, Any]] = {}  # name of a barrier -> process -> its value
        self._tasks: set[asyncio.Task[None]] = set()
        self._jax_port = _free_port()

    async def start(self, port: int) -> None:
        """Listens. Raises: OSError if the port is in use."""
        self._server = await asyncio.start_server(self._serve, port=port, reuse_address=True)
        self._task(self._watch())

    def _task(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        member = None
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if member is None:
                    member = self._join(message, writer)
                    if member is None:
                        while await reader.read(1 << 16):  # closing with unread input would discard what was written
                            pass
                        return
                else:
                    self._receive(member, message)
        except (ValueError, KeyError, TypeError, ConnectionError, asyncio.CancelledError):
            pass  # not a process of a run, or one whose connection is lost, or this one ends
        finally:
            if member is not None and not member.ended:
                self._fail(member, "its connection is lost: the machine, its network or its supervisor has failed")
            with suppress(ConnectionError):
                writer.close()

    def _join(self, hello: Message, writer: asyncio.StreamWriter) -> _Member | None:
        """Add a process. One that cannot belong to the run is refused; before the run has begun, that ends it."""
        member = _Member(hello["id"], hello["host"], hello["pid"], writer, time.monotonic(), time.monotonic())
        if (problem := self._problem(member, hello)) is None:
            self.members[member.id] = member
            if len(self.members) == self.count:
                self._send_all({"begin": self._jax_port})
            return member
        writer.write(encode({"end": problem, "culprit": member.id}))
        if len(self.members) < self.count:
            self._failures.append(Failure(0, time.monotonic(), problem, member.id))
            self._task(self._end())
        return None

    def _problem(self, member: _Member, hello: Message) -> str | None:
        if (other := self.members.get(member.id)) is not None:
            places = f"pid {other.pid} on {other.host} and pid {member.pid} on {member.host}"
            return f"--process-id {member.id}: is used twice, by {places}; give each process its own number"
        if hello["count"] != self.count or not 0 <= member.id < self.count:
            return f"{self._name(member)}: has --num-processes {hello['count']}, but process 0 has {self.count}"
        for name, version in self.versions.items():
            if (its := hello["versions"].get(name)) != version:
                return f"{self._name(member)}: has {name} {its}, but process 0 has {version}; install one version"
        return None

    def _receive(self, member: _Member, message: Message) -> None:
        member.heard = time.monotonic()
        if message:
            member.ran = member.heard
        if "work" in message:
            member.position, member.work, member.since = member.position + 1, message["work"], member.heard
        if "agree" in message:
            self._agree(member, message["agree"], message["value"])
        if "failed" in message:
            self._fail(member, message["failed"], message["rank"])
        if "finished" in message:
            member.ended = True
            if len(self.members) == self.count and all(m.ended for m in self.members.values()):
                self.finished.set()

    def _agree(self, member: _Member, name: str, value: Any) -> None:
        values = self._values.setdefault(name, {})
        values[member.id] = value
        if 0 in values and (differing := [m for m in values if values[m] != values[0]]):
            a, b = next(_differences(values[differing[0]], values[0], name))
            reason = f"{a}, but process 0 has {b}; start all with the same settings"
            self._fail(self.members[differing[0]], reason)
        elif len(values) == self.count:
            del self._values[name]
            self._send_all({"agreed": name})

    def _send_all(self, message: Message) -> None:
        for member in self.members.values():
            if not member.writer.is_closing():
                member.writer.write(encode(message))

    def _name(self, member: _Member) -> str:
        return f"process {member.id} of {self.count} (pid {member.pid} on {member.host})"

    def _fail(self, member: _Member, reason: str, rank: int = 0) -> None:
        line = f"{self._name(member)}: {reason}"
        if member.work != "starting":
            line += f"; it had begun {member.work}. Every listed checkpoint is complete: run the same command to resume"
        member.failed, member.ended = True, rank == 0
        self._failures.append(Failure(rank, time.monotonic(), line, member.id))
        if len(self._failures) == 1:
            self._task(self._end())

    async def _end(self) -> None:
        """Tell all processes the cause, after those that follow from it have been reported too."""
        await asyncio.sleep(_TOGETHER)
        limit = time.monotonic() + _HIDDEN
        while min(self._failures).rank > 0 and time.monotonic() < limit:
            await asyncio.sleep(0.2)
        cause = min(self._failures)
        for member in self.members.values():
            with suppress(ConnectionError):
                member.writer.write(encode({"end": cause.line, "culprit": cause.culprit}))
                await member.writer.drain()
        self.finished.set()

    async def _watch(self) -> None:
        """Send heartbeats, and look for processes that are absent, silent or behind."""
        start, has_printed = time.monotonic(), False
        while True:
            await asyncio.sleep(1.0)
            now = time.monotonic()
            if len(self.members) < self.count:
                absent = ", ".join(str(i) for i in range(self.count) if i not in self.members)
                line = f"waiting for process {absent} of {self.count}"
                if now - start > GATHERING and not self._failures:
                    self._failures.append(Failure(0, now, f"{line}: not connected after {GATHERING:.0f} s", -1))
                    self._task(self._end())
                elif now - start > PATIENCE and not has_printed:
                    self._say(line)
                    has_printed = True
            if now % HEARTBEAT < 1:
                self._send_all({})
            for member in [m for m in self.members.values() if not m.ended]:
                if now - member.heard > SILENCE:
                    self._fail(member, f"no heartbeat from its machine for {SILENCE:.0f} s")
                elif now - member.ran > UNRESPONSIVE and not member.failed:
                    self._fail(member, f"is stopped, or hangs: it has not responded for {UNRESPONSIVE:.0f} s")
            self._check_positions(now)

    def _check_positions(self, now: float) -> None:
        """A process that is behind another one keeps it waiting, because all do the same work together."""
        members = [m for m in self.members.values() if not m.ended]
        running = [m for m in members if not m.failed]
        if len(members) < self.count or not running:
            return
        last = min(running, key=lambda m: m.position)
        waiting = [m.since for m in members if m.position > last.position]
        if waiting and now - min(waiting) > BEHIND:
            self._fail(last, f"hangs: the others have waited for it for {BEHIND:.0f} s")


def _differences(value: Any, other: Any, name: str) -> Iterator[tuple[str, str]]:
    """Where two JSON values differ: `name=value` of the first, and the second value."""
    if isinstance(value, dict) and isinstance(other, dict):
        for key in sorted({*value, *other}):
            if value.get(key) != other.get(key):
                yield from _differences(value.get(key), other.get(key), f"{name}.{key}")
    else:
        yield f"{name}={value!r}", repr(other)


def _free_port() -> int:
    with socket.socket() as candidate:
        candidate.bind(("", 0))
        return candidate.getsockname()[1]
