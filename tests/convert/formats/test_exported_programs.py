"""`twinax convert` to a .stablehlo file: what it contains, what it compares, and what it refuses."""

import json
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import twinax
from twinax import TransformerConfig, convert
from twinax.inference import export
from twinax.inference.exported_file import read_exported
from twinax.parity.functions import random_arrays

CONFIG = TransformerConfig.preset(
    "tiny", d_model=12, num_heads=2, d_ff=8, num_encoder_layers=1, num_decoder_layers=1, max_length=6
)
FILES = {"tokenizer/tokenizer.json": b'{"version": "1.0"}', "tokenizer/tokenizer_config.json": b"{}"}


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Write a checkpoint of a config; return its path. The current directory is that of the test."""
    monkeypatch.chdir(tmp_path)

    def write(config, **fields):
        checkpoint = convert.Checkpoint(config, random_arrays(config, 0), **fields)
        convert.save(checkpoint, "model.safetensors")
        return "model.safetensors"

    return write


@pytest.mark.newest
def test_a_file_has_all_that_a_caller_needs(written, command):
    """In bfloat16, which NumPy lacks. No path of this machine is in it."""
    status, out, _ = command("convert", written(CONFIG, files=FILES), "new/model.stablehlo", "--dtype", "bfloat16")
    assert status == 0
    assert "encoder and decoder step for cpu, cuda, tpu" in out
    assert "bit-identical after reading back" in " ".join(out.replace("│", "").split())
    file = read_exported(Path("new/model.stablehlo"))
    for program in file.programs:
        assert program.platforms == ("cpu", "cuda", "tpu")
        assert program.calling_convention_version == file.document["calling_convention_version"]
    checkpoint = convert.load("model.safetensors")
    assert file.checkpoint.files == FILES
    assert file.checkpoint.config == checkpoint.config.replace(param_dtype="bfloat16", compute_dtype="bfloat16")
    assert file.document["sha256_of_weights"] == convert.checksum(file.checkpoint.arrays)
    for name, array in checkpoint.arrays.items():
        np.testing.assert_array_equal(file.checkpoint.arrays[name], array.astype("bfloat16"))
    document = file.document
    assert (document["pad_id"], document["eos_id"], document["forced_bos_id"]) == (0, 2, None)
    assert document["forced_eos_id"] == document["eos_id"]
    assert document["arrays"]["cache"]["layers.0.keys"] == {"shape": ["b", 2, 13, "t"], "dtype": "bfloat16"}
    with zipfile.ZipFile("new/model.stablehlo") as archive:
        assert {entry.compress_type for entry in archive.infolist()} == {zipfile.ZIP_STORED}
        programs = [archive.read(name) for name in ("encoder", "decoder_step")]
        assert json.loads(archive.read("model.json")) == document
    package = str(Path(twinax.__file__).parent).encode()
    for text in (package, str(Path(__file__).parents[3]).encode(), b".py"):
        assert not any(text in program for program in programs)


@pytest.mark.parametrize("arguments", [["inspect"], ["translate", "--src-lang", "de"], ["convert"]])
def test_other_commands_say_what_the_file_is(arguments, command, tmp_path):
    path = tmp_path / "model.stablehlo"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("model.json", "encoder", "decoder_step"):
            archive.writestr(name, "{}")
    rest = [tmp_path / "new.pt"] if arguments == ["convert"] else []
    status, out, err = command(arguments[0], path, *arguments[1:], *rest)
    assert status == 2
    assert err.count("\n") == (arguments[0] != "inspect")
    text = " ".join((out + err).replace("│", " ").split())
    assert "a model that `twinax convert` exported" in text
    assert "docs/export.md has a script that runs it" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder_start_id": None}, "decoder_start_id=None: the model has no decoder start token"),
        ({"cross_mask": "encoder"}, "cross_mask='encoder': needs as many target as source tokens"),
        ({"mask_value": -1.0}, "mask_value=-1.0 gives masked keys weight"),
        ({"norm": "layer_norm_over_length"}, "norm='layer_norm_over_length' mixes all positions"),
        ({"decoder_mask": "causal_in_training"}, "decoder_mask='causal_in_training' is not causal in evaluation"),
        ({"param_dtype": "float64", "compute_dtype": "float64"}, "pass --dtype float32"),
    ],
)
def test_a_model_that_cannot_be_exported_is_refused_in_one_line(written, command, changes, message):
    status, out, err = command("convert", written(CONFIG.replace(**changes)), "model.stablehlo")
    assert (status, out) == (2, "")
    assert err.startswith("twinax: model.stablehlo: the model cannot be exported: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("model.stablehlo").exists()


@pytest.mark.parametrize(
    "arguments", [["--layout", "marian"], ["--max-shard-size", "5GB"], ["--run", "runs/x"], ["--quantize", "int8"]]
)
def test_options_of_checkpoints_are_refused(written, command, arguments):
    status, _, err = command("convert", written(CONFIG), "model.stablehlo", *arguments)
    assert status == 2
    assert err.startswith(f"twinax: {arguments[0]}")
    assert err.count("\n") == 1


def test_an_existing_file_stays(written, command):
    Path("model.stablehlo").write_text("mine")
    status, _, err = command("convert", written(CONFIG), "model.stablehlo")
    assert status == 2
    assert err == f"twinax: {Path('model.stablehlo').resolve()}: exists; give another name, or remove it\n"
    assert Path("model.stablehlo").read_text() == "mine"


def test_without_flatbuffers_the_command_says_what_to_install(written, command, monkeypatch):
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    status, _, err = command("convert", written(CONFIG), "model.stablehlo")
    assert status == 2
    assert err.endswith("pip install 'twinax[export]'\n")


def test_a_program_that_computes_something_else_is_not_written(written, command, monkeypatch):
    """The command finds positions that are off by one."""
    count_positions = export.count_positions
    monkeypatch.setattr(export, "count_positions", lambda config, tokens: count_positions(config, tokens) + 1)
    status, out, _ = command("convert", written(CONFIG), "model.stablehlo")
    assert status == 1
    assert "DIFFERENT" in out
    assert not Path("model.stablehlo").exists()
    assert [path.name for path in Path().iterdir()] == ["model.safetensors"]
    assert jax.config.jax_traceback_in_locations_limit != 0
