"""Weight directories: every form that is read, what is written back, and one clear line per error."""

import contextlib
import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from parity_tests.support.conversion import changes, random_model
from twinax import convert
from twinax.backend.errors import CheckpointError
from twinax.convert.checkpoint import Checkpoint
from twinax.convert.formats.hugging_face import family
from twinax.convert.weight_files import reading
from twinax.train.checkpointing.checkpoints import read_run

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about how it writes
WEIGHTS, SHARDS = "model.safetensors", "model.safetensors.index.json"


def edit(directory, **settings):
    values = json.loads((directory / "config.json").read_text()) | settings
    (directory / "config.json").write_text(json.dumps(values))


def edit_weights(directory, change):
    arrays = load_file(directory / WEIGHTS)
    change(arrays)
    save_file(arrays, directory / WEIGHTS, metadata={"format": "pt"})


def same(left, right):
    return left.keys() == right.keys() and all(
        (left[n].shape, left[n].dtype, left[n].tobytes()) == (right[n].shape, right[n].dtype, right[n].tobytes())
        for n in left
    )


# ---- what is read


def as_torch_file(directory):
    torch.save(load_tensors(directory / WEIGHTS), directory / "pytorch_model.bin")
    (directory / WEIGHTS).unlink()


def as_old_torch_file(directory):
    tensors = load_tensors(directory / WEIGHTS)
    torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (directory / WEIGHTS).unlink()


def as_shards(directory):
    shard(directory, "model-{}.safetensors", SHARDS, save_file, load_file)


def as_torch_shards(directory):
    shard(directory, "pytorch_model-{}.bin", "pytorch_model.bin.index.json", torch.save, load_tensors)


def shard(directory, name, index, save, load):
    arrays, weight_map = load(directory / WEIGHTS), {}
    for i, names in enumerate((sorted(arrays)[:20], sorted(arrays)[20:])):
        save({n: arrays[n] for n in names}, directory / name.format(i))
        weight_map |= dict.fromkeys(names, name.format(i))
    (directory / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / WEIGHTS).unlink()


def with_the_copies_of_old_versions(directory):
    def change(arrays):
        for name in ("lm_head", "model.encoder.embed_tokens", "model.decoder.embed_tokens"):
            arrays[f"{name}.weight"] = arrays["model.shared.weight"]
        arrays["model.encoder.version"] = np.ones(1, np.float32)

    edit_weights(directory, change)


def with_another_of_the_copies(directory):
    edit_weights(directory, lambda arrays: arrays.update({"lm_head.weight": arrays.pop("model.shared.weight")}))


def as_the_bare_model(directory):
    def change(arrays):
        for name in list(arrays):
            arrays[name.removeprefix("model.")] = arrays.pop(name)

    edit_weights(directory, change)


FORMS = (
    as_torch_file, as_old_torch_file, as_shards, as_torch_shards, with_the_copies_of_old_versions,
    with_another_of_the_copies, as_the_bare_model,
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_directory_is_the_same_checkpoint(bart, form):
    expected = convert.load(bart)
    form(bart)
    checkpoint = convert.load(bart)
    assert checkpoint.config == expected.config
    assert same(checkpoint.arrays, expected.arrays)


def test_shards_that_transformers_writes(bart, tmp_path):
    transformers.BartForConditionalGeneration.from_pretrained(bart).save_pretrained(
        tmp_path / "s", max_shard_size="9KB"
    )
    assert len(list((tmp_path / "s").glob("model-*.safetensors"))) > 1
    assert same(convert.load(tmp_path / "s").arrays, convert.load(bart).arrays)


def test_what_may_be_missing_is_what_transformers_makes_anew(directories, tmp_path):
    """The output bias is zeros, and a fixed table is computed, in float32."""
    directory = shutil.copytree(directories / "Pegasus", tmp_path / "pegasus")
    expected = convert.load(directory)
    missing = ["final_logits_bias", "model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"]
    edit_weights(directory, lambda arrays: [arrays.pop(name) for name in missing])
    checkpoint = convert.load(directory)
    assert not checkpoint.arrays["output.bias"].any()
    assert same(checkpoint.arrays | {"output.bias": expected.arrays["output.bias"]}, expected.arrays)


def test_a_table_in_the_file_counts(directories, tmp_path):
    """`transformers` loads Marian's table if the file has one; such a table, and no other, is written back."""
    directory = shutil.copytree(directories / "Marian", tmp_path / "marian")
    edit_weights(directory, lambda a: a.update({"model.encoder.embed_positions.weight": np.ones((13, 12), np.float32)}))
    checkpoint = convert.load(directory)
    assert (checkpoint.arrays["src_input.positions.table"] == 1).all()
    convert.save(checkpoint, tmp_path / "again", layout="marian")
    assert changes(directory, tmp_path / "again") == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["Marian, untied", "Pegasus", "M2M100"])
