"""Several processes of a run: they meet, agree, and end together; and their training is that of one process."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cluster import SETTINGS, Cluster, Stage, compare
from twinax.backend.errors import RunError
from twinax.train.processes import hub
from twinax.train.processes.process_group import Launch, complete, split_address, take_flags
from twinax.train.processes.step_summary import checksum
from twinax.train.step.partitioning import Placement

# A process without JAX: it meets the others, begins an update, and does what its last argument says. As in a training,
# SIGTERM does not end it at once, and it may have a child; this one keeps standard error open.
PROCESS = """
import os, signal, subprocess, sys, threading, time
from twinax.train.processes import hub, supervisor, process_group

hub.UNRESPONSIVE, hub.BEHIND, hub.GATHERING, hub.PATIENCE, process_group.HEARTBEAT = 1.5, 1.5, 3.0, 0.5, 0.3
hub.SILENCE, hub.HEARTBEAT, supervisor.SILENCE, supervisor.HEARTBEAT = 1.5, 1.0, 2.3, 0.3
hub._TOGETHER, hub._HIDDEN = 1.0, 0.5
supervisor.GATHERING, supervisor._NAMELESS, supervisor.PATIENCE = 1.5, 1.5, 0.5
address, count, number, version, act = sys.argv[1:]
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
process_group._PACKAGES = ("twinax",)
process_group.version = lambda name: version
worker = supervisor.fork()
worker.meet(address, int(count), int(number))
worker.barrier("run", {"rate": 2 if act == "differs" else 1})
worker.report_progress("update 7")
print("has begun", flush=True)
if act == "stops":
    worker.report_progress("update 8")
match act:
    case "dies":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    case "aborts":
        os.abort()
    case "exits":
        sys.exit(5)
    case "loses":
        os.kill(os.getppid(), signal.SIGKILL)
    case "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    case "fails":
        if worker.fail("KeyError: 'x'", follows=True):
            raise KeyError("x")
    case "refuses":
        worker.fail("no such file")
        sys.exit("its own line")
    case "follows":
        if worker.fail("Gloo all-reduce failed", follows=True):
            raise OSError("Gloo all-reduce failed")
        time.sleep(60)
    case "hangs":
        time.sleep(60)
    case "finishes":
        time.sleep(2.8)
        worker.finish()
        print("has finished", flush=True)
        sys.exit(0)
    case "lingers":
        time.sleep(2.8)
        worker.finish()
        time.sleep(3.5)  # ten heartbeats
        sys.exit(0)
    case "saves":
        stopped.wait()
        worker.finish()
        sys.exit(128 + signal.SIGTERM)
worker.report_progress("update 8")
if act == "waits":
    subprocess.Popen(["sleep", "60"])
