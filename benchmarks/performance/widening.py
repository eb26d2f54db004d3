"""A model of base size with the function of a smaller one: units are repeated, and further layers add 0.

It makes the translations of a small trained model with the operations of a large one.
"""

from dataclasses import replace

import numpy as np

from twinax.convert.checkpoint import Checkpoint

WIDTH, HEADS, INNER, LAYERS = 512, 8, 2048, 6
_RESIDUALS = ("out_proj", "outer_proj")  # which a layer adds


def widened(checkpoint: Checkpoint) -> Checkpoint:
    """The same function at the paper's base size, without tokenizer changes; positions are learned, so that they fit.

    Of a pre-norm model with tied, scaled embeddings. Source: Chen et al. 2016, "Net2Net".
    """
    small = checkpoint.config
    config = small.replace(
        d_model=WIDTH, num_heads=HEADS, d_ff=INNER, num_encoder_layers=LAYERS, num_decoder_layers=LAYERS,
        positions="learned",
    )  # fmt: skip
    size, heads = small.d_model // small.num_heads, np.arange(small.d_model).reshape(small.num_heads, -1)
    units = {  # of the larger model -> its unit of the small one
        "residual": np.tile(np.arange(small.d_model), WIDTH // small.d_model),
        "heads": heads.repeat(HEADS // small.num_heads, axis=0).repeat(WIDTH // HEADS // size, axis=1).ravel(),
        "inner": np.tile(np.arange(small.d_ff), INNER // small.d_ff),
    }
    arrays = {}
    for name, array in checkpoint.arrays.items():
        *_, module, kind = name.split(".")
        inputs = {"out_proj": "heads", "outer_proj": "inner"}.get(module, "residual")
        outputs = (
            "heads" if module in ("q_proj", "k_proj", "v_proj") else "inner" if module == "inner_proj" else "residual"
        )
        wide = array if name == "output.bias" else array[..., units[outputs]]
        if kind == "kernel":
            wide = wide[units[inputs]] * (array.shape[0] / len(units[inputs]))  # a sum over repeated units
        if module == "q_proj":
            wide = wide * (size / (WIDTH // HEADS)) ** 0.5  # a head has more elements, and a smaller scale
        if kind == "embedding":
            wide = wide * (small.d_model / WIDTH) ** 0.5  # which the model multiplies by the root of its width
        if name.startswith("decoder.final_norm"):
            wide = wide * (small.d_model / WIDTH) ** 0.5  # the sum of a logit has more elements
        arrays[name] = wide.astype(array.dtype)
    for side, layers in (("encoder", small.num_encoder_layers), ("decoder", small.num_decoder_layers)):
        first = {name: array for name, array in arrays.items() if name.startswith(f"{side}.layers.0.")}
        for i in range(layers, LAYERS):
            for name, array in first.items():
                adds = name.split(".")[-2] in _RESIDUALS
                arrays[name.replace(".0.", f".{i}.", 1)] = np.zeros_like(array) if adds else array
    return replace(checkpoint, config=config, arrays=arrays, training=None)
