"""Systems that lack what Linux has: one line on Windows; on macOS, which was not tried, no call to what is missing."""

from pathlib import Path

import pytest

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"

# As on Windows, where Python has no such module.
WINDOWS = """
import sys
sys.argv[0] = "twinax"
sys.modules["fcntl"] = None
from twinax.cli.entry import main
main()
"""
MACOS = """
import ctypes, os, sys
del os.sched_getaffinity, os.sysconf_names["SC_AVPHYS_PAGES"]
os.sysconf = lambda name: 1 if name in os.sysconf_names else 1 / 0

class Library:
    def __init__(self, name): pass
ctypes.CDLL = Library

from twinax.backend.malloc import keep_freed_memory
from twinax.cli.commands import main
from twinax.cli.proofs.parity_command import _parse_shape
from twinax.configs import TransformerConfig
from twinax.inference.batches import decoding_threads

assert not keep_freed_memory()
assert decoding_threads() in (1, 2)
assert _parse_shape("4x8", TransformerConfig.preset("tiny")) == (4, 8)
sys.argv[0] = "twinax"
main()
"""


@pytest.mark.parametrize("words", [("--help",), ("inspect", STORED), ("train", "--src", "a", "--tgt", "b")])
def test_without_locks_of_files_every_command_is_one_line(words, forks):
    assert forks(WINDOWS, *words) == (2, "", "twinax: this system has no fcntl, which locks files; use Linux\n")


def test_without_what_macos_lacks(forks, tmp_path):
    (tmp_path / "text").write_text("a b c\n")
    result = forks(MACOS, "translate", STORED, tmp_path / "text", "--max-length", "4")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1
