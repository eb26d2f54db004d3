"""What a checkpoint from somebody else must not do: lead out of its directory, or declare far more than it holds."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from ...backend.errors import ConversionError
from ...configs.schema import TransformerConfig

_FREE = 1 << 28  # numbers, or bytes of arrays, that any checkpoint may declare: computed tables are in no file
_RATIO = 16  # the same per byte of the files: zeros compress well, and tied arrays are stored once
_LAYER = 1000  # numbers that a layer counts for, because it costs time even if it is small
_SIZES = ["num_encoder_layers", "num_decoder_layers", "d_model", "d_ff", "decoder_d_ff", "max_length"]
_SIZES += ["num_heads", "decoder_num_heads", "head_dim", "v_head_dim", "src_vocab_size", "tgt_vocab_size"]
_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_size: ContextVar[int | None] = ContextVar("size", default=None)  # bytes of the files that are being read


def check_entries(directory: Path) -> None:
    """Check all entries of a directory, without opening one.

    Links may lead to another place in the directory or, in a snapshot of the Hugging Face Hub's cache, to its blobs.

    Raises:
        ConversionError: one is a pipe, a device, a socket, or a link that leads elsewhere.
    """
    root = directory.resolve()
    roots = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for entry in _entries(root):
        path = Path(entry.path)
        if entry.is_symlink():
            target = Path(os.path.realpath(path))
            if not any(target.is_relative_to(root) for root in roots):
                raise ConversionError(f"{path}: is a link to {target}, outside of the checkpoint; put a copy there")
        mode = entry.stat().st_mode if path.exists() else 0
        for is_kind, kind in _KINDS:
            if is_kind(mode):
                raise ConversionError(f"{path}: is {kind}; a checkpoint has files and directories only")


def _entries(directory: Path) -> Iterator[os.DirEntry[str]]:
    """All entries below a directory; links are not followed."""
    with os.scandir(directory) as entries:
        for entry in entries:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Within the context, what is declared is compared with the size of the files at a path."""
    sizes = [entry.stat().st_size for entry in _entries(path) if entry.is_file()] if path.is_dir() else []
    token = _size.set(sum(sizes) if path.is_dir() else path.stat().st_size)
    try:
        yield
    finally:
        _size.reset(token)


def check_declared_size(config: TransformerConfig) -> None:
    """Compare the model of a config with the files that are being read, before anything of its size is built.

    Raises:
        ConversionError: it is far larger.
    """
    if (size := _size.get()) is None:
        return
    decoder_heads, decoder_d_ff = config.decoder_num_heads or config.num_heads, config.decoder_d_ff or config.d_ff
    encoder = config.num_encoder_layers, config.num_heads, config.d_ff
    decoder = config.num_decoder_layers, decoder_heads, decoder_d_ff
    tables = 0 if config.positions == "none" else 2 * config.table_length
    vocabularies = config.src_vocab_size + config.tgt_vocab_size
    numbers = 0
    for layers, heads, d_ff in (encoder, decoder):
        attention = heads * (config.query_key_width(heads) + config.value_width(heads))
        numbers += layers * (_LAYER + config.d_model * (attention + d_ff))
    numbers += (vocabularies + tables) * config.d_model
    if numbers > _FREE + _RATIO * size:
        largest = max(_SIZES, key=lambda name: getattr(config, name) or 0)
        raise ConversionError(
            f"declares a model of {numbers:.1e} numbers, such as {largest}={getattr(config, largest):,}, in files of "
            f"{size:,} bytes"
        )


def check_declared_bytes(declared: int) -> None:
    """Compare the bytes of declared arrays with the files that are being read, before they are copied.

    Raises:
        ConversionError: they are far more.
    """
    size = _size.get()
    if size is not None and declared > _FREE + _RATIO * size:
        raise ConversionError(f"declares arrays of {declared:,} bytes in files of {size:,} bytes")
