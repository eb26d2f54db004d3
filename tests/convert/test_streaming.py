"""Reading and writing one array at a time: safetensors files, shards, dtypes, memory, what a killed process leaves."""

import fcntl
import json
import os
import re
import time
import tracemalloc
from fractions import Fraction
from threading import Timer

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from transformers import AutoModelForSeq2SeqLM, BartConfig, BartForConditionalGeneration

from parity_tests.support.conversion import random_model
from twinax import TransformerConfig, convert
from twinax.convert.arrays.dtypes import logit_movement, random_tokens, to_dtype
from twinax.convert.arrays.frameworks import cast
from twinax.convert.arrays.verification import compare_checkpoints
from twinax.convert.io.progress import listening
from twinax.convert.io.safetensors_files import read_safetensors, write_safetensors
from twinax.convert.layouts import fairseq
from twinax.convert.port import flax_specs
from twinax.parity.functions import random_arrays

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes


def flat(out):
    return " ".join(out.replace("│", " ").split())


DTYPES = [np.float64, np.float32, np.float16, np.int64, np.uint8, np.bool_]
SHAPES = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
ARRAYS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.sampled_from(DTYPES).flatmap(lambda dtype: npst.arrays(dtype, SHAPES)),
    max_size=5,
)


@given(arrays=ARRAYS, metadata=st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2))
def test_files_are_those_of_the_library(arrays, metadata, tmp_path_factory):
    """Both ways; a transposed array is written in C order."""
    path = tmp_path_factory.mktemp("file") / "x.safetensors"
    arrays |= {"a transposed one": np.arange(6.0).reshape(2, 3).T}
    write_safetensors(path, arrays, metadata)
    result = safetensors.numpy.load_file(path)
    assert result.keys() == arrays.keys()
    assert all(np.array_equal(result[name], a, equal_nan=a.dtype.kind == "f") for name, a in arrays.items())
    with safetensors.safe_open(path, "numpy") as file:
        assert {name: text for name, text in file.metadata().items() if name != "twinax_checksums"} == metadata
    safetensors.numpy.save_file({name: np.array(a, order="C") for name, a in arrays.items()}, path, metadata)
    again, texts = read_safetensors(path)
    assert (again.keys(), texts) == (arrays.keys(), metadata)
    for name, array in arrays.items():
        assert (again[name].dtype, again[name].shape) == (array.dtype, array.shape)
        assert again[name].tobytes() == np.ascontiguousarray(array).tobytes()


def test_bfloat16_is_torch_s(tmp_path):
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    safetensors.torch.save_file({"a": tensor}, tmp_path / "x.safetensors")
    arrays, _ = read_safetensors(tmp_path / "x.safetensors")
    write_safetensors(tmp_path / "y.safetensors", arrays, {})
    assert torch.equal(safetensors.torch.load_file(tmp_path / "y.safetensors")["a"], tensor)


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bart") / "model"
    random_model("BART").save_pretrained(folder)
    return folder


def test_transformers_loads_shards(bart, tmp_path, command):
    code, out, err = command("convert", bart, tmp_path / "new", "--layout", "bart", "--max-shard-size", "4KB")
    assert (code, "bit-identical" in out) == (0, True), err
    shards = sorted((tmp_path / "new").glob("model-*.safetensors"))
    sizes = [[a.nbytes for a in safetensors.numpy.load_file(shard).values()] for shard in shards]
    assert len(shards) > 3
    assert all(sum(size) <= 4000 or len(size) == 1 for size in sizes)
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    expected = AutoModelForSeq2SeqLM.from_pretrained(bart).state_dict()
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "new").state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    code, _, err = command("convert", tmp_path / "new", tmp_path / "one", "--layout", "bart")  # shards are read too
    assert code == 0, err
    one, original = (safetensors.safe_open(d / "model.safetensors", "numpy") for d in (tmp_path / "one", bart))
    arrays, expected = (safetensors.numpy.load_file(d / "model.safetensors") for d in (tmp_path / "one", bart))
    assert {name: a.tobytes() for name, a in arrays.items()} == {name: a.tobytes() for name, a in expected.items()}
    assert one.metadata()["format"] == original.metadata()["format"]


@pytest.mark.parametrize("size", ["0GB", "five", "5 GB", "-1MB", "5gb"])
def test_a_size_that_is_none_is_refused(size, bart, tmp_path, command):
    code, _, err = command("convert", bart, tmp_path / "new", "--layout", "bart", "--max-shard-size", size)
    assert code == 2
    assert err.endswith("must be a number of bytes, KB, MB, GB, KiB, MiB or GiB, as in 5GB\n")
    assert list(tmp_path.iterdir()) == []


def test_only_directories_of_families_have_shards(bart, tmp_path, command):
    code, _, err = command("convert", bart, tmp_path / "new.safetensors", "--max-shard-size", "4KB")
    assert (code, err) == (2, "twinax: max_shard_size=4000: only a family's directory has shards; omit it\n")


