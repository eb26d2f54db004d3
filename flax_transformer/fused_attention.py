"""Attention by `jax.nn.dot_product_attention`: cuDNN's flash attention where it applies, XLA's elsewhere.

Letters: B batch, T query length, S key length, N heads, H width of a head.
"""

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
    """Whether cuDNN's flash attention supports this process's devices and these dtypes and shapes.

    Source: `check_is_flash_attention` of JAX: with a mask, both lengths must be even.
    """
    fits = q.dtype.name in _CUDNN_DTYPES and q.shape[-1] <= _CUDNN_WIDEST and q.shape[-1] % 8 == 0
    return fits and q.shape[1] % 2 == k.shape[1] % 2 == 0 and "cuda" in get_backend().platform_version
