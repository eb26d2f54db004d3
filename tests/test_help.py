"""What the command says about itself: quickly, and with examples that run."""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from twinax import cli
from twinax.foreign_flags import FOREIGN
from twinax.train_help import FIRST

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


@pytest.fixture(scope="module")
def flags_of():
    """command -> the flags that its whole help lists, by tyro."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        for name in FOREIGN:
            printed = io.StringIO()
            patch.setattr(sys, "argv", ["twinax", name, "--help-all" if name in ("train", "data") else "--help"])
            with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
                cli.main()
            flags = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", printed.getvalue()))
            found[name] = flags | {flag.replace("--corpus.", "--") for flag in flags}
    return found


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_other_toolkits_are_answered_with_flags_that_exist(name, flags_of):
    for theirs, ours in FOREIGN[name].items():
        assert theirs not in flags_of[name]
        named = re.findall(r"--[\w.-]+", ours)
        assert named
        assert {*named} <= flags_of[name], theirs


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("train", "--lr", "1e-3"), "--lr: in twinax, use --training.learning-rate"),
        (
            ("data", "--max_tokens=9"),
            "--max-tokens: in twinax, use --batches.tokens (tokens per side, padding included)",
        ),
        (("translate", "x", "--beam", "4"), "--beam: in twinax, use --beam-size"),
        (("translate", "x", "--nbest", "4"), "--nbest: in twinax, use --n-best"),
        (("evaluate", "x", "--lenpen", "1"), "--lenpen: in twinax, use --length-exponent"),
        (("parity", "x", "--lang", "de"), "--lang: in twinax, use --forced-bos (the token of the target language)"),
        (("score", "x", "--reference", "y"), "--reference: in twinax, use --tgt"),
    ],
)
def test_a_name_of_another_toolkit_is_one_line(arguments, line, command):
    assert command(*arguments) == (2, "", f"twinax: {line}\n")


@pytest.mark.parametrize("name", ["train", "data"])
def test_the_short_help_has_twenty_settings(name, command, flags_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command(name, "scan", "--help")
    rows = dict(re.findall(r"^(--[\w.-]+) +(.*?) *$", out, flags=re.MULTILINE))
    assert code == 0
    assert len(out.splitlines()) < 50
    assert len(FIRST) == 20
    assert {*FIRST} < {*rows} <= flags_of[name]
    assert rows["--model.d-model"].endswith("(default: 128)")  # of the run that is named
    assert f"all settings: twinax {name} --help-all, or docs/settings.md" in out