def test_number_types_there_and_back(name, dtype, tmp_path):
    random_model(name).to(dtype).save_pretrained(tmp_path / "theirs")
    checkpoint = convert.load(tmp_path / "theirs")
    assert checkpoint.config.param_dtype == checkpoint.config.compute_dtype == str(dtype).removeprefix("torch.")
    checkpoint = replace(checkpoint, arrays=Checkpoint.of(checkpoint.to_torch()).arrays)
    convert.save(checkpoint, tmp_path / "again", layout=checkpoint.layout)
    assert changes(tmp_path / "theirs", tmp_path / "again") == []


@settings(max_examples=15)
@given(
    st.sampled_from(["Marian, untied", "BART", "T5 v1.1, Flan-T5"]),
    st.sampled_from([None, "float32", "bfloat16", "float16"]),
    st.lists(st.sampled_from(["float32", "bfloat16", "float16"]), min_size=1, max_size=3),
    st.sampled_from([None, "float32", "bfloat16"]),
)
def test_weights_of_other_dtypes_than_stated(directories, name, stated, dtypes, wanted):
    """The oracle is what `from_pretrained` loads, saved again; `wanted` is its argument, and that of `--dtype`."""
    with tempfile.TemporaryDirectory() as folder:
        theirs, again = shutil.copytree(directories / name, Path(folder, "theirs")), Path(folder, "again")
        state = load_tensors(theirs / WEIGHTS)
        cast = {n: t.to(getattr(torch, dtypes[i % len(dtypes)])) for i, (n, t) in enumerate(state.items())}
        save_tensors(cast, theirs / WEIGHTS, metadata={"format": "pt"})
        edit(theirs, dtype=stated)
        differs = stated is not None and any(t.dtype != getattr(torch, stated) for t in cast.values())
        wanted = wanted if differs else None
        options = {} if wanted is None else {"dtype": getattr(torch, wanted)}
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(theirs, **options)
        model.save_pretrained(again)
        checkpoint, expected = convert.load(theirs, dtype=wanted), convert.load(again)
    assert checkpoint.config == expected.config
    assert same(checkpoint.arrays, expected.arrays)


def test_the_command_converts_from_the_weights_and_not_from_the_stated_dtype(bart, tmp_path, command):
    """Or numbers would be rounded to the stated dtype first."""
    weights = convert.load(bart).arrays
    edit(bart, dtype="float16")
    assert command("convert", bart, tmp_path / "new", "--layout", "bart", "--dtype", "float32")[0] == 0
    assert same(convert.load(tmp_path / "new").arrays, weights)


def test_generation_config_decides_on_decoding(bart):
    (bart / "generation_config.json").write_text(json.dumps({"forced_bos_token_id": 7, "decoder_start_token_id": 5}))
    config = convert.load(bart).config
    assert (config.forced_bos_id, config.forced_eos_id, config.decoder_start_id) == (7, None, 5)
    (bart / "generation_config.json").unlink()
    config = convert.load(bart).config
    assert (config.forced_bos_id, config.forced_eos_id, config.decoder_start_id) == (None, 2, 2)


# ---- what is wrong


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


class RunsCode:
    def __reduce__(self):
        return print, ("code ran",)


def no_shard(directory):
    as_shards(directory)
    (directory / "model-1.safetensors").unlink()


def wrong_shard(directory):
    as_shards(directory)
    (directory / "model-1.safetensors").write_bytes((directory / "model-0.safetensors").read_bytes())


def shard_elsewhere(directory):
    as_shards(directory)
    (directory / SHARDS).write_text(json.dumps({"weight_map": {"a": "../model-1.safetensors"}}))


def truncated_torch_file(directory):
    as_torch_file(directory)
    truncate(directory / "pytorch_model.bin")


