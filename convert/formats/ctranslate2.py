"""CTranslate2 directories: `model.bin`, `config.json`, vocabularies, and the files that twinax reads back.

CTranslate2 itself is needed neither to write nor to read them.
Source: `ctranslate2.specs.model_spec`.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...backend.errors import ConversionError
from ...configs.json_text import parse_json
from ...configs.registry import later_module
from ...configs.schema import TransformerConfig
from ..checkpoint import CONFIG, FOLDERS, TOKENIZER_FILES, Checkpoint
from ..identify.unreadable import printable
from ..io.atomic_io import new_directory, write_files
from ..io.checksums import checksum_of_json, checksums_of_files, verify_files, verify_json
from ..io.untrusted import check_declared_size
from ..layouts import ctranslate2
from ..weight_files.reading import read_json
from .ctranslate2_binary import read_model, write_model

LAYOUT = "ctranslate2"
MODEL, TWINAX = "model.bin", "twinax.json"  # TWINAX: config, layout and documents, which CTranslate2 does not read
CHECKSUMS, OWN_CHECKSUM = "checksums", "checksum"  # keys in TWINAX: of the other files, and of its other entries
QUANTIZATIONS = ("int8", "int8_float32", "float16")
_SLACK = 1e-4  # float32 rounds a weight times its scale, up to 127, before it is rounded to an int8
_SMALLEST = np.float32(127) / np.finfo(np.float32).max  # smallest row maximum whose scale is a finite float32
_SCALE = "_scale"  # suffix of the variable with the scales of another


class Vocabulary(NamedTuple):
    """The tokens of one side by id, one for each row of the model, and the token of unknown words."""

    tokens: Sequence[str]
    unk: str


def recognizes(path: Path) -> bool:
    """Whether a path is a CTranslate2 directory that twinax wrote."""
    return (path / MODEL).is_file() and (path / TWINAX).is_file()


def read(path: Path) -> Checkpoint:
    """The checkpoint in a directory that `write` wrote; quantized weights are dequantized.

    Raises:
        ConversionError: a file is missing or damaged, or the variables do not fit the config.
    """
    values = _read_values(path)
    verify_files(path, values.get(CHECKSUMS))
    config = _config(path, values)
    variables = {name: _dequantize(array) for name, array in _read_variables(path).items()}
    try:
        arrays = ctranslate2.read(config, _as_dtype(variables, config.param_dtype))
    except ConversionError as error:
        raise ConversionError(f"{path / MODEL}: {error}") from None
    names = (f"{folder}/{name}" for folder in FOLDERS for name in TOKENIZER_FILES)
    files = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}
    layout, documents = values.get("layout"), values.get("documents")
    if not isinstance(layout, str | None) or not isinstance(documents, dict):
        raise ConversionError(f"{path / TWINAX}: layout={layout!r} and documents={documents!r}: cannot be read"[:300])
    return Checkpoint(config, arrays, layout, documents, files=files)


def describe(path: Path) -> str:
    """What a directory is, with its quantization if it has one."""
    with suppress(ConversionError):  # reading it reports the damage
        if quantization := read_json(path / TWINAX).get("quantization"):
            return f"CTranslate2 directory, {printable(quantization)}"
    return "CTranslate2 directory"


def protection(path: Path) -> str | None:
    """What the files are compared with when they are read; None: nothing."""
    return "checksums" if CHECKSUMS in read_json(path / TWINAX) else None


def read_config(path: Path) -> TransformerConfig:
    """The config of a directory that `write` wrote. Raises: ConversionError, as `read`."""
    return _config(path, _read_values(path))


def write(checkpoint: Checkpoint, path: Path, layout: str, quantization: str | None = None) -> None:
    """Atomically write a new directory that `ctranslate2.Translator` loads, with its tokenizer files.

    `quantization`: one of QUANTIZATIONS; None stores the weights as they are.

    Raises:
        ConversionError: CTranslate2 has no such model, there is no tokenizer, the path exists and is not an empty
            directory, or writing fails.
    """
    ctranslate2.check(checkpoint.config)
    vocabularies = later_module("vocabularies").of_checkpoint(checkpoint)
    if vocabularies is None:
        raise ConversionError(
            "layout ctranslate2 needs a tokenizer, because CTranslate2 translates tokens instead of ids; pass "
            "--tokenizer to `twinax convert`"
        )
    source, target = Vocabulary(*vocabularies.source), Vocabulary(*vocabularies.target)
    config = checkpoint.config
    if vocabularies.starts_with_language:  # then CTranslate2 starts with the first token of `target_prefix`
        config = config.replace(decoder_start_id=None)
    with new_directory(path) as folder:
        write_into(folder, config, checkpoint.arrays, source, target, quantization)
        write_files(folder, checkpoint.files)
        values = {"layout": checkpoint.layout, "documents": checkpoint.documents, "config": checkpoint.config.to_dict()}
        values |= {"quantization": quantization, CHECKSUMS: checksums_of_files(folder)}
        values = json.loads(_to_json(values))  # as they are read
        _write_json(folder / TWINAX, values | {OWN_CHECKSUM: checksum_of_json(values)})


def write_into(
    folder: Path,
    config: TransformerConfig,
    arrays: Mapping[str, np.ndarray],
    source: Vocabulary,
    target: Vocabulary,
    quantization: str | None = None,
) -> None:
    """Write what `ctranslate2.Translator` reads into an existing folder.

    Raises:
        ConversionError: CTranslate2 has no such model, or a vocabulary is not that of the model.
    """
    for side, vocabulary in (("src", source), ("tgt", target)):
        size = getattr(config, f"{side}_vocab_size")
        if len({*vocabulary.tokens}) != size or len(vocabulary.tokens) != size:
            count = len({*vocabulary.tokens})
            raise ConversionError(f"{side}_vocab_size={size}: the vocabulary has {count} different tokens")
    variables, aliases = ctranslate2.write(config, arrays)
    write_model(folder / MODEL, _quantize(variables, quantization), aliases)
    tokens = [list(source.tokens), list(target.tokens)]
    sides = ("source", "target") if tokens[0] != tokens[1] else ("shared",)
    for side, names in zip(sides, tokens, strict=False):
        _write_json(folder / f"{side}_vocabulary.json", names)
    _write_json(folder / CONFIG, _settings(config, source, target))


def read_tokens(path: Path, side: str) -> list[str]:
    """The tokens by id of a directory's side, source or target."""
    shared = path / "shared_vocabulary.json"
    return parse_json((shared if shared.is_file() else path / f"{side}_vocabulary.json").read_text(encoding="utf-8"))


