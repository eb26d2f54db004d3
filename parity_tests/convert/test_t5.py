"""T5's directories: which settings and weights scale the logits and tie the output, old files, and what is refused."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from parity_tests.support import conversion
from twinax import TransformerConfig, convert
from twinax.parity.functions import random_batch, torch_function
from twinax.parity.harness import compare_arrays
from twinax.parity.ladder import comparable, rung_of
from twinax.parity.oracles.transformers import load_model, load_oracle

# `transformers` warns about saving and about weights that differ from their settings
pytestmark = [pytest.mark.newest, pytest.mark.filterwarnings("ignore")]

VARIANTS = {"t5": ("T5", "T5 v1.1, Flan-T5"), "mt5": ("mT5, tied", "mT5"), "umt5": ("UMT5, tied", "UMT5")}
# (layout, whether the weights tie, tie_word_embeddings, scale_decoder_outputs); None: the setting is missing
CASES = [
    *(("t5", *case) for case in product([True, False], [None, False], [None, False])),
    ("t5", True, False, True),
    ("t5", False, True, True),
    *(("umt5", tied, tie, None) for tied, tie in product([True, False], [True, False])),
    ("umt5", False, True, False),
    *(("mt5", tied, False, None) for tied in (True, False)),
]


def write(layout, tied, folder, **settings):
    """A directory of `transformers` with these settings in its config.json; None removes one."""
    conversion.random_model(VARIANTS[layout][0 if tied else 1]).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | settings
    (folder / "config.json").write_text(json.dumps({n: v for n, v in values.items() if v is not None}, indent=2))


def check_equal(folder, checkpoint):
    """The directory's model in `transformers` and the checkpoint are the same function."""
    config = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64")
    batch = random_batch(config, np.random.default_rng(1), 3, 7, 6)
    expected = load_oracle(folder, checkpoint)(batch)
    outputs = torch_function(config)({n: a.astype(np.float64) for n, a in checkpoint.arrays.items()}, batch)
    outputs = comparable(outputs, expected, batch, config.pad_id)
    compare_arrays(expected, outputs, criteria=conversion.CRITERIA, rung_of=rung_of).check()


@pytest.mark.parametrize(("layout", "tied", "tie_word_embeddings", "scale_decoder_outputs"), CASES)
def test_scale_and_tie_are_those_of_transformers(layout, tied, tie_word_embeddings, scale_decoder_outputs, tmp_path):
    """Files of `transformers` 4 have `tie_word_embeddings` only, those of `transformers` 5 always state True."""
    changes = {"tie_word_embeddings": tie_word_embeddings, "scale_decoder_outputs": scale_decoder_outputs}
    write(layout, tied, tmp_path / "a", **changes)
    checkpoint = convert.load(tmp_path / "a")
    assert checkpoint.config.tied_output == tied
    check_equal(tmp_path / "a", checkpoint)
    convert.save(checkpoint, tmp_path / "b", layout=layout)  # its documents are written back
    assert conversion.changes(tmp_path / "a", tmp_path / "b") == []
    new = convert.Checkpoint(checkpoint.config.replace(bos_id=3), checkpoint.arrays)
    convert.save(new, tmp_path / "c", layout=layout)  # new documents
    again = convert.load(tmp_path / "c")
    assert (again.config.tied_output, again.config.logit_scale) == (tied, checkpoint.config.logit_scale)
    check_equal(tmp_path / "c", again)