def code(directory):
    (directory / WEIGHTS).unlink()
    torch.save({"a": RunsCode()}, directory / "pytorch_model.bin")


def empty_torch_file(directory):
    (directory / WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"")


def with_bias(directory, change, write):
    tensors = load_tensors(directory / WEIGHTS)
    tensors["final_logits_bias"] = change(tensors["final_logits_bias"])
    (directory / WEIGHTS).unlink()
    write(tensors, directory)


def float8(directory):
    with_bias(directory, lambda t: t.to(torch.float8_e4m3fn), lambda t, d: save_tensors(t, d / WEIGHTS))


def float8_in_torch(directory):
    with_bias(directory, lambda t: t.to(torch.float8_e4m3fn), lambda t, d: torch.save(t, d / "pytorch_model.bin"))


def sparse(directory):
    with_bias(directory, lambda t: t.to_sparse(), lambda t, d: torch.save(t, d / "pytorch_model.bin"))


def empty_index(directory):
    (directory / WEIGHTS).unlink()
    (directory / SHARDS).write_text(json.dumps({"weight_map": {}}))


def long_name(directory):
    (directory / WEIGHTS).unlink()
    (directory / SHARDS).write_text(json.dumps({"weight_map": {"a": "x" * 5000}}))


def no_state_dict(directory):
    (directory / WEIGHTS).unlink()
    torch.save({"a": {"b": torch.ones(1)}}, directory / "pytorch_model.bin")


def narrow(arrays):
    arrays["model.encoder.layers.0.fc1.weight"] = arrays["model.encoder.layers.0.fc1.weight"][:5]


