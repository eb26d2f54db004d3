"""The twins against the original modules of the published systems: all ten variants and their files."""

import argparse
import collections
import contextlib

import numpy as np
import pytest
import torch
from flax import nnx

from parity_tests.support import published_decoding, published_training
from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.convert import Checkpoint
from twinax.convert.formats.file_layouts import layout_of
from twinax.parity.functions import random_arrays, random_batch
from twinax.parity.oracles.published import (
    LENGTH,
    PAD,
    SYSTEMS,
    checkpoint_of,
    compare_published,
    find_oracle,
    oracle_of,
    random_model,
    variant_of,
)
from twinax.published.registry import ORACLES

VARIANTS = [(name, as_published) for name in SYSTEMS for as_published in (True, False)]


@pytest.mark.parametrize(("name", "as_published"), VARIANTS)
def test_both_twins_are_the_published_model(name, as_published):
    for framework, report in compare_published(name, as_published).items():
        assert report.ok, f"{framework}: {report}"
        paths = {finding.path for finding in report.findings}
        assert {"encoder.layers.1.self_attention.weights", "decoder.layers.0.cross_attention.output"} < paths
        assert "gradients.encoder.layers.0.self_attention.q_proj.kernel" in paths


def masks_of(name, model, src, tgt):
    """Masks that a system passes to encoder, decoder and cross-attention; True = attend."""
    attention_masks = {}

    def hook(path):
        def record(module, args):
            masks = [a for a in args if torch.is_tensor(a) and a.dtype is torch.bool]
            attention_masks.setdefault(path, masks[0] if masks else None)

        return record

    with contextlib.ExitStack() as hooks:
        for path, module in model.named_modules():
            if "Attention" in type(module).__name__:
                hooks.callback(module.register_forward_pre_hook(hook(path)).remove)
        ORACLES[name].call(model, src, tgt, PAD)
    stack_masks = {
        stack: [m for path, m in attention_masks.items() if path.startswith(stack) and "0" in path]
        for stack in ("enc", "dec")
    }
    result = stack_masks["enc"][0], stack_masks["dec"][0], stack_masks["dec"][-1]
    if name == "d2l_note":
        result = tuple(None if mask is None else ~mask for mask in result)
    return result


@pytest.mark.parametrize(("name", "as_published"), VARIANTS)
def test_masks(name, as_published):
    model = random_model(name, as_published).eval()
    checkpoint = checkpoint_of(name, model, as_published)
    batch = random_batch(checkpoint.config, np.random.default_rng(1), 3, LENGTH, LENGTH if as_published else 5)
    src, tgt = torch.from_numpy(batch.src_tokens), torch.from_numpy(batch.tgt_tokens)
    _, activations = torch_reference.activations(checkpoint.to_torch().eval(), src, tgt)
    for key, system_mask in zip(
        ("encoder_mask", "decoder_mask", "cross_mask"), masks_of(name, model, src, tgt), strict=True
    ):
        expected = torch.ones(1, 1, 1, dtype=torch.bool) if system_mask is None else system_mask
        expected = expected if expected.ndim == 4 else expected[:, None]
        assert torch.equal(activations[key].expand(3, 1, -1, -1), expected.expand_as(activations[key])), key


@pytest.mark.parametrize("as_published", [True, False])
def test_d2l_note_in_training(as_published):
    for framework, report in compare_published("d2l_note", as_published, training=True).items():
        assert report.ok, f"{framework}: {report}"


UNTIED = {"tied_output": False, "shared_embeddings": False}


@pytest.mark.parametrize("as_published", [True, False])
def test_jadore801120_untied(as_published):
    for framework, report in compare_published("jadore801120", as_published, **UNTIED).items():
        assert report.ok, f"{framework}: {report}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "as_published"), VARIANTS)
def test_a_state_dict_comes_back_bit_for_bit(name, as_published, dtype, tmp_path):
    check_round_trip(random_model(name, as_published).to(dtype), name, as_published, tmp_path)


