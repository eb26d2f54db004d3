"""Reading and writing of Hugging Face directories: config.json, weights and tokenizer files."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ...backend.errors import ConversionError
from ...configs.decoding import BEAM_SIZE
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ..checkpoint import CONFIG, FOLDERS, GENERATION, TOKENIZER_FILES, Checkpoint
from ..identify.families import unsupported_settings
from ..identify.foreign_directories import unsupported_hugging_face, unsupported_project
from ..identify.unreadable import UnreadableError
from ..io.atomic_io import write_directory
from ..layouts.canonical import up_to_rounding
from ..layouts.foreign import not_written
from ..layouts.hugging_face import Family
from ..layouts.hugging_face_settings import DECODING
from ..optimizers import trainer
from ..weight_files.reading import has_flax_weights, read_json, read_weights, read_weights_file
from ..weight_files.wrappers import unwrap
from .generation import decoding_document, end_ids
from .lora import merge_adapter, read_adapter

_ONE_FILE = 1 << 62  # bytes; no model is larger
# Each is a module of `convert.layouts` that defines FAMILY.
LAYOUTS = ("marian", "bart", "mbart", "m2m100", "pegasus", "blenderbot", "t5", "mt5", "umt5")


def read_directory(
    path: Path,
    adapter: Path | None = None,
    run: RunConfig | None = None,
    file: Path | None = None,
    dtype: str | None = None,
) -> Checkpoint:
    """The checkpoint in a local Hugging Face directory: config.json with safetensors, PyTorch or Flax files.

    Weights of another dtype than config.json states are converted to that one, as `transformers` does, or to `dtype`.

    `adapter`: the directory of a LoRA adapter, which is merged into the weights. `run`: the run that resumes from the
    optimizer's state in a checkpoint of `transformers`' Trainer. `file`: another file of weights than the directory's.

    Raises:
        ConversionError: twinax does not support the family or a setting, or the weights are missing, damaged, or not
            those of the config; or the adapter is not of this model, or the optimizer's state not of this run.
    """
    change = None if adapter is None else read_adapter(adapter)
    documents = {CONFIG: read_json(path / CONFIG)}
    if (path / GENERATION).is_file():
        documents[GENERATION] = read_json(path / GENERATION)
    layout = _layout_of(documents[CONFIG], path, file is None)
    settings, place = _settings(documents), str(file or path)
    try:
        if file is None and has_flax_weights(
            path
        ):  # Flax classes ignore these settings, which may be those of other weights
            settings |= {"dtype": None, "torch_dtype": None}
        weights, skipped = read_weights(path) if file is None else read_weights_file(file)
        family(layout).check_class(settings, weights)
        weights, stripped = unwrap(weights, family(layout).table_names)
        settings, weights = family(layout).in_dtype(settings, weights, dtype)
        if change is not None:
            settings, weights = merge_adapter(change, family(layout), settings, weights)
            documents[CONFIG] |= {n: settings[n] for n in ("tie_word_embeddings",) if n in settings}
            place = f"{path}, merged with {adapter}"
        config, arrays, unused = family(layout).read(settings, weights)
    except ConversionError as error:
        raise ConversionError(str(error) if str(path) in str(error) else f"{place}: {error}") from None
    files = _tokenizer_files(path)
    if not files and documents[CONFIG].get("tokenizer_class") == "ByT5Tokenizer":  # it needs no file but its name
        files = {f"{FOLDERS[0]}/tokenizer_config.json": b'{"tokenizer_class": "ByT5Tokenizer"}\n'}
    checkpoint = Checkpoint(config, arrays, layout, documents, unused, files, skipped=skipped, stripped=stripped)
    if file is not None:
        return checkpoint
    if run is not None:
        return trainer.with_training(checkpoint, path, family(layout), run)
    return replace(checkpoint, skipped=(*skipped, trainer.FILES[0])) if trainer.has_state(path) else checkpoint


def holds_weights_of(path: Path, file: Path) -> bool:
    """Whether a file has the names of the model in a directory. Raises: ConversionError, as `read_directory`."""
    settings = read_json(path / CONFIG)
    names, known = read_weights_file(file)[0], family(_layout_of(settings, path, False)).table_names
    return any(f".{name}".endswith(tuple(f".{table}" for table in known)) for name in names)


def write_hugging_face(checkpoint: Checkpoint, directory: Path, layout: str, max_shard_size: int = _ONE_FILE) -> None:
    """Write a directory that `from_pretrained` of the layout's class loads; unchanged settings are written back.

    `max_shard_size`: the most bytes per file of weights; a larger array has a file of its own. A checkpoint with an
    optimizer gets the files from which `transformers`' Trainer resumes, unless Trainer does not make such updates.

    Raises:
        ConversionError: the layout has no such model, or the directory exists. Nothing is written then.
    """
    target = family(layout)
    documents = {name: dict(document) for name, document in checkpoint.documents.items()}
    if checkpoint.layout != layout or not _same(target, documents, checkpoint.config):
        base_documents = documents if checkpoint.layout == layout else decoding_document(documents)
        documents = _rewrite(target, base_documents, checkpoint.config)
        if GENERATION in documents:
            documents[GENERATION] |= end_ids(checkpoint.documents, checkpoint.config)
    documents[CONFIG]["architectures"] = [target.architecture]
    arrays = target.write(documents[CONFIG], checkpoint.config, checkpoint.arrays, checkpoint.unused)
    # One tokenizer goes where `transformers` looks for it. It does not support two, which stay in their folders.
    files = {name.removeprefix(f"{FOLDERS[0]}/"): content for name, content in checkpoint.files.items()}
    files |= trainer.trainer_files(replace(checkpoint, documents=documents), target)
    write_directory(directory, arrays, documents, files, max_shard_size)


def family(layout: str) -> Family:
    """The family of a layout's name. Raises: ConversionError if there is no such layout."""
    if layout not in LAYOUTS:
        raise ConversionError(f"layout={layout!r}: there is no such layout; choose one of {', '.join(LAYOUTS)}")
    return import_module(f"..layouts.families.{layout}", __package__).FAMILY


