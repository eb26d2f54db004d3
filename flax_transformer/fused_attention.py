"""Attention by `jax.nn.dot_product_attention`: cuDNN's flash attention where it applies, XLA's elsewhere.

cuDNN's applies only without deterministic operations: with them, XLA up to jaxlib 0.11.2 compiles the backward pass of
one layer, but not of a second one of the same shape (openxla/xla#46500).

Letters: B batch, T query length, S key length, N heads, H width of a head.
"""

import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend
from jaxtyping import Array, Bool, Float

# Factor of q · k for each `score_scaling`; "query" is "product" up to rounding.
FUSED_SCALES: dict[str, Callable[[int], float]] = {
    "product": lambda width: width**-0.5,
    "query": lambda width: width**-0.5,
    "none": lambda width: 1.0,
}
_CUDNN_DTYPES = ("bfloat16", "float16")
_CUDNN_WIDEST = 128  # on all GPUs that cuDNN's flash attention supports
_DETERMINISM = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


def fused_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S N H"],
    v: Float[Array, "B S N H"],
    mask: Bool[Array, "B 1 T S"],
    bias: Float[Array, "#B #N T S"] | None,
    score_scaling: str,
) -> Float[Array, "B T N H"]:
    """softmax(scale · q · k + bias) v over the attended keys, 0 in a fully masked row; the softmax is in float32.

    Source: Dao 2023, "FlashAttention-2"; `jax.nn.dot_product_attention`.
    """
    heads = jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=bias if bias is None else bias.astype(q.dtype),  # exact: biases are rounded to the compute dtype before
        mask=mask,
        scale=FUSED_SCALES[score_scaling](q.shape[-1]),
        implementation="cudnn" if uses_cudnn(q, k) else "xla",
    )
    # The library attends to every key of a fully masked row.
    return jnp.where(mask.any(-1)[:, 0, :, None, None], heads, 0)


def uses_cudnn(q: Float[Array, "B T N H"], k: Float[Array, "B S N H"]) -> bool:
    """Whether cuDNN's flash attention supports this process's devices and flags, and these dtypes and shapes.

    Source: `check_is_flash_attention` of JAX: with a mask, both lengths must be even.
    """
    fits = q.dtype.name in _CUDNN_DTYPES and q.shape[-1] <= _CUDNN_WIDEST and q.shape[-1] % 8 == 0
    fits = fits and q.shape[1] % 2 == k.shape[1] % 2 == 0 and not _must_be_deterministic()
    return fits and "cuda" in get_backend().platform_version


def _must_be_deterministic() -> bool:
    """Whether XLA_FLAGS ask a GPU for deterministic operations, or name a file. Of equal flags, the last one counts."""
    words = os.environ.get("XLA_FLAGS", "").split()
    if words and not words[0].startswith("-"):
        return True  # the file may ask for them
    flags = (word.partition("=") for word in words)
    values = {name: value.lower() in ("", "true", "1") for name, _, value in flags}
    return any(values.get(name, False) for name in _DETERMINISM)
