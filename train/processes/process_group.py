"""The processes of a run, as one of them sees the others."""

import json
import os
import queue
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from threading import Lock, Thread
from typing import Any, NamedTuple

from ...backend.errors import RunError
from ...backend.xla_flags import expected_backend
from .hub import HEARTBEAT, SILENCE, Message, encode

_PACKAGES = ("twinax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")  # must be of one version
FLAGS = ("--coordinator", "--num-processes", "--process-id")
_OPEN_MPI = "OMPI_COMM_WORLD_SIZE"  # number of processes
_JAX_SECONDS = 120  # for connections and heartbeats of JAX's own service: more than the hub needs to end the run


class ProcessGroup:
    """The processes of a run. This class is a process without others."""

    id, count = 0, 1

    def barrier(self, name: str, value: Any = None) -> None:
        """Wait until all processes are here; end the run if their values (JSON) differ."""

    def report_progress(self, work: str) -> None:
        """Say which work begins, which all processes do together: the next update, for example."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes what one process writes: logs, plots, the config."""
        return self.id == 0


class Launch(NamedTuple):
    """The flags of a run of several processes; None: read from the scheduler's environment."""

    coordinator: str | None = None  # HOST:PORT of process 0
    processes: int | None = None
    id: int | None = None


class Worker(ProcessGroup):
    """A process of a run with others, below its supervisor."""

    def __init__(self, channel: socket.socket, log: int):
        self._channel, self._log = channel, log
        self._replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._joined, self._lock = False, Lock()
        Thread(target=self._listen, name="supervisor", daemon=True).start()

    def join(self, launch: Launch) -> None:
        """Connect to the other processes, as the flags or the scheduler say, and start JAX's service.

        Raises:
            RunError: a flag or the scheduler's environment cannot be used.
        """
        coordinator, count, process, local_devices = complete(launch)
        if count == 1 or (count, *launch) == (None,) * 4:
            return
        if coordinator is None or count is None or process is None:
            raise RunError(
                f"{FLAGS[0]} HOST:PORT: is required, because the scheduler does not provide it"
                if count
                else f"{', '.join(FLAGS)}: all three are needed, because no scheduler is recognized"
            )
        port = self.meet(coordinator, count, process)
        self._separate_native_output()

        import jax

        if hasattr(jax.config, "jax_enable_preemption_service"):
            jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is handled here
        jax.distributed.initialize(
            f"{coordinator.rpartition(':')[0]}:{port}",
            count,
            process,
            local_device_ids=local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=_JAX_SECONDS,
            heartbeat_timeout_seconds=_JAX_SECONDS,
        )

    def meet(self, coordinator: str, count: int, process: int) -> int:
        """Wait until all processes are there; return the port of JAX's service.

        Raises:
            RunError: the address or the number is not one.
        """
        split_address(coordinator)
        if not 0 <= process < count:
            raise RunError(f"--process-id {process}: must be between 0 and {count - 1}")
        self.id, self.count = process, count
        hello = {"id": process, "count": count, "host": socket.gethostname(), "pid": os.getpid()}
        versions = {name: version(name) for name in _PACKAGES}
        self._send({"coordinator": coordinator, **hello, "versions": versions})
        self._joined = True
        Thread(target=self._respond, name="heartbeats", daemon=True).start()
        return self._wait_for("begin")["begin"]

    def barrier(self, name: str, value: Any = None) -> None:
        """Wait until all processes are here; end the run if their values (JSON) differ."""
        if self._joined:
            self._send({"agree": name, "value": value})
            self._wait_for("agreed")

    def report_progress(self, work: str) -> None:
        """Say which work begins, which all processes do together: the next update, for example."""
        if self._joined:
            self._send({"work": work})

    def finish(self) -> None:
        """Say that this process has done all its work."""
        if self._joined:
            self._send({"finished": True})

    def fail(self, line: str, *, follows: bool = False) -> bool:
        """Say why this process fails; return whether it is to print the reason.

        `follows`: it may be a consequence of another process's failure: then it waits for the verdict.
        """
        if not self._joined:
            return True
        self._send({"failed": line, "rank": int(follows)})
        while follows:
            with suppress(queue.Empty):
                reply = self._replies.get(timeout=SILENCE)
                if "end" in reply:
                    return reply["culprit"] == self.id
        return True

    def _wait_for(self, word: str) -> Message:
        """The next message with this word; others say that the supervisor is about to end this process."""
        while word not in (message := self._replies.get()):
            pass
        return message

    def _send(self, message: Message) -> None:
        with self._lock:
            self._channel.sendall(encode(message))

    def _listen(self) -> None:
        with suppress(ConnectionError), self._channel.makefile("rb") as file:
            for line in file:
                self._replies.put(json.loads(line))
        os._exit(1)  # the supervisor was killed

    def _respond(self) -> None:
        """Show that the threads of this process run, also while it compiles or waits for others."""
        while True:
            time.sleep(HEARTBEAT)
            with suppress(ConnectionError):
                self._send({"runs": True})

    def _separate_native_output(self) -> None:
        """Send what native code prints to the log: pages of stack traces, if another process has died."""
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            getattr(sys, name).flush()
            setattr(sys, name, os.fdopen(os.dup(descriptor), "w", buffering=1))
            os.dup2(self._log, descriptor)


def take_flags(words: Sequence[str]) -> tuple[list[str], Launch | None]:
    """(the words without the flags of several processes, their values); None: a run of one process.

    Raises:
        RunError: a flag has no value, or not a number.
    """
    rest, values = [], {}
    words = list(words)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag.replace("_", "-") not in FLAGS:
            rest.append(flag + equals + value)
            continue
        if not equals and not words:
            raise RunError(f"{flag}: needs a value")
        values[flag.replace("_", "-")] = value if equals else words.pop(0)
    numbers = []
    for flag in FLAGS[1:]:
        value = values.get(flag)
        if value is not None and not value.isdecimal():
            raise RunError(f"{flag} {value}: must be a number")
        numbers.append(None if value is None else int(value))
    if values or _in_cluster():
        return rest, Launch(values.get(FLAGS[0]), *numbers)
    return rest, None


def split_address(address: str) -> tuple[str, int]:
    """(host, port). Raises: RunError if the address has another form."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RunError(f"--coordinator {address}: must be HOST:PORT, the machine of process 0 and a free port there")
    return host.strip("[]"), int(port)


def _in_cluster() -> bool:
    """Whether there may be other processes: Slurm's, Open MPI's, or on the other machines of a TPU."""
    counts = ("SLURM_STEP_NUM_TASKS", _OPEN_MPI)
    return any(os.environ.get(name, "1") != "1" for name in counts) or expected_backend() == "tpu"


def complete(launch: Launch) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """The flags, completed by what JAX reads from the environment: (coordinator, count, id, local devices)."""
    if None not in launch:
        return launch.coordinator, launch.processes, launch.id, None
    if _OPEN_MPI in os.environ and "OMPI_MCA_orte_hnp_uri" not in os.environ:
        # Open MPI 5: JAX does not recognize it before 0.11, and needs mpi4py for it from 0.11 on
        count, process, device = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("SIZE", "RANK", "LOCAL_RANK"))
        count = count if launch.processes is None else launch.processes
        return launch.coordinator, count, process if launch.id is None else launch.id, [device]
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(*launch, None, None, 30)
