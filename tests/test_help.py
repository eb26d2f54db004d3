"""What the command says about itself: quickly, and with examples that run."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "checkpoints" / "v1"
COMMANDS = ("train", "data", "translate", "evaluate", "score", "parity", "audit", "convert", "inspect", "demo")
ELSEWHERE = ("parity", "demo")  # what tests of their own run, for they take long
BASICS = {"jax", "torch", "flax", "numpy", "tokenizers", "datasets", "grain", "orbax", "sacrebleu", "matplotlib"}


@pytest.mark.parametrize("arguments", [["--help"], ["translate", "--help"], ["convert", "--help"]])
def test_help_imports_little(arguments):
    """A count of modules, for a time would be another on every machine; it was 290."""
    code = f"""
import sys
sys.argv = ["twinax", *{arguments}]
from twinax import cli
try:
    cli.main()
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    modules = done.stderr.split()
    assert len(modules) < 350
    assert not BASICS & set(modules)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The files that the examples name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(STORED, "runs/de_en")
    lines = [" ".join("abcdefgh"[i % 5 : i % 5 + 1 + i % 3]) for i in range(40)]
    for name in ("input", "test", "train", "val"):
        Path(f"{name}.de").write_text("\n".join(lines) + "\n")
        Path(f"{name}.en").write_text("\n".join(lines).upper() + "\n")


def test_the_overview_names_every_command(command, here):
    code, out, _ = command("--help")
    assert code == 0
    assert tuple(re.findall(r"•\s+(\w+)", out)) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_run(name, command, here):
    code, out, _ = command(name, "--help")
    assert code == 0
    (line,) = re.findall(r"Examples?: (twinax .*?)\s*│?\n", out)
    for example in line.split("; "):
        words = shlex.split(example.split(" > ")[0])
        assert words[:2] == ["twinax", name]
        if name == "train":
            words.append("--print-config")  # all but the training itself
            if "runs/de_en" in words[2:3]:
                shutil.copy("runs/de_en/run/config.json", "runs/de_en/config.json")
        if name not in ELSEWHERE:
            code, out, err = command(*words[1:])
            assert (code, "Traceback" in err) == (0, False), err
