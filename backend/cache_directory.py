"""The directory of what can be computed again: compiled programs, encoded corpora, trained tokenizers."""

import os
from pathlib import Path


def cache_directory(name: str) -> Path:
    """$XDG_CACHE_HOME/twinax/NAME, or ~/.cache/twinax/NAME; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "twinax" / name
