"""What a file or directory is that twinax cannot read, what the obstacle is, and what to do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...backend.errors import ConversionError
from ...configs.printing import escape

NOT_READABLE = "twinax cannot read it"
COMPARE = f"{NOT_READABLE}; `twinax compare` checks a JAX port of such a model (docs/compare.md)"
READABLE = (
    "pass a run, a Hugging Face directory (config.json and weights), a .safetensors or .pt file, a fairseq checkpoint "
    "or a Marian .npz"
)
_LENGTH = 60  # characters of a value


@dataclass(frozen=True)
class Unsupported:
    """The reason why something cannot be read. Each field is one line."""

    what: str  # a noun phrase with its article
    why: str  # the setting or feature that twinax does not support
    hint: str


class UnreadableError(ConversionError):
    """A file or directory that twinax identifies but cannot read."""

    def __init__(self, path: Path, unsupported: Unsupported):
        super().__init__(f"{escape(str(path))}: is {unsupported.what}: {unsupported.why}; {unsupported.hint}")
        self.unsupported = unsupported


def printable(value: Any) -> str:
    """A value from a file as short text on one line."""
    text = escape(value if isinstance(value, str) else repr(value))
    return text if len(text) <= _LENGTH else f"{text[:_LENGTH]}…"
