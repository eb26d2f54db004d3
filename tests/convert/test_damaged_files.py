"""Damaged checkpoints and other files: each error is one line, and nothing is written."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from twinax import convert
from twinax.convert import Checkpoint
from twinax.parity.functions import random_arrays

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"


@pytest.fixture(scope="module")
def stored_files(tmp_path_factory):
    """The stored checkpoint as a PyTorch file and a safetensors file."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("x.pt", "x.safetensors"):
        convert.save(convert.load(STORED), folder / name)
    return folder


class Code:
    def __reduce__(self):
        return os.system, ("touch was_run",)


def damage(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def edit_torch(path, **changes):
    content = torch.load(path, weights_only=True) | changes
    del content["checksums"]  # which would report the change
    torch.save(content, path)


WRONG = {  # case -> (arguments after the command's name, message)
    "no checkpoint": (("inspect", "nowhere"), "nowhere: there is no such file or directory"),
    "an empty directory": (
        ("convert", "empty", "y.pt"),
        "empty: is an empty directory: it has no config.json; pass a run",
    ),
    "truncated": (("convert", "half.pt", "y.pt"), "half.pt: not a complete PyTorch file; download or copy it again ("),
    "no pickle": (("convert", "odd.pt", "y.pt"), "odd.pt: not a complete PyTorch file; download or copy it again\n"),
    "code": (("convert", "code.pt", "y.pt"), "code.pt: is a file of pickled objects: holds more than tensors, a posix"),
    "a destination that exists": (("convert", "x.pt", "text.txt"), "text.txt: exists; give another name"),
    "a directory as a file": (("convert", "x.pt", "empty.pt"), "empty.pt: is a directory; give the name of a file"),
    "an existing directory": (("convert", "x.pt", "full"), "full: exists and is not empty; give another name"),
    "no such layout": (("convert", "x.pt", "y", "--layout", "led"), "led: is not a layout; the layouts are twinax"),
    "a layout that has no such model": (("convert", "x.pt", "y", "--layout", "bart"), "bart has no such model:"),
    "a file for a directory": (("convert", "x.pt", "y.pt", "--layout", "bart"), "bart is the layout of a directory"),
    "a directory for a file": (
        ("convert", "x.pt", "y", "--layout", "torch_nn"),
        "y: a file of layout torch_nn needs a name",
    ),
    "no such config": (("convert", "x.pt", "y.pt", "--config", "no.json"), "--config no.json: there is no such file"),
    "a config too many": (("convert", "x.pt", "y.pt", "--config", "x.pt"), "x.pt: has its own config"),
    "a config for a run": (("convert", STORED, "y.pt", "--config", "x.pt"), "v1: has its own config"),
    "a name that looks like a file's": (("convert", "x.pt", "y.bin"), "y.bin: a directory's name has no suffix"),
    "a run within": (
        ("translate", "outer"),
        "outer: is neither a run, nor a checkpoint, nor a Hugging Face",
    ),
    "no bytes of UTF-8": (("convert", "bare.pt", "y.pt", "--config", "latin.json"), "latin.json: cannot be read as"),
    "no tensors": (("convert", "none.pt", "y.pt", "--config", "config.json"), "none.pt: holds no tensors"),
    "a file elsewhere": (("translate", "evil.pt", "text.txt"), "evil.pt: holds the file '../evil', which no"),
    "a document elsewhere": (("convert", "page.pt", "y.pt"), "page.pt: holds the document '../evil', which no"),
    "a loop of links": (("convert", "x.pt", "loop"), "loop: cannot be written"),
    "a picture's place": (("inspect", "x.pt", "--json", "full"), "full: is a directory; pass a file name"),
    "sentences of a preset": (("parity", "tiny", "--src", "text.txt"), "tiny: is a preset with random weights"),
    "targets alone": (("parity", "x.pt", "--tgt", "text.txt"), "--tgt text.txt: needs --src, the source sentences"),
    "translations of nothing": (("parity", "x.pt", "--translations"), "--translations: needs --src, the source"),
    "other shapes": (("parity", "x.pt", "small.pt"), "different shapes; their settings differ in d_ff=16 and 8"),
    "no sentences": (("parity", "x.pt", "--src", "blank.txt"), "blank.txt: has no sentence"),
    "unequal files": (("parity", "x.pt", "--src", "text.txt", "--tgt", "blank.txt"), "has 1 lines and blank.txt has 2"),
}

UNREADABLE = {  # case -> (file, its obstacle)
    "a file of another kind": ("text.txt", "a text file that starts with 'a b'"),
    "truncated safetensors": ("half.safetensors", "it has "),
    "names of nobody": (
        "names.pt",
        "its 1 tensors (a) match no layout that twinax supports; if the file is of a Hugging Face directory",
    ),
    "another version": ("later.pt", "twinax_file_version=9: this twinax reads version 1"),
    "a part missing": ("part.pt", "1 arrays do not fit the model"),
    "another optimizer": ("adam.pt", "its optimizer is not that of the run"),
    "no layout": ("layout.pt", "is not in twinax's format: 'layout'"),
    "a source of nothing": ("source.pt", "is not in twinax's format"),
    "a run of nothing": ("run.pt", "is not in twinax's format"),
    "half a position": ("position.pt", "is not in twinax's format"),
    "an update that is text": ("update.pt", "update='abc': must be an integer of at least 0"),
    "files that are none": ("files.pt", "its files are None, not a mapping from names to bytes"),
    "metadata of depth": ("deep.safetensors", "its metadata are not in twinax's format"),
    "another model's config": ("weights", "6 arrays do not fit the model"),
}


@pytest.fixture(scope="module")
def damaged_folder(stored_files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    with pytest.MonkeyPatch.context() as context:
        context.chdir(folder)
        write_damaged_files(stored_files)
    return folder


@pytest.fixture
def damaged_files(damaged_folder, tmp_path, monkeypatch):
    """A copy for one test, as the current folder."""
    shutil.copytree(damaged_folder, tmp_path / "files", symlinks=True)
    monkeypatch.chdir(tmp_path / "files")


def write_damaged_files(stored_files):
    for name in ("x.pt", "half.pt", "later.pt", "part.pt", "adam.pt"):
        Path(name).write_bytes((stored_files / "x.pt").read_bytes())
    Path("half.safetensors").write_bytes((stored_files / "x.safetensors").read_bytes())
    damage(Path("half.pt"))
    damage(Path("half.safetensors"))
    Path("odd.pt").write_bytes(b"h\xff" + bytes(9))  # an instruction of a pickle that gets object 255
    torch.save({"model": Code()}, "code.pt")
    torch.save({"a": torch.ones(2)}, "names.pt")
    edit_torch("later.pt", twinax_file_version=9)
    model = torch.load("x.pt", weights_only=True)["model"]
    edit_torch("part.pt", model={n: t for n, t in model.items() if n != "output.bias"})
    edit_torch("adam.pt", optimizer={"state": {}, "param_groups": [{"params": [0]}]})
    config = convert.load(STORED).config.replace(d_ff=8)
    convert.save(Checkpoint(config, random_arrays(config, 0)), Path("small.pt"))
    torch.save(model, "bare.pt")
    torch.save({}, "none.pt")
    content = torch.load("x.pt", weights_only=True)
    torch.save({name: value for name, value in content.items() if name != "layout"}, "layout.pt")
    wrong_values = {"source": "abc", "run": None, "position": [1], "update": "abc", "files": None}
    for name, value in wrong_values.items():
        torch.save(content | {name: value}, f"{name}.pt")
    torch.save(content | {"files": {"../evil": b"x"}}, "evil.pt")
    torch.save(content | {"source": {"layout": "bart", "documents": {"../evil": {}}}}, "page.pt")
    safetensors.torch.save_file(model, "deep.safetensors", metadata={"twinax": "[" * 100_000})
    convert.save(replace(convert.load(STORED), training=None), Path("weights"))
    config_file = Path("weights/run/model.json")
    Path("config.json").write_text(config_file.read_text())
    config_file.write_text(config_file.read_text().replace('"d_ff": 16', '"d_ff": 8'))
    Path("weights/run/checksums.json").unlink()
    Path("latin.json").write_bytes(b"\xff")
    Path("loop").symlink_to("loop")
    shutil.copytree(STORED, "outer/inner")
    Path("text.txt").write_text("a b\n")
    Path("blank.txt").write_text("\n \n")
    Path("empty").mkdir()
    Path("full").mkdir()
    Path("empty.pt").mkdir()
    Path("full/a").write_text("a")


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_before_anything_is_written(case, command, damaged_files):
    arguments, message = WRONG[case]
    files = {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()}
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("twinax: ")
    assert message in err
    assert "Traceback" not in err
    assert not Path("../evil").exists()
    assert files == {p: p.read_bytes() for p in Path().rglob("*") if p.is_file()}


@pytest.mark.parametrize("case", UNREADABLE)
def test_inspect_prints_the_obstacle(case, command, damaged_files):
    file, obstacle = UNREADABLE[case]
    code, out, err = command("inspect", file, "--json", "report.json")
    assert (code, err) == (2, "")
    assert json.loads(Path("report.json").read_text())["obstacle"].startswith(obstacle)
    assert {"type", "obstacle"} <= {*out.split()}
