"""Every stored array is compared with its checksum: a flipped bit is refused, or changed nothing."""

import gc
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.numpy import load_file, save_file

from twinax import convert
from twinax.backend.errors import CheckpointError, ConversionError
from twinax.convert.formats.registry import describe_verification
from twinax.convert.io.checksums import checksum_of

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
FORMS = {  # name -> (layout, whether the training is stored, number of flipped bits)
    "training": ("twinax", True, 8),
    "weights": ("twinax", False, 16),
    "training.pt": ("twinax", True, 12),
    "training.safetensors": ("twinax", True, 40),
    "torch_nn.pt": ("torch_nn", False, 24),
}
BY_EITHER = "checksums or CRC-32 of all arrays match"  # of a .pt
BY_CHECKSUMS, BY_CRC = "checksums of all arrays match", "CRC-32 of all arrays match"
WITHOUT = "not verified: the file has no checksums"


def write(name, folder):
    layout, with_training, _ = FORMS[name]
    checkpoint = convert.load(STORED)
    convert.save(checkpoint if with_training else replace(checkpoint, training=None), folder / name, layout=layout)
    return folder / name


def contents(path):
    """Everything that a reader gets from a checkpoint."""
    checkpoint = convert.load(path)
    arrays = {name: (str(a.dtype), a.shape, a.tobytes()) for name, a in checkpoint.tensors.items()}
    training = checkpoint.training and replace(checkpoint.training, exp_avg={}, exp_avg_sq={})
    return arrays, checkpoint.config, checkpoint.files, training


