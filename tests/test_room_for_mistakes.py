"""Published mistakes fit into the shared formulas as one small function each, in both frameworks, without a branch.

The functions here are not part of the product; they show that a later value of a registry is enough.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from twinax import TransformerConfig, flax_transformer, torch_reference
from twinax.configs import schema
from twinax.parity_tests.functions import flax_function, random_arrays, random_batch, torch_function
from twinax.parity_tests.harness import compare
from twinax.parity_tests.ladder import CRITERIA, rung_of

CONFIG = TransformerConfig(
    src_vocab_size=11,
    tgt_vocab_size=13,
    d_model=6,
    num_heads=2,
    d_ff=7,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=8,
    pad_id=3,
    param_dtype="float64",
    compute_dtype="float64",
)


def norm_over_length_and_width(x, eps):
    centred = x - x.mean((-2, -1), keepdims=True)
    return centred / ((centred**2).mean((-2, -1), keepdims=True) + eps) ** 0.5


def keys_and_query_rows(keep, length):
    return keep[:, None, None, :] & keep[:, None, :, None]


def causal_with_padding_and_query_rows(library):
    def mask(tokens, given, pad_id, training):
        keep = tokens != pad_id
        causal = library.tril(library.ones((tokens.shape[1],) * 2, dtype=bool))
        return causal & keep[:, None, None, :] & keep[:, None, :, None]

    return mask


def causal_only_in_training(library):
    def mask(tokens, given, pad_id, training):
        ones = library.ones((tokens.shape[0], 1, tokens.shape[1], tokens.shape[1]), dtype=bool)
        return library.tril(ones) if training else ones

    return mask


def whole_table(library):
    """The whole table is added, whatever the input's length: right where that is the table's."""
    return lambda tokens, pad_id, table_length: library.arange(table_length)[None]


def both(function):
    return function, function


# name -> (module, registry, (Flax value, PyTorch value))
NEW_VALUES = {
    "norm": ("layers", "NORMS", both(norm_over_length_and_width)),
    "cross_attention_residual": ("layers", "RESIDUALS", both(lambda x, y: x)),
    "encoder_mask": ("attention", "ENCODER_MASKS", both(keys_and_query_rows)),
    "cross_mask": ("attention", "CROSS_MASKS", both(keys_and_query_rows)),  # the source's shape: needs T == S
    "decoder_mask": (
        "attention",
        "DECODER_MASKS",
        (causal_with_padding_and_query_rows(jnp), causal_with_padding_and_query_rows(torch)),
    ),
    "decoder_mask, training only": (
        "attention",
        "DECODER_MASKS",
        (causal_only_in_training(jnp), causal_only_in_training(torch)),
    ),
    "position_counting, whole table": ("layers", "POSITION_COUNTINGS", (whole_table(jnp), whole_table(torch))),
    "output_activation": (
        "model",
        "OUTPUT_ACTIVATIONS",
        (lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), lambda x: x.softmax(-1)),
    ),
}


@pytest.mark.parametrize("name", NEW_VALUES)
def test_a_new_value_is_one_function(name, monkeypatch):
    module, registry, values = NEW_VALUES[name]
    field = name.split(",")[0]
    monkeypatch.setattr(schema, "check_field_types", lambda config: None)  # it knows the product's own values only
    config = CONFIG.replace(**{field: name})
    for package, value in zip((flax_transformer, torch_reference), values, strict=True):
        monkeypatch.setitem(getattr(getattr(package, module), registry), name, value)
    length = config.max_length if field == "position_counting" else 5
    batch = random_batch(config, np.random.default_rng(0), 3, length, length)
    arrays = random_arrays(config, 0)
    functions = torch_function(config), flax_function(config)
    report = compare(*functions, arrays, batch, criteria=CRITERIA, rung_of=rung_of)
    report.check()
    unchanged = compare(torch_function(CONFIG), functions[0], arrays, batch, criteria=CRITERIA, rung_of=rung_of).ok
    assert unchanged == ("whole table" in name)


def test_what_they_break(monkeypatch):
    """The discarded cross-attention output makes the logits blind to the source; a norm over (T, d) sees the future."""
    batch = random_batch(CONFIG, np.random.default_rng(0), 3, 5, 5)
    other = batch._replace(src_tokens=np.where(batch.src_tokens > 0, 12 - batch.src_tokens, 0) % 11)
    arrays = random_arrays(CONFIG, 0)
    monkeypatch.setattr(schema, "check_field_types", lambda config: None)
    monkeypatch.setitem(torch_reference.layers.RESIDUALS, "new", lambda x, y: x)
    run = torch_function(CONFIG.replace(cross_attention_residual="new"))
    assert torch.equal(run(arrays, batch)["logits"], run(arrays, other)["logits"])

    later = batch.tgt_tokens.copy()
    later[:, -1] = (later[:, -1] + 1) % 13
    monkeypatch.setitem(torch_reference.layers.NORMS, "new", norm_over_length_and_width)
    run = torch_function(CONFIG.replace(norm="new"))
    logits = [run(arrays, b)["logits"] for b in (batch, batch._replace(tgt_tokens=later))]
    assert (logits[0][:, 0] - logits[1][:, 0]).abs().max() > 1e-3
