"""The commands where PyTorch, which is optional, is not installed."""

import numpy as np
import pytest

from twinax import convert

CODE = """
import sys
from importlib.machinery import PathFinder

for name in [name for name in sys.modules if name.partition(".")[0] in ("torch", "transformers")]:
    del sys.modules[name]
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
from twinax.cli import entry
sys.argv = ["twinax", *sys.argv[1:]]
entry.main()
"""
SMALL = (
    *("--corpus.held-out", "10", "--batches.shapes", "1", "--loop.updates", "2", "--loop.validate-every", "2"),
    *("--model.d-model", "16", "--model.num-heads", "2", "--model.d-ff", "16", "--training.warmup-updates", "1"),
    *("--model.num-encoder-layers", "1", "--model.num-decoder-layers", "1"),
)


@pytest.fixture
def without_torch(forks, tmp_path):
    """Run `twinax` in a process that cannot import PyTorch."""
    return lambda *arguments: forks(CODE, *arguments, cwd=tmp_path)


@pytest.fixture
def text(corpus):
    return ["--src", corpus.src, "--tgt", corpus.tgt]


@pytest.fixture(scope="module")
def models(tmp_path_factory, directories):
    """A model as files, and an M2M100 directory."""
    folder = tmp_path_factory.mktemp("models")
    checkpoint = convert.load(directories / "BART")
    for suffix in (".pt", ".safetensors"):
        convert.save(checkpoint, folder / f"model{suffix}")
    (folder / "M2M100").symlink_to(directories / "M2M100")
    return folder


def test_a_run_is_trained_and_used(without_torch, text, tmp_path):
    commands = [
        ["data", *text],
        ["train", *text, "--out", "run", *SMALL],
        ["translate", "run", text[1], "--beam-size", "1", "--max-length", "8"],
        ["inspect", "run"],
        ["convert", "run", "run.safetensors"],
        ["convert", "run.safetensors", "again"],
        ["translate", "again", text[1], "--beam-size", "1", "--max-length", "8"],
        ["plan", "--help"],
    ]
    results = [without_torch(*arguments) for arguments in commands]
    for arguments, result in zip(commands, results, strict=True):
        assert result.returncode == 0, (arguments, result.stderr)
    assert results[2].stdout == results[6].stdout
    assert len(results[2].stdout.splitlines()) == 80


def test_safetensors_become_a_hugging_face_directory_and_back(without_torch, directories, tmp_path):
    commands = [
        ["convert", directories / "BART", "one.safetensors"],
        ["convert", "one.safetensors", "directory", "--layout", "bart"],
        ["convert", "directory", "two.safetensors"],
    ]
    for arguments in commands:
        result = without_torch(*arguments)
        assert result.returncode == 0, (arguments, result.stderr)
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


REFERENCE = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.GELU(), torch.nn.Linear(9, 6)).eval()
"""
PORT = """
import jax

def make():
    zeros = {"a": jax.numpy.zeros((6, 9)), "b": jax.numpy.zeros((9, 6)), "c": jax.numpy.zeros(9)}
    return (lambda p, x: (x @ p["a"] + p["c"]) @ p["b"]), zeros

def convert(state):
    return {"a": state["0.weight"].T, "b": state["2.weight"].T, "c": state["0.bias"], "d": state["2.bias"]}

def right(state):
    return lambda p, x: jax.nn.gelu(x @ p["a"] + p["c"], approximate=False) @ p["b"] + p["d"], convert(state)

def wrong(state):
    return lambda p, x: jax.nn.gelu(x @ p["a"] + p["c"]) @ p["b"] + p["d"], convert(state)
"""


def test_a_recorded_reference_is_compared(without_torch, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ref.py").write_text(REFERENCE)
    (tmp_path / "port.py").write_text(PORT)
    np.save("x.npy", np.random.default_rng(0).standard_normal((4, 6)).astype("f"))
    command("capture", "ref.py:make", "--inputs", "x.npy", "--out", "ref.trace", "--gradients")
    equal = without_torch("compare", "ref.trace", "port.py:right", "--gradients")
    assert (equal.returncode, equal.stderr) == (0, "")
    assert "other inputs, because aten.addmm, aten.gelu, aten.t cannot be computed here without" in " ".join(
        equal.stdout.split()
    )
    different = without_torch("compare", "ref.trace", "port.py:wrong")
    assert different.returncode == 1
    assert "port.py:15" in different.stdout, different.stdout
    assert "erf gelu" in different.stdout
    refused = without_torch("compare", "ref.trace", "port.py:make")
    assert refused.returncode == 2
    assert "no weights can be inferred; pass --convert or --rules" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        ("parity tiny", "twinax parity"),
        ("audit tiny", "twinax audit"),
        ("compare a.py:model b.py:model --inputs x.npy", "twinax compare"),
        ("demo", "twinax demo"),
        ("translate FOLDER/model.safetensors text --framework torch", "--framework torch"),
        ("score FOLDER/model.safetensors --src text --tgt text --framework torch", "--framework torch"),
        ("evaluate FOLDER/model.safetensors --src text --tgt text --framework torch", "--framework torch"),
        ("translate FOLDER/model.pt text", "FOLDER/model.pt: reading it"),
        ("inspect FOLDER/model.pt", "FOLDER/model.pt: reading it"),
        ("train --init-from FOLDER/model.pt --src text --tgt text", "FOLDER/model.pt: reading it"),
        ("convert FOLDER/model.pt new.safetensors", "FOLDER/model.pt: reading it"),
        ("convert FOLDER/model.safetensors new.pt", "new.pt: writing it"),
        ("convert FOLDER/model.safetensors new --layout fairseq", "new: writing it"),
        ("convert FOLDER/model.safetensors new.safetensors --layout torch_nn", "--layout torch_nn"),
        (
            "convert FOLDER/model.safetensors new.safetensors --dtype bfloat16",
            "--dtype bfloat16: the comparison of logits",
        ),
        ("inspect FOLDER/M2M100", "the position table of m2m_100"),
    ],
)
def test_what_needs_torch_says_so_in_one_line(arguments, subject, without_torch, models, tmp_path):
    for name in ("text", "a.py", "b.py"):
        (tmp_path / name).write_text("a\n")
    np.save(tmp_path / "x.npy", np.zeros(1))
    before = sorted(tmp_path.iterdir())
    arguments, subject = (words.replace("FOLDER", str(models)) for words in (arguments, subject))
    result = without_torch(*arguments.split())
    message = f"twinax: {subject} needs PyTorch, which is not installed: pip install 'twinax[torch]'\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", message)
    assert sorted(tmp_path.iterdir()) == before


def test_python_says_so_too(forks):
    code = CODE.partition("from twinax")[0] + "import twinax.torch_reference"
    result = forks(code)
    assert result.returncode == 1
    message = "twinax.torch_reference needs PyTorch, which is not installed: pip install 'twinax[torch]'"
    assert result.stderr.splitlines()[-1] == f"twinax.backend.errors.MissingPackageError: {message}"
