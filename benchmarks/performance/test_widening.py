"""The widened model computes the function of the small one."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.performance import widening
from twinax.configs import TransformerConfig
from twinax.convert.checkpoint import Checkpoint
from twinax.parity.functions import random_arrays


@pytest.mark.parametrize("sizes", [(32, 4, 48, 3), (16, 2, 96, 2)])
def test_a_widened_model_has_the_same_logits(sizes, monkeypatch):
    config = TransformerConfig.preset(
        "tiny", d_model=16, num_heads=2, d_ff=24, head_dim=None, v_head_dim=None, decoder_d_ff=None,
        decoder_num_heads=None, num_encoder_layers=1, num_decoder_layers=2, norm_placement="pre",
        final_norm=True, shared_embeddings=True, tied_output=True, embedding_scale="sqrt_d_model",
        positions="sinusoidal_half", output_bias="learned", tgt_vocab_size=101, src_vocab_size=101,
    )  # fmt: skip
    small = Checkpoint(config, random_arrays(config, 0))
    for name, size in zip(("WIDTH", "HEADS", "INNER", "LAYERS"), sizes, strict=True):
        monkeypatch.setattr(widening, name, size)
    wide = widening.widened(small)
    assert (wide.config.d_model, wide.config.num_heads, wide.config.d_ff, wide.config.num_encoder_layers) == sizes
    src, tgt = jnp.array([[5, 6, 7, 8, 0], [8, 9, 0, 0, 0]]), jnp.array([[1, 11, 12, 4], [1, 13, 14, 0]])
    expected, logits = (np.asarray(model.to_flax()(src, tgt)) for model in (small, wide))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
