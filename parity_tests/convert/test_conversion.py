"""The families of `transformers` as an independent oracle: values, gradients, attention maps and round trips."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch

from parity_tests.support import conversion
from twinax import convert
from twinax.convert.formats.hugging_face import LAYOUTS, family
from twinax.parity.functions import flax_function, random_batch, torch_function
from twinax.parity.harness import compare_arrays
from twinax.parity.ladder import comparable, rung_of
from twinax.parity.oracles.transformers import load_oracle, oracle_of

# `transformers` warns about saving and about changes in later versions
pytestmark = pytest.mark.filterwarnings("ignore")


# Of each layout, the variants that differ most from its defaults are enough here; test_t5.py has T5's in PyTorch.
SLOW = ("Marian", "Marian, untied", "BART", "M2M100", "T5", "mT5", "mT5, tied", "UMT5, tied")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in conversion.VARIANTS])
def test_variant(name, tmp_path):
    row = conversion.measure(name, tmp_path)
    for report in row.reports:
        report.check()
    assert row.changes == ()
    assert len(row.reports) == 2
    assert row.ok


def test_every_layout_has_a_variant():
    assert {layout for layout, _ in conversion.VARIANTS.values()} == set(LAYOUTS)


ENCODER, DECODER = "encoder.layers.*", "decoder.layers.*"
# mistake -> (variant, field of the family, the wrong value or the entries to change)
MISTAKES = {
    "q and k swapped": (
        "BART",
        "modules",
        {
            f"{ENCODER}.self_attention.q_proj": f"model.{ENCODER}.self_attn.k_proj",
            f"{ENCODER}.self_attention.k_proj": f"model.{ENCODER}.self_attn.q_proj",
        },
    ),
    "norms of attention and feed-forward swapped": (
        "Pegasus",
        "modules",
        {
            f"{DECODER}.self_attention_residual.norm": f"model.{DECODER}.final_layer_norm",
            f"{DECODER}.feed_forward_residual.norm": f"model.{DECODER}.self_attn_layer_norm",
        },
    ),
    "positions from row 1": ("BART", "fixed", {"position_offset": 1, "position_table_length": 15}),
    "positions that count padding": ("M2M100", "fixed", {"position_counting": "all"}),
    "table computed in float64": ("M2M100", "position_table", None),
    "pre-norm": ("Marian", "fixed", {"norm_placement": "pre"}),
    "eps of 1e-6": ("mBART", "fixed", {"norm_eps": 1e-6}),
    "padding trained": ("Marian", "fixed", {"embedding_padding": "trained"}),
    "gate and inner projection swapped": (
        "T5 v1.1, Flan-T5",
        "gated_modules",
        {
            f"{stack}.layers.*.feed_forward.{projection}": f"{stack}.block.*.layer.{number}.DenseReluDense.{name}"
            for stack, number in (("encoder", 1), ("decoder", 2))
            for projection, name in (("gate_proj", "wi_1"), ("inner_proj", "wi_0"))
        },
    ),
    "relative positions of encoder and decoder swapped": (
        "T5",
        "modules",
        {
            f"{a}.relative_positions": f"{b}.block.0.layer.0.SelfAttention.relative_attention_bias"
            for a, b in (("encoder", "decoder"), ("decoder", "encoder"))
        },
    ),
    "scores divided by sqrt(H)": ("T5", "fixed", {"score_scaling": "product"}),
    "logits of mT5 scaled": ("mT5", "fixed", {"logit_scale": "rsqrt_d_model"}),
    "buckets up to another distance": ("mT5", "fixed", {"relative_position_max_distance": 4}),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_family_is_seen(mistake, tmp_path, monkeypatch):
    """In PyTorch only, which needs no compilation."""
    name, part, replacement = MISTAKES[mistake]
    layout = conversion.VARIANTS[name][0]
    conversion.random_model(name).save_pretrained(tmp_path)
    layout_family = family(layout)
    oracle = load_oracle(tmp_path, convert.load(tmp_path))
    if part == "modules":
        replacement = {
            **replacement,
            **{path: layout_family.modules[path] for path in layout_family.modules.keys() - replacement.keys()},
        }
    elif part == "fixed":
        changes, replacement = replacement, lambda settings: layout_family.fixed(settings) | changes
    monkeypatch.setattr(
        f"twinax.convert.layouts.families.{layout}.FAMILY", replace(layout_family, **{part: replacement})
    )
    checkpoint = convert.load(tmp_path)
    config = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64")
    batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
    batch.src_tokens[0, 3] = batch.tgt_tokens[0, 2] = config.pad_id
    monkeypatch.undo()
    expected = oracle(batch)
    outputs = torch_function(config)({n: a.astype(np.float64) for n, a in checkpoint.arrays.items()}, batch)
    outputs = comparable(outputs, expected, batch, config.pad_id)
    assert not compare_arrays(expected, outputs, criteria=conversion.CRITERIA, rung_of=rung_of).ok


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["M2M100", "Marian, untied", "BART", "T5", "UMT5"])
def test_narrow_checkpoints_are_the_same_function(name, dtype, tmp_path):
    """Position tables missing from a file are rounded to its dtype, as in `transformers`."""
    conversion.random_model(name).to(dtype).save_pretrained(tmp_path)
    checkpoint = convert.load(tmp_path)
    config = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64")
    batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
    expected = load_oracle(tmp_path, checkpoint)(batch)
    arrays = {n: a.astype(np.float64) for n, a in checkpoint.arrays.items()}
    outputs = comparable(torch_function(config)(arrays, batch), expected, batch, config.pad_id)
    compare_arrays(expected, outputs, criteria=conversion.CRITERIA, rung_of=rung_of).check()


def test_a_zero_start_is_marian_s_with_a_zero_pad_row(tmp_path):
    """Marian was trained to start from zeros; in `transformers` it starts from the pad id, whose row is zero."""
    model = conversion.random_model("Marian, two vocabularies").double()
    model.save_pretrained(tmp_path)
    checkpoint = convert.load(tmp_path)  # its pad row is random
    with torch.no_grad():
        model.model.decoder.embed_tokens.weight[checkpoint.config.pad_id] = 0
        model.lm_head.weight = torch.nn.Parameter(
            torch.from_numpy(checkpoint.arrays["tgt_embedding.embedding"]).clone()
        )
    config = checkpoint.config.replace(decoder_start="zero_embedding")
    batch = random_batch(config, np.random.default_rng(1), 5, 7, 6)
    tgt = np.where(batch.tgt_tokens == config.pad_id, 3, batch.tgt_tokens)
    tgt[:, 0] = config.decoder_start_id
    batch = batch._replace(tgt_tokens=tgt)
    expected = {"logits": oracle_of(model, checkpoint)(batch)["logits"]}
    for function in (torch_function, flax_function):
        outputs = {"logits": function(config, gradients=False)(checkpoint.arrays, batch)["logits"]}
        compare_arrays(expected, outputs, criteria=conversion.CRITERIA, rung_of=rung_of).check()


def test_random_models_hide_nothing():
    """No learned array or output bias is constant, unlike the gains and biases of a new model."""
    for name in conversion.VARIANTS:
        for path, array in conversion.random_model(name).state_dict().items():
            assert array.flatten().std() > 0 or "embed_positions" in path, path


def test_row_shows_what_changed():
    row = conversion.Row("X", 1e-15, 1e-15, 1e-16, 1e-16, (), ())
    assert row.ok
    changed_row = dataclasses.replace(row, changes=("through flax: ties",))
    assert not changed_row.ok
