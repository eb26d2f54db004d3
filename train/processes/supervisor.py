"""The supervisor of a process of a run: its parent, which ends it when another one fails, with a line that says why.

It watches from outside, because a process that is blocked in a collective operation cannot: XLA waits for a dead or
hanging process indefinitely on a GPU, and half a minute on a CPU. Ending a process at any moment loses nothing, because
its checkpoints are atomic.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from tempfile import mkstemp
from typing import Any, NamedTuple

from .hub import GATHERING, HEARTBEAT, PATIENCE, SILENCE, Hub, Message, encode
from .process_group import Worker, split_address

_NAMELESS = 30.0  # seconds until process 0's host name must resolve
_PRINTING = 3.0  # seconds in which a process that has failed prints its own error
_TAIL = 1500  # characters to show of what native code has printed, if it has ended the process


def fork() -> Worker:
    """Continue in a child process and return it; this process becomes its supervisor, and ends after it."""
    channel, child_channel = socket.socketpair()
    log, name = mkstemp()  # what XLA, gloo and NCCL print
    os.unlink(name)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)  # Ctrl-C reaches the supervisor alone; the child's own children can be ended with it
        channel.close()
        return Worker(child_channel, log)
    child_channel.close()
    sys.exit(asyncio.run(_Supervisor(pid, channel, log).run()))


class _Verdict(NamedTuple):
    """Why the run ends, as one line, and the id of the process that is the cause; -1: no single one."""

    line: str
    culprit: int


class _Supervisor:
    """Passes messages between its process and the hub until one of them ends."""

    def __init__(self, pid: int, channel: socket.socket, log: int):
        self._pid, self._channel, self._log = pid, channel, log
        self._id: int | None = None  # of the process in the run; None: not connected
        self._reported = ""  # what the process has said of its end: finished, failed, or follows from another's
        self._printed = ""  # the end of what native code has printed, if that ended the process
        self._hub: Hub | None = None  # in the supervisor of process 0
        self._tasks: list[asyncio.Task[Any]] = []

    async def run(self) -> int:
        """The exit status: the process's own, or 2 if another one ends the run."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_drop_resets)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._forward, number)
        ended = asyncio.ensure_future(asyncio.to_thread(os.waitpid, self._pid, 0))
        reader, self._worker = await asyncio.open_connection(sock=self._channel)
        following = asyncio.ensure_future(self._follow(reader))
        await asyncio.wait({ended, following}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            verdict = await self._verdict_on(ended.result()[1], following)
        else:
            verdict = following.result()
            await self._end_process(ended)
        status = os.waitstatus_to_exitcode((await ended)[1])
        if verdict is None:
            return status if status >= 0 else 128 - status
        if verdict.culprit == self._id and self._printed:
            print(self._printed, file=sys.stderr)
        has_printed = self._reported == "failed" or (self._reported == "follows" and verdict.culprit == self._id)
        if not has_printed or status <= 0:
            self._say(verdict.line)
        return status if status > 0 else 2

    async def _follow(self, reader: asyncio.StreamReader) -> _Verdict:
        """Connect the process to the hub and pass messages on, until the run ends because of a failure."""
        join = await _read(reader)
        if join is None or "id" not in join:  # it ends before that, or is alone
            await asyncio.Event().wait()
        assert join is not None
        address = join.pop("coordinator")
        try:
            hub_reader, self._to_hub = await self._connect(address, join)
        except ConnectionError as error:
            return _Verdict(str(error), -1)
        self._id = join["id"]
        self._to_hub.write(encode(join))
        self._tasks = [asyncio.ensure_future(task) for task in (self._pass_on(reader), self._send_heartbeats())]
        while True:
            try:
                async with asyncio.timeout(SILENCE):  # `wait_for` of Python 3.11 may lose a cancellation
                    message = await _read(hub_reader)
            except TimeoutError:
                return _Verdict(f"process 0 at {address}: no heartbeat for {SILENCE:.0f} s", 0)
            if message is None and self._reported == "finished":
                for task in self._tasks:  # asyncio prints a warning about heartbeats that nobody reads
                    task.cancel()
                await asyncio.Event().wait()  # all others have finished, and the process is about to end
            if message is None:
                return _Verdict(f"process 0 at {address}: has ended, or the connection to it is lost", 0)
            if message:
                self._worker.write(encode(message))
            if "end" in message:
                return _Verdict(message["end"], message["culprit"])

    async def _connect(self, address: str, join: Message) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the hub, which process 0 starts. Raises: ConnectionError, with the line to print."""
        host, port = split_address(address)
        is_first = join["id"] == 0
        if is_first:
            self._hub = Hub(join["count"], join["versions"], self._say)
            try:
                await self._hub.start(port)
            except OSError as error:
                raise ConnectionError(
                    f"--coordinator {address}: process 0 cannot listen on this port "
                    f"({os.strerror(error.errno or 0)}); is there another process 0? Otherwise choose another port"
                ) from None
        start, has_printed = time.monotonic(), False
        while True:
            try:
                return await asyncio.wait_for(asyncio.open_connection(host, port), 5)
            except socket.gaierror:
                reason, limit = f"{host}: the host name cannot be resolved", _NAMELESS
            except (OSError, TimeoutError) as error:
                reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else "no answer"
                limit = GATHERING
            waited = time.monotonic() - start
            if waited > (PATIENCE if is_first else limit):
                advice = "process 0 must run on this machine" if is_first else "start process 0 there, or open the port"
                raise ConnectionError(f"--coordinator {address}: cannot be reached ({reason}); {advice}")
            if waited > PATIENCE and not has_printed:
                self._say(f"waiting for process 0 at {address}, which cannot be reached yet ({reason})")
                has_printed = True
            await asyncio.sleep(0.2)

    async def _pass_on(self, reader: asyncio.StreamReader) -> None:
        """Pass the messages of the process to the hub."""
        while (message := await _read(reader)) is not None:
            if "finished" in message or "failed" in message:
                self._reported = "finished" if "finished" in message else ("follows" if message["rank"] else "failed")
            self._to_hub.write(encode(message))

    async def _send_heartbeats(self) -> None:
        while True:
            self._to_hub.write(encode({}))
            await asyncio.sleep(HEARTBEAT)

    async def _verdict_on(self, status: int, following: "asyncio.Task[_Verdict]") -> _Verdict | None:
        """Report that the process has ended; wait for what the hub says, and in process 0 for all others."""
        if self._id is None:
            return None
        await asyncio.wait(self._tasks[:1], timeout=1)  # its last messages
        if self._reported == "finished":
            if self._hub is not None:
                done = asyncio.ensure_future(self._hub.finished.wait())
                await asyncio.wait({following, done}, return_when=asyncio.FIRST_COMPLETED)
            return following.result() if following.done() else None
        if not self._reported:
            may_follow = os.waitstatus_to_exitcode(status) == -signal.SIGABRT  # as XLA ends if its connection is lost
            self._to_hub.write(encode({"failed": self._describe(status), "rank": int(may_follow)}))
        return await following

    async def _end_process(self, ended: asyncio.Future[Any]) -> None:
        if self._reported:
            await asyncio.wait({ended}, timeout=_PRINTING)
        with suppress(ProcessLookupError, PermissionError):  # the latter on macOS, if all have ended
            os.killpg(self._pid, signal.SIGKILL)

    def _describe(self, status: int) -> str:
        """How a process ended that did not say so."""
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return f"ended with status {code}"
        start = max(os.fstat(self._log).st_size - _TAIL, 0)
        if code != -signal.SIGKILL:
            self._printed = os.pread(self._log, _TAIL, start).decode(errors="replace").strip()
        hint = ", often because it ran out of memory" if code == -signal.SIGKILL else ""
        return f"was ended by {signal.Signals(-code).name}{hint}"

    def _forward(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, number)

    def _say(self, line: str) -> None:
        show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # a progress bar hides it
        print(f"{show_cursor}twinax: {line}", file=sys.stderr, flush=True)


def _drop_resets(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Do not print that a connection was reset after its reader was cancelled: the verdict is what is printed."""
    if not isinstance(context.get("exception"), ConnectionError):
        loop.default_exception_handler(context)


async def _read(reader: asyncio.StreamReader) -> Message | None:
    """The next message; None: the other side has ended."""
    try:
        line = await reader.readline()
        return json.loads(line) if line else None
    except (ConnectionError, ValueError):
        return None
