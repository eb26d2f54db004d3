"""Compiled programs, kept on the disk: the next run with the same shapes does not compile them again."""

import os
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache


def use_compilation_cache() -> Path | None:
    """Switches JAX's cache on, in $XDG_CACHE_HOME/twinax/xla or ~/.cache/twinax/xla, and says where it is.

    None where there cannot be one. Where JAX has one already (`JAX_COMPILATION_CACHE_DIR`), or is told to have none
    (`JAX_ENABLE_COMPILATION_CACHE=0`), that stays.
    """
    if not getattr(jax.config, "jax_enable_compilation_cache", True):
        return None
    if (own := getattr(jax.config, "jax_compilation_cache_dir", None)) is not None:
        return Path(own)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = home / "twinax" / "xla"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home, or one that cannot be written
        return None
    jax.config.update("jax_compilation_cache_dir", str(place))
    compilation_cache.reset_cache()  # where something was compiled before, JAX has settled that there is none
    return place