time.sleep(60)
"""


class Process:
    """A process of PROCESS."""

    def __init__(self, address, count, number, act="waits", version="1"):
        words = [sys.executable, "-c", PROCESS, address, str(count), str(number), version, act]
        self.popen = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(self):
        """(exit status, what it printed to standard error)."""
        try:
            _, errors = self.popen.communicate(timeout=20)
        finally:
            self.popen.kill()  # its supervisor
        return self.popen.returncode, errors

    def wait_until(self, line):
        """Wait until it prints this line."""
        assert self.popen.stdout.readline() == f"{line}\n"


def free_port():
    with socket.socket() as candidate:
        candidate.bind(("", 0))
        return candidate.getsockname()[1]


@pytest.fixture
def address():
    return f"localhost:{free_port()}"


CULPRIT = rf"twinax: process 1 of 3 \(pid \d+ on {socket.gethostname()}\): "
WAITING = re.compile("twinax: waiting for process 0 .*\n")  # on a loaded machine, where process 0 begins late
ENDINGS = {
    "dies": "was ended by SIGKILL, often because it ran out of memory; it had begun update 7. Every listed checkpoint",
    "exits": "ended with status 5; it had begun update 7",
    "loses": "its connection is lost: the machine, its network or its supervisor has failed",
    "stops": "is stopped, or hangs: it has not responded for 2 s; it had begun update 8",
    "hangs": "hangs: the others have waited for it for 2 s; it had begun update 7",
    "fails": "KeyError: 'x'; it had begun update 7",
    "refuses": "no such file; it had begun update 7",
    "differs": "run.rate=2, but process 0 has 1; start all with the same settings",
}


@pytest.mark.parametrize("act", ENDINGS)
def test_a_process_that_fails_ends_the_others_with_one_line(address, act):
    """Processes 0 and 2 may fail as a consequence, before the cause is known."""
    culprit = Process(address, 3, 1, act)
    acts = ("follows", "aborts") if act == "dies" else ("waits", "waits")
    others = [Process(address, 3, number, act) for number, act in zip((0, 2), acts, strict=True)]
    expected = CULPRIT + re.escape(ENDINGS[act])
    for process in others:
        code, errors = process.end()
        errors = WAITING.sub("", errors)
        assert (code, len(errors.splitlines())) == (2, 1), errors
        assert re.match(expected, errors), errors
    code, errors = culprit.end()
    assert code != 0
    if act == "fails":
        assert errors.startswith("Traceback")
    elif act == "refuses":
        assert errors == "its own line\n"
    elif act != "loses":
        assert re.match(expected, WAITING.sub("", errors)), errors


def test_all_finish(address):
    """After work that takes longer than any wait for a sign of life. Process 0 has finished first, another ends last.

    A stranger changes nothing, and a signal to a supervisor reaches its process.
    """
    processes = [Process(address, 3, number, act) for number, act in enumerate(("finishes", "lingers", "saves"))]
    processes[0].wait_until("has begun")
    code, errors = Process(address, 3, 1).end()
    assert (code, "--process-id 1: is used twice" in errors) == (2, True)
    processes[0].wait_until("has finished")
    time.sleep(0.3)
    processes[2].popen.terminate()
    assert [process.end() for process in processes] == [(0, ""), (0, ""), (128 + signal.SIGTERM, "")]


def test_a_process_without_others_ends_as_it_is_killed():
    code = "import os; from twinax.train.processes import supervisor; supervisor.fork(); os.kill(os.getpid(), 9)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert (process.returncode, process.stderr) == (128 + signal.SIGKILL, "")


class Connection:
    """A connection of a hub to a supervisor, with the messages that were sent."""

    def __init__(self):
        self.sent = []

    def write(self, line):
        self.sent.append(json.loads(line))

    def is_closing(self):
        return False

    async def drain(self):
        pass


def members(count):
    """A hub and its members, of which each has been told to begin."""
    server = hub.Hub(count, {}, print)
    hellos = ({"id": number, "count": count, "host": "h", "pid": number, "versions": {}} for number in range(count))
    joined = [server._join(hello, Connection()) for hello in hellos]
    for member in joined:
        assert "begin" in member.writer.sent.pop()
    return server, joined


def test_a_barrier_waits_for_all_each_time():
    server, joined = members(3)
    for _ in range(2):
        for member in joined:
            assert not any(other.writer.sent for other in joined)
            server._receive(member, {"agree": "x", "value": None})
        assert [member.writer.sent for member in joined] == [[{"agreed": "x"}]] * 3
        for member in joined:
            member.writer.sent.clear()


def test_the_cause_is_named_whenever_it_is_reported(monkeypatch):
    """After an error in communication that follows from it; and a value that differs though process 0's comes last."""
    monkeypatch.setattr(hub, "_TOGETHER", 0.0)

    async def run(*messages):
        server, joined = members(2)
        for number, message in messages:
            server._receive(joined[number], message)
            await asyncio.sleep(0.1)
        await asyncio.wait_for(server.finished.wait(), 5)
        ends = [member.writer.sent[-1] for member in joined]
        assert ends[0] == ends[1]
        return ends[0]["culprit"], ends[0]["end"].partition(": ")[2]

    failures = ((0, {"failed": "Gloo failed", "rank": 1}), (1, {"failed": "KeyError: 'x'", "rank": 0}))
    assert asyncio.run(run(*failures)) == (1, "KeyError: 'x'")
    values = ((1, {"agree": "x", "value": 1}), (0, {"agree": "x", "value": 2}))
    assert asyncio.run(run(*values)) == (1, "x=1, but process 0 has 2; start all with the same settings")


