"""Weights of the Flax classes of `transformers` 4: forms, precedence and damaged files. parity_tests has the values."""

import contextlib
import json
import shutil
from pathlib import Path

import msgpack
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from parity_tests.support.legacy_flax_files import FOLDER
from twinax import convert
from twinax.convert.weight_files import reading
from twinax.convert.weight_files.reading import WEIGHTS

FLAX = "flax_model.msgpack"
SHARDS = "t5_gated_sharded"


@pytest.fixture
def bart(tmp_path):
    return shutil.copytree(FOLDER / "bart", tmp_path / "bart")


def tree_of(directory):
    return serialization.msgpack_restore((directory / FLAX).read_bytes())


def same(a, b):
    return a.config == b.config and all(np.array_equal(a.arrays[n], b.arrays[n]) for n in {*a.arrays, *b.arrays})


def test_arrays_in_chunks(bart, monkeypatch):
    """As files have them that hold arrays of more than a gigabyte."""
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    (bart / FLAX).write_bytes(serialization.msgpack_serialize(tree_of(bart)))
    assert b"__msgpack_chunked_array__" in (bart / FLAX).read_bytes()
    assert same(convert.load(bart), convert.load(FOLDER / "bart"))


def test_the_bare_model(bart):
    (bart / FLAX).write_bytes(serialization.msgpack_serialize(tree_of(bart)["model"]))
    checkpoint = convert.load(bart)
    assert not checkpoint.arrays["output.bias"].any()
    kernel = "decoder.layers.0.cross_attention.q_proj.kernel"
    assert np.array_equal(checkpoint.arrays[kernel], convert.load(FOLDER / "bart").arrays[kernel])


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_dtype_in_the_settings_is_ignored(name, bart, tmp_path):
    """Flax classes keep that of the PyTorch weights that they started from. What is written states the right one."""
    values = json.loads((bart / "config.json").read_text())
    (bart / "config.json").write_text(json.dumps(values | {name: "float16"}))
    checkpoint = convert.load(bart)
    assert same(checkpoint, convert.load(FOLDER / "bart"))
    convert.save(checkpoint, tmp_path / "new", layout="bart")
    settings = json.loads((tmp_path / "new" / "config.json").read_text())
    assert (settings["dtype"], settings.get("torch_dtype")) == ("float32", None)
    assert same(convert.load(tmp_path / "new"), checkpoint)


def test_arrays_are_copies(bart):
    assert all(array.flags.writeable for array in convert.load(bart).arrays.values())


def test_other_forms_come_first(bart, tmp_path):
    """As in `transformers`: safetensors, PyTorch, Flax."""
    convert.save(convert.load(bart), tmp_path / "new", layout="bart")
    tensors = load_file(tmp_path / "new" / WEIGHTS)
    tensors["final_logits_bias"] += 1
    save_file(tensors, bart / WEIGHTS, metadata={"format": "pt"})
    bias = convert.load(FOLDER / "bart").arrays["output.bias"]
    assert np.array_equal(convert.load(bart).arrays["output.bias"], bias + 1)
    (bart / WEIGHTS).rename(bart / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (bart / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    assert np.array_equal(convert.load(bart).arrays["output.bias"], bias + 1)
    (bart / f"{WEIGHTS}.index.json").unlink()
    (bart / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(convert.ConversionError, match=r"pytorch_model\.bin is an empty file"):
        convert.load(bart)


def test_commands(command, tmp_path):
    code, out, _ = command("inspect", FOLDER / SHARDS)
    assert (code, "t5" in out, "trained parameters" in out) == (0, True, True)
    code, out, _ = command("convert", FOLDER / SHARDS, tmp_path / "new", "--layout", "t5")
    assert (code, "bit-identical after reading back" in " ".join(out.split())) == (0, True)
    assert same(convert.load(tmp_path / "new"), convert.load(FOLDER / SHARDS))


def content(value):
    return lambda d: (d / FLAX).write_bytes(value)


def tree(change):
    def write(directory):
        values = tree_of(directory)
        change(values)
        (directory / FLAX).write_bytes(serialization.msgpack_serialize(values))

    return write


def shard(change):
    """A directory whose weights are shards, changed."""

    def write(directory):
        shutil.rmtree(directory)
        shutil.copytree(FOLDER / SHARDS, directory)
        change(directory)

    return write


def elsewhere(directory):
    index = directory / f"{FLAX}.index.json"
    index.write_text(index.read_text().replace("flax_model-00001", "../flax_model-00001"))


def array_of(shape, dtype, values):
    return msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb((shape, dtype, values)))})


