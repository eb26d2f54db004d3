"""Help texts: fast to print, with examples that run."""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args, get_origin, get_type_hints
from unittest.mock import Mock

import numpy as np
import pytest
import tyro

from twinax.backend import environment
from twinax.cli import commands
from twinax.cli.flags import known_flags, run_arguments
from twinax.cli.flags.foreign_flags import FOREIGN, LISTS, check_flags
from twinax.cli.flags.train_help import FIRST
from twinax.cli.usage import UsageError
from twinax.configs.run import RunConfig

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
COMMANDS = (
    *("train", "data", "translate", "evaluate", "score", "serve", "parity", "compare", "capture", "audit", "convert"),
    *("inspect", "plan", "demo"),
)
ELSEWHERE = ("serve", "parity", "plan", "demo")  # run in tests of their own, because they take long
BASICS = {"jax", "torch", "flax", "numpy", "tokenizers", "datasets", "grain", "orbax", "sacrebleu", "matplotlib"}


@pytest.mark.parametrize("arguments", [["--help"], ["translate", "--help"], ["convert", "--help"]])
def test_help_imports_little(arguments):
    """Counts modules, because times vary between machines; the count was 290."""
    code = f"""
import sys
sys.argv = ["twinax", *{arguments}]
from twinax import cli
try:
    cli.main()
except SystemExit:
    print(*sys.modules, file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    modules = result.stderr.split()
    assert len(modules) < 350
    assert not BASICS & set(modules)


def test_the_version_lists_what_a_bug_report_needs(command, monkeypatch):
    """And names a package that is missing."""
    names = ["twinax", "jax", "jaxlib", "flax", "torch", "Python", "platform", "processor", "devices"]
    code, out, err = command("--version")
    rows = [line.split(" ", 1) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [name for name, _ in rows] == names
    assert all(re.match(r"\d+\.\d+", version) for _, version in rows[:6])
    assert rows[8][1].endswith("× cpu")
    monkeypatch.setattr(environment, "PACKAGES", ("twinax", "no-package"))
    assert command("--version")[1].splitlines()[1] == "no-package not installed"


@pytest.mark.parametrize(("error", "reason"), [(RuntimeError("no TPU"), "no TPU"), (AssertionError(), "JAX finds no")])
def test_the_version_is_printed_without_devices(error, reason, command, monkeypatch):
    """JAX raises either if JAX_PLATFORMS names a platform that it lacks."""
    monkeypatch.setattr("jax.devices", Mock(side_effect=error))
    code, out, _ = command("--version")
    assert code == 0
    assert out.splitlines()[-1].startswith(f"devices none: {reason}")


@pytest.fixture
def example_files(tmp_path, monkeypatch):
    """Create the files that the examples name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(STORED, "runs/de_en")
    lines = [" ".join("abcdefgh"[i % 5 : i % 5 + 1 + i % 3]) for i in range(40)]
    for name in ("input", "test", "train", "val"):
        Path(f"{name}.de").write_text("\n".join(lines) + "\n")
        Path(f"{name}.en").write_text("\n".join(lines).upper() + "\n")
    reference = "import torch\n\n\ndef make():\n    torch.manual_seed(0)\n    return torch.nn.Linear(3, 2)\n"
    Path("ref.py").write_text(reference)
    Path("port.py").write_text(
        "def make(state):\n    return lambda p, x: x @ p['weight'].T + p['bias'], state\n",
    )
    np.savez("batch.npz", np.arange(6.0).reshape(2, 3))


