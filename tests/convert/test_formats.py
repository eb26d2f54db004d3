"""Checkpoints across file formats and layouts: round trips, other readers, and errors."""

import json
import os
import re
import resource
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twinax
from parity_tests.support.conversion import VARIANTS, changes, random_model
from twinax import TransformerConfig, convert
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.configs.training import TrainingConfig
from twinax.convert import Checkpoint
from twinax.convert.checkpoint import Training
from twinax.convert.formats.file_layouts import to_named
from twinax.convert.io import atomic_io as new_files
from twinax.convert.port import flax_specs
from twinax.parity.functions import random_arrays
from twinax.torch_reference.optimizers import make_optimizer
from twinax.train.checkpointing.checkpoints import read_checkpoint

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
FORMS = ("x.pt", "x.safetensors", "x")


def same(left, right):
    return {n: (a.dtype, a.shape, a.tobytes()) for n, a in left.tensors.items()} == {
        n: (a.dtype, a.shape, a.tobytes()) for n, a in right.tensors.items()
    }


def training_of(config, seed):
    """A training state in mid-run, with random moments."""
    rng = np.random.default_rng(seed)
    optimizer, decayed = [("adam", "all"), ("adamw", "matrices")][seed % 2]
    run = RunConfig(
        corpus=CorpusConfig(src="a", tgt="b"),
        model=config,
        training=TrainingConfig(optimizer=optimizer, decayed=decayed, weight_decay=0.01),
    )
    specs = flax_specs(config, trained_only=True)
    moments = ({n: rng.uniform(0, 1, s.shape).astype(s.dtype) for n, s in specs.items()} for _ in range(2))
    return Training(run, 30, seed, (2, 5), 29, *moments)


SETTINGS = [
    {},
    {"tied_output": True, "positions": "learned", "activation": "gelu_tanh", "output_bias": "stored"},
    {"norm_placement": "pre", "final_norm": True, "ffn_bias": False, "norm_bias": False, "output_bias": "none"}
    | dict.fromkeys(("q_proj_bias", "k_proj_bias", "v_proj_bias", "out_proj_bias"), False),
    {"norm": "rms_norm", "head_dim": 7, "v_head_dim": 5, "decoder_d_ff": 11, "ffn_gate": True}
    | {"relative_positions": "per_layer", "relative_position_buckets": 5},
]


@settings(max_examples=20)
@given(
    fields=st.sampled_from(SETTINGS),
    dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
    seed=st.integers(0, 9),
    forms=st.lists(st.sampled_from(FORMS), min_size=1, max_size=3),
    in_training=st.booleans(),
    files=st.sampled_from([{}, {"tokenizer/vocab.json": b"\x00\xff"}]),
)
def test_any_way_through_the_forms_gives_the_same_bytes(
    fields, dtype, seed, forms, in_training, files, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("forms")
    sizes = {"d_model": 8, "num_heads": 2, "head_dim": None, "v_head_dim": None, "d_ff": 6} | fields
    sizes |= {"num_encoder_layers": 1, "num_decoder_layers": 1, "param_dtype": dtype}
    config = TransformerConfig.preset("tiny", **sizes)
    training = training_of(config, seed) if in_training else None
    original = Checkpoint(config, random_arrays(config, seed), files=files, training=training)
    checkpoint = original
    for i, form in enumerate(forms):
        convert.save(checkpoint, folder / f"{i}{form}")
        checkpoint = convert.load(folder / f"{i}{form}")
    assert same(checkpoint, original)
    assert (checkpoint.config, checkpoint.files) == (original.config, original.files)
    if training is not None:
        expected = replace(training, exp_avg={}, exp_avg_sq={})
        assert replace(checkpoint.training, exp_avg={}, exp_avg_sq={}) == expected


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_a_hugging_face_directory_comes_back_through_every_form(name, tmp_path):
    layout = VARIANTS[name][0]
    random_model(name).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "source.spm").write_bytes(b"\x00\xff")
    (tmp_path / "hf" / "notes.txt").write_text("not ours")
    place = tmp_path / "hf"
    for form in FORMS:
        convert.save(convert.load(place), tmp_path / form)
        place = tmp_path / form
    convert.save(convert.load(place), tmp_path / "back", layout=layout)
    assert changes(tmp_path / "hf", tmp_path / "back") == []
    assert (tmp_path / "back" / "source.spm").read_bytes() == b"\x00\xff"
    assert not (tmp_path / "back" / "notes.txt").exists()


