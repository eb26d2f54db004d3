"""Checkpoints in files and directories of others: which form a path has, and what reads and writes it."""

from dataclasses import replace
from os import PathLike
from pathlib import Path

from ..configs.schema import TransformerConfig
from .checkpoint import Checkpoint
from .file_layouts import file_layouts, is_file_layout
from .hugging_face import LAYOUTS, read_directory, write_hugging_face
from .rules import ConversionError
from .single_file import SUFFIXES, has_suffix, read_file, write_file


def load(path: str | PathLike[str], config: TransformerConfig | str | None = None) -> Checkpoint:
    """The checkpoint in a Hugging Face directory or in a file, PyTorch's or safetensors, whatever its name.

    `config` is that of a file which has none: bare tensors by the names of `torch_reference` or `torch.nn.Transformer`.
    Those of a published system need none; `leftover:repaired,num_heads=4` is the repaired one with that many heads.
    What neither they nor `config` determine is listed in the checkpoint's `assumed`.

    Raises:
        ConversionError: there is none, it is damaged, of a family or setting that twinax does not know, or has no
            config.
    """
    place = Path(path)
    if place.is_file():
        return read_file(place, config)
    if not place.is_dir():
        raise ConversionError(f"{place}: there is no such file or directory")
    return read_directory(place)


def save(checkpoint: Checkpoint, path: str | PathLike[str], *, layout: str = "twinax") -> None:
    """Writes what `load` reads: a directory for a family's layout, else a file; whole or not at all.

    What a training goes on from is held by files of layout twinax alone.

    Raises:
        ConversionError: the layout has no such model or no such form, something is there already, or the disk refuses.
    """
    place = Path(path)
    if is_file_layout(layout) and has_suffix(place):
        # the state of `torch.optim` counts parameters, and those of a `torch.nn.Transformer` are other ones
        write_file(checkpoint if layout == "twinax" else replace(checkpoint, training=None), place, layout)
    elif is_file_layout(layout):
        raise ConversionError(f"{place}: a file of layout {layout} needs a name that ends in {', '.join(SUFFIXES)}")
    elif layout in LAYOUTS and has_suffix(place):
        raise ConversionError(f"{place}: {layout} is the layout of a directory; give a name without {place.suffix}")
    elif layout in LAYOUTS:
        write_hugging_face(checkpoint, place, layout)
    else:
        known = ", ".join((*file_layouts(), *LAYOUTS))
        raise ConversionError(f"layout={layout!r}: there is no such layout; known are {known}")
