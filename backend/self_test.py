"""A test of the compiler itself: some versions of jaxlib silently compile sums on CPUs to wrong results."""

import os
from functools import cache
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

from .errors import RunError
from .xla_flags import FUSIONS, MISCOMPILING, NO_FUSED_SUMS

_ROWS = {"float32": 32_769, "float64": 16_385}  # the smallest numbers at which jaxlib 0.10.2 was seen to be wrong


@cache
def check_compiler() -> str | None:
    """Compare compiled sums after products, y = Σ (M x)², with their exact values. Once per process, on CPUs only.

    Returns one line if such sums are not fused because of `avoid_wrong_sums`. Not checked if the user's own XLA_FLAGS
    set that flag.

    Raises:
        RunError: this jaxlib compiles them to wrong results, as in jax-ml/jax#39103.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.default_backend() != "cpu" or FUSIONS in flags.replace(NO_FUSED_SUMS, ""):
        return None
    if wrong := [dtype for dtype in _ROWS if not _is_right(dtype)]:
        raise RunError(
            f"jaxlib {version('jaxlib')} computes wrong sums in {' and '.join(wrong)} on this CPU "
            f"(jax-ml/jax#39103): set XLA_FLAGS={NO_FUSED_SUMS} before JAX starts; `import twinax` does so for "
            f"jaxlib {' and '.join(MISCOMPILING)}, unless XLA_FLAGS names a file"
        )
    off = f"note: jaxlib {version('jaxlib')} gets some fused sums wrong on CPUs, so they are not fused"
    return f"{off}; there is nothing to do (XLA_FLAGS={FUSIONS}=+reduce fuses them)" if NO_FUSED_SUMS in flags else None


def _is_right(dtype: str) -> bool:
    """Whether sums over 0², 1², 2², … are right, all of which are exact to a rounding."""
    with jax.enable_x64(dtype == "float64"):
        numbers = np.arange(_ROWS[dtype], dtype=dtype)
        rows = np.stack([numbers, 0 * numbers, 0 * numbers], axis=1)
        sums = jax.jit(jax.vmap(lambda row, matrix: jnp.sum((matrix @ row) ** 2), in_axes=(0, None)))
        return bool(np.allclose(sums(rows, np.eye(3, dtype=dtype)), numbers**2, rtol=1e-6))
