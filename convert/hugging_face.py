"""Hugging Face directories: config.json, weights and tokenizer files of a family of `convert.layouts`."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ..configs.errors import ConversionError
from ..configs.schema import TransformerConfig
from .atomic_io import write_directory
from .checkpoint import CONFIG, FOLDERS, GENERATION, TOKENIZER_FILES, Checkpoint
from .files import read_json, read_weights
from .layouts.hugging_face import NOT_WRITTEN, Family, canonical
from .layouts.hugging_face_settings import ALIASES, DECODING
from .obstacles import obstacle

LAYOUTS = (
    "marian",
    "bart",
    "mbart",
    "m2m100",
    "pegasus",
    "blenderbot",
)  # a module of `convert.layouts` each, with its FAMILY


def read_directory(path: Path) -> Checkpoint:
    """The checkpoint in a local Hugging Face directory: config.json with safetensors or PyTorch files.

    Raises:
        ConversionError: a family or a setting that twinax does not know, or weights that are missing, damaged, or not
            those of the config.
    """
    documents = {CONFIG: read_json(path / CONFIG)}
    if (path / GENERATION).is_file():
        documents[GENERATION] = read_json(path / GENERATION)
    layout = _layout_of(documents[CONFIG], path)
    try:
        config, arrays, unused = family(layout).read(_settings(documents), read_weights(path))
    except ConversionError as error:
        raise ConversionError(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    return Checkpoint(config, arrays, layout, documents, unused, _tokenizer_files(path))


def write_hugging_face(checkpoint: Checkpoint, directory: Path, layout: str) -> None:
    """Writes a directory that `from_pretrained` of that layout's class loads; what was read is written back.

    Raises:
        ConversionError: the layout has no such model, or the directory exists; nothing is written then.
    """
    found = family(layout)
    documents = {name: dict(document) for name, document in checkpoint.documents.items()}
    if checkpoint.layout != layout or not _same(found, documents, checkpoint.config):
        documents = _rewritten(found, documents if checkpoint.layout == layout else {}, checkpoint.config)
    documents[CONFIG]["architectures"] = [found.architecture]
    arrays = found.write(documents[CONFIG], checkpoint.config, dict(checkpoint.arrays), dict(checkpoint.unused))
    # One tokenizer stands where `transformers` looks for it; it knows no two, which keep their folders.
    files = {name.removeprefix(f"{FOLDERS[0]}/"): content for name, content in checkpoint.files.items()}
    write_directory(directory, arrays, documents, files)


def family(layout: str) -> Family:
    """The family of a layout's name. Raises: ConversionError where there is none."""
    if layout not in LAYOUTS:
        raise ConversionError(f"layout={layout!r}: there is no such layout; known are {', '.join(LAYOUTS)}")
    return import_module(f".layouts.{layout}", __package__).FAMILY


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    """Those of the directory, by the path that they have in every other form; two stand in folders of ours."""
    files = {f"{FOLDERS[0]}/{name}": path / name for name in TOKENIZER_FILES}
    files |= {f"{folder}/{name}": path / folder / name for folder in FOLDERS[1:] for name in TOKENIZER_FILES}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


def _layout_of(settings: Mapping[str, Any], path: Path) -> str:
    by_type = {family(layout).model_type: layout for layout in LAYOUTS}
    model_type = settings.get("model_type")
    if model_type not in list(by_type):
        known = ", ".join(by_type)
        raise ConversionError(f"{path / CONFIG}: model_type={model_type!r} {obstacle(settings)}; known are {known}")
    return by_type[model_type]


def _settings(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of a model; of decoding, what generation_config.json says counts where there is one."""
    settings = dict(documents[CONFIG])
    if GENERATION in documents:
        said = documents[GENERATION]
        settings |= {name: said[name] for name in DECODING if name in said}
        settings |= {name: None for name in DECODING if name.startswith("forced_") and name not in said}
    return settings


def _same(found: Family, documents: Mapping[str, Mapping[str, Any]], config: TransformerConfig) -> bool:
    """Whether the settings that were read are still those of the config."""
    settings = _settings(documents)
    said = settings.pop("torch_dtype", None), settings.pop("dtype", None)
    if not {*said} <= {None, config.param_dtype}:
        return False
    read = found.config(settings, config.param_dtype)
    return read == canonical(config).replace(**{name: getattr(read, name) for name in NOT_WRITTEN})


def _rewritten(found: Family, documents: dict[str, Any], config: TransformerConfig) -> dict[str, Any]:
    settings = found.settings(config)
    identity = {"model_type": found.model_type, "is_encoder_decoder": True}
    ids = {name: value for name, value in settings.items() if name.endswith("_token_id") and value is not None}
    # other names of what is written anew would contradict it
    kept = {name: v for name, v in documents.get(CONFIG, {}).items() if name not in (*ALIASES, "torch_dtype")}
    written = {CONFIG: {**kept, **settings, **identity}}
    if GENERATION in documents or not documents:
        kept = {name: value for name, value in documents.get(GENERATION, {}).items() if not name.endswith("_token_id")}
        written[GENERATION] = kept | ids
    return written