def largest_error(checkpoint: Checkpoint, path: Path, quantization: str) -> float:
    """The largest error of the weights in a directory, in units of what rounding to `quantization` allows.

    int8 allows half a step, max|row| / 254; float16 half a unit in the last place. Above 1, a weight is wrong.
    """
    variables, _ = ctranslate2.write(checkpoint.config, checkpoint.arrays)
    stored = _read_variables(path)
    worst = 0.0 if variables.keys() == stored.keys() else np.inf
    for name in variables.keys() & stored.keys():
        expected, array = variables[name].astype(np.float64), _dequantize(stored[name]).astype(np.float64)
        if isinstance(stored[name], tuple):
            allowed = np.abs(expected).max(1, keepdims=True) / 254 * (1 + _SLACK)
        elif array.ndim and quantization == "float16":
            allowed = np.maximum(np.abs(expected) * 2.0**-11, 2.0**-25)
        else:
            allowed = np.zeros_like(expected)
        errors = np.abs(array - expected) / np.where(allowed > 0, allowed, 1)
        wrong = ((allowed == 0) & (errors > 0)) | np.isnan(errors)
        worst = max(worst, float(np.where(wrong, np.inf, errors).max(initial=0)))
    return worst


def _settings(config: TransformerConfig, source: Vocabulary, target: Vocabulary) -> dict[str, Any]:
    """The content of config.json. The tokenizer adds the special tokens of a source, so CTranslate2 adds none."""
    start = config.decoder_start_id
    first = config.bos_id if config.bos_id is not None else config.eos_id
    return {
        "add_source_bos": False,
        "add_source_eos": False,
        "bos_token": target.tokens[first],
        "decoder_start_token": None if start is None else target.tokens[start],
        "eos_token": target.tokens[config.eos_id],
        "layer_norm_epsilon": config.norm_eps,
        "multi_query_attention": False,
        "unk_token": target.unk if target.unk in source.tokens else source.unk,
    }