REFUSED = {
    "one number twice": ([(3, 0, "1"), (3, 1, "1"), (3, 1, "1")], "twinax: --process-id 1: is used twice, by pid "),
    "another count": (
        [(3, 0, "1"), (2, 1, "1")],
        r"twinax: process 1 of 3 .*: has --num-processes 2, but process 0 has 3",
    ),
    "another version": (
        [(3, 0, "1.0"), (3, 2, "1.1")],
        r"twinax: process 2 of 3 .*: has twinax 1.1, but process 0 has 1.0; install one version",
    ),
    "absent": ([(3, 0, "1"), (3, 2, "1")], "twinax: waiting for process 1 of 3: not connected after 3 s"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_processes_that_are_not_of_one_run_are_refused(address, case):
    members, expected = REFUSED[case]
    processes = [Process(address, count, number, version=version) for count, number, version in members]
    for process in processes:
        code, errors = process.end()
        assert code == 2
        assert re.match(expected, errors.splitlines()[-1]), errors


def test_a_coordinator_that_cannot_be_used(address):
    code, errors = Process(address, 2, 1).end()
    first, last = errors.splitlines()
    assert (code, first) == (
        2,
        f"twinax: waiting for process 0 at {address}, which cannot be reached yet ({REFUSED_TEXT})",
    )
    assert last.startswith(
        f"twinax: --coordinator {address}: cannot be reached ({REFUSED_TEXT}); start process 0 there"
    )
    assert "no.such.host: the host name cannot be resolved" in Process("no.such.host:1234", 2, 1).end()[1]
    (line,) = Process("no.such.host:1234", 2, 0).end()[1].splitlines()  # process 0 does not wait for itself
    assert line.endswith("process 0 must run on this machine")
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        assert "process 0 cannot listen on this port (Address already in use)" in Process(address, 2, 0).end()[1]


REFUSED_TEXT = "Connection refused"


def test_flags():
    words = ["--src", "x", "--coordinator", "h:1", "--num_processes=2", "--process-id", "1", "--out=y"]
    assert take_flags(words) == (["--src", "x", "--out=y"], Launch("h:1", 2, 1))
    assert take_flags(["--src", "x"]) == (["--src", "x"], None)
    for words, message in (
        (["--process-id", "one"], "--process-id one: must be a number"),
        (["--coordinator"], "--coordinator: needs a value"),
    ):
        with pytest.raises(RunError, match=message):
            take_flags(words)
    assert split_address("[::1]:80") == ("::1", 80)
    for text in ("host", "host:", ":80", "host:0", "host:65536", "host:x"):
        with pytest.raises(RunError, match="must be HOST:PORT"):
            split_address(text)


SCHEDULERS = {
    "Slurm": (
        {"SLURM_JOB_ID": "5000", "SLURM_STEP_NODELIST": "node[07-09,12]", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
        | {"SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "4", "SLURM_STEP_NUM_TASKS": "4"},
        ("node07:62344", 4, 3, [0]),
    ),
    "Open MPI 5": (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        (None, 2, 1, [0]),
    ),
    "Open MPI 4": (
        {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
        | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911"},
        ("10.96.0.1:62624", 2, 1, [1]),
    ),
}


@pytest.mark.newest
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_tells_the_numbers(name, monkeypatch):
    environment, expected = SCHEDULERS[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    words, launch = take_flags(["--src", "x"])
    assert (words, launch) == (["--src", "x"], Launch())
    assert complete(launch) == expected
    assert complete(Launch("host:80", id=0)) == ("host:80", expected[1], 0, expected[3])


@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**32), st.data())
def test_checksums_of_shares_add_up(rows, length, seed, data):
    rng = np.random.default_rng(seed)
    src, labels = rng.integers(0, 9, (2, rows, length))
    here = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    numbers = np.arange(rows)
    whole, *parts = (checksum(numbers[k], src[k], labels[k]) for k in (numbers >= 0, here, ~here))
    assert sum(parts) % 2**32 == whole
    moved = checksum(numbers, src[::-1], labels[::-1])
    assert (moved == whole) == np.array_equal(np.hstack([src, labels]), np.hstack([src, labels])[::-1])


DEVICES = """
import jax, numpy as np
from twinax.configs.schema import TransformerConfig
from twinax.configs.sharding import ShardingConfig
from twinax.train.step.partitioning import Placement
from twinax.train.processes.step_summary import Exchange, StepSummary
from twinax.train.processes.process_group import ProcessGroup

group = ProcessGroup()
group.count = 2
exchange = Exchange(Placement.of(ShardingConfig(), TransformerConfig.preset("tiny")), group)
rows = jax.device_put(np.uint32([[0, 2**32 - 1], [15, 3], [15, 0], [0, 0]]), exchange._sharding)
print([tuple(map(int, summary)) for summary in (exchange(StepSummary(2, 7)), exchange._combine(rows))])
"""


def test_processes_tell_each_other_once(forks):
    """A process with four devices, which counts once; then four with one each, of which two have caught a signal."""
    result = forks(DEVICES, XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4")
    assert result.stdout == "[(2, 7), (15, 2)]\n", result.stderr


class Device(NamedTuple):
    """A device of a process."""

    id: int
    process_index: int


@given(
    sentences=st.integers(1, 30),
    parts=st.integers(1, 3),
    shares=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=5),
)
def test_every_sentence_is_one_process_s_own(sentences, parts, shares):
    """`shares`: for each part of the rows, the processes that hold it, because an axis does not divide rows."""
    total = sentences + -sentences % (len(shares) * parts)
    size = total // len(shares)
    indices = {
        Device(10 * share + number, process): (slice(share * size, (share + 1) * size),)
        for share, processes in enumerate(shares)
        for number, process in enumerate(processes)
    }
    own = []
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(jax, "make_array_from_callback", lambda shape, sharding, part: part)
        patches.setattr(Placement, "shares", len(shares))
        sharding = SimpleNamespace(devices_indices_map=lambda shape: indices if shape == (total,) else {})
        patches.setattr(Placement, "row_sharding", sharding)
        patches.setattr(jax, "process_count", lambda: 3)
        for process in {process for processes in shares for process in processes}:
            patches.setattr(jax, "process_index", lambda process=process: process)
            rows = Placement(None).rows(sentences, parts)
            assert rows.total == total
            own += rows.here[rows.own].tolist()
            (numbers,) = Placement(None).put_rows([], rows)
            for index in (index for device, index in indices.items() if device.process_index == process):
                assert np.array_equal(numbers(index), np.arange(total)[index])
    assert sorted(own) == [*range(sentences)]


def test_two_processes_are_one(tmp_path, command, monkeypatch):
    """Two processes with two devices each; a signal to one stops both; then one process goes on, as if always alone."""
    settings = dict(zip(SETTINGS[::2], SETTINGS[1::2], strict=True))
    settings |= {"--held-out": "3", "--batches.shapes": "1"}
    settings |= {"--loop.validate-every": "8", "--loop.checkpoint-every": "2"}
    cluster = Cluster(tmp_path, tuple(word for setting in settings.items() for word in setting))
    monkeypatch.chdir(tmp_path)
    train = ("train", "--src", "src", "--tgt", "tgt", *cluster.settings, "--loop.updates", "8", "--out")
    assert command(*train, "alone")[0] == 0
    processes = cluster.start("moved", 1000, Stage(2, 2, ("--sharding.fsdp", "2", "--sharding.tensor", "2")))
    while not cluster.checkpoints("moved") and all(process.poll() is None for process in processes):
        time.sleep(0.05)
    processes[1].terminate()
    assert [process.wait(timeout=60) for process in processes] == [128 + signal.SIGTERM] * 2
    first, second = (cluster.output("moved", number).read_text() for number in range(2))
    update = cluster.checkpoints("moved")[-1]
    assert "devices: 4 × cpu in 2 processes; data=1 · fsdp=2 · tensor=2; each computes 1/2 of the rows" in first
    assert first.endswith(f"stopped and saved after update {update}; run the same command to resume\n")
    assert second == ""
    code, _, errors = command(*train, "moved")
    note = (
        "which was on data=1 · fsdp=2 · tensor=2 in 2 processes; on data=1 · fsdp=1 · tensor=1 in 1 process, the same "
    )
    assert (code, f"resuming after update {update}, {note}losses up to rounding" in errors) == (0, True)
    loss, validation, differing = compare(cluster, "moved", "alone")
    assert (loss < 1e-10, validation < 1e-10, differing) == (True, True, 0)