@pytest.mark.parametrize("settings", [UNTIED, {"shared_embeddings": False}])
def test_other_ties_come_back_bit_for_bit(settings, tmp_path):
    check_round_trip(random_model("jadore801120", True, **settings), "jadore801120", True, tmp_path)


def check_round_trip(model, name, as_published, tmp_path):
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    checkpoint = convert.load(tmp_path / "theirs.pt", variant_of(name, as_published))
    convert.save(checkpoint, tmp_path / "back.pt", layout=name)
    convert.save(checkpoint, tmp_path / "ours.safetensors")
    convert.save(convert.load(tmp_path / "ours.safetensors"), tmp_path / "again.pt", layout=name)
    for path in ("back.pt", "again.pt"):
        state = torch.load(tmp_path / path, weights_only=True)["model"]
        assert state.keys() == model.state_dict().keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in model.state_dict().items())
        assert all(state[key].dtype == tensor.dtype for key, tensor in model.state_dict().items())
        model.load_state_dict(state, strict=True)


def test_what_nothing_reads_is_kept(tmp_path):
    model = random_model("leftover", as_published=True)
    torch.save({"model_state_dict": model.state_dict()}, tmp_path / "theirs.pt")
    with pytest.raises(convert.ConversionError, match=r"num_heads=8: d_model=12 is not .* as in leftover:num_heads=4"):
        convert.load(tmp_path / "theirs.pt")
    checkpoint = convert.load(tmp_path / "theirs.pt", "leftover:num_heads=4")
    assert checkpoint.config.cross_mask == "encoder"
    assert set(checkpoint.unused) == {"decoder.proj.weight", "decoder.proj.bias"}


def test_open_prefixes(tmp_path):
    names = {"encoder": "net.enc", "decoder": "net.dec", "projection": "head"}
    model = random_model("leftover", as_published=True)
    renamed_state = {}
    for key, tensor in model.state_dict().items():
        part, _, rest = key.partition(".")
        renamed_state[f"{names[part]}.{rest}"] = tensor
    assert layout_of(renamed_state) == "leftover:encoder=net.enc,decoder=net.dec,projection=head"
    torch.save(renamed_state, tmp_path / "theirs.pt")
    checkpoint = convert.load(tmp_path / "theirs.pt", "leftover:num_heads=4")
    convert.save(checkpoint, tmp_path / "back.pt", layout=layout_of(renamed_state))
    saved_state = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    assert saved_state.keys() == renamed_state.keys()
    assert all(torch.equal(saved_state[key], renamed_state[key]) for key in renamed_state)
    reloaded_checkpoint = convert.load(tmp_path / "back.pt")
    assert all(np.array_equal(reloaded_checkpoint.arrays[key], a) for key, a in checkpoint.arrays.items())


WRONG = {
    "leftover:enc=a": r"leftover allows new prefixes for encoder and decoder and projection",
    "lucky_glass:encoder=a": r"lucky_glass allows no new prefix",
    "leftover:encoder=a,decoder=a": r"two parts have the same prefix",
    "leftover:encoder": r"allows new prefixes",
    "leftover:encoder=decoder": r"two parts have the same prefix",
    "leftover:projection=decoder": r"two parts have the same prefix",
    "leftover:encoder=encoder,encoder=x": r"two parts have the same prefix",
}


@pytest.mark.parametrize("layout", WRONG)
def test_wrong_prefixes_are_refused(layout, tmp_path):
    checkpoint = checkpoint_of("leftover", random_model("leftover", as_published=True), as_published=True)
    with pytest.raises(convert.ConversionError, match=WRONG[layout]):
        convert.save(checkpoint, tmp_path / "x.pt", layout=layout)
    assert not (tmp_path / "x.pt").exists()


