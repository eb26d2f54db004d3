"""fairseq checkpoints: a `.pt` with `args` or `cfg` and `model`, and the dictionaries `dict.LANGUAGE.txt` beside it."""

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...backend.errors import ConversionError
from ...backend.torch_package import require_torch
from ..arrays.frameworks import to_torch_tensor
from ..checkpoint import ARGS, CONFIG, Checkpoint
from ..io.atomic_io import check_new, new_directory, new_file
from ..io.headers import pickle_of
from ..layouts import fairseq
from ..weight_files.reading import read_torch, to_arrays
from .fairseq_dictionary import dictionary_files, tokenizer_files

LAYOUT = "fairseq"
SUFFIXES = (".pt", ".pth")
_NAMES = ("model.pt", "checkpoint_best.pt", "checkpoint_last.pt")  # in a directory, in the order of preference
_HEAD = 1 << 20  # bytes of a file of PyTorch before 1.6 that contain the names of its entries
_DEPTH = 4  # of nested settings
_SECTIONS = ("encoder", "decoder", "quant_noise")  # of cfg.model, whose settings `args` has with these prefixes
# Entries of every fairseq checkpoint, as they are pickled: settings and an embedding
_MARKS = (
    rb"(X\x04\0\0\0|\x8c\x04)args|(X\x03\0\0\0|\x8c\x03)cfg",
    rb"(X\x1b\0\0\0|\x8c\x1b)encoder\.embed_tokens\.weight",
)
_TASK = {  # settings of a checkpoint that was not read from fairseq
    **{"task": "translation", "source_lang": "src", "target_lang": "tgt", "data": "."},
    **{"left_pad_source": "True", "left_pad_target": "False"},
}
# Run where fairseq is installed, it writes the settings as plain values.
_PLAIN = (
    'python -c "import sys, json, torch; from omegaconf import OmegaConf as O; '
    "s = torch.load(sys.argv[1], map_location='cpu', **({'weights_only': False} if torch.__version__ >= '2' else {})); "
    "p = lambda v: json.loads(json.dumps(v, default=lambda o: O.to_container(o, resolve=True, enum_to_str=True) "
    "if O.is_config(o) else getattr(o, '__dict__', str(o)))); "
    "torch.save({'args': p(s.get('args')), 'cfg': p(s.get('cfg')), 'model': dict(s['model'])}, sys.argv[2])\""
)


def recognizes(path: Path) -> bool:
    """Whether a path is a fairseq checkpoint, or a directory of one, with or without its dictionaries."""
    if path.is_dir():
        files = [] if (path / CONFIG).exists() else sorted(path.glob("*.pt"))
        return bool(files) and (any(path.glob("dict.*.txt")) or any(map(recognizes, files)))
    return path.is_file() and all(re.search(pattern, pickle_of(path, _HEAD)) for pattern in _MARKS)


def read(path: Path) -> Checkpoint:
    """The checkpoint at a path; its tokenizers look up tokens that are separated by spaces.

    Raises:
        ConversionError: a file is missing or damaged, or twinax does not support the model or a setting.
    """
    file = file_in(path) if path.is_dir() else path
    advice = f"where fairseq is installed, run: {_PLAIN} {file} PLAIN.pt; then convert PLAIN.pt"
    content = read_torch(file, advice)
    if not isinstance(content, dict):
        raise ConversionError(f"{file}: is not a fairseq checkpoint: holds a {type(content).__name__}")
    arrays = to_arrays(content.get("model"), file)
    try:
        settings = _flatten(content)
        has_copies = any(map(fairseq.FAST_PATH.fullmatch, arrays))
        config, arrays = fairseq.read(settings, arrays)
        sizes = (config.src_vocab_size, config.tgt_vocab_size)
        files = tokenizer_files(_dictionaries(file.parent, settings), sizes)
    except ConversionError as error:
        raise ConversionError(str(error) if str(file.parent / "dict") in str(error) else f"{file}: {error}") from None
    skipped = [name for name in sorted(content, key=str, reverse=True) if name not in ("args", "cfg", "model")]
    skipped += ["the encoder's in_proj_*, out_proj_*, fc1_*, fc2_* (copies of its weights)"] * has_copies
    documents = {ARGS: settings}
    return Checkpoint(config, arrays, LAYOUT, documents, files=files, skipped=tuple(map(str, skipped)))


