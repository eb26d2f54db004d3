"""Files of published systems: what they do not state is said, and what cannot be read is named."""

import json
import shutil

import pytest
import torch

from twinax import convert
from twinax.parity_tests.published import SYSTEMS, random_model
from twinax.torch_reference.published import annotated_transformer, lucky_glass
from twinax.train import portable

IDS = ("pad_id=1", "bos_id=2", "eos_id=3")
OPEN = {  # what the tensors leave open, by the description of each system's state dict
    "lucky_glass": ("as published", *IDS),
    "jadore801120": ("num_heads=8", "logit_scale='rsqrt_d_model'", *IDS),
    "leftover": ("as published", "num_heads=8", *IDS),
    "d2l_note": ("as published", "num_heads=4", "max_length=10", *IDS),
    "annotated_transformer": ("num_heads=8", "pad_id=2", "bos_id=0", "eos_id=1"),
}


def save(name, path, *, as_published=True, width=16):
    """A state dict of a model of 4 heads whose width 8 heads divide too."""
    sizes = {"d_model": width, "d_ff": 8, "layers": 1, "dropout": 0.0, "as_published": as_published}
    if name == "jadore801120":
        model = random_model(name, as_published, layers=1)
    elif name == "annotated_transformer":
        model = annotated_transformer.Transformer(13, 13, h=4, **sizes)
    elif name == "lucky_glass":
        model = lucky_glass.Transformer(13, 13, heads=4, **sizes)
    else:
        from twinax.parity_tests import published

        module = getattr(published, name)
        model = module.Transformer(13, 13, heads=4, seq_len=10, **sizes)
    torch.save(model.float().state_dict(), path)
    return path


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_a_file_leaves_open_is_named(name, tmp_path):
    """And goes along into our files, where the config does not show any more that it was assumed."""
    checkpoint = convert.load(save(name, tmp_path / "theirs.pt"))
    assert checkpoint.assumed == OPEN[name]
    for form in ("ours.pt", "ours.safetensors", "ours"):
        portable.write(checkpoint, tmp_path / form)
        assert portable.read(tmp_path / form).assumed == OPEN[name]


@pytest.mark.parametrize("name", SYSTEMS)
def test_what_is_given_is_not_assumed(name, tmp_path):
    path = save(name, tmp_path / "theirs.pt")
    given = ",".join(item.replace(" ", "_").replace("'", "") for item in OPEN[name])
    checkpoint = convert.load(path, f"{name}:{given}")
    assert checkpoint.assumed == ()
    assert checkpoint.config == convert.load(path).config


def test_the_repaired_norm_tells_the_variant(tmp_path):
    """jadore801120's additional norm is in the tensors or not: nothing is open then, nor without it."""
    path = save("jadore801120", tmp_path / "theirs.pt", as_published=False)
    checkpoint = convert.load(path)
    assert checkpoint.config.embedding_norm == "none"
    assert "as published" not in checkpoint.assumed


def test_every_command_says_what_was_assumed(command, tmp_path):
    path = save("annotated_transformer", tmp_path / "theirs.pt")
    line = f"{path}: assumed num_heads=8, pad_id=2, bos_id=0, eos_id=1, which its tensors do not determine; set them"
    for arguments in (("inspect", path), ("convert", path, tmp_path / "ours.pt")):
        status, _, err = command(*arguments)
        assert status == 0
        assert line in err
        assert "--config annotated_transformer:repaired,num_heads=4" in err
    _, out, err = command("inspect", tmp_path / "ours.pt", "--json", tmp_path / "ours.json")
    assert line.replace("theirs", "ours") in err
    assert json.loads((tmp_path / "ours.json").read_text())["assumed"] == list(OPEN["annotated_transformer"])
    assert "num_heads=8" in out


@pytest.mark.parametrize("name", ["jadore801120", "leftover", "annotated_transformer"])
@pytest.mark.parametrize("heads", ["3", "0", "-2", "many", "true", "2.0"])
def test_heads_that_cannot_be(name, heads, tmp_path):
    path = save(name, tmp_path / "theirs.pt")
    with pytest.raises(convert.ConversionError, match=r"num_heads=.*(divisible|at least 1)") as error:
        convert.load(path, f"{name}:num_heads={heads}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("variant", ["as_published=false", "as_published=true", "repaired,as_published", "width=3"])
def test_variants_that_cannot_be(variant, tmp_path):
    path = save("lucky_glass", tmp_path / "theirs.pt")
    expected = {
        "as_published=false": r"write lucky_glass:as_published or lucky_glass:repaired$",
        "as_published=true": r"write lucky_glass:as_published or lucky_glass:repaired$",
        "repaired,as_published": r"nor one of them as leftover:repaired,num_heads=4$",
        "width=3": r"TransformerConfig has no field 'width'",
    }[variant]
    with pytest.raises(convert.ConversionError, match=expected):
        convert.load(path, f"lucky_glass:{variant}")


@pytest.mark.parametrize("name", ["model.chkpt", "model", "best.ckpt", "weights.safetensors"])
def test_a_file_is_recognised_by_its_content(name, command, tmp_path):
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
    status, _, err = command("inspect", tmp_path / "x")
    assert (status, err.count("\n")) == (2, 1)
    assert "x: is no checkpoint: its content is neither PyTorch's nor that of safetensors" in err


def test_what_is_left_out_of_a_checkpoint_is_named(command, tmp_path):
    """leftover saves its optimiser and counters, for which no run is there to go on with."""
    state = torch.load(save("leftover", tmp_path / "theirs.pt"))
    whole = {"epoch": 3, "model_state_dict": state, "optimizer_state_dict": {"state": {}}, "global_step": 5}
    torch.save(whole, tmp_path / "theirs.pt")
    status, out, _ = command(
        "convert", tmp_path / "theirs.pt", tmp_path / "ours.pt", "--config", "leftover:num_heads=4"
    )
    assert status == 0
    text = " ".join(out.replace("│", " ").split())
    assert "not read, left out epoch, optimizer_state_dict, global_step" in text
    assert "optimizer_state_dict left out: the file has no run to go on with" in text
    assert "optimizer_state_dict" in command("inspect", tmp_path / "theirs.pt")[1]


def test_float64_weights_compute_in_float64(tmp_path):
    torch.save(random_model("leftover", as_published=True).state_dict(), tmp_path / "theirs.pt")
    config = convert.load(tmp_path / "theirs.pt", "leftover:num_heads=4").config
    assert (config.param_dtype, config.compute_dtype) == ("float64", "float64")
    config = convert.load(tmp_path / "theirs.pt", "leftover:num_heads=4,compute_dtype=float32").config
    assert (config.param_dtype, config.compute_dtype) == ("float64", "float32")
