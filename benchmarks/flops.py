"""FLOPs of an update, and of a device: their quotient is the model FLOPs utilization (MFU)."""

import math

from twinax import TransformerConfig
from twinax.convert.port import flax_specs

# bfloat16 FLOP/s of one device, dense. Sources: NVIDIA's data sheets of A100, H100 SXM and H200 (the latter two print
# twice the value, with sparsity); of TPUs, jax/_src/pallas/mosaic/tpu_info.py.
PEAKS = {
    **dict.fromkeys(("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), 312e12),
    **dict.fromkeys(("NVIDIA H100 80GB HBM3", "NVIDIA H200"), 989e12),
    **{"TPU v4": 275e12, "TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12, "TPU v6 lite": 920e12},
}


def model_flops(config: TransformerConfig, sentences: int, length: int) -> int:
    """FLOPs of an update of `sentences` pairs, both sides of one length; what `remat` computes again does not count.

    6 · W · B · T + 12 · (encoder layers + 2 · decoder layers) · B · T² · d, where W is the number of weights in matrix
    products, the output projection among them, and d the width of all heads together. Masked keys count.

    Source: Chowdhery et al. 2022, "PaLM", appendix B.
    """
    specs = flax_specs(config, trained_only=True)
    weights = sum(math.prod(shape) for name, (shape, _) in specs.items() if name.endswith(".kernel"))
    weights += config.tgt_vocab_size * config.d_model if config.tied_output else 0
    width = config.num_heads * config.query_key_width(config.num_heads)
    attentions = config.num_encoder_layers + 2 * config.num_decoder_layers
    return 6 * weights * sentences * length + 12 * attentions * sentences * length**2 * width


def utilization(flops_per_second: float, kind: str) -> str:
    """Percent of a device's peak, or "unknown peak"."""
    return f"{flops_per_second / PEAKS[kind]:.1%}" if kind in PEAKS else "unknown peak"