FORMATS = {  # significant bits, smallest exponent, largest number
    "bfloat16": (8, -126, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
    "float16": (11, -14, 65504.0),
    "float32": (24, -126, float(np.finfo(np.float32).max)),
}


# Halfway between two numbers of a format up to what float32 cannot hold: rounded in two steps, they go the wrong way.
BESIDE_TIES = st.builds(
    lambda odd, bits, side, exponent: (1 + (2 * odd + 1) / 2**bits + side * 2**-40) * 2.0**exponent,
    *(st.integers(0, 60), st.sampled_from([8, 11, 24]), st.sampled_from([-1, 0, 1]), st.integers(-9, 9)),
)


def nearest(x, dtype):
    """The nearest number of a format, ties to even, in exact arithmetic."""
    bits, lowest, _ = FORMATS[dtype]
    exponent = max(np.frexp(x)[1] - 1, lowest)
    unit = Fraction(2) ** int(exponent - bits + 1)
    return float(round(Fraction(x) / unit) * unit)  # Python rounds to even


@given(
    x=st.floats(-65000, 65000) | st.floats(-1e-6, 1e-6) | BESIDE_TIES,
    dtype=st.sampled_from(sorted(FORMATS)),
    source=st.sampled_from([np.float64, np.float32]),
)
def test_rounding_is_to_nearest_even(x, dtype, source):
    number = source(x)
    (result,) = cast({"a": np.array([number])}, dtype)["a"].astype(np.float64)
    assert result == nearest(float(number), dtype)


@pytest.mark.parametrize("source", [np.float64, np.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_number_beyond_the_range_is_refused(dtype, source):
    largest = FORMATS[dtype][2]
    special = np.array([np.inf, -np.inf, np.nan, largest], source)
    assert np.array_equal(cast({"a": special}, dtype)["a"].astype(source), special, equal_nan=True)
    beyond = np.array([0.0, -min(1.01 * largest, np.finfo(np.float32).max)], source)
    with pytest.raises(convert.ConversionError, match=rf"^a: holds -\S+, which is beyond the range of {dtype}$"):
        cast({"a": beyond}, dtype)["a"]


def logits(model, source, target):
    """Logits of a class of `transformers` in float32."""
    with torch.inference_mode():
        return model.float().eval()(input_ids=source, decoder_input_ids=target, use_cache=False).logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("name", "layout"), [("BART", "bart"), ("T5", "t5"), ("M2M100", "m2m100")])
def test_a_dtype_is_that_of_transformers(name, layout, dtype, tmp_path, command):
    """Its class in that dtype, saved, and how far its logits move; in float16, T5's `wo` stays in float32."""
    random_model(name).save_pretrained(tmp_path / "wide")
    target = tmp_path / "narrow"
    code, out, err = command("convert", tmp_path / "wide", target, "--layout", layout, "--dtype", dtype)
    assert code == 0, err
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "wide", dtype=getattr(torch, dtype))
    model.save_pretrained(tmp_path / "expected")
    expected, actual = (safetensors.torch.load_file(tmp_path / f / "model.safetensors") for f in ("expected", "narrow"))
    assert actual.keys() == expected.keys()
    for key, tensor in actual.items():
        assert tensor.dtype == expected[key].dtype, key
        assert torch.equal(tensor, expected[key]), key
    assert json.loads((target / "config.json").read_text())["dtype"] == dtype
    source, decoder = map(torch.from_numpy, random_tokens(convert.load(tmp_path / "wide").config))
    before = logits(AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "wide"), source, decoder)
    after = logits(model, source, decoder)
    printed = re.search(
        r"float32 → \w+: logits moved by at most (\S+), the largest being (\S+); .* at (\d+) of", flat(out)
    )
    assert printed is not None, out
    assert float(printed[1]) == pytest.approx((before - after).abs().max().item(), rel=0.051)  # two digits
    assert float(printed[2]) == pytest.approx(before.abs().max().item(), rel=0.051)
    assert int(printed[3]) == (before.argmax(-1) == after.argmax(-1)).sum().item()


@pytest.mark.parametrize(
    ("source", "dtype"), [("bfloat16", "float32"), ("bfloat16", "float16"), ("float16", "float32")]
)
def test_tables_are_those_of_the_new_dtype(source, dtype, tmp_path, command):
    """A rounded table in a wider dtype is not the one that `transformers` computes."""
    random_model("M2M100").to(getattr(torch, source)).save_pretrained(tmp_path / "a")
    for layout, name in (("m2m100", "b"), ("twinax", "b.safetensors")):
        flags = ("--layout", layout, "--dtype", dtype)
        code, out, err = command("convert", tmp_path / "a", tmp_path / name, *flags)
        assert (code, "bit-identical" in flat(out), "except" in flat(out)) == (0, True, False), out + err
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "a", dtype=getattr(torch, dtype))
    table = convert.load(tmp_path / "b").arrays["src_input.positions.table"]
    expected = model.model.encoder.embed_positions.weights.numpy()
    assert np.array_equal(table, expected[: len(table)])