def write(checkpoint: Checkpoint, path: Path, layout: str) -> None:
    """Write a `.pt` with its dictionaries beside it, or a new directory of both, which fairseq loads.

    Raises:
        ConversionError: fairseq has no such model, a file exists, or writing fails, which can leave new dictionaries.
    """
    require_torch(f"{path}: writing it")
    settings = dict(checkpoint.documents.get(ARGS, {})) if checkpoint.layout == LAYOUT else {}
    new_settings = fairseq.settings_of(checkpoint.config)
    sizes = (checkpoint.config.src_vocab_size, checkpoint.config.tgt_vocab_size)
    dtype = checkpoint.config.param_dtype
    if not settings or not fairseq.same_model(fairseq.config_of(settings, sizes, dtype), checkpoint.config):
        settings |= new_settings
    settings = _TASK | settings
    content = _content(settings, fairseq.write(checkpoint.config, checkpoint.arrays))
    names = [f"dict.{language}.txt" for language in _languages(settings) or ()]
    dictionaries = dict(zip(names, dictionary_files(checkpoint), strict=False))
    if path.suffix.lower() not in SUFFIXES:
        with new_directory(path) as folder:
            _save(content, folder / _NAMES[0])
            for name, text in dictionaries.items():
                (folder / name).write_bytes(text)
        return
    check_new(path)
    new = {n: text for n, text in dictionaries.items() if not _is_same(path.parent / n, text)}
    for name in new:
        check_new(path.parent / name)
    for name, text in new.items():
        with new_file(path.parent / name) as temporary:
            temporary.write_bytes(text)
    with new_file(path) as temporary:
        _save(content, temporary)


def _save(content: Any, path: Path) -> None:
    import torch

    torch.save(content, path)


def _content(settings: Mapping[str, Any], arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that fairseq requires; of its settings, every version reads a Namespace `args`."""
    history = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": Namespace(**settings),
        "cfg": None,
        "model": {name: to_torch_tensor(array) for name, array in arrays.items()},
        "optimizer_history": [history],
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }


def _is_same(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def file_in(folder: Path) -> Path:
    """The checkpoint in a directory. Raises: ConversionError if several could be meant."""
    names = {path.name for path in folder.glob("*.pt")}
    preferred = next((name for name in _NAMES if name in names), None)
    if preferred is None and len(names) > 1:
        raise ConversionError(f"{folder}: holds several checkpoints ({', '.join(sorted(names)[:5])}); name one of them")
    return folder / (preferred or min(names))


def _flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """All settings by their names in `args`. Raises: ConversionError if the file states none."""
    args, cfg = _plain(content.get("args")), _plain(content.get("cfg"))
    if isinstance(args, dict):
        return args
    model = cfg.get("model") if isinstance(cfg, dict) else None
    if not isinstance(cfg, dict) or not isinstance(model, dict):
        raise ConversionError("states neither args nor cfg.model, so its settings are unknown")
    task = cfg["task"] if isinstance(cfg.get("task"), dict) else {}
    settings = {name: value for name, value in {**task, **model}.items() if name not in _SECTIONS and name != "_name"}
    for section in _SECTIONS:
        values = model.get(section)
        settings |= {f"{section}_{name}": value for name, value in (values if isinstance(values, dict) else {}).items()}
    return {"task": task.get("_name"), "arch": model.get("_name")} | settings


def _plain(value: Any, depth: int = 0) -> Any:
    """A value of settings as JSON; what JSON lacks is left out."""
    if isinstance(value, Namespace):
        value = vars(value)
    if isinstance(value, dict) and depth < _DEPTH:
        plain = {name: _plain(item, depth + 1) for name, item in value.items() if isinstance(name, str)}
        return {name: item for name, item in plain.items() if item is not None}
    if isinstance(value, list | tuple) and depth < _DEPTH:
        return [_plain(item, depth + 1) for item in value]
    return value if isinstance(value, str | bool | int | float) else None


def _languages(settings: Mapping[str, Any]) -> tuple[str, str] | None:
    """The languages of source and target. Raises: ConversionError if one cannot be part of a file's name."""
    languages = settings.get("source_lang"), settings.get("target_lang")
    source, target = languages
    if not isinstance(source, str) or not isinstance(target, str):
        return None
    for language in (source, target):
        if not re.fullmatch(r"\w[\w.@+-]*", language):
            raise ConversionError(f"source_lang={source!r}, target_lang={target!r}: must be names of languages"[:200])
    return source, target


def _dictionaries(folder: Path, settings: Mapping[str, Any]) -> list[Path]:
    """The dictionaries of source and target; empty if neither exists. Raises: ConversionError if one is missing."""
    languages = _languages(settings)
    paths = [folder / f"dict.{language}.txt" for language in languages or ()]
    missing = [path for path in paths if not path.is_file()]
    if missing and len({*missing}) < len({*paths}):
        raise ConversionError(f"{missing[0]}: there is no such file; the dictionaries of both sides must be beside it")
    return [] if missing else paths
