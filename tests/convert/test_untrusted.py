"""Checkpoints from somebody else: they lead nowhere else, and declare no more than they hold."""

import io
import json
import os
import shutil
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from twinax import convert
from twinax.backend.errors import CheckpointError, ConversionError

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"


@pytest.fixture
def weights(tmp_path):
    """A checkpoint of weights, as a directory."""
    convert.save(replace(convert.load(STORED), training=None), tmp_path / "weights")
    return tmp_path / "weights"


def pipe(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def link(path):
    path.symlink_to("/etc/hostname")


def linked_folder(path):
    path.symlink_to("/etc")


ENTRIES = {
    pipe: "is a pipe; a checkpoint has files and directories only",
    device: "is a link to /dev/zero, outside of the checkpoint",
    link: "is a link to /etc/hostname, outside of the checkpoint",
    linked_folder: "is a link to /etc, outside of the checkpoint",
}


@pytest.mark.parametrize("make", ENTRIES)
@pytest.mark.parametrize("place", ["x", "run/vocab.json", "run/tokenizer/merges.txt"])
def test_what_leads_out_of_a_checkpoint_is_refused(make, place, weights, tmp_path, command):
    make(weights / place)
    for name in ("inspect", "convert"):
        code, out, err = command(name, weights, *([tmp_path / "y.pt"] if name == "convert" else []))
        assert code == 2
        assert f"{weights / place}: {ENTRIES[make]}" in (out + err).replace("\n", " ") or name == "inspect"
    assert not (tmp_path / "y.pt").exists()


def test_config_json_as_a_pipe_does_not_hang(bart):
    (bart / "config.json").unlink()
    os.mkfifo(bart / "config.json")
    with pytest.raises(ConversionError, match="is a pipe"):
        convert.load(bart)


def test_links_within_a_checkpoint_and_into_the_hub_s_cache_are_followed(bart, tmp_path):
    expected = convert.load(bart)
    (bart / "model.safetensors").rename(bart / "w")
    (bart / "model.safetensors").symlink_to("w")
    assert convert.load(bart).config == expected.config
    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "1a2b"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in bart.iterdir():
        shutil.copy(path, blobs / f"hash-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"hash-{path.name}")
    assert convert.load(snapshot).config == expected.config
    (snapshot / "vocab.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConversionError, match=r"vocab\.json: is a link to .*elsewhere, outside of the checkpoint"):
        convert.load(snapshot)


def test_a_checkpoint_behind_a_link_is_read(weights, tmp_path):
    (tmp_path / "link").symlink_to(weights)
    convert.load(tmp_path / "link")


@pytest.mark.parametrize(
    "field",
    ["num_encoder_layers", "num_decoder_layers", "d_ff", "decoder_d_ff", "d_model", "max_length", "src_vocab_size"],
)
def test_a_config_far_larger_than_the_files(field, weights, tmp_path):
    model = weights / "run" / "model.json"
    (weights / "run" / "checksums.json").unlink()
    values = json.loads(model.read_text())
    fields = {field, "tgt_vocab_size"} if field == "src_vocab_size" else {field}  # the embeddings are shared
    model.write_text(json.dumps(values | dict.fromkeys(fields, 10**9 - 10**9 % values["num_heads"])))
    with pytest.raises(CheckpointError, match=rf"declares a model of .* numbers, such as {field}=[\d,]+, in files of"):
        convert.load(weights)
    convert.save(replace(convert.load(STORED), training=None), tmp_path / "x.pt")
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    torch.save(content | {"config": json.loads(model.read_text())}, tmp_path / "x.pt")
    with pytest.raises(ConversionError, match="declares a model of"):
        convert.load(tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["max_position_embeddings", "encoder_layers", "d_model"])
def test_settings_of_a_family_far_larger_than_its_files(name, directories, tmp_path):
    directory = shutil.copytree(directories / "Pegasus", tmp_path / "pegasus")
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | {name: 10**9}))
    with pytest.raises(ConversionError):
        convert.load(directory)


def test_tensors_that_repeat_one_number(tmp_path):
    torch.save({"a": torch.zeros(1).expand(10**9)}, tmp_path / "x.pt")
    with pytest.raises(ConversionError, match="declares arrays of 4,000,000,000 bytes in files of"):
        convert.load(tmp_path / "x.pt")
    one = torch.zeros(10**6)
    torch.save({str(i): one for i in range(200)}, tmp_path / "y.pt")
    with pytest.raises(ConversionError, match="declares arrays of 800,000,000 bytes in files of"):
        convert.load(tmp_path / "y.pt")


def test_an_optimizer_that_repeats_one_number(tmp_path):
    """Also in a file that twinax wrote, whose checksums then fail, as after a training in PyTorch."""
    checkpoint = convert.load(STORED)
    convert.save(checkpoint, tmp_path / "x.pt")
    content = torch.load(tmp_path / "x.pt", weights_only=True)
    content["optimizer"]["state"][0]["exp_avg"] = torch.zeros(1).expand(10**9)
    torch.save(content, tmp_path / "y.pt")
    torch.save({"model": content["model"], "optimizer": [content["optimizer"]]}, tmp_path / "z.pt")
    for name in ("y.pt", "z.pt"):
        with pytest.raises(ConversionError, match=r"declares arrays of 4,0\d\d,\d\d\d,\d\d\d bytes in files of"):
            convert.load(tmp_path / name)


@pytest.mark.parametrize("name", ["M2M100", "Pegasus", "Marian"])
def test_no_position_table_is_computed_before_its_size_is_checked(name, directories, tmp_path):
    """A table of that length takes at least a gigabyte."""
    directory = shutil.copytree(directories / name, tmp_path / name)
    settings = json.loads((directory / "config.json").read_text())
    length = 2**28 // settings["d_model"]
    (directory / "config.json").write_text(json.dumps(settings | {"max_position_embeddings": length}))
    tracemalloc.start()
    try:
        with pytest.raises(ConversionError, match=rf"declares a model of .* such as max_length={length:,}"):
            convert.load(directory)
        assert tracemalloc.get_traced_memory()[1] < 1e8
    finally:
        tracemalloc.stop()


def test_a_compressed_archive_of_zeros(tmp_path):
    array = io.BytesIO()
    np.save(array, np.zeros(10**6, np.float32))
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for i in range(80):
            archive.writestr(f"a{i}.npy", array.getvalue())
    with pytest.raises(ConversionError, match="declares arrays of 320,010,240 bytes in files of"):
        convert.load(tmp_path / "x.npz")