@pytest.mark.parametrize("layout", VARIANTS)
def test_old_files_have_copies_and_biases_that_nothing_reads(layout, tmp_path):
    """Copies of the shared table, and a bias of cross-attention that `transformers` ignores."""
    write(layout, False, tmp_path)
    expected = convert.load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for stack in ("encoder", "decoder"):
        tensors[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"].clone()
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(6, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = convert.load(tmp_path)
    assert checkpoint.config == expected.config
    assert all(np.array_equal(a, expected.arrays[name]) for name, a in checkpoint.arrays.items())
    tensors["encoder.embed_tokens.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(convert.ConversionError, match=r"encoder.embed_tokens.weight differs from shared.weight"):
        convert.load(tmp_path)


def test_without_a_length_it_is_512(tmp_path):
    """`transformers` has no limit, and computes the same at the twins' longest length."""
    write("t5", True, tmp_path, n_positions=None)
    checkpoint = convert.load(tmp_path)
    assert checkpoint.config.max_length == 512
    tokens = torch.from_numpy(np.random.default_rng(0).integers(1, 31, (1, 512)))
    expected = load_model(tmp_path, checkpoint)(input_ids=tokens, decoder_input_ids=tokens).logits
    assert torch.allclose(checkpoint.to_torch()(tokens, tokens), expected, atol=1e-4)


REFUSED = {
    "unknown": ({"rotary": True}, "rotary=True: twinax does not know this setting of t5"),
    "activation": ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj='gated-tanh': must be one of 'gated-"),
    "contradiction": ({"dense_act_fn": "gelu"}, "dense_act_fn='gelu': contradicts feed_forward_proj='relu'"),
    "gate": ({"is_gated_act": True}, "is_gated_act=True: contradicts feed_forward_proj='relu'"),
    "scale": ({"scale_decoder_outputs": "no"}, "scale_decoder_outputs='no': must be one of True, False"),
    "buckets": ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets=2: must be at least 4"),
    "distance": ({"relative_attention_max_distance": 3}, "relative_attention_max_distance=3: must be above 3"),
    "layers": ({"num_layers": 3}, "num_layers=3: contradicts the weights, which have 2"),
    "dropout": ({"dropout_rate": 2.0}, "dropout_rate=2.0: a dropout rate must be at least 0 and below 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_settings_are_named(name, tmp_path):
    settings, message = REFUSED[name]
    write("t5", True, tmp_path, **settings)
    with pytest.raises(convert.ConversionError) as error:
        convert.load(tmp_path)
    assert message in str(error.value)


def test_other_layouts_refuse_t5(tmp_path):
    """Each field that they cannot represent is listed, and nothing is written."""
    write("t5", True, tmp_path / "t5")
    checkpoint = convert.load(tmp_path / "t5")
    gated = checkpoint.config.replace(ffn_gate=True, relative_positions="none", score_scaling="product")
    for layout in ("bart", "torch_nn", "annotated_transformer"):
        place = tmp_path / (layout if layout == "bart" else f"{layout}.pt")
        with pytest.raises(convert.ConversionError, match="relative_positions='shared'") as error:
            convert.save(checkpoint, place, layout=layout)
        assert "score_scaling='none'" in str(error.value)
        with pytest.raises(convert.ConversionError, match="ffn_gate=True"):
            convert.save(convert.Checkpoint(gated, checkpoint.arrays), place, layout=layout)
        assert not place.exists()
    tiny = TransformerConfig.preset("tiny", activation="gelu", ffn_gate=True)
    with pytest.raises(convert.ConversionError, match="activation='gelu': a t5 model has 'gelu_tanh'"):
        convert.family("t5").settings(tiny)


@pytest.mark.filterwarnings("ignore")  # `transformers` warns about saving
@pytest.mark.parametrize("name", ["T5", "mT5", "UMT5"])
def test_half_precision_directories_have_some_arrays_in_float32(name, tmp_path):
    """`transformers` keeps `wo` in float32 when it loads a T5 in float16, and saves it so; no value changes."""
    model = conversion.random_model(name).half()
    for path, parameter in model.named_parameters():
        if path.endswith(".wo.weight"):
            parameter.data = parameter.data.float()
    model.save_pretrained(tmp_path / "mixed")
    checkpoint = convert.load(tmp_path / "mixed")
    assert checkpoint.config.param_dtype == "float32"
    assert checkpoint.layout is not None
    convert.save(checkpoint, tmp_path / "wide", layout=checkpoint.layout)
    narrow, wide = (load_file(tmp_path / folder / "model.safetensors") for folder in ("mixed", "wide"))
    assert {tensor.dtype for tensor in narrow.values()} == {torch.float16, torch.float32}
    assert all(torch.equal(narrow[key].float(), tensor) for key, tensor in wide.items())
    assert json.loads((tmp_path / "wide" / "config.json").read_text())["dtype"] == "float32"
