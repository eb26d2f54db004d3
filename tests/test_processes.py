"""Several processes of a run: they meet, agree, and end together; and their training is that of one process."""

import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.processes import SETTINGS, Cluster, Stage, compare
from twinax.configs.errors import RunError
from twinax.train.processes.exchange import checksum
from twinax.train.processes.team import Launch, complete, split_address, take_flags

# A process without JAX: it meets the others, begins an update, and does what its last argument says.
PROCESS = """
import os, signal, sys, time
from twinax.train.processes import hub, supervisor, team

hub.UNRESPONSIVE, hub.BEHIND, hub.GATHERING, hub.PATIENCE, team.HEARTBEAT = 1.5, 1.5, 3.0, 0.5, 0.3
hub._HIDDEN = 0.5
supervisor.GATHERING, supervisor._NAMELESS, supervisor.PATIENCE = 1.5, 1.5, 0.5
address, count, number, version, act = sys.argv[1:]
team._PACKAGES = ("twinax",)
team.version = lambda name: version
worker = supervisor.fork()
worker.meet(address, int(count), int(number))
worker.agree("run", {"rate": 2 if act == "differs" else 1})
worker.begin("update 7")
if act == "stops":
    worker.begin("update 8")
match act:
    case "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    case "exits":
        sys.exit(5)
    case "loses":
        os.kill(os.getppid(), signal.SIGKILL)
    case "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    case "fails":
        if worker.fail("KeyError: 'x'", follows=True):
            raise KeyError("x")
    case "follows":
        worker.fail("Gloo all-reduce failed", follows=True)
    case "hangs":
        time.sleep(60)
    case "finishes":
        worker.finish()
        sys.exit(0)
worker.begin("update 8")
time.sleep(60)
"""


class Process:
    """A process of PROCESS."""

    def __init__(self, address, count, number, act="waits", version="1"):
        words = [sys.executable, "-c", PROCESS, address, str(count), str(number), version, act]
        self.popen = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)

    def end(self):
        """(exit status, what it printed)."""
        _, errors = self.popen.communicate(timeout=30)
        return self.popen.returncode, errors


def free_port():
    with socket.socket() as candidate:
        candidate.bind(("", 0))
        return candidate.getsockname()[1]


@pytest.fixture
def address():
    return f"localhost:{free_port()}"


CULPRIT = rf"twinax: process 1 of 3 \(pid \d+ on {socket.gethostname()}\): "
ENDINGS = {
    "dies": "was ended by SIGKILL, often because it ran out of memory; it had begun update 7. Every listed checkpoint",
    "exits": "ended with status 5; it had begun update 7",
    "loses": "its connection is lost: the machine, its network or its supervisor has failed",
    "stops": "is stopped, or hangs: it has not responded for 2 s; it had begun update 8",
    "hangs": "hangs: the others have waited for it for 2 s; it had begun update 7",
    "fails": "KeyError: 'x'; it had begun update 7",
    "differs": "run.rate=2, but process 0 has 1; start all with the same settings",
}


@pytest.mark.parametrize("act", ENDINGS)
def test_a_process_that_fails_ends_the_others_with_one_line(address, act):
    """Process 0 fails as a consequence, before the cause is known."""
    culprit = Process(address, 3, 1, act)
    others = [Process(address, 3, 0, "follows" if act == "dies" else "waits"), Process(address, 3, 2)]
    expected = CULPRIT + re.escape(ENDINGS[act])
    for process in others:
        code, errors = process.end()
        assert (code, len(errors.splitlines())) == (2, 1), errors
        assert re.match(expected, errors), errors
    code, errors = culprit.end()
    assert code != 0
    if act == "fails":
        assert errors.startswith("Traceback")
    elif act != "loses":
        assert re.match(expected, errors), errors


def test_all_finish(address):
    processes = [Process(address, 3, number, "finishes") for number in range(3)]
    assert [process.end() for process in processes] == [(0, "")] * 3


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
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_tells_the_numbers(name, monkeypatch):
    environment, expected = SCHEDULERS[name]
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    words, launch = take_flags(["--src", "x"])
    assert (words, launch) == (["--src", "x"], Launch())
    assert complete(launch) == expected


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


def test_two_processes_are_one(tmp_path, command, monkeypatch):
    """Two processes with two devices each; a signal to one stops both; then one process goes on, as if always alone."""
    cluster = Cluster(tmp_path, (*SETTINGS, "--loop.checkpoint-every", "2"))
    monkeypatch.chdir(tmp_path)
    train = ("train", "--src", "src", "--tgt", "tgt", *cluster.settings, "--loop.updates", "12", "--out")
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