WRONG = {
    "no directory": (lambda d: [p.unlink() for p in d.iterdir()] and d.rmdir(), "there is no such file or directory"),
    "no config": (
        lambda d: (d / "config.json").unlink(),
        "is weights without a config.json: it has model.safetensors and no config.json",
    ),
    "config is no JSON": (lambda d: truncate(d / "config.json"), "config.json: cannot be read as JSON"),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), "config.json: is a JSON list, not an object"),
    "unknown family": (
        lambda d: edit(d, model_type="led"),
        "is a Hugging Face model of model_type='led': twinax does not support local attention, over blocks or "
        "windows; twinax cannot read it",
    ),
    "unknown setting": (
        lambda d: edit(d, rope_theta=1e4),
        "rope_theta=10000.0: twinax does not know this setting of bart",
    ),
    "refused setting": (
        lambda d: edit(d, normalize_before=True),
        "normalize_before=True: must be False, because transformers' BART is post-norm regardless",
    ),
    "unknown activation": (
        lambda d: edit(d, activation_function="tanh"),
        "activation_function='tanh': must be one of 'relu'",
    ),
    "no pad id": (lambda d: edit(d, pad_token_id=None), "pad_token_id=None: must be a whole number"),
    "pad id that is a text": (lambda d: edit(d, pad_token_id="1"), "pad_token_id='1': must be a whole number"),
    "two eos ids": (lambda d: edit(d, eos_token_id=[1, 2]), "eos_token_id=[1, 2]: must be a whole number"),
    "contradicting alias": (
        lambda d: edit(d, num_hidden_layers=3),
        "num_hidden_layers=3: contradicts encoder_layers=2",
    ),
    "dtype": (lambda d: edit(d, dtype="int8"), "dtype='int8': contradicts the weights, which are float32"),
    "quantised": (lambda d: edit(d, quantization_config={}), "quantization_config={}: twinax does not know"),
    "vocabulary": (
        lambda d: edit(d, vocab_size=32),
        "wrong: model.shared.weight is float32[31, 12], must be float32[32, 12]",
    ),
    "layers": (lambda d: edit(d, decoder_layers=2), "decoder_layers=2: contradicts the weights, which have 1"),
    "untied": (lambda d: edit(d, tie_word_embeddings=False), "missing: lm_head.weight, float32[31, 12]"),
    "no weights": (lambda d: (d / WEIGHTS).unlink(), "has no weights; looked for model.safetensors, pytorch_model.bin"),
    "truncated": (lambda d: truncate(d / WEIGHTS), "model.safetensors is not a complete safetensors file: it has"),
    "empty file": (lambda d: (d / WEIGHTS).write_bytes(b""), "model.safetensors is an empty file: it has 0 bytes"),
    "no tensors": (lambda d: save_file({}, d / WEIGHTS), "model.safetensors: holds no tensors"),
    "truncated torch file": (truncated_torch_file, "pytorch_model.bin: not a complete PyTorch file"),
    "code in a torch file": (code, "pytorch_model.bin: holds more than tensors, a "),
    "nested torch file": (no_state_dict, "pytorch_model.bin: is not a state dict"),
    "empty torch file": (empty_torch_file, "pytorch_model.bin is an empty file: it has 0 bytes"),
    "float8": (float8, "model.safetensors: final_logits_bias has dtype F8_E4M3, which numpy lacks"),
    "float8 in a torch file": (
        float8_in_torch,
        "final_logits_bias is torch.float8_e4m3fn on cpu, torch.strided, which",
    ),
    "sparse": (sparse, "final_logits_bias is torch.float32 on cpu, torch.sparse_coo, which numpy does not support"),
    "deep JSON": (lambda d: (d / "config.json").write_text("[" * 100_000), "config.json: cannot be read as JSON"),
    "empty index": (empty_index, "model.safetensors.index.json: has no weight_map"),
    "long name of a shard": (long_name, "1 of 1 shards missing: xxx"),
    "layers without end": (
        lambda d: edit(d, encoder_layers=10**9),
        "encoder_layers=1000000000: contradicts the weights",
    ),
    "dropout of null": (lambda d: edit(d, dropout=None), "bart settings: dropout=None: must be a number"),
    "1 for true": (lambda d: edit(d, scale_embedding=1), "scale_embedding=1: must be one of True, False"),
    "missing shard": (no_shard, "1 of 2 shards missing: model-1.safetensors"),
    "wrong shard": (wrong_shard, "model-1.safetensors: does not match model.safetensors.index.json"),
    "shard elsewhere": (shard_elsewhere, "names a file outside its directory: ../model-1.safetensors"),
    "wrong shape": (
        lambda d: edit_weights(d, narrow),
        "wrong: model.encoder.layers.0.fc1.weight is float32[5, 12], must be float32[17, 12]",
    ),
    "foreign tensor": (
        lambda d: edit_weights(d, lambda a: a.update({"pooler.bias": np.ones(3, np.float32)})),
        "not in the model: pooler.bias, float32[3]",
    ),
    "ties that are none": (
        lambda d: edit_weights(d, lambda a: a.update({"lm_head.weight": a["model.shared.weight"] + 1})),
        "tie_word_embeddings=True: contradicts the weights, lm_head.weight differs from model.shared.weight",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_a_clear_line(case, bart, capfd):
    damage, line = WRONG[case]
    damage(bart)
    with pytest.raises(convert.ConversionError) as error:
        convert.load(bart)
    assert line in str(error.value)
    assert str(bart) in str(error.value)
    assert "code ran" not in capfd.readouterr().out


@given(data=st.data())
def test_a_damaged_torch_file_is_one_line_whatever_is_wrong(data, tmp_path_factory):
    """Truncated anywhere, or with bytes changed, in the old file format and the new one."""
    path = tmp_path_factory.mktemp("torch") / "pytorch_model.bin"
    torch.save(
        {"a": torch.ones(7), "b": torch.ones(2, 3)}, path, _use_new_zipfile_serialization=data.draw(st.booleans())
    )
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(3):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with contextlib.suppress(convert.ConversionError):  # a number with a flipped bit is still a number
        reading.read_weights(path.parent)


def test_a_table_that_memory_cannot_hold(directories):
    """As of a config that was not read from files, whose size would limit it."""
    for name in ("Marian", "M2M100"):
        config = convert.load(directories / name).config.replace(max_length=10**12)
        with pytest.raises(convert.ConversionError, match="max_position_embeddings=1000000000000: a position table"):
            family(name.lower()).position_tables(config)


def test_a_file_for_a_directory(bart):
    with pytest.raises(convert.ConversionError, match=r"bare tensors and no config; .* give the directory"):
        convert.load(bart / WEIGHTS)


def test_a_hugging_face_directory_is_no_run(bart):
    with pytest.raises(CheckpointError, match="is of a Hugging Face directory, not of a run; choose another directory"):
        read_run(bart)