@pytest.mark.parametrize("layout", ["d2l_note", "fairseq"])
def test_tables_of_other_layouts_are_too(layout, tmp_path, command):
    """The oracle is the check on writing: a layout refuses tables that it does not compute."""
    dtypes = {"param_dtype": "bfloat16", "compute_dtype": "bfloat16"}
    if layout == "fairseq":
        config = fairseq.config_of({"arch": "transformer_tiny"}, (20, 20), "bfloat16")
        tables = fairseq.position_tables(config)
    else:
        config, tables = TransformerConfig.published(layout, as_published=True, **dtypes), {}
    checkpoint = convert.Checkpoint(config, random_arrays(config, 0) | tables)
    convert.save(checkpoint, tmp_path / "a.pt", layout=layout)
    code, _, err = command("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--layout", layout, "--dtype", "float32")
    assert code == 0, err


def test_a_dtype_that_cannot_hold_the_weights_writes_nothing(tmp_path, command):
    checkpoint = convert.Checkpoint(config := TransformerConfig.preset("tiny"), random_arrays(config, 0))
    checkpoint.arrays["output.bias"][3] = 1e6
    convert.save(checkpoint, tmp_path / "a.safetensors")
    code, _, err = command("convert", tmp_path / "a.safetensors", tmp_path / "b.pt", "--dtype", "float16")
    assert (code, err) == (2, "twinax: output.bias: holds 1e+06, which is beyond the range of float16\n")
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A BART of 16 MB, of which the largest array has 0.5 MB."""
    sizes = {"vocab_size": 500, "max_position_embeddings": 40, "d_model": 128}
    sizes |= {f"{side}_ffn_dim": 1024 for side in ("encoder", "decoder")}
    sizes |= {f"{side}_layers": 5 for side in ("encoder", "decoder")}
    folder = tmp_path_factory.mktemp("larger") / "model"
    BartForConditionalGeneration(BartConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["bart", "twinax", "torch_nn"])
def test_one_array_is_in_memory_at_a_time(layout, dtype, larger, tmp_path):
    path = tmp_path / ("new" if layout == "bart" else "new.safetensors")
    checkpoint = convert.load(larger, memory_map=True)  # what is kept of the first call is not counted
    sizes = [array.nbytes for array in checkpoint.tensors.values()]
    flax_specs(to_dtype(checkpoint, dtype, layout).config)
    tracemalloc.start()
    checkpoint = to_dtype(convert.load(larger, memory_map=True), dtype, layout)
    convert.save(checkpoint, path, layout=layout)
    result = convert.load(path, memory_map=True)
    assert not compare_checkpoints(checkpoint, result).different
    logit_movement(checkpoint, result)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3 * max(sizes) + 3e6 < sum(sizes) / 3


def test_progress_counts_every_byte(bart, tmp_path):
    checkpoint = convert.load(bart, memory_map=True)
    total = sum(array.nbytes for array in checkpoint.tensors.values())
    written, compared = [], []
    with listening(written.append):
        convert.save(checkpoint, tmp_path / "new.safetensors")
    with listening(compared.append):
        compare_checkpoints(checkpoint, convert.load(tmp_path / "new.safetensors"))
    assert (sum(written), sum(compared)) == (total, total)


def test_what_a_killed_process_left_is_removed(bart, tmp_path):
    """Not what another process is writing, which holds its lock."""
    for form, name in (("new", "new"), ("new.pt", "new.pt")):
        left, locked = (tmp_path / f".{name}.twinax-{who}" for who in ("left", "live"))
        other = tmp_path / f".{name}x.twinax-left"  # of another target in the same folder
        for path in (left, locked, other):
            path.mkdir()
            (path / "half").write_text("half")
        descriptor = os.open(locked, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        convert.save(convert.load(bart), tmp_path / form, layout="bart" if form == "new" else "twinax")
        os.close(descriptor)
        assert (left.exists(), locked.exists(), other.exists()) == (False, True, False)


def test_a_locked_folder_is_not_waited_for(bart, tmp_path):
    """Then what a killed process left stays, because another process may be about to write there."""
    (tmp_path / ".new.twinax-left").mkdir()
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    release = Timer(10, os.close, [descriptor])  # so that waiting for it fails, and does not hang
    release.start()
    start = time.monotonic()
    convert.save(convert.load(bart), tmp_path / "new", layout="bart")
    assert time.monotonic() - start < 5
    release.cancel()
    os.close(descriptor)
    assert sorted(os.listdir(tmp_path)) == [".new.twinax-left", "new"]
