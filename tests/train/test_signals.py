"""Ctrl-C is handled while the main thread is in C code, as it is when XLA compiles."""

import signal
import subprocess
import sys
import time

from twinax.train.loop import signals

# Like a compilation, this holds no GIL, runs no handler, and is not interrupted by a signal.
BLOCKED = """
import hashlib, sys
from twinax.train.loop.signals import StopSignals

def say(line):
    print(line, flush=True)

with StopSignals(say, lambda: say("closed")) as stop, stop.during("this update's compilation"):
    say("blocked")
    hashlib.pbkdf2_hmac("sha256", b"", b"", int(sys.argv[1]))
say(f"caught {stop.caught}")
"""

STOPPING = "stopping after this update's compilation; a second signal ends the process now\n"


def blocked(rounds):
    process = subprocess.Popen([sys.executable, "-c", BLOCKED, str(rounds)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "blocked\n"
    time.sleep(0.1)  # until it is in C code
    return process


def test_a_signal_is_answered_at_once_and_a_second_one_ends():
    process = blocked(2**26)  # tens of seconds, long enough to detect a missing reaction
    try:
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert process.stdout.readline() == STOPPING
        answer_time = time.monotonic()
        process.send_signal(signal.SIGTERM)  # at once: the same stop, from a scheduler
        time.sleep(0.6)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output = process.stdout.read()
        assert process.wait(timeout=30) == 128 + signal.SIGINT
        assert output == "closed\nended; run the same command to resume after the last checkpoint\n"
        assert answer_time - start < 1
        assert time.monotonic() - answer_time < 5
    finally:
        process.kill()
        process.stdout.close()
        process.wait()


def test_the_main_thread_goes_on_after_one_signal():
    process = blocked(2**20)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert output == f"{STOPPING}caught {signal.SIGTERM.value}\n"
    assert process.returncode == 0


def interrupts(number):
    """Whether this signal interrupts the main thread."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt:
        return True
    return False


def test_what_a_second_signal_interrupts(monkeypatch):
    """Not what is saved, if the first one arrives twice. Nor do messages name work that has ended."""
    monkeypatch.setattr(signals, "_SAME", 0.2)
    lines = []
    with signals.StopSignals(lines.append, lambda: None) as stop:
        with stop.during("this validation"):
            pass
        assert [interrupts(signal.SIGTERM) for _ in range(2)] == [False, False]
        time.sleep(0.3)
        assert interrupts(signal.SIGINT)
    assert stop.caught == signal.SIGTERM
    assert lines == ["stopping after this update; a second signal ends the process now"]


def test_ctrl_c_while_the_command_is_imported_is_one_line(forks):
    """Wherever it is imported, and whatever is imported then handles the exception."""
    code = """
import os, signal, sys

module, sys.argv = sys.argv[1], ["twinax", "inspect", "."]

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                sys.exit(3)

from twinax.cli.entry import main
sys.meta_path.insert(0, Interrupt())
main()
"""
    for module in ("twinax.cli.commands", "twinax.cli.checkpoints.inspect_command"):
        finished = forks(code, module)
        assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "twinax: interrupted\n")
