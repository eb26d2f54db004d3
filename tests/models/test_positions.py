"""Fixed position tables against independent implementations and the paper's formula."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from twinax import TransformerConfig, flax_transformer, torch_reference
from twinax.formulas.position_tables import POSITION_TABLES


@pytest.mark.parametrize("d_model", [5, 8, 64])
def test_half_split_is_marian_s(d_model):
    marian = MarianSinusoidalPositionalEmbedding(100, d_model).create_weight()
    assert np.array_equal(POSITION_TABLES["sinusoidal_half"](100, d_model).astype(np.float32), marian.numpy())


@pytest.mark.parametrize("d_model", [5, 8, 64])
def test_half_split_t2t_is_m2m100_s(d_model):
    m2m100 = M2M100SinusoidalPositionalEmbedding.get_embedding(100, d_model)
    # the reference takes sin and cos of float32 arguments up to 99, half an ulp of which is 4e-6
    assert np.allclose(POSITION_TABLES["sinusoidal_half_t2t"](100, d_model), m2m100.double(), atol=1e-5, rtol=0)
    assert POSITION_TABLES["sinusoidal_half_t2t"](100, d_model).shape == m2m100.shape


@pytest.mark.parametrize("d_model", [1, 5, 8])
def test_interleaved_is_the_paper_s(d_model):
    table = POSITION_TABLES["sinusoidal_interleaved"](50, d_model)
    for position in (0, 1, 49):
        for i in range(d_model):
            angle = position / 10_000 ** (2 * (i // 2) / d_model)
            assert table[position, i] == pytest.approx(math.cos(angle) if i % 2 else math.sin(angle), abs=1e-14)


def test_half_split_is_the_interleaved_table_reordered():
    interleaved, half = (POSITION_TABLES[f"sinusoidal_{kind}"](20, 8) for kind in ("interleaved", "half"))
    assert np.allclose(np.concatenate([interleaved[:, 0::2], interleaved[:, 1::2]], axis=1), half, atol=1e-15)


def test_tables_are_float64():
    assert {table(3, 8).dtype for table in POSITION_TABLES.values()} == {np.dtype(np.float64)}
    assert torch.from_numpy(POSITION_TABLES["sinusoidal_half"](3, 8)).dtype == torch.float64


@pytest.mark.parametrize("pad_id", [0, 1, 3])
def test_positions_without_padding_are_m2m100_s(pad_id):
    """M2M100 counts from pad_id + 1 and gives padding the row of the pad id, which is zeros."""
    tokens = torch.from_numpy(np.random.default_rng(pad_id).integers(0, 5, (7, 9)))
    expected = M2M100SinusoidalPositionalEmbedding.create_position_ids_from_input_ids(tokens, pad_id) - (pad_id + 1)
    actual = torch_reference.layers.count_non_padding(tokens, pad_id)
    assert torch.equal(actual, expected)
    assert np.array_equal(flax_transformer.layers.count_non_padding(jnp.asarray(tokens.numpy()), pad_id), expected)


def test_learned_positions_with_an_offset_are_bart_s():
    """BART's first position is row 2 of its table."""
    settings = {"positions": "learned", "position_offset": 2, "position_table_length": 11}
    config = TransformerConfig.preset("tiny", src_vocab_size=7, tgt_vocab_size=7, max_length=9, **settings)
    model = torch_reference.layers.Positions(config)
    bart = BartLearnedPositionalEmbedding(9, config.d_model)
    bart.weight.data = model.table.data
    expected = bart(torch.zeros(1, 9, dtype=torch.long)).detach()
    twin = flax_transformer.layers.Positions(config, rngs=nnx.Rngs(0))
    twin.table[...] = jnp.asarray(model.table.detach().numpy())
    assert torch.equal(model(torch.arange(9)[None]).expand_as(expected), expected)
    assert np.array_equal(np.broadcast_to(twin(jnp.arange(9)[None]), expected.shape), expected)