def deep(depth):
    return b"\x81\xa1a" * depth + b"\x01"


SHARD = "flax_model-00001-of-00003.msgpack"
WRONG = {
    "empty": (content(b""), f"whose {FLAX} is an empty file"),
    "truncated": (
        lambda d: (d / FLAX).write_bytes((d / FLAX).read_bytes()[:3000]),
        f"{FLAX}: not a complete Flax file: ValueError",
    ),
    "a pointer of git-lfs": (content(b"version https://git-lfs"), f"whose {FLAX} is a git-lfs pointer"),
    "a list": (content(msgpack.packb([1, 2])), f"{FLAX}: holds a list, not a tree of arrays"),
    "no arrays": (content(msgpack.packb({})), f"{FLAX}: holds no tensors"),
    "a map without end": (content(b"\xdf\xff\xff\xff\xff"), f"{FLAX}: not a complete Flax file: ValueError"),
    "lists without end": (content(b"\xdd\xff\xff\xff\xff" * 400), f"{FLAX}: not a complete Flax file: ValueError"),
    "depth": (content(deep(100_000)), f"{FLAX}: not a complete Flax file"),
    "depth that msgpack reads": (content(deep(500)), "a is a int, not an array"),
    "objects": (content(array_of((1,), "O", b"12345678")), f"{FLAX}: not a complete Flax file: ValueError"),
    "another shape": (content(array_of((9,), "float32", b"1234")), f"{FLAX}: not a complete Flax file: ValueError"),
    "an unknown dtype": (content(array_of((1,), "x", b"1234")), f"{FLAX}: not a complete Flax file: TypeError"),
    "half a chunk": (
        content(msgpack.packb({"a": {"__msgpack_chunked_array__": True}})),
        f"{FLAX}: not a complete Flax file: KeyError",
    ),
    "text": (tree(lambda t: t["model"].update(shared="x")), f"{FLAX}: model/shared is a str, not an array"),
    "a number": (tree(lambda t: t.update(step=np.int32(3))), f"{FLAX}: step is a int32, not an array"),
    "an unknown kind": (content(msgpack.packb({"a": msgpack.ExtType(7, b"x")})), "a is a ExtType, not an array"),
    "a number for a name": (content(msgpack.packb({3: 4})), "the path (3,) has a part that is not text"),
    "a path twice": (
        tree(lambda t: t.update({"model/shared/embedding": np.ones(2)})),
        f"{FLAX}: holds model/shared/embedding twice",
    ),
    "a name twice": (
        tree(lambda t: t["model"]["shared"].update(weight=np.ones(2))),
        "model/shared/weight: is a second array for model.shared.weight",
    ),
    "a missing shard": (shard(lambda d: (d / SHARD).unlink()), f"1 of 3 shards missing: {SHARD}"),
    "a shard elsewhere": (shard(elsewhere), f"names a file outside its directory: ../{SHARD}"),
    "another shard": (
        shard(lambda d: shutil.copy(d / SHARD.replace("00001-", "00002-"), d / SHARD)),
        f"{SHARD}: does not match {FLAX}.index.json: ",
    ),
    "TensorFlow alone": (
        lambda d: (d / FLAX).rename(d / "tf_model.h5"),
        f"has no weights; looked for model.safetensors, pytorch_model.bin, {FLAX} and shards of them",
    ),
    "another family": (
        lambda d: (d / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}'),
        "is not an encoder-decoder of text: model_type='bert'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_a_clear_line(case, bart):
    damage, line = WRONG[case]
    damage(bart)
    with pytest.raises(convert.ConversionError) as error:
        convert.load(bart)
    assert line in str(error.value)
    assert str(bart) in str(error.value)


@given(data=st.data())
@settings(max_examples=60)
def test_a_damaged_file_is_one_line_whatever_is_wrong(data, tmp_path_factory):
    """Truncated anywhere, or with bytes changed."""
    values = bytearray((FOLDER / "bart" / FLAX).read_bytes())
    if data.draw(st.booleans()):
        del values[data.draw(st.integers(0, len(values) - 1)) :]
    else:
        for _ in range(3):
            values[data.draw(st.integers(0, len(values) - 1))] ^= data.draw(st.integers(1, 255))
    path = Path(tmp_path_factory.mktemp("flax"), FLAX)
    path.write_bytes(values)
    with contextlib.suppress(convert.ConversionError):  # a number with a flipped bit is still a number
        reading.read_weights(path.parent)