def _quantize(variables: Mapping[str, np.ndarray], quantization: str | None) -> dict[str, np.ndarray]:
    """The variables as stored: matrices of weights as int8 with one scale per row, or everything in float16."""
    if quantization is None:
        return dict(variables)
    if quantization not in QUANTIZATIONS:
        raise ConversionError(f"quantization={quantization!r}: must be one of {', '.join(QUANTIZATIONS)}")
    result: dict[str, np.ndarray] = {}
    for name, array in variables.items():
        if array.ndim == 0:
            result[name] = array
        elif quantization == "float16":
            if (largest := np.abs(array).max(initial=0)) > np.finfo(np.float16).max:
                raise ConversionError(f"--quantize float16: {name} has the value {largest:.6g}, which float16 lacks")
            result[name] = array.astype(np.float16)
        elif name.endswith("/weight"):
            weights = array.astype(np.float32)
            if not np.isfinite(weights).all():
                raise ConversionError(f"--quantize {quantization}: {name} has NaN or infinite values, which int8 lacks")
            largest = np.abs(weights).max(axis=1)
            scale = np.float32(127) / np.where(largest == 0, np.float32(127), np.maximum(largest, _SMALLEST))
            result |= {name: np.rint(weights * scale[:, None]).astype(np.int8), f"{name}{_SCALE}": scale}
        else:
            result[name] = array.astype(np.float32) if quantization == "int8_float32" else array
    return result


def _read_variables(path: Path) -> dict[str, Any]:
    """The variables of a directory; a quantized one is a pair (int8 values, scales)."""
    variables = read_model(path / MODEL)
    scaled = {name for name in variables if f"{name}{_SCALE}" in variables}
    pairs = {name: (variables[name], variables[f"{name}{_SCALE}"]) for name in scaled}
    return {name: a for name, a in variables.items() if name.removesuffix(_SCALE) not in scaled} | pairs


def _dequantize(variable: Any) -> np.ndarray:
    if not isinstance(variable, tuple):
        return variable
    values, scale = variable
    return values.astype(np.float32) / scale[:, None]


def _as_dtype(variables: Mapping[str, np.ndarray], dtype: str) -> dict[str, np.ndarray]:
    return {name: array.astype(dtype) if array.ndim else array for name, array in variables.items()}


def _read_values(path: Path) -> dict[str, Any]:
    """The entries of TWINAX. Raises: ConversionError if they cannot be read or do not match their checksum."""
    values = read_json(path / TWINAX)
    if (checksum := values.pop(OWN_CHECKSUM, None)) is not None:  # earlier versions wrote none
        verify_json(values, checksum, path / TWINAX)
    return values


def _config(path: Path, values: Mapping[str, Any]) -> TransformerConfig:
    try:
        config = TransformerConfig.from_dict(values["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConversionError(f"{path / TWINAX}: has no valid config: {' '.join(str(error).split())[:300]}") from None
    check_declared_size(config)
    return config


def _write_json(path: Path, values: Any) -> None:
    path.write_text(_to_json(values) + "\n", encoding="utf-8")


def _to_json(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False, default=dict)