def flipped(path, rng):
    """Flips a bit of a checkpoint's file, chosen by size; returns the file and its content before."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size) if path.is_dir() else [path]
    sizes = np.array([file.stat().st_size for file in files])
    file = files[rng.choice(len(files), p=sizes / sizes.sum())]
    content = file.read_bytes()
    damaged, place = bytearray(content), int(rng.integers(8 * len(content)))
    damaged[place // 8] ^= 1 << place % 8
    file.write_bytes(damaged)
    return file, content


@pytest.mark.filterwarnings("ignore")  # orbax leaves coroutines unawaited where a file is damaged
@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_is_refused_or_changes_nothing(form, tmp_path):
    path, rng = write(form, tmp_path), np.random.default_rng(0)
    expected, refused, flips = contents(path), 0, FORMS[form][2]
    for _ in range(flips):
        file, content = flipped(path, rng)
        try:
            assert contents(path) == expected, file
        except (CheckpointError, ConversionError):
            refused += 1
        file.write_bytes(content)
    gc.collect()  # of these coroutines, which would otherwise fail a later test
    assert refused > 0  # the damage is noticed; orbax stores much that it does not read


def test_the_checksum_is_that_of_the_library():
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert checksum_of(array) == xxhash.xxh3_128(b"float32 [2, 3]\n" + array.tobytes()).hexdigest()
    assert checksum_of(np.asfortranarray(array)) == checksum_of(array)
    others = array.astype(np.int32), array.reshape(3, 2), array[::-1], np.float32(0), np.zeros(1, np.float32)
    assert len({checksum_of(other) for other in (array, *others)}) == 6


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_what_it_was_compared_with(form, tmp_path, command):
    path, expected = write(form, tmp_path), BY_EITHER if form.endswith(".pt") else BY_CHECKSUMS
    assert describe_verification(path) == expected
    _, out, err = command("inspect", path)
    assert expected in out
    assert not err
    _, out, _ = command("inspect", path, "--no-verify")
    assert "not verified: --no-verify" in out


def test_files_of_other_programs(tmp_path, bart):
    """safetensors and old PyTorch files have no checksums; a zip archive has CRC-32."""
    assert describe_verification(bart) == WITHOUT
    assert describe_verification(STORED) == WITHOUT
    arrays = load_file(bart / "model.safetensors")
    (bart / "model.safetensors").unlink()
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    torch.save(tensors, bart / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert describe_verification(bart) == WITHOUT
    torch.save(tensors, bart / "pytorch_model.bin")
    assert describe_verification(bart) == BY_CRC


def test_a_flipped_bit_in_a_zip_archive_of_another_program(tmp_path, bart):
    arrays = load_file(bart / "model.safetensors")
    (bart / "model.safetensors").unlink()
    torch.save({name: torch.tensor(array) for name, array in arrays.items()}, bart / "pytorch_model.bin")
    expected, rng, reasons = contents(bart), np.random.default_rng(1), []
    for _ in range(16):
        _, content = flipped(bart / "pytorch_model.bin", rng)
        try:
            assert contents(bart) == expected
        except ConversionError as error:
            reasons.append(str(error))
        (bart / "pytorch_model.bin").write_bytes(content)
    assert sum("does not match its CRC-32" in reason for reason in reasons) > 4


def test_a_family_directory_and_its_shards(tmp_path, directories):
    """The checksums are in each file, where `transformers` ignores them; without them, the files are as before."""
    checkpoint = convert.load(directories / "Marian")
    convert.save(checkpoint, tmp_path / "shards", layout="marian", max_shard_size=4000)
    assert describe_verification(tmp_path / "shards") == BY_CHECKSUMS
    shard = sorted((tmp_path / "shards").glob("*.safetensors"))[1]
    arrays = load_file(shard)
    name = min(arrays)
    content = bytearray(shard.read_bytes())
    place = content.rindex(arrays[name].tobytes())
    content[place] ^= 1
    shard.write_bytes(content)
    with pytest.raises(ConversionError, match=f"{shard.name}: damaged or edited: {name} does not match its checksum"):
        convert.load(tmp_path / "shards")
    with convert.verifying(False):
        convert.load(tmp_path / "shards")
    save_file(arrays, shard, metadata={"format": "pt"})
    assert describe_verification(tmp_path / "shards") == WITHOUT
    convert.load(tmp_path / "shards")


def test_no_verify_reads_what_is_damaged(tmp_path, command):
    path = write("training.safetensors", tmp_path)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the last array
    path.write_bytes(content)
    code, _, err = command("convert", path, tmp_path / "x.pt")
    assert code == 2
    assert err.startswith(f"twinax: {path}: damaged or edited: ")
    assert not (tmp_path / "x.pt").exists()
    assert command("convert", path, tmp_path / "x.pt", "--no-verify")[0] == 0
    assert describe_verification(tmp_path / "x.pt") == BY_EITHER


@pytest.mark.parametrize("change", ["config.json", "tokenizer"])
def test_other_files_of_a_checkpoint(change, tmp_path):
    """A digit of the config that another digit replaces is valid JSON."""
    path = write("training", tmp_path)
    file = next(p for p in sorted((path / "run").rglob("*")) if change in str(p) and p.is_file())
    file.write_text(file.read_text().replace("1", "2", 1))
    with pytest.raises(CheckpointError, match=f"{file.name}: damaged or edited: does not match its checksum"):
        convert.load(path)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name}: is missing"):
        convert.load(path)


def test_the_checksums_themselves(tmp_path):
    """What is beside an array is not trusted either: other types, a name too few or too many."""
    path = write("weights", tmp_path)
    file = path / "run" / "checksums.json"
    whole = json.loads(file.read_text())
    name = min(whole["arrays"])
    fewer = {n: c for n, c in whole["arrays"].items() if n != name}
    for arrays in ([], {name: 1}, fewer, whole["arrays"] | {"new": "0" * 32}):
        file.write_text(json.dumps(whole | {"arrays": arrays}))
        with pytest.raises(CheckpointError, match="damaged or edited"):
            convert.load(path)
    file.write_text("[")
    with pytest.raises(CheckpointError, match=r"checksums\.json: cannot be read as JSON"):
        convert.load(path)


def test_nan_and_infinite_weights_are_named(tmp_path, command):
    checkpoint = replace(convert.load(STORED), training=None)
    name = "encoder.layers.0.feed_forward.inner_proj.kernel"
    for value in (np.nan, np.inf):
        path = tmp_path / f"{value}.pt"
        array = checkpoint.arrays[name].copy()
        array[0, 0] = value
        convert.save(replace(checkpoint, arrays={**checkpoint.arrays, name: array}), path)
        line = f"{path}: 1 of {len(checkpoint.arrays)} arrays hold NaN or infinite numbers, first {name}\n"
        assert line in command("inspect", path)[2]
        assert line in command("convert", path, tmp_path / f"{value}.safetensors")[2]


def test_a_copy_of_a_run_keeps_its_checksums(tmp_path):
    """They depend on no path."""
    path = write("training", tmp_path)
    moved = shutil.copytree(path, tmp_path / "elsewhere" / "x")
    shutil.rmtree(path)
    assert describe_verification(moved) == BY_CHECKSUMS
    convert.load(moved)


@pytest.mark.parametrize("form", ["training", "training.pt", "training.safetensors", "weights"])
def test_weights_alone(form, tmp_path):
    path = write(form, tmp_path)
    checkpoint, weights = convert.load(path), convert.load(path, weights_only=True)
    assert weights.training is None
    assert {**checkpoint.arrays}.keys() == {**weights.arrays}.keys()
    for name, array in checkpoint.arrays.items():
        assert weights.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(weights.arrays[name], array, strict=True)
    assert (weights.config, weights.files) == (checkpoint.config, checkpoint.files)


@pytest.mark.parametrize(("kind", "refused"), [(".params[", True), (".buffers[", True), (".optimizer", False)])
def test_weights_alone_are_verified_and_the_optimizer_is_not(kind, refused, tmp_path):
    path = write("training", tmp_path)
    document = json.loads((path / "run" / "checksums.json").read_text())
    name = next(name for name in document["arrays"] if name.startswith(kind))
    document["arrays"][name] = "0" * 32
    (path / "run" / "checksums.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        convert.load(path)
    if refused:
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            convert.load(path, weights_only=True)
    else:
        convert.load(path, weights_only=True)
