"""Files of published systems: assumptions are listed, and unreadable files are named."""

import argparse
import json
import shutil

import pytest
import torch

from twinax import convert
from twinax.convert.formats.file_layouts import describe_assumed
from twinax.parity.oracles.published import SYSTEMS, random_model
from twinax.published.annotated_transformer import module as annotated_transformer
from twinax.published.d2l_note import module as d2l_note
from twinax.published.jadore801120 import module as jadore801120
from twinax.published.leftover import module as leftover
from twinax.published.lucky_glass import module as lucky_glass

IDS = ("pad_id=1", "bos_id=2", "eos_id=3")
OPEN = {  # what the tensors do not determine, per system
    "lucky_glass": ("as published", *IDS),
    "jadore801120": ("num_heads=8", "embedding_scale='none'", "logit_scale='rsqrt_d_model'", *IDS),
    "leftover": ("as published", "num_heads=8", *IDS),
    "d2l_note": ("as published", "num_heads=4", "max_length=10", *IDS),
    "annotated_transformer": ("num_heads=8", "pad_id=2", "bos_id=0", "eos_id=1"),
}


def save(name, path, *, as_published=True, width=16):
    """Save the state dict of a model with 4 heads, whose width is also divisible by 8."""
    sizes = {"d_model": width, "d_ff": 8, "layers": 1, "dropout": 0.0, "as_published": as_published}
    if name == "jadore801120":
        model = random_model(name, as_published, layers=1)
    elif name == "annotated_transformer":
        model = annotated_transformer.Transformer(13, 13, h=4, **sizes)
    elif name == "lucky_glass":
        model = lucky_glass.Transformer(13, 13, heads=4, **sizes)
    else:
        model = {"leftover": leftover, "d2l_note": d2l_note}[name].Transformer(13, 13, heads=4, seq_len=10, **sizes)
    torch.save(model.float().state_dict(), path)
    return path


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_a_file_leaves_open_is_named(name, tmp_path):
    """The list is saved with the checkpoint, because the config alone does not show it."""
    checkpoint = convert.load(save(name, tmp_path / "theirs.pt"))
    assert checkpoint.assumed == OPEN[name]
    for form in ("ours.pt", "ours.safetensors", "ours"):
        convert.save(checkpoint, tmp_path / form)
        assert convert.load(tmp_path / form).assumed == OPEN[name]


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_given_is_not_assumed(name, tmp_path):
    path = save(name, tmp_path / "theirs.pt")
    settings = ",".join(item.replace(" ", "_").replace("'", "") for item in OPEN[name])
    checkpoint = convert.load(path, f"{name}:{settings}")
    assert checkpoint.assumed == ()
    assert checkpoint.config == convert.load(path).config


def test_the_repaired_norm_tells_the_variant(tmp_path):
    """jadore801120's additional norm is present in the tensors or absent, so either way the variant is determined."""
    path = save("jadore801120", tmp_path / "theirs.pt", as_published=False)
    checkpoint = convert.load(path)
    assert checkpoint.config.embedding_norm == "none"
    assert "as published" not in checkpoint.assumed


def test_every_command_says_what_was_assumed(command, tmp_path):
    path = save("annotated_transformer", tmp_path / "theirs.pt")
    line = f"{path}: assumed num_heads=8, pad_id=2, bos_id=0, eos_id=1, because the file does not state it; to set it: "
    for arguments in (("inspect", path), ("convert", path, tmp_path / "ours.pt")):
        status, _, err = command(*arguments)
        assert status == 0
        assert line in err
        assert "--config annotated_transformer:num_heads=8,pad_id=2,bos_id=0,eos_id=1" in err
    _, out, err = command("inspect", tmp_path / "ours.pt", "--json", tmp_path / "ours.json")
    assert line.replace("theirs", "ours") in err
    assert json.loads((tmp_path / "ours.json").read_text())["assumed"] == list(OPEN["annotated_transformer"])
    assert "num_heads=8" in out


def stop(*arguments, **keywords):
    raise convert.ConversionError("far enough")


