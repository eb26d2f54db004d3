"""The command, as a person calls it."""

import json
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


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A small Marian model as `transformers` writes it."""
    from twinax.parity_tests.conversion import random_model

    folder = tmp_path_factory.mktemp("marian")
    random_model("Marian").save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
def test_parity_of_a_directory_has_transformers_for_a_third(directory):
    done = twinax("parity", str(directory))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "┃ transformers ┃" in done.stdout
    for rung in ("attention weights", "encoder", "decoder", "logits", "gradients"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"│ {rung} ")]
        assert float(line.split("│")[3]) <= 1e-12
        assert line.split("│")[-2].strip() == "equal"


@pytest.mark.filterwarnings("ignore")
def test_parity_of_a_directory_sees_where_transformers_differs(directory, monkeypatch, capsys):
    from twinax import cli
    from twinax.parity_tests import ladder, transformers_oracle

    right = transformers_oracle.load_oracle

    def wrong(*args):
        oracle = right(*args)
        return lambda batch: {name: value + (name == "logits") * 1e-9 for name, value in oracle(batch).items()}

    monkeypatch.setattr(transformers_oracle, "load_oracle", wrong)
    monkeypatch.setattr(ladder, "POOLED", 2)
    monkeypatch.setattr(sys, "argv", ["twinax", "parity", str(directory)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    printed = capsys.readouterr().out
    assert "Flax and transformers: 1 of " in printed
    assert "PyTorch and transformers: 1 of " in printed
    assert "begins at logits" in printed


@pytest.mark.filterwarnings("ignore")
def test_parity_of_a_directory_without_transformers(directory, monkeypatch, capsys):
    from twinax import cli

    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    assert "oracle" not in cli._model_of(str(directory))
    assert "transformers is not installed" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_a_directory_that_transformers_refuses(directory, tmp_path):
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"use_cache": "no"}))
    done = twinax("parity", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"twinax: {tmp_path}: transformers cannot load it: ")
    assert "use_cache" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("nowhere/model", "nowhere/model: is neither a preset (tiny, small, base, big) nor a directory"),
        ("smal", "smal: is neither a preset (tiny, small, base, big) nor a directory; did you mean small?"),
        (".", ".: has no config.json"),
        ("x" * 300, f"{'x' * 300}: is neither a preset (tiny, small, base, big) nor a directory"),
    ],
)
def test_parity_of_what_is_no_model(model, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = twinax("parity", model)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"twinax: {line}\n")