def test_the_checkpoint_that_jadore801120_saves(tmp_path):
    """Epoch, settings (an argparse.Namespace with the number of heads) and model."""
    model = random_model("jadore801120", as_published=True)
    heads = model.encoder.layer_stack[0].slf_attn.n_head
    settings = argparse.Namespace(n_head=heads, dropout=0.1, cuda=True, log=None)
    torch.save({"epoch": 3, "settings": settings, "model": model.state_dict()}, tmp_path / "theirs.chkpt.pt")
    assert convert.load(tmp_path / "theirs.chkpt.pt").config.num_heads == heads
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    widths = model.encoder.layer_stack[0].slf_attn.w_qs.weight.shape[0]
    config = convert.load(tmp_path / "bare.pt", "jadore801120:num_heads=1").config
    assert (config.num_heads, config.head_dim) == (1, widths)
    with pytest.raises(
        convert.ConversionError, match=r"num_heads=5: does not divide the attention widths \d+ and \d+; set"
    ):
        convert.load(tmp_path / "bare.pt", "jadore801120:num_heads=5")
    with pytest.raises(convert.ConversionError, match="param_dtype: is determined by the tensors"):
        convert.load(tmp_path / "bare.pt", "jadore801120:param_dtype=float64")
    torch.save({"model": model.state_dict(), "more": collections.deque()}, tmp_path / "x.pt")
    with pytest.raises(convert.ConversionError, match=r"a collections\.deque; none of its code was run; save"):
        convert.load(tmp_path / "x.pt")


@pytest.mark.parametrize("wrapper", ["module.", "model.", "_orig_mod.module."])
def test_wrappers_of_the_whole_model(wrapper, tmp_path):
    model = random_model("lucky_glass", as_published=True)
    torch.save({wrapper + key: tensor for key, tensor in model.state_dict().items()}, tmp_path / "theirs.pt")
    convert.save(convert.load(tmp_path / "theirs.pt"), tmp_path / "back.pt", layout="lucky_glass")
    state = torch.load(tmp_path / "back.pt", weights_only=True)["model"]
    assert state.keys() == model.state_dict().keys()


