"""The registry of checkpoint formats behind `load`, `save` and the commands.

| format | at the path |
|---|---|
| run | an orbax checkpoint, or a run directory that has one; `train` reads and writes it |
| Hugging Face | a directory with `config.json` and weights |
| Marian | an `.npz` with its options |
| fairseq | a `.pt` with its settings, or a directory of one with its dictionaries |
| CTranslate2 | a directory that twinax wrote for CTranslate2 |
| safetensors, PyTorch | one file, recognized by its content |
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from os import PathLike
from pathlib import Path

from ...backend.errors import ConversionError
from ...configs.printing import escape
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ...configs.verification import is_verifying, verifying
from ..checkpoint import CONFIG, Checkpoint
from ..identify.foreign_directories import unidentified_directory, unsupported_directory
from ..identify.foreign_files import unidentified_file, unsupported_file
from ..identify.unreadable import READABLE, UnreadableError, Unsupported, printable
from ..io.untrusted import check_entries, reading
from ..weight_files.reading import common_protection, protection_of, weight_files
from . import ctranslate2, fairseq, marian, run
from .file_layouts import file_layouts, is_file_layout, is_published
from .format import Format
from .hugging_face import LAYOUTS, read_directory, write_hugging_face
from .single_file import (
    SUFFIXES,
    TORCH_SUFFIXES,
    has_suffix,
    is_safetensors,
    is_torch,
    read_file,
    read_training,
    write_file,
)

Config = TransformerConfig | str | None


def _file(suffixes: tuple[str, ...], recognizes: Callable[[Path], bool], description: str) -> Format:
    return Format(
        recognizes=lambda path: path.is_file() and recognizes(path),
        describe=lambda path: description,
        protection=protection_of,
        read=read_file,
        read_config=lambda path: read_file(path).config,
        accepts=lambda path, layout: path.suffix.lower() in suffixes and is_file_layout(layout),
        # published systems have arrays that no optimizer of the twins has
        write=lambda checkpoint, path, layout: write_file(
            replace(checkpoint, training=None) if is_published(layout) else checkpoint, path, layout
        ),
    )


_SAFETENSORS = _file((".safetensors",), is_safetensors, "safetensors file")
_TORCH = _file(TORCH_SUFFIXES, is_torch, "PyTorch file")
_HUGGING_FACE = Format(
    recognizes=lambda path: (path / CONFIG).is_file(),
    describe=lambda path: "Hugging Face directory",
    protection=lambda path: common_protection(weight_files(path)),
    read=read_directory,
    read_config=lambda path: read_directory(path).config,
    accepts=lambda path, layout: layout in LAYOUTS and not has_suffix(path),
    write=write_hugging_face,
)
_FAIRSEQ = Format(
    recognizes=fairseq.recognizes,
    describe=lambda path: f"fairseq {'directory' if path.is_dir() else 'checkpoint'}",
    protection=lambda path: protection_of(fairseq.file_in(path) if path.is_dir() else path),
    read=fairseq.read,
    read_config=lambda path: fairseq.read(path).config,
    accepts=lambda path, layout: layout == "fairseq" and path.suffix.lower() in ("", *fairseq.SUFFIXES),
    write=fairseq.write,
)
_MARIAN = Format(
    recognizes=marian.recognizes,
    describe=lambda path: "Marian model",
    protection=protection_of,
    read=marian.read,
    read_config=lambda path: marian.read(path).config,
    accepts=lambda path, layout: layout == "marian_npz" and path.suffix.lower() == marian.SUFFIX,
    write=marian.write,
)
_CTRANSLATE2 = Format(
    recognizes=ctranslate2.recognizes,
    describe=ctranslate2.describe,
    protection=ctranslate2.protection,
    read=ctranslate2.read,
    read_config=ctranslate2.read_config,
    accepts=lambda path, layout: layout == ctranslate2.LAYOUT and not has_suffix(path),
    write=ctranslate2.write,
)
_CHILDREN = ("*", "snapshots/*")  # where a directory around a checkpoint has it
_MOST_CHILDREN = 1000
# Layouts of other toolkits and the names that they are written to.
TOOLKITS = {
    "fairseq": "that ends in .pt, .pth, or no suffix",
    "marian_npz": "that ends in .npz",
    "ctranslate2": "without a suffix",
}


def formats() -> tuple[Format, ...]:
    """All formats; if several recognize a path, the first one applies."""
    return (_MARIAN, _FAIRSEQ, _CTRANSLATE2, _SAFETENSORS, _TORCH, run.FORMAT, _HUGGING_FACE)


def layouts() -> tuple[str, ...]:
    """The names of all layouts."""
    return (*file_layouts(), *TOOLKITS, *LAYOUTS)


def is_layout(layout: str) -> bool:
    """Whether `save` knows this layout. Raises: ConversionError if its prefixes are invalid."""
    return layout in (*LAYOUTS, *TOOLKITS) or is_file_layout(layout)


def is_single_file(path: Path) -> bool:
    """Whether a path holds a file of tensors, with or without a config. Raises: ConversionError, as `load`."""
    return _format_of(path) in (_SAFETENSORS, _TORCH)


def load(
    path: str | PathLike[str],
    config: Config = None,
    *,
    adapter: str | PathLike[str] | None = None,
    run: RunConfig | None = None,
    memory_map: bool = False,
    weights_only: bool = False,
    dtype: str | None = None,
) -> Checkpoint:
    """The checkpoint at a path, in any of the formats.

    `config` is required for a file without one: bare tensors with the names of `torch_reference` or
    `torch.nn.Transformer`. It is optional for a published system's tensors; `leftover:repaired,num_heads=4` selects the
    repaired variant with 4 heads. The checkpoint's `assumed` lists settings that neither the tensors nor `config`
    determine. `adapter` is the directory of a LoRA adapter, which is merged into the weights of a Hugging Face
    directory. `run` is the run that resumes from an optimizer's state which another program saved: of a checkpoint of
    `transformers`' Trainer, or of a .pt with a user's own model and AdamW.

    `memory_map`: arrays may be read-only views of the files, which must not change, or computed on access, so that a
    model larger than memory can be converted.

    `weights_only`: the training state is omitted; in a run it is neither read nor verified.

    `dtype`: that of weights in a Hugging Face directory whose config.json states another one than they have; None: the
    stated one, as in `transformers`.

    Raises:
        CheckpointError, ConversionError: there is no checkpoint, it is damaged, it has a family or setting that twinax
            does not support, or it has no config; the adapter cannot be merged into it, or the optimizer is not the
            run's.
    """
    path = Path(path)
    form = _format_of(path)
    if weights_only and form.read_weights is not None:
        form = replace(form, read=form.read_weights)
    with reading(path):
        checkpoint = _read(form, path, config, adapter, run, dtype)
    if weights_only:
        checkpoint = replace(checkpoint, training=None)
    return checkpoint if memory_map else checkpoint.copy()


def _read(
    form: Format,
    path: Path,
    config: Config,
    adapter: str | PathLike[str] | None,
    run: RunConfig | None,
    dtype: str | None,
) -> Checkpoint:
    if adapter is not None:
        if config is not None:
            raise ConversionError(f"{path}: an adapter is merged into a Hugging Face directory; omit `config`")
        if run is not None:
            raise ConversionError(f"{path}: an adapter changes the weights, which the optimizer's state does not fit")
        return _read_adapted(form, path, Path(adapter), dtype)
    if run is not None:
        return _read_training(form, path, config, run, dtype)
    if config is None:
        return read_directory(path, dtype=dtype) if form is _HUGGING_FACE else form.read(path)
    if form not in (_SAFETENSORS, _TORCH):
        raise ConversionError(f"{path}: has its own config; omit `config`")
    return read_file(path, config)


def _read_adapted(form: Format, path: Path, adapter: Path, dtype: str | None = None) -> Checkpoint:
    """The checkpoint in a Hugging Face directory with a LoRA adapter merged. Raises: ConversionError, as `load`."""
    if form is not _HUGGING_FACE:
        raise ConversionError(
            f"{path}: is a {form.describe(path)}; the adapter {adapter} is merged into the Hugging Face directory of "
            "its base model: pass that"
        )
    return read_directory(path, adapter, dtype=dtype)


def _read_training(form: Format, path: Path, config: Config, run: RunConfig, dtype: str | None) -> Checkpoint:
    """The checkpoint at a path with the state that a run resumes from. Raises: ConversionError, as `load`."""
    if form is _TORCH:
        return read_training(path, config, run)
    if form is not _HUGGING_FACE or config is not None:
        kinds = "a checkpoint of Trainer, or a .pt with model and optimizer"
        raise ConversionError(f"{path}: is a {form.describe(path)}; a run is for {kinds}")
    return read_directory(path, run=run, dtype=dtype)


def load_config(path: str | PathLike[str], *, adapter: str | PathLike[str] | None = None) -> TransformerConfig:
    """The config of the checkpoint at a path. Raises: CheckpointError, ConversionError, as `load`."""
    path = Path(path)
    form = _format_of(path)
    with reading(path), verifying(False):
        return form.read_config(path) if adapter is None else _read_adapted(form, path, Path(adapter)).config


def describe(path: str | PathLike[str]) -> str:
    """A description of the checkpoint at a path that `load` reads."""
    return _format_of(Path(path)).describe(Path(path))


def describe_verification(path: str | PathLike[str]) -> str:
    """One line on what `load` compares the weights at a path with."""
    if not is_verifying():
        return "not verified: --no-verify"
    protection = _format_of(Path(path)).protection(Path(path))
    return f"{protection} of all arrays match" if protection else "not verified: the file has no checksums"


def save(
    checkpoint: Checkpoint,
    path: str | PathLike[str],
    *,
    layout: str = "twinax",
    max_shard_size: int | None = None,
    quantization: str | None = None,
) -> None:
    """Atomically write a checkpoint that `load` reads.

    A name that ends in .pt, .pth or .safetensors selects a file. A family's layout selects a directory that
    `from_pretrained` loads; layout fairseq, a .pt or a directory with its dictionaries; layout marian_npz, an .npz;
    layout ctranslate2, a directory. Any other name becomes an orbax checkpoint, as in a run. Layouts twinax and
    torch_nn store the state to resume a training from; a family's layout does so for `transformers`' Trainer.

    `max_shard_size`: the most bytes per file of a family's directory; a larger array has a file of its own.
    `quantization`: of layout ctranslate2, int8, int8_float32 or float16.

    Raises:
        ConversionError: the layout has no such model or format, the path exists and is not an empty directory, or
            writing fails.
    """
    path = Path(path)
    if not is_layout(layout):
        raise ConversionError(f"layout={layout!r}: there is no such layout; choose one of {', '.join(layouts())}")
    selected = next((form for form in formats() if form.accepts(path, layout)), None)
    if max_shard_size is not None and selected is not _HUGGING_FACE:
        raise ConversionError(f"max_shard_size={max_shard_size}: only a family's directory has shards; omit it")
    if quantization is not None and selected is not _CTRANSLATE2:
        raise ConversionError(
            f"quantization={quantization!r}: needs layout ctranslate2; others store weights unchanged"
        )
    if selected is _CTRANSLATE2:
        ctranslate2.write(checkpoint, path, layout, quantization)
    elif selected is not None and max_shard_size is not None:
        write_hugging_face(checkpoint, path, layout, max_shard_size)
    elif selected is not None:
        selected.write(checkpoint, path, layout)
    elif layout in LAYOUTS:
        raise ConversionError(f"{path}: {layout} is the layout of a directory; give a name without {path.suffix}")
    elif layout in TOOLKITS:
        raise ConversionError(f"{path}: layout {layout} needs a name {TOOLKITS[layout]}")
    elif path.suffix.lower() == marian.SUFFIX:
        raise ConversionError(f"{path}: an .npz file needs --layout marian_npz, the layout of marian-dev")
    else:
        target = f"a file of layout {layout}" if layout != "twinax" else "a directory's name has no suffix, and a file"
        raise ConversionError(f"{path}: {target} needs a name that ends in {', '.join(SUFFIXES)}")


def _format_of(path: Path) -> Format:
    """The format of a path. Raises: ConversionError if `load` cannot read the path."""
    if path.is_dir():
        check_entries(path)
    if path.is_file() and not _is_toolkit(path) and (unsupported := unsupported_file(path)):
        raise UnreadableError(path, unsupported)
    selected = next((form for form in formats() if form.recognizes(path)), None)
    if selected is not None:
        return selected
    if path.is_dir():
        raise UnreadableError(
            path, unsupported_directory(path) or _unsupported_child(path) or unidentified_directory(path)
        )
    if not path.exists():
        raise ConversionError(f"{path}: there is no such file or directory")
    special = Unsupported("a device, a pipe or a socket", "it is not a file", READABLE)
    raise UnreadableError(path, unidentified_file(path) if path.is_file() else special)


def _is_toolkit(path: Path) -> bool:
    """Whether a file is of a toolkit, whose reader describes its obstacles."""
    return fairseq.recognizes(path) or marian.recognizes(path)


def _unsupported_child(path: Path) -> Unsupported | None:
    """The obstacle of a directory around a checkpoint, as in the cache of the Hugging Face Hub."""
    directories = (run.FORMAT, _HUGGING_FACE)
    candidates = islice((child for depth in _CHILDREN for child in path.glob(depth) if child.is_dir()), _MOST_CHILDREN)
    children = [child for child in candidates if any(form.recognizes(child) for form in directories)]
    if not children:
        return None
    child = max(sorted(children), key=lambda path: path.stat().st_mtime)  # the newest, of several of a training
    kind = "neither a run, nor a checkpoint, nor a Hugging Face directory"
    return Unsupported(kind, f"the checkpoint is in {printable(child.name)}", f"pass {escape(str(child))}")