def test_the_overview_names_every_command(command, example_files):
    code, out, _ = command("--help")
    assert code == 0
    assert tuple(re.findall(r"•\s+(\w+)", out)) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_run(name, command, example_files):
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
    """Table: command -> all flags in its full help, as tyro prints it."""
    table = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        for name in FOREIGN:
            output = io.StringIO()
            patch.setattr(sys, "argv", ["twinax", name, "--help-all" if name in ("train", "data") else "--help"])
            with contextlib.redirect_stdout(output), pytest.raises(SystemExit):
                commands.main()
            flags = set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", output.getvalue()))
            table[name] = flags | {flag.replace("--corpus.", "--") for flag in flags}
    return table


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_other_toolkits_are_answered_with_flags_that_exist(name, flags_of):
    for foreign_flag, answer in FOREIGN[name].items():
        assert foreign_flag not in flags_of[name]
        flags = re.findall(r"--[\w.-]+", answer)
        assert flags or answer.startswith("not available: ")
        assert {*flags} <= flags_of[name], foreign_flag


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
        (("parity", "x", "--lang", "de"), "--lang: in twinax, use --tgt-lang"),
        (("score", "x", "--reference", "y"), "--reference: in twinax, use --tgt"),
        (("translate", "x", "--do-sample"), "--do-sample: in twinax, use --samples"),
        (("evaluate", "x", "--sampling_topk=5"), "--sampling-topk: in twinax, use --top-k"),
        (
            ("translate", "x", "--output-file", "y"),
            "--output-file: in twinax, use --output",
        ),
        (
            ("train", "--report_to", "none"),
            "--report-to: in twinax, use --loop.swanlab; TensorBoard's files are always written to the run",
        ),
        (("compare", "a", "b", "--input", "c"), "--input: in twinax, use --inputs"),
    ],
)
def test_a_name_of_another_toolkit_is_one_line(arguments, line, command):
    assert command(*arguments) == (2, "", f"twinax: {line}\n")


@pytest.mark.parametrize("name", [*FOREIGN])
def test_flags_of_other_tools_that_many_try(name):
    """Every command answers to a device; those that decode to sampling and batches."""
    tried = ["--device", *(["--sampling", "--topk", "--batch-size"] if name in ("translate", "evaluate") else [])]
    for flag in tried:
        with pytest.raises(UsageError, match=f"^{flag}: "):
            check_flags(name, ["x", flag, "1"])


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_names_the_help_of_its_command(name, command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    words = {"score": ["x", "--src", "a", "--tgt", "b"], "convert": ["x", "y"], "compare": ["x", "y", "--inputs", "z"]}
    words |= {"train": ["--src", "a", "--tgt", "b"], "data": ["--src", "a", "--tgt", "b"], "demo": []}
    words |= {"evaluate": words["score"], "plan": ["tiny", "--topology", "v4:2x2x1"]}
    code, out, err = command(name, *words.get(name, ["x"]), "--bogus-flag", "1")
    assert (code, out) == (2, "")
    assert f"twinax {name} --help" in err
    assert "--bogus-flag" in err


def class_of(name):
    """The dataclass that has the flags of a command."""
    kind = commands.COMMANDS[name]
    return kind if is_dataclass(kind) else run_arguments._command(None, name == "data")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_of_a_command_are_those_that_tyro_parses(name):
    with warnings.catch_warnings(action="ignore"):  # deprecated, but the commands do not need it
        parser = tyro.extras.get_parser(class_of(name))
    assert {*known_flags.flags_of(class_of(name))} == parser._option_string_actions.keys() - {"-h", "--help"}


@pytest.mark.parametrize("name", COMMANDS)
def test_two_letters_swapped_suggest_the_flag(name):
    known = {*known_flags.flags_of(class_of(name))}
    for flag in known:
        for i in range(2, len(flag) - 1):
            word = flag[:i] + flag[i + 1] + flag[i] + flag[i + 2 :]
            if word in known | FOREIGN.get(name, {}).keys():
                continue
            with pytest.raises(UsageError) as error:
                known_flags.check_known(name, class_of(name), ["x", f"{word}=1"])
            line = f"{word}: there is no such flag; twinax {name} --help lists them; did you mean {flag}?"
            assert str(error.value) == line


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("score", "x", "--sorce", "y"), "score --help lists them; did you mean --src?"),
        (("score", "x", "--src", "y", "--t_gt", "z"), "score --help lists them; did you mean --tgt?"),
        (
            ("translate", "x", "--sorce", "y"),
            "translate --help lists them; --source: not available: the name of the file follows that of the "
            "checkpoint: twinax translate CHECKPOINT FILE",
        ),
        (("translate", "x", "--bems=4"), "translate --help lists them; did you mean --beam-size?"),
        (("train", "--sorce", "y"), "train --help lists them; did you mean --src?"),
        (
            ("train", "--src", "x", "--tgt", "y", "--process-di", "1"),
            "train --help lists them; did you mean --process-id?",
        ),
        (("data", "--clear-cahce"), "data --help lists them; did you mean --clear-cache?"),
        (("inspect", "x", "--verbsoe"), "inspect --help lists them; did you mean --verbose?"),
        (("inspect", "x", "--qqqqqqqq"), "inspect --help lists them"),
    ],
)
def test_a_flag_that_does_not_exist_is_one_line(arguments, line, command):
    flag = next(word for word in arguments[1:] if word.startswith("--") and word not in ("--src", "--tgt"))
    expected = f"twinax: {flag.partition('=')[0]}: there is no such flag; twinax {line}\n"
    assert command(*arguments) == (2, "", expected)


