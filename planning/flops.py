"""FLOPs of the matrix products of an update, from the config alone.

Letters: B sentences, S source length, T target length, W weights of a product, N heads, H and U their widths.
"""

import math

from ..configs.schema import TransformerConfig
from ..convert.port import flax_specs

# kernels that read the source: the encoder's, and those of keys and values in cross-attention
_SOURCE = ("encoder.", "cross_attention.k_proj.", "cross_attention.v_proj.")


def forward_flops(config: TransformerConfig, sentences: int, src_length: int, tgt_length: int) -> dict[str, float]:
    """FLOPs of a forward pass, by part: `layers`, `attention` (scores and their products with values) and `output`.

    A product with W weights costs 2 · W per token. Attention of Q queries to K keys costs 2 · B · Q · K · N · (H + U).
    Padding and masked keys count, because they are computed.

    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    tokens = {True: sentences * src_length, False: sentences * tgt_length}
    layers, output = 0.0, 0.0
    for name, (shape, _) in flax_specs(config, trained_only=True).items():
        if name.startswith("output.") and name.endswith(".kernel"):
            output += 2 * math.prod(shape) * tokens[False]
        elif name.endswith(".kernel"):
            layers += 2 * math.prod(shape) * tokens[any(part in f".{name}" for part in _SOURCE)]
    if config.tied_output:
        output += 2 * config.tgt_vocab_size * config.d_model * tokens[False]
    return {"layers": layers, "attention": _attention(config, sentences, src_length, tgt_length), "output": output}


def _attention(config: TransformerConfig, sentences: int, src_length: int, tgt_length: int) -> float:
    def widths(heads: int) -> int:
        return heads * (config.query_key_width(heads) + config.value_width(heads))

    encoder = config.num_encoder_layers * src_length**2 * widths(config.num_heads)
    decoder = config.num_decoder_layers * tgt_length * (tgt_length + src_length)
    return 2.0 * sentences * (encoder + decoder * widths(config.decoder_num_heads or config.num_heads))


def model_flops(config: TransformerConfig, sentences: int, src_length: int, tgt_length: int) -> float:
    """FLOPs of an update: three times the forward pass. What `remat` computes again does not count."""
    return 3 * sum(forward_flops(config, sentences, src_length, tgt_length).values())


def executed_flops(
    config: TransformerConfig, sentences: int, src_length: int, tgt_length: int, remat: str = "none"
) -> float:
    """FLOPs of an update, with what `remat` computes again: `layers` and `attention`, or the latter."""
    parts = forward_flops(config, sentences, src_length, tgt_length)
    again = {"none": (), "layers": ("layers", "attention"), "dots": ("attention",)}[remat]
    return 3 * sum(parts.values()) + sum(parts[part] for part in again)
