"""JAX's persistent compilation cache: a later process with equal shapes loads its programs instead of compiling."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from .cache_directory import cache_directory

# JAX's default of one second would skip all programs of a small model's decoding, which together take seconds.
_THRESHOLD = "jax_persistent_cache_min_compile_time_secs"


def use_compilation_cache() -> Path | None:
    """Enable JAX's cache in $XDG_CACHE_HOME/twinax/xla or ~/.cache/twinax/xla, and return its directory.

    Returns None if that directory cannot be written. JAX's own environment variables take precedence:
    `JAX_COMPILATION_CACHE_DIR` moves the cache, `JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS` skips programs that
    compile faster (default in twinax: 0), `JAX_ENABLE_COMPILATION_CACHE=0` disables it.
    """
    if not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    if _THRESHOLD.upper() not in os.environ:
        jax.config.update(_THRESHOLD, 0.0)
    if (configured := getattr(jax.config, "jax_compilation_cache_dir", None)) is not None:
        return Path(configured)
    directory = cache_directory("xla")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home, or one that cannot be written
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    compilation_cache.reset_cache()  # JAX decides at the first compilation whether there is a cache
    return directory