def test_negative_numbers_and_what_follows_two_dashes_are_no_flags():
    for words in (["--port", "-1"], ["--window", "-inf"], ["--", "--sorce"], ["--sorce", "--help"][::-1]):
        known_flags.check_known("serve", commands.COMMANDS["serve"], words)


COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
$(complete -p twinax | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_bash_completes_commands_and_their_flags(command, tmp_path):
    script = tmp_path / "twinax"
    assert not command("--tyro-write-completion", "bash", script)[0]

    def complete(*words):
        result = subprocess.run(["bash", "-c", COMPLETE, "-", script, "twinax", *words], capture_output=True, text=True)
        assert result.stderr == ""
        return result.stdout.splitlines()

    assert {*COMMANDS} <= {*complete("")}
    assert complete("trans") == ["translate"]
    assert {*complete("translate", "--beam")} == {"--beam-groups", "--beam-size"}
    assert complete("train", "--training.learning-r") == ["--training.learning-rate"]
    assert complete("train", "--src") == ["--src", "--src-column"]
    assert all(re.fullmatch(r"--?[\w.-]+", flag) for name in COMMANDS for flag in complete(name, "--"))
    assert "--tokenizer.vocab-size" in complete("data", "--tokenizer.voc")


@pytest.mark.parametrize("name", ["train", "data"])
def test_the_short_help_has_twenty_settings(name, command, flags_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command(name, "scan", "--help")
    rows = dict(re.findall(r"^(--[\w.-]+) +(.*?) *$", out, flags=re.MULTILINE))
    assert code == 0
    assert len(out.splitlines()) < 50
    assert len(FIRST) == 20
    assert {*FIRST} < {*rows} <= flags_of[name]
    assert rows["--model.d-model"].endswith("(default: 128)")  # of the named run
    assert f"all settings: twinax {name} --help-all, or docs/settings.md" in out


def _lists(config, prefix=""):
    """Flags of the fields of a config, and of those within it, whose value is a list."""
    for name, kind in get_type_hints(config).items():
        if is_dataclass(kind):
            yield from _lists(kind, f"{prefix}{name}.")
        elif get_origin(kind) is tuple and get_args(kind)[1:] == (...,):
            yield f"--{prefix}{name}".replace("_", "-")


def test_every_list_is_refused_if_it_is_given_twice():
    kinds = [kind for kind in commands.COMMANDS.values() if is_dataclass(kind)]
    lists = {
        f"--{field.name.replace('_', '-')}" for kind in kinds for field in fields(kind) if field.type == tuple[str, ...]
    }
    assert {"--references", "--optimizer"} <= lists
    assert {*LISTS} >= lists | {*_lists(RunConfig)}
    for flag in LISTS:
        check_flags("x", [flag, "a", "b"])
        for words in ([flag, "a", flag, "b"], [f"{flag}=a", "--x", f"{flag.replace('-', '_').replace('__', '--')}=b"]):
            with pytest.raises(UsageError, match=f"^{flag}: is given twice"):
                check_flags("x", words)
