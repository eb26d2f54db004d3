"""The file of an exported model: a zip archive of programs, weights, a description as JSON, and tokenizers.

Its entries are not compressed, and NumPy reads the weights:

    model.json                  ids, sizes, shapes of all arguments, versions, the model's config
    encoder, decoder_step       programs, as `jax.export` serializes them
    weights/NAME.npy            bfloat16, which NumPy lacks, as uint16
    tokenizer/..., generation_config.json    what the checkpoint has of them
"""

import json
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jax import export

from ..backend.errors import ConfigError, ConversionError
from ..configs.schema import TransformerConfig
from ..convert.arrays.lazy import specs_of
from ..convert.checkpoint import GENERATION, Checkpoint, checksum
from ..convert.io.atomic_io import new_file
from ..convert.io.progress import advance
from .export import ARGUMENTS, DECODER_STEP, ENCODER, PLATFORMS, RESULTS, Programs, check_exportable, export_programs

SUFFIX = ".stablehlo"
DOCUMENT = "model.json"
FORMAT_VERSION = 1


class ExportedFile(NamedTuple):
    """The contents of the file of an exported model."""

    document: dict[str, Any]
    programs: Programs
    checkpoint: Checkpoint  # config, weights and tokenizers


def write_exported(checkpoint: Checkpoint, path: Path) -> None:
    """Atomically write the programs of a model, its weights and tokenizers to a new file.

    Raises:
        ConversionError: the model cannot be decoded with a key-value cache, the path exists, or writing fails.
        MissingPackageError: flatbuffers, with which JAX serializes programs, is not installed.
    """
    config = checkpoint.config
    try:
        check_exportable(config)
    except ConfigError as error:
        raise ConversionError(f"{path}: the model cannot be exported: {error}") from None
    with new_file(path) as temporary:
        programs = export_programs(config, specs_of(checkpoint.arrays))
        document = _document(config, programs) | {"sha256_of_weights": checksum(checkpoint.arrays)}
        with zipfile.ZipFile(temporary, "w") as archive:
            archive.writestr(_entry(DOCUMENT), json.dumps(document, indent=1))
            for name, program in zip((ENCODER, DECODER_STEP), programs, strict=True):
                archive.writestr(_entry(name), bytes(program.serialize()))
            for name, content in checkpoint.files.items():
                archive.writestr(_entry(name), content)
            if GENERATION in checkpoint.documents:
                archive.writestr(_entry(GENERATION), json.dumps(checkpoint.documents[GENERATION], indent=2))
            for name in checkpoint.arrays:
                array = np.ascontiguousarray(checkpoint.arrays[name])
                with archive.open(_entry(_weight(name)), "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, _stored(array), allow_pickle=False)
                advance(array.nbytes)


def read_exported(path: Path) -> ExportedFile:
    """Read a file that `write_exported` wrote. zipfile compares every entry with its CRC-32."""
    with zipfile.ZipFile(path) as archive:
        document = json.loads(archive.read(DOCUMENT))
        programs = Programs(*(export.deserialize(bytearray(archive.read(name))) for name in (ENCODER, DECODER_STEP)))
        arrays = {}
        for name, spec in document["arrays"]["weights"].items():
            with archive.open(_weight(name)) as file:
                arrays[name] = np.lib.format.read_array(file, allow_pickle=False).view(spec["dtype"])
        files = {name: archive.read(name) for name in archive.namelist() if "tokenizer/" in name}
    return ExportedFile(
        document, programs, Checkpoint(TransformerConfig.from_dict(document["config"]), arrays, files=files)
    )


def _document(config: TransformerConfig, programs: Programs) -> dict[str, Any]:
    ids = ("pad_id", "bos_id", "eos_id", "decoder_start_id", "forced_bos_id")
    sizes = ("max_length", "src_vocab_size", "tgt_vocab_size")
    return {
        "format": "twinax export",
        "format_version": FORMAT_VERSION,
        "versions": {name: version(name) for name in ("twinax", "jax")},
        "platforms": list(PLATFORMS),
        "calling_convention_version": programs.encoder.calling_convention_version,
        **{name: getattr(config, name) for name in ids + sizes},
        "forced_eos_id": config.eos_id if config.forced_eos_id is None else config.forced_eos_id,
        "programs": {name: {"arguments": list(ARGUMENTS[name]), "results": list(RESULTS[name])} for name in ARGUMENTS},
        "arrays": programs.shapes(),
        "config": config.to_dict(),
    }


def _weight(name: str) -> str:
    return f"weights/{name}.npy"


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry with the fixed date of its default, so that one model gives one file."""
    return zipfile.ZipInfo(name)


def _stored(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