def test_what_computes_says_it_too(command, tmp_path, monkeypatch):
    """score, evaluate, audit and train --init-from list the assumptions before they compute."""
    path = save("leftover", tmp_path / "theirs.pt", as_published=False)
    (tmp_path / "words.txt").write_text("\n".join(["[UNK]", "[PAD]", "[SOS]", "[EOS]", *"abcdefghi"]))
    (tmp_path / "text").write_text("a b\nc\n")
    options = ("--config", "leftover:repaired,num_heads=4", "--tokenizer", tmp_path / "words.txt")
    assert command("convert", path, tmp_path / "ours.pt", *options)[0] == 0
    for place in (
        "inference.translator.Translator.score",
        "inference.translator.Translator.hypotheses",
        "train.loop.loop.prepare_in",
    ):
        monkeypatch.setattr(f"twinax.{place}", stop)
    monkeypatch.setattr("twinax.cli.proofs.audit_command.audit_config", stop)
    checkpoint, text = tmp_path / "ours.pt", ("--src", tmp_path / "text", "--tgt", tmp_path / "text")
    calls = [(name, checkpoint, *text) for name in ("score", "evaluate")]
    calls += [("audit", checkpoint), ("train", "--init-from", checkpoint, *text, "--out", tmp_path / "r")]
    for call in calls:
        status, _, err = command(*call)
        assert (status, "far enough" in err) == (2, True), call
        assert "ours.pt: assumed pad_id=1, bos_id=2, eos_id=3, because the file does not state it" in err, call


def test_the_hint_can_be_followed(tmp_path):
    path = save("leftover", tmp_path / "theirs.pt")
    line = describe_assumed("theirs.pt", convert.load(path))
    checkpoint = convert.load(path, line.rpartition("--config ")[2])
    assert checkpoint.assumed == ()
    assert checkpoint.config == convert.load(path).config


def test_the_decoder_starts_with_the_bos_that_is_given(tmp_path):
    path = save("leftover", tmp_path / "theirs.pt")
    config = convert.load(path, "leftover:pad_id=0,bos_id=1,eos_id=2").config
    assert (config.pad_id, config.bos_id, config.eos_id, config.decoder_start_id) == (0, 1, 2, 1)
    assert convert.load(path, "leftover:bos_id=1,decoder_start_id=4").config.decoder_start_id == 4


@pytest.mark.parametrize(("scale", "expected"), [("prj", (1, 16**-0.5)), ("emb", (4, 1)), ("none", (1, 1))])
def test_the_settings_of_jadore801120_count(scale, expected, tmp_path):
    """Its checkpoint states heads, padding and the scale, which tensors do not; the module itself is the oracle."""
    sizes = {"d_model": 16, "d_inner": 8, "n_layers": 1, "n_head": 4, "d_k": 4, "d_v": 4}
    model = jadore801120.Transformer(13, 13, 3, 3, as_published=True, scale_emb_or_prj=scale, **sizes)
    assert (model.encoder.scale, model.logit_scale) == expected
    settings = argparse.Namespace(n_head=4, src_pad_idx=3, trg_pad_idx=3, scale_emb_or_prj=scale)
    torch.save({"epoch": 1, "settings": settings, "model": model.state_dict()}, tmp_path / "model.chkpt")
    checkpoint = convert.load(tmp_path / "model.chkpt", "jadore801120:bos_id=1,eos_id=2")
    assert (checkpoint.assumed, checkpoint.skipped) == ((), ("epoch",))
    src, tgt = torch.tensor([[5, 6, 7, 3]]), torch.tensor([[1, 8, 9]])
    expected_logits = model.eval()(src, tgt).unflatten(0, (1, 3))
    torch.testing.assert_close(checkpoint.to_torch().eval()(src, tgt), expected_logits, rtol=1e-4, atol=1e-5)


def test_a_system_is_known_by_its_layout(command, tmp_path):
    """Also with a setting that differs from both variants; `--config` of a checkpoint keeps its assumptions."""
    path = save("lucky_glass", tmp_path / "theirs.pt")
    checkpoint = convert.load(path, "lucky_glass:norm_eps=1e-6")
    assert (checkpoint.system, checkpoint.assumed) == ("lucky_glass", OPEN["lucky_glass"])
    convert.save(checkpoint, tmp_path / "one.pt")
    arguments = ("convert", path, tmp_path / "two.pt", "--config", tmp_path / "one.pt")
    assert command(*arguments)[0] == 0
    assert convert.load(tmp_path / "two.pt").assumed == OPEN["lucky_glass"]


def test_a_vocabulary_that_contradicts_the_ids_is_refused(command, tmp_path):
    """The vocabulary is sorted, as in newer editions of the book; unchecked, commas would be padding."""
    path = save("d2l_note", tmp_path / "theirs.pt", as_published=False)
    words = ["!", ",", ".", "<bos>", "<eos>", "<pad>", "<unk>", "?", *"abcde"]
    (tmp_path / "words.txt").write_text("\n".join(words))
    arguments = ("convert", path, tmp_path / "ours.pt", "--tokenizer", tmp_path / "words.txt", "--config")
    status, _, err = command(*arguments, "d2l_note:repaired")
    assert (status, err.count("\n")) == (2, 1)
    assert "'<pad>' has id 5, but the model's pad_id is 1" in err
    assert command(*arguments, f"d2l_note:repaired,{err.strip().rpartition('NAME:')[2]}")[0] == 0