@pytest.fixture(scope="module")
def stored_files(tmp_path_factory):
    """The stored checkpoint in every file format."""
    folder = tmp_path_factory.mktemp("stored")
    for form in FORMS:
        convert.save(convert.load(STORED), folder / form)
    convert.save(convert.load(STORED), folder / "nn.pt", layout="torch_nn")
    convert.save(convert.load(STORED), folder / "nn.safetensors", layout="torch_nn")
    return folder


@pytest.mark.parametrize("form", [*FORMS, "nn.pt", "nn.safetensors"])
def test_every_form_translates(stored_files, form):
    assert twinax.load(stored_files / form).translate(["a b c", "h e"]) == ["A B C", "H E"]


def with_rate(optimizer):
    """The optimizer with the learning rate of the stored checkpoint's next update, which is constant."""
    for group in optimizer.param_groups:
        group["lr"] = 0.02
    return optimizer


def test_pytorch_reads_the_torch_file_alone(stored_files):
    content = torch.load(stored_files / "x.pt", weights_only=True)
    model = twinax.torch_reference.Transformer(TransformerConfig.from_dict(content["config"]))
    model.load_state_dict(content["model"])
    run = RunConfig.from_dict(content["run"])
    optimizer = make_optimizer(model, run.training)
    optimizer.load_state_dict(content["optimizer"])
    checkpoint = read_checkpoint(STORED)
    expected = convert.to_optimizer_state(
        checkpoint.state.optimizer, model, with_rate(make_optimizer(model, run.training))
    )
    torch.testing.assert_close(content["optimizer"], expected, rtol=0, atol=0)
    assert len(content["optimizer"]["state"]) == len(list(model.parameters()))
    assert (content["update"], content["position"]) == (600, [120, 0])


def test_the_optimizer_of_layout_torch_nn_has_the_names_of_its_parameters(stored_files):
    """So that an optimizer over the same parameters, in any order, finds its state."""
    content = torch.load(stored_files / "nn.pt", weights_only=True)
    entries, groups = content["optimizer"]["state"], content["optimizer"]["param_groups"]
    names = [name for group in groups for name in group["param_names"]]
    training, config = convert.load(STORED).training, convert.load(STORED).config
    for key in ("exp_avg", "exp_avg_sq"):
        expected = to_named(getattr(training, key), config, "torch_nn", trained_only=True)
        assert {n: entries[i][key].numpy().tobytes() for i, n in enumerate(names)} == {
            name: array.tobytes() for name, array in expected.items()
        }
    assert {*names} <= content["model"].keys()
    assert {group["lr"] for group in groups} == {0.02}


