"""The command, as a person calls it."""

import subprocess
import sys
from pathlib import Path

import pytest

TWINAX = Path(sys.executable).parent / "twinax"


def twinax(*arguments):
    return subprocess.run([TWINAX, *arguments], capture_output=True, text=True)


def test_parity_prints_the_ladder_and_exits_with_0():
    done = twinax("parity", "tiny", "--seed", "1")
    assert done.returncode == 0, done.stderr
    for rung in ("masks", "attention weights", "sublayers", "encoder", "decoder", "logits", "gradients"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"│ {rung} ")]
        assert line.split("│")[-2].strip() == "equal"


def test_parity_exits_with_1_where_the_twins_differ(monkeypatch, capsys):
    from twinax import cli
    from twinax.parity_tests import ladder
    from twinax.torch_reference import layers

    monkeypatch.setattr(ladder, "POOLED", 2)

    monkeypatch.setitem(layers.EMBEDDING_SCALES, "sqrt_d_model", lambda d_model: 1.0)
    monkeypatch.setattr(sys, "argv", ["twinax", "parity", "tiny"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT" in printed
    assert "reproduce: twinax parity tiny --seed 0" in printed
    assert "begins at src_input.embedded" in printed


def test_wrong_seed():
    done = twinax("parity", "tiny", "--seed", "-1")
    assert done.returncode == 2
    assert done.stderr == "twinax: --seed -1: must be at least 0\n"


def test_wrong_preset():
    done = twinax("parity", "huge")
    assert done.returncode == 2
    assert "huge" in done.stderr
    assert "tiny" in done.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["parity", "--help"]])
def test_help_has_an_example(arguments):
    done = twinax(*arguments)
    assert done.returncode == 0
    assert "Example: twinax parity tiny" in done.stdout