@pytest.mark.parametrize("name", ["jadore801120", "leftover", "annotated_transformer"])
@pytest.mark.parametrize("heads", ["3", "0", "-2", "many", "true", "2.0"])
def test_heads_that_cannot_be(name, heads, tmp_path):
    path = save(name, tmp_path / "theirs.pt")
    with pytest.raises(
        convert.ConversionError,
        match=r"num_heads=.*(divisible by it|does not divide .* as in jadore801120:num_heads=4|at least 1)",
    ) as error:
        convert.load(path, f"{name}:num_heads={heads}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "variant", ["as_published=false", "repaired=true", "repaired,as_published", "width=3", "a=1,a=2"]
)
def test_variants_that_cannot_be(variant, tmp_path):
    path = save("lucky_glass", tmp_path / "theirs.pt")
    expected = {
        "as_published=false": r"write lucky_glass:as_published or lucky_glass:repaired$",
        "repaired=true": r"write lucky_glass:as_published or lucky_glass:repaired$",
        "a=1,a=2": r"sets a field twice$",
        "repaired,as_published": r"optionally with settings, as in leftover:repaired,num_heads=4$",
        "width=3": r"TransformerConfig has no field 'width'",
    }[variant]
    with pytest.raises(convert.ConversionError, match=expected):
        convert.load(path, f"lucky_glass:{variant}")


@pytest.mark.parametrize("name", ["model.chkpt", "model", "best.ckpt", "weights.safetensors"])
def test_a_file_is_recognized_by_its_content(name, command, tmp_path):
    """jadore801120 writes model.chkpt; a wrong ending does no harm either."""
    path = save("jadore801120", tmp_path / name)
    status, out, _ = command("inspect", path)
    assert status == 0
    assert "PyTorch file" in out
    checkpoint = convert.load(path)
    convert.save(checkpoint, tmp_path / "ours.safetensors")
    shutil.copy(tmp_path / "ours.safetensors", tmp_path / "ours.bin")
    assert convert.load(tmp_path / "ours.bin").config == checkpoint.config
    assert "safetensors file" in command("inspect", tmp_path / "ours.bin")[1]


@pytest.mark.parametrize("content", [b"", b"{", b"text\n" * 9, bytes(100)])
def test_other_files_are_refused(content, command, tmp_path):
    (tmp_path / "x").write_bytes(content)
    status, out, err = command("inspect", tmp_path / "x")
    assert (status, err) == (2, "")
    assert "pass a run" in out or "download or copy it again" in out


def test_what_is_left_out_of_a_checkpoint_is_named(command, tmp_path):
    """leftover saves its optimizer and counters, but there is no run to resume."""
    state = torch.load(save("leftover", tmp_path / "theirs.pt"))
    content = {"epoch": 3, "model_state_dict": state, "optimizer_state_dict": {"state": {}}, "global_step": 5}
    torch.save(content, tmp_path / "theirs.pt")
    status, out, _ = command(
        "convert", tmp_path / "theirs.pt", tmp_path / "ours.pt", "--config", "leftover:num_heads=4"
    )
    assert status == 0
    text = " ".join(out.replace("│", " ").split())
    assert "ignored epoch, optimizer_state_dict, global_step" in text
    assert "optimizer_state_dict ignored: pass --run, the run that resumes from it" in text
    assert "optimizer_state_dict" in command("inspect", tmp_path / "theirs.pt")[1]


def test_float64_weights_compute_in_float64(tmp_path):
    torch.save(random_model("leftover", as_published=True).state_dict(), tmp_path / "theirs.pt")
    config = convert.load(tmp_path / "theirs.pt", "leftover:num_heads=4").config
    assert (config.param_dtype, config.compute_dtype) == ("float64", "float64")
    config = convert.load(tmp_path / "theirs.pt", "leftover:num_heads=4,compute_dtype=float32").config
    assert (config.param_dtype, config.compute_dtype) == ("float64", "float32")


def test_a_scale_that_the_repaired_model_cannot_have_settles_nothing_else(tmp_path):
    """Untied, the published code scales nothing; stating that does not select the repaired model."""
    settings = {"tied_output": False, "shared_embeddings": False}
    torch.save(random_model("jadore801120", True, **settings).state_dict(), tmp_path / "theirs.pt")
    checkpoint = convert.load(tmp_path / "theirs.pt", "jadore801120:embedding_scale=none")
    assert checkpoint.assumed == ("num_heads=8", *IDS)