def test_safetensors_reads_the_other_file_alone(stored_files):
    tensors = safetensors.torch.load_file(stored_files / "x.safetensors")
    weights = {name: tensor for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    model = twinax.torch_reference.Transformer(convert.load(STORED).config)
    model.load_state_dict(weights)
    assert len(tensors) - len(weights) == 2 * len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_torch_nn_transformer_reads_its_part(stored_files):
    """torch.nn's encoder on our embeddings computes the same output as ours."""
    checkpoint = convert.load(STORED)
    config, twin = checkpoint.config, checkpoint.to_torch().eval()
    sizes = (config.num_encoder_layers, config.num_decoder_layers, config.d_ff)
    module = nn.Transformer(config.d_model, config.num_heads, *sizes, norm_first=True, batch_first=True).eval()
    tensors = safetensors.torch.load_file(stored_files / "nn.safetensors")
    prefix = "transformer."
    module.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    src = torch.tensor([[5, 6, 7, 2], [8, 9, 2, 0]])
    with torch.no_grad():
        _, activations = twinax.torch_reference.activations(twin, src, src)
        expected = module.encoder(activations["src_input.output"], src_key_padding_mask=src == config.pad_id)
    mask = src != config.pad_id
    torch.testing.assert_close(activations["encoder.output"][mask], expected[mask], rtol=1e-5, atol=1e-5)


def test_bare_tensors_need_a_config(command, stored_files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = convert.load(STORED).to_torch()
    torch.save(model.state_dict(), "bare.pt")
    torch.save({"epoch": 3, "model_state_dict": model.state_dict()}, "wrapped.pth")
    nn_tensors = safetensors.torch.load_file(stored_files / "nn.safetensors")
    nn_tensors = {name: tensor for name, tensor in nn_tensors.items() if not name.startswith("optimizer.")}
    safetensors.torch.save_file(nn_tensors, "bare.safetensors")
    code, out, err = command("translate", "bare.pt")
    assert (code, out) == (2, "")
    assert "bare tensors and no config; convert them with `twinax convert --config`" in err
    Path("config.json").write_text(model.config.to_json())
    for name, config in (("bare.pt", "config.json"), ("wrapped.pth", STORED), ("bare.safetensors", stored_files / "x")):
        assert command("convert", name, f"{name}.pt", "--config", config)[0] == 0
        assert convert.load(Path(f"{name}.pt")).config == model.config
        np.testing.assert_equal(dict(convert.load(Path(f"{name}.pt")).arrays), dict(convert.load(STORED).arrays))
    code, out, _ = command("inspect", "bare.safetensors")
    assert (code, "torch_nn" in out, "bare tensors, no config" in out) == (0, True, True)


def test_convert_says_what_it_did(command, tmp_path):
    code, out, _ = command("convert", STORED, tmp_path / "a.pt")
    text = " ".join(out.replace("│", " ").split())
    assert code == 0
    assert "50 arrays, 1,844 numbers: bit-identical after reading back" in text
    assert "adam after 600 updates: bit-identical after reading back" in text
    code, out, _ = command("convert", tmp_path / "a.pt", tmp_path / "b", "--weights-only")
    assert (code, "left out" in out) == (0, False)
    assert convert.load(tmp_path / "b").training is None
    code, out, _ = command("convert", STORED, tmp_path / "c.pt", "--layout", "torch_nn")
    assert (code, "adam after 600 updates: bit-identical after reading back" in _flat(out)) == (0, True)


def test_convert_sees_what_came_back_different(command, tmp_path, monkeypatch):
    right = convert.save

    def save_changed(checkpoint, path, **options):
        arrays = {name: a.T if name.endswith("q_proj.kernel") else a for name, a in checkpoint.arrays.items()}
        right(replace(checkpoint, arrays=arrays), path, **options)

    monkeypatch.setattr(convert, "save", save_changed)
    code, out, _ = command("convert", STORED, tmp_path / "a.pt")
    assert (
        code,
        "DIFFERENT after reading back, first decoder.layers.0.cross_attention.q_proj.kernel" in _flat(out),
    ) == (1, True)
    assert "nothing, because what was read back is DIFFERENT" in _flat(out)
    assert os.listdir(tmp_path) == []


def _flat(out):
    return " ".join(out.replace("│", " ").split())


def test_inspect_gives_one_checksum_in_every_form(command, stored_files, tmp_path, monkeypatch):
    sums = set()
    monkeypatch.setenv("COLUMNS", "160")
    for form in (*FORMS, "nn.pt", "nn.safetensors"):
        code, out, _ = command("inspect", stored_files / form, "--tensors", "--json", tmp_path / "i.json")
        report = json.loads((tmp_path / "i.json").read_text())
        assert (code, report["trained parameters"], report["layout"]) == (0, 1716, ("twinax", "torch_nn")["nn" in form])
        assert report["training"]["update"] == 600
        assert len(report["tensors"]) == sum(report["arrays"].values())
        assert "q_proj" in out
        sums.add(report["sha256 of weights"])
    assert len(sums) == 1


def test_a_full_disk_leaves_nothing(tmp_path, forks):
    """In a process limited to 8 kB per file."""
    code = f"""
import resource, sys
from twinax import cli
sys.argv = ["twinax", "convert", {str(STORED)!r}, sys.argv[1]]
sys.dont_write_bytecode = True  # or a file of bytecode would be cut short
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, {resource.RLIM_INFINITY}))
cli.main()
"""
    for form in ("x.pt", "x.safetensors"):
        result = forks(code, tmp_path / form)
        assert result.returncode == 2, result.stderr
        assert result.stderr.startswith(f"twinax: {tmp_path / form}: cannot be written: ")
        assert len(result.stderr.splitlines()) == 1
        assert os.listdir(tmp_path) == []


def test_nothing_is_replaced_by_one_who_comes_second(tmp_path, monkeypatch):
    checkpoint, sync = convert.load(STORED), new_files._sync

    def write_first(path):
        (tmp_path / "x.pt").write_text("theirs")
        sync(path)

    monkeypatch.setattr(new_files, "_sync", write_first)
    with pytest.raises(convert.ConversionError, match=r"x\.pt: exists; give another name"):
        convert.save(checkpoint, tmp_path / "x.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]
    assert (tmp_path / "x.pt").read_text() == "theirs"


def test_what_pytorch_trained_on_comes_back(stored_files, tmp_path):
    content = torch.load(stored_files / "x.pt", weights_only=True)
    checkpoint = convert.load(stored_files / "x.pt")
    model, run = checkpoint.to_torch(), checkpoint.training.run
    optimizer = make_optimizer(model, run.training)
    optimizer.load_state_dict(content["optimizer"])
    tokens = torch.tensor([[5, 6, 7, 2]])
    model(tokens, tokens).square().sum().backward()
    optimizer.step()
    torch.save(
        content | {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "update": 601}, tmp_path / "x.pt"
    )
    convert.save(convert.load(tmp_path / "x.pt"), tmp_path / "x")
    round_trip = read_checkpoint(tmp_path / "x")
    assert (int(round_trip.state.update), round_trip.run) == (601, run)
    expected = convert.to_optimizer_state(
        round_trip.state.optimizer, model, with_rate(make_optimizer(model, run.training))
    )
    torch.testing.assert_close(optimizer.state_dict(), expected, rtol=0, atol=0)


def test_averaged_weights_have_no_optimizer(command, tmp_path):
    """The optimizer state belongs to the last update's weights. A run may hold averaged weights alone."""
    shutil.copytree(STORED, tmp_path / "run" / "averaged" / "600")
    assert convert.load(tmp_path / "run").training is None
    code, out, _ = command("convert", tmp_path / "run", tmp_path / "x.pt")
    assert (code, "run, averaged checkpoint 600" in _flat(out), "optimizer none" in _flat(out)) == (0, True, True)
    assert convert.load(tmp_path / "run" / "averaged" / "600").training is None


def test_float64_needs_no_switch(tmp_path, forks):
    """float64 bytes are copied whether or not JAX computes in float64."""
    config = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1, param_dtype="float64")
    config = config.replace(compute_dtype="float64")
    files = convert.load(STORED).files
    convert.save(
        Checkpoint(config, random_arrays(config, 0), files=files, training=training_of(config, 0)), tmp_path / "a"
    )
    code = """
import sys
from twinax import cli
for words in (["convert", "a", "b.pt"], ["convert", "b.pt", "c"], ["inspect", "c"], ["translate", "c", "t"]):
    sys.argv = ["twinax", *words]
    try:
        cli.main()
    except SystemExit as ended:
        print(ended.code)
"""
    (tmp_path / "t").write_text("a\n")
    result = forks(code, cwd=tmp_path)
    assert re.findall(r"^\d$", result.stdout, flags=re.MULTILINE) == ["0", "0", "0", "2"]
    assert "or set JAX_ENABLE_X64=1" in result.stderr
    assert "Traceback" not in result.stderr
    assert same(convert.load(tmp_path / "a"), convert.load(tmp_path / "c"))


def test_names_in_large_letters_are_files(tmp_path):
    checkpoint = convert.load(STORED)
    for name in ("X.PT", "X.SafeTensors"):
        convert.save(checkpoint, tmp_path / name)
        assert (tmp_path / name).is_file()
        assert same(convert.load(tmp_path / name), checkpoint)


def test_a_directory_of_theirs_may_have_any_folder(directories, tmp_path):
    shutil.copytree(directories / "Marian", tmp_path / "m")
    (tmp_path / "m" / "weights").mkdir()
    assert convert.formats.registry.describe(tmp_path / "m") == "Hugging Face directory"
    assert convert.load(tmp_path / "m").layout == "marian"


def test_a_torch_script_is_refused_without_running(tmp_path, recwarn):
    torch.jit.script(nn.Linear(2, 2)).save(tmp_path / "script.pt")
    recwarn.clear()
    with pytest.raises(convert.ConversionError, match=r"script\.pt: is a TorchScript model"):
        convert.load(tmp_path / "script.pt")
    assert not recwarn
