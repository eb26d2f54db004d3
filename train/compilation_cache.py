"""JAX's persistent compilation cache: the next process with the same shapes reads its programs instead of compiling."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

# JAX's own threshold, one second, leaves out every program of a small model's decoding: together they take seconds.
_THRESHOLD = "jax_persistent_cache_min_compile_time_secs"


def use_compilation_cache() -> Path | None:
    """Enable JAX's cache in $XDG_CACHE_HOME/twinax/xla or ~/.cache/twinax/xla, and return its directory.

    None where that cannot be written. JAX's own environment variables take precedence: `JAX_COMPILATION_CACHE_DIR`
    moves the cache, `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` leaves out programs that compile faster (default here:
    0), `JAX_ENABLE_COMPILATION_CACHE=0` disables it.
    """
    if not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    if _THRESHOLD.upper() not in os.environ:
        jax.config.update(_THRESHOLD, 0.0)
    if (own := getattr(jax.config, "jax_compilation_cache_dir", None)) is not None:
        return Path(own)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = home / "twinax" / "xla"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home, or one that cannot be written
        return None
    jax.config.update("jax_compilation_cache_dir", str(place))
    compilation_cache.reset_cache()  # JAX decides at the first compilation whether there is a cache
    return place