@pytest.mark.parametrize("name", ["lucky_glass", "jadore801120", "leftover", "d2l_note", "annotated_transformer"])
@pytest.mark.parametrize("as_published", [True, False])
def test_a_model_that_begins_here_goes_into_their_names(name, as_published, tmp_path):
    sizes = {"d_model": 16, "num_heads": 2, "d_ff": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    sizes |= {"src_vocab_size": 11, "tgt_vocab_size": 11, "max_length": 12}
    config = TransformerConfig.published(name, as_published=as_published, **sizes)
    twin = flax_transformer.Transformer(config, rngs=nnx.Rngs(0))
    convert.save(convert.Checkpoint.of(twin), tmp_path / "x.pt", layout=name)
    checkpoint = convert.load(tmp_path / "x.pt")
    assert checkpoint.config == config


def test_scales_that_jadore801120_cannot_have(tmp_path):
    sizes = {"src_vocab_size": 11, "tgt_vocab_size": 11, "d_model": 16, "head_dim": 8, "v_head_dim": 8, "d_ff": 8}
    for changes in ({"tied_output": False, "shared_embeddings": False}, {"embedding_scale": "sqrt_d_model"}):
        config = TransformerConfig.published("jadore801120", as_published=True, **sizes, **changes)
        checkpoint = convert.Checkpoint.of(flax_transformer.Transformer(config, rngs=nnx.Rngs(0)))
        with pytest.raises(convert.ConversionError, match="jadore801120 has no such model:\n  embedding_scale="):
            convert.save(checkpoint, tmp_path / "x.pt", layout="jadore801120")


def test_what_is_refused(tmp_path):
    """A wrong system, an incomplete state dict, differing copies of a tie, a model that the system cannot express."""
    model = random_model("jadore801120", as_published=True)
    state = model.state_dict()
    torch.save(state, tmp_path / "theirs.pt")
    with pytest.raises(convert.ConversionError, match=r"the tensors are in layout jadore801120"):
        convert.load(tmp_path / "theirs.pt", "leftover")
    with pytest.raises(convert.ConversionError, match=r"must be one of annotated_transformer, d2l_note"):
        convert.load(tmp_path / "theirs.pt", "jadore801120:better")
    torch.save({k: t for k, t in state.items() if "w_qs" not in k}, tmp_path / "half.pt")
    with pytest.raises(convert.ConversionError, match=r"half.pt: is not a complete state dict of jadore801120: .*w_qs"):
        convert.load(tmp_path / "half.pt")
    config = convert.load(tmp_path / "theirs.pt").config
    torch.save(state | {"trg_word_prj.weight": state["trg_word_prj.weight"] + 1}, tmp_path / "untied.pt")
    with pytest.raises(convert.ConversionError, match=r"copies of one tensor differ"):
        convert.load(tmp_path / "untied.pt", config)
    with pytest.raises(
        convert.ConversionError, match=r"(?s)leftover has no such model:\n.*shared_embeddings=True: must be"
    ):
        convert.save(convert.load(tmp_path / "theirs.pt"), tmp_path / "x.pt", layout="leftover")


@pytest.mark.parametrize("name", SYSTEMS)
def test_updates_as_published(name):
    """With dropout on and each system's own update rule, such as lucky_glass skipping parameters without a gradient.

    `make published` runs 50 per variant.
    """
    updates = 5 if name == "annotated_transformer" else 8  # there, of ten micro-batches each
    comparison = published_training.train(name, as_published=True, updates=updates)
    assert len(comparison.losses) == updates
    assert comparison.loss <= published_training.LOSS_BOUND
    assert comparison.parameters <= published_training.PARAMETER_BOUND
    # lucky_glass: encoder layer, source embedding and cross-attention; leftover: an unused layer.
    assert comparison.unchanged == {"lucky_glass": 17 + 1 + 13, "leftover": 2}.get(name, 0)
    assert comparison.losses[-1, 0] < comparison.losses[0, 0]


@pytest.mark.parametrize(("name", "as_published"), VARIANTS)
def test_decoding(name, as_published):
    """The published decoding and both twins give identical tokens; if it raises, the twins reject the model."""
    comparison = published_decoding.search(name, as_published)
    assert comparison.ok
    assert comparison.rejected or comparison.equal == published_decoding.SENTENCES
    raises = {("leftover", True): "must match the size", ("d2l_note", True): "cannot be converted to Scalar"}
    expected = raises.get((name, as_published), "none" if name == "lucky_glass" else "ran")
    assert expected in comparison.published
    assert len(set(comparison.lengths)) > 1 or name == "lucky_glass" or comparison.rejected


@pytest.mark.parametrize(("name", "as_published"), VARIANTS)
def test_the_systems_module_of_a_checkpoint(name, as_published):
    """The oracle of `twinax parity` equals the module whose weights were saved."""
    model = random_model(name, as_published)
    checkpoint = checkpoint_of(name, model, as_published)
    oracle = find_oracle(checkpoint)
    if (name, as_published) == ("d2l_note", True):  # requires inputs of one length
        assert oracle is None
        return
    assert oracle is not None
    assert oracle.name == name
    batch = random_batch(checkpoint.config, np.random.default_rng(1), 3, 5, 4)
    outputs, expected = oracle.function(batch), oracle_of(name, model.eval(), checkpoint)(batch)
    assert outputs.keys() == expected.keys()
    assert all(torch.equal(torch.as_tensor(outputs[key]), torch.as_tensor(value)) for key, value in expected.items())


def test_no_system_has_the_default_model():
    config = TransformerConfig.preset("tiny")
    assert find_oracle(Checkpoint(config, random_arrays(config, 0))) is None
