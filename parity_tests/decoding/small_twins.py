"""Small twins in float64 with random weights, for tests of decoding."""

import jax.numpy as jnp

from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.parity.functions import random_arrays

SMALL = TransformerConfig.preset(
    "tiny",
    d_model=16,
    d_ff=24,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=8,
    src_vocab_size=13,
    tgt_vocab_size=11,
    param_dtype="float64",
    compute_dtype="float64",
)


def small_twins(
    config: TransformerConfig, seed: int, end: float = 0.0
) -> tuple[flax_transformer.Transformer, torch_reference.Transformer]:
    """The Flax and the PyTorch model; `end` is added to the logit of EOS."""
    arrays = random_arrays(config, seed)
    arrays["output.proj.kernel"] *= 2
    arrays["output.bias"][config.eos_id] += end
    model = flax_transformer.Transformer.from_arrays(config, {name: jnp.asarray(a) for name, a in arrays.items()})
    return model, convert.to_torch(model)