def fitting_families(config: TransformerConfig) -> dict[str, str]:
    """By layout: why the family has no such model, the first field that differs; empty if it has."""
    return {layout: _mismatch(family(layout), config) for layout in LAYOUTS}


def describe_fitting(config: TransformerConfig) -> str:
    """The layouts of the families that have such a model, in words."""
    fitting = [layout for layout, mismatch in fitting_families(config).items() if not mismatch]
    return f"fits the families {', '.join(fitting)}" if len(fitting) > 1 else f"fits {' '.join(fitting) or 'no family'}"


def _mismatch(target: Family, config: TransformerConfig) -> str:
    try:
        target.settings(config)
    except ConversionError as error:
        return next(iter(str(error).splitlines()[1:]), str(error)).strip()
    return ""


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    """The tokenizer files of a directory, by their path in other formats; two tokenizers are in folders of twinax."""
    files = {f"{FOLDERS[0]}/{name}": path / name for name in TOKENIZER_FILES}
    files |= {f"{folder}/{name}": path / folder / name for folder in FOLDERS[1:] for name in TOKENIZER_FILES}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


def _layout_of(settings: Mapping[str, Any], path: Path, has_weights: bool = True) -> str:
    """The layout of a directory. Raises: UnreadableError if twinax does not support its family or weights.

    `has_weights`: whether the weights are in the directory.
    """
    by_type = {family(layout).model_type: layout for layout in LAYOUTS}
    unsupported = unsupported_project(path) if settings.get("model_type") is None else None
    unsupported = unsupported or unsupported_settings(settings, tuple(by_type))
    unsupported = unsupported or (unsupported_hugging_face(path) if has_weights else None)
    if unsupported is not None:
        raise UnreadableError(path, unsupported)
    return by_type[settings["model_type"]]


def _settings(documents: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of a model; generation_config.json, if present, overrides those of decoding."""
    settings = dict(documents[CONFIG])
    if GENERATION in documents:
        generation = documents[GENERATION]
        settings |= {name: generation[name] for name in DECODING if generation.get(name) is not None}
        settings |= {n: None for n in DECODING if n.startswith("forced_") and generation.get(n) is None}
    return settings


def _same(target: Family, documents: Mapping[str, Mapping[str, Any]], config: TransformerConfig) -> bool:
    """Whether the settings in the documents are still those of the config."""
    settings = _settings(documents)
    dtypes = {settings.pop("torch_dtype", None), settings.pop("dtype", None)}
    if not dtypes <= {None, config.param_dtype}:
        return False
    original = target.config(target.resolve(settings, config.tied_output), config.param_dtype)
    return original == up_to_rounding(config).replace(**{name: getattr(original, name) for name in not_written(config)})


def _rewrite(target: Family, documents: dict[str, Any], config: TransformerConfig) -> dict[str, Any]:
    try:
        settings = target.settings(config)
    except ConversionError as error:
        raise ConversionError(f"{error}\nthe model {describe_fitting(config)}") from None
    if not documents:  # twinax ends the longest translation with EOS, and so must `generate`
        settings |= {"forced_eos_token_id": config.eos_id if config.forced_eos_id is None else config.forced_eos_id}
    identity = {"model_type": target.model_type, "is_encoder_decoder": True}
    ids = {name: value for name, value in settings.items() if name.endswith("_token_id") and value is not None}
    repeated = (*target.tables.repeated, "torch_dtype")  # they would contradict the new settings
    rest = {name: v for name, v in documents.get(CONFIG, {}).items() if name not in repeated}
    output = {CONFIG: {**rest, **settings, **identity}}
    if GENERATION in documents or not documents:
        # `max_length` counts the start token too
        defaults = {"num_beams": BEAM_SIZE, "max_length": config.max_length + 1, "bad_words_ids": [[config.pad_id]]}
        first = {} if documents else defaults  # those of twinax; `generate` would be greedy and stop after 20 tokens
        rest = {name: value for name, value in documents.get(GENERATION, {}).items() if not name.endswith("_token_id")}
        output[GENERATION] = first | rest | ids
    return output
