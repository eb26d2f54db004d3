"""The last line of a command that fails: one line, harmless to a terminal, with exit status 2 or 70."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from twinax import convert
from twinax.cli.process.messages import one_line, show_all
from twinax.cli.usage import UsageError, one_line_errors

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"


@given(st.text())
def test_every_message_is_one_printable_line(message):
    line = one_line(message)
    assert line.isprintable()
    assert len(line) < 2200


def test_of_a_list_of_problems_the_first_three_are_shown():
    problems = [f"missing: a{i}" for i in range(9)]
    message = "9 arrays do not fit the model:\n  " + "\n  ".join(problems)
    line = "9 arrays do not fit the model: missing: a0; missing: a1; missing: a2; and 6 more, which --verbose lists"
    assert one_line(message) == line
    assert one_line("one\ntwo") == "one; two"
    assert one_line(f"{message}\nthe model fits bart") == f"{line}; the model fits bart"
    try:
        show_all(True)
        assert one_line(message) == message
    finally:
        show_all(False)


def test_a_file_s_names_cannot_change_the_terminal(tmp_path, command):
    save_file({"\x1b[2Jx": np.zeros(2, np.float32)}, tmp_path / "x.safetensors")
    _, out, err = command("inspect", tmp_path / "x.safetensors")
    assert "\x1b[2J" not in out + err
    code, out, err = command("convert", tmp_path / "x.safetensors", tmp_path / "y.pt", "--config", STORED)
    assert (code, out) == (2, "")
    assert "\x1b" not in err
    assert err.count("\n") == 1


def test_a_list_of_problems_is_one_line_unless_all_are_asked_for(tmp_path, command):
    checkpoint = convert.load(STORED)
    tensors = {name: tensor.numpy() for name, tensor in checkpoint.to_torch().state_dict().items()}
    save_file(tensors, tmp_path / "x.safetensors")
    (tmp_path / "c.json").write_text(checkpoint.config.replace(d_model=2 * checkpoint.config.d_model).to_json())
    arguments = ("convert", tmp_path / "x.safetensors", tmp_path / "y.pt", "--config", tmp_path / "c.json")
    code, _, err = command(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    whole = command(*arguments, "--verbose")[2]
    number = int(re.search(r"(\d+) arrays do not fit", err)[1])
    assert f"; and {number - 3} more, which --verbose lists" in err
    assert whole.count("\n  ") == number > 30


def test_an_unforeseen_exception_is_a_defect_of_twinax(command, monkeypatch, tmp_path):
    def fail(*arguments):
        raise RuntimeError("no such thing\n\x1b[31m")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("twinax.cli.checkpoints.inspect_command.inspect_checkpoint", fail)
    code, out, err = command("inspect", STORED)
    assert (code, out) == (70, "")
    expected = r"twinax: this is a defect of twinax: RuntimeError: no such thing; .*; the traceback is in (\S+); please"
    path = re.match(expected, err)
    assert path is not None, err
    assert err.count("\n") == 1
    content = Path(path[1]).read_text()
    assert "in execute" in content
    assert content.startswith("twinax inspect ")


def test_memory_that_is_not_enough_is_no_defect(command, monkeypatch):
    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr("twinax.cli.checkpoints.inspect_command.inspect_checkpoint", fail)
    assert command("inspect", STORED)[::2] == (2, "twinax: out of memory\n")


CODE = """
import sys
from twinax.cli.commands import main
for stream in (sys.stdout, sys.stderr):
    stream.reconfigure(encoding="ascii", errors="strict")
main()
"""


def test_a_terminal_that_is_not_utf_8(forks, tmp_path):
    """Tables are printed with escapes; a character of a translation that the terminal lacks is an error."""
    result = forks(CODE, "convert", STORED, tmp_path / "x.pt")
    assert (result.returncode, result.stderr) == (0, "")
    assert "bit-identical" in result.stdout
    result = forks(CODE, "inspect", STORED)
    assert result.returncode == 0
    match = r"the output is ascii, which has no '\\xe4'; set PYTHONIOENCODING=utf-8"
    with pytest.raises(UsageError, match=match), one_line_errors():
        "a\xe4".encode("ascii")


def test_a_full_disk_names_the_file(command, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    path = tmp_path / "x.json"
    assert command("inspect", STORED, "--json", path)[::2] == (
        2,
        f"twinax: {path}: cannot be written: No space left on device\n",
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flag", ["--verbose", "--no-verify"])
def test_flags_of_all_commands(flag, command):
    assert command("inspect", flag, STORED)[0] == 0
    assert command("inspect", STORED, flag)[0] == 0
    assert flag in command("--help")[1]
