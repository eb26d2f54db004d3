"""The formats of checkpoints, one registry behind `load`, `save` and the commands.

| format | what stands at the path |
|---|---|
| run | an orbax checkpoint, or a run directory that has some; `train` reads and writes it |
| Hugging Face | a directory with `config.json` and weights |
| safetensors, PyTorch | one file, recognised by its content |
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from ..configs import registry
from ..configs.errors import ConversionError
from ..configs.schema import TransformerConfig
from .checkpoint import CONFIG, Checkpoint
from .file_layouts import file_layouts, is_file_layout
from .hugging_face import LAYOUTS, read_directory, write_hugging_face
from .single_file import SUFFIXES, has_suffix, is_safetensors, read_file, write_file

Config = TransformerConfig | str | None


@dataclass(frozen=True)
class Format:
    """One way in which a checkpoint is stored."""

    recognises: Callable[[Path], bool]  # whether it is what stands at a path
    describe: Callable[[Path], str]  # that, in words
    read: Callable[[Path], Checkpoint]
    read_config: Callable[[Path], TransformerConfig]
    accepts: Callable[[Path, str], bool]  # whether (a new path, a layout) ask for it
    write: Callable[[Checkpoint, Path, str], None]


def _file(suffixes: tuple[str, ...], recognises: Callable[[Path], bool], description: str) -> Format:
    return Format(
        recognises=lambda path: path.is_file() and recognises(path),
        describe=lambda path: description,
        read=read_file,
        read_config=lambda path: read_file(path).config,
        accepts=lambda path, layout: path.suffix.lower() in suffixes and is_file_layout(layout),
        # the state of `torch.optim` counts parameters, and those of a `torch.nn.Transformer` are other ones
        write=lambda checkpoint, path, layout: write_file(
            checkpoint if layout == "twinax" else replace(checkpoint, training=None), path, layout
        ),
    )


_SAFETENSORS = _file((".safetensors",), is_safetensors, "safetensors file")
_TORCH = _file((".pt", ".pth"), lambda path: not is_safetensors(path), "PyTorch file")
_HUGGING_FACE = Format(
    recognises=lambda path: (path / CONFIG).is_file(),
    describe=lambda path: "Hugging Face directory",
    read=read_directory,
    read_config=lambda path: read_directory(path).config,
    accepts=lambda path, layout: layout in LAYOUTS and not has_suffix(path),
    write=write_hugging_face,
)


def formats() -> tuple[Format, ...]:
    """Every format; of two that a path could be, the first is meant."""
    return (_SAFETENSORS, _TORCH, *registry.CHECKPOINT_FORMATS.values(), _HUGGING_FACE)


def load(path: str | PathLike[str], config: Config = None) -> Checkpoint:
    """The checkpoint at a path, in whichever of the formats.

    `config` is that of a file which has none: bare tensors by the names of `torch_reference` or `torch.nn.Transformer`.
    Those of a published system need none; `leftover:repaired,num_heads=4` is the repaired one with that many heads.
    What neither they nor `config` determine is listed in the checkpoint's `assumed`.

    Raises:
        CheckpointError, ConversionError: there is none, it is damaged, of a family or setting that twinax does not
            know, or has no config.
    """
    place = Path(path)
    if config is None:
        return _format_of(place).read(place)
    if place.is_dir():
        raise ConversionError(f"{place}: has a config of its own; omit `config`")
    _format_of(place)
    return read_file(place, config)


def load_config(path: str | PathLike[str]) -> TransformerConfig:
    """The config of the checkpoint at a path. Raises: CheckpointError, ConversionError, as `load`."""
    return _format_of(Path(path)).read_config(Path(path))


def describe(path: str | PathLike[str]) -> str:
    """What stands at a path that `load` reads, in words."""
    return _format_of(Path(path)).describe(Path(path))


def save(checkpoint: Checkpoint, path: str | PathLike[str], *, layout: str = "twinax") -> None:
    """Writes what `load` reads, whole or not at all.

    A name that ends in .pt, .pth or .safetensors is a file's; a family's layout makes a directory that
    `from_pretrained` loads; any other name becomes an orbax checkpoint, as a run has them. What a training goes on from
    is held by layout twinax alone.

    Raises:
        ConversionError: the layout has no such model or no such form, something is there already, or the disk refuses.
    """
    place = Path(path)
    if layout not in LAYOUTS and not is_file_layout(layout):
        raise ConversionError(
            f"layout={layout!r}: there is no such layout; known are {', '.join((*file_layouts(), *LAYOUTS))}"
        )
    chosen = next((form for form in formats() if form.accepts(place, layout)), None)
    if chosen is not None:
        chosen.write(checkpoint, place, layout)
    elif layout in LAYOUTS:
        raise ConversionError(f"{place}: {layout} is the layout of a directory; give a name without {place.suffix}")
    else:
        what = f"a file of layout {layout}" if layout != "twinax" else "a file, and a directory's name has no ending,"
        raise ConversionError(f"{place}: {what} needs a name that ends in {', '.join(SUFFIXES)}")


def _format_of(path: Path) -> Format:
    """Raises: ConversionError where nothing that `load` reads stands at the path."""
    form = next((form for form in formats() if form.recognises(path)), None)
    if form is not None:
        return form
    if not path.is_dir():
        raise ConversionError(f"{path}: there is no such file or directory")
    runs = registry.CHECKPOINT_FORMATS.values()
    within = next((p for p in sorted(path.iterdir()) if any(form.recognises(p) for form in runs)), None)
    hint = f"there is a run in {within}" if within else f"it has no {CONFIG}"
    raise ConversionError(f"{path}: is neither a run, nor a checkpoint, nor a Hugging Face directory; {hint}")
