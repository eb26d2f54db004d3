"""`twinax convert` and `twinax inspect`: checkpoints between forms and layouts, and what is in one."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from twinax import convert
from twinax.configs import TransformerConfig
from twinax.configs.data import TokenizerConfig
from twinax.configs.errors import CheckpointError, ConfigError, ConversionError, DataError
from twinax.convert import Checkpoint, checksum
from twinax.convert.atomic_io import check_new
from twinax.convert.checkpoint import MOMENTS
from twinax.convert.file_layouts import PUBLISHED, file_layouts, is_file_layout, is_published, system_of
from twinax.convert.files import read_json
from twinax.convert.formats import describe
from twinax.convert.hugging_face import LAYOUTS
from twinax.convert.port import flax_specs
from twinax.convert.single_file import Parts, read_parts
from twinax.published.registry import RECIPES
from twinax.train.checkpointing.checkpoints import is_run_or_checkpoint
from twinax.train.data.prepare import Tokenizers, check_fits
from twinax.train.data.pretrained import load_for_model
from twinax.train.data.tokenization import FILE
from twinax.train.translator import Translator

from .usage import UsageError, check_folder, report_assumed

_SIZES = (
    "d_model",
    "num_heads",
    "d_ff",
    "num_encoder_layers",
    "num_decoder_layers",
    "src_vocab_size",
    "tgt_vocab_size",
)


def convert_checkpoint(
    src: Path,
    dst: Path,
    layout: str,
    weights_only: bool,
    config: str | None,
    tokenizer: Sequence[str],
    languages: Sequence[str],
) -> int:
    """Writes `dst`, reads it again and prints what came back. Exit status: 1 where a weight did not."""
    if layout not in LAYOUTS and not is_file_layout(layout):
        raise UsageError(f"--layout {layout}: there is none; known are {', '.join((*file_layouts(), *LAYOUTS))}")
    check_new(dst)
    model, other = (None, None) if config is None else _config(config)
    checkpoint = convert.load(src, model)
    if other is not None:  # its config, and with it what was assumed of that
        checkpoint = replace(checkpoint, assumed=other.assumed)
    checkpoint, given = replace(checkpoint, files=checkpoint.files or (other.files if other else {})), {}
    carried, pretokenization = checkpoint.files, ""
    if tokenizer:
        given, pretokenization = _tokenizer_files(checkpoint, tokenizer, languages)
        checkpoint = replace(checkpoint, files=_with_tokenizer(carried, given))
    elif languages:
        raise UsageError(f"--languages {' '.join(languages)}: needs --tokenizer, the vocabularies of both sides")
    if weights_only:
        checkpoint = replace(checkpoint, training=None)
    convert.save(checkpoint, dst, layout=layout)
    back = convert.load(dst)
    table = Table("", "", show_header=False, title=escape(f"{src} → {dst}"), title_justify="left")
    table.add_row("read", escape(describe(src)))
    table.add_row("written", f"{describe(dst)}, layout {layout}")
    ours, theirs = (replace(side, training=None).tensors for side in (checkpoint, back))
    different = sorted(name for name in {*ours, *theirs} if _bytes(ours.get(name)) != _bytes(theirs.get(name)))
    computes = layout in LAYOUTS or (layout in PUBLISHED and PUBLISHED[layout].tables(checkpoint.config))
    rebuilt = [name for name in different if name.endswith(".table") and computes]
    said = f"{len(ours)} arrays, {_numbers(ours):,} numbers: "
    if len(different) > len(rebuilt):
        said += f"[bold red]{len(different)} came back DIFFERENT, as {different[0]}[/]"
    else:
        said += f"all came back bit-identical, sha256 {checksum(checkpoint.arrays)[:16]}"
        said += f", but for {', '.join(rebuilt)}, which {layout} computes anew" if rebuilt else ""
    table.add_row("weights", said)
    if checkpoint.unused:
        table.add_row("read by nothing, kept", escape(_text(list(checkpoint.unused))))
    optimizer, same_optimizer = _optimizer_came_back(checkpoint, back)
    table.add_row("optimiser", optimizer)
    if checkpoint.skipped:
        table.add_row("ignored", escape(", ".join(checkpoint.skipped)))
    files = _changes(carried, given, checkpoint.files) if given else ", ".join(checkpoint.files) or "none"
    table.add_row("tokenizer", escape(files) if checkpoint.files == back.files else "[bold red]came back DIFFERENT[/]")
    if pretokenization:
        table.add_row("pre-tokenization", escape(pretokenization))
    Console().print(table)
    report_assumed(str(src), checkpoint)
    return int(len(different) > len(rebuilt) or not same_optimizer or checkpoint.files != back.files)


def inspect_checkpoint(path: Path, tensors: bool, json_file: str | None) -> int:
    """Prints what is in a checkpoint. Exit status: 0."""
    check_folder(json_file)
    if path.is_file():
        parts = read_parts(path)
        layout, (checkpoint, holds) = parts.layout, _known(parts)
        arrays = parts.found["model"] if checkpoint is None else checkpoint.tensors
    else:
        checkpoint, holds = convert.load(path), None
        layout, arrays = "twinax" if is_run_or_checkpoint(path) else checkpoint.layout, checkpoint.tensors
    if checkpoint is not None:
        report_assumed(str(path), checkpoint)
    found: dict[str, Any] = {"form": describe(path), "layout": layout}
    found |= ({"holds": holds} if holds else {}) | (_describe(checkpoint) if checkpoint else {})
    found["arrays"] = dict(Counter(str(array.dtype) for array in arrays.values()))
    wanted = arrays if tensors or json_file else {}
    every = {n: {"shape": list(a.shape), "dtype": str(a.dtype), "sha256": checksum({n: a})} for n, a in wanted.items()}
    if json_file is not None:
        document = {"path": str(path), **found, "tensors": every}
        Path(json_file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    table = Table("", Column("", overflow="fold"), show_header=False, title=escape(str(path)), title_justify="left")
    for name, value in found.items():
        if name != "config":
            table.add_row(name, escape(_text(value)))
        else:
            table.add_row("sizes", ", ".join(f"{field} {value[field]}" for field in _SIZES))
            table.add_row("settings", "; ".join(_settings(value)) or "the defaults")
    console = Console()
    console.print(table)
    if tensors:
        listing = Table(Column("array", overflow="fold"), "shape", "dtype", "sha256")
        for name, about in every.items():
            listing.add_row(escape(name), "×".join(map(str, about["shape"])), about["dtype"], about["sha256"][:16])
        console.print(listing)
    return 0


def _known(parts: Parts) -> tuple[Checkpoint | None, str | None]:
    """(the checkpoint in a file, where there is a config for it; what to say of bare tensors)."""
    if not parts.bare:
        return parts.checkpoint(), None
    if not is_published(parts.layout):
        return None, "bare tensors, no config"
    try:
        return parts.checkpoint(), None
    except ConversionError as error:
        return None, f"bare tensors, no config: {error}"


def _describe(checkpoint: Checkpoint) -> dict[str, Any]:
    config, arrays = checkpoint.config, checkpoint.arrays
    trained = {name: arrays[name] for name in flax_specs(config, trained_only=True)}
    found: dict[str, Any] = {"once a directory of": checkpoint.layout} if checkpoint.layout else {}
    found |= {"config": config.to_dict(), "trained parameters": _numbers(trained)}
    found["fixed numbers"] = _numbers({name: a for name, a in arrays.items() if name not in trained})
    found |= {"assumed": list(checkpoint.assumed)} if checkpoint.assumed else {}
    found |= {"ignored": list(checkpoint.skipped)} if checkpoint.skipped else {}
    found["unused numbers"] = _numbers(checkpoint.unused)
    found |= {"unused, kept": list(checkpoint.unused)} if checkpoint.unused else {}
    ties = {"shared_embeddings": "source and target embedding", "tied_output": "target embedding and output layer"}
    found["ties"] = [text for field, text in ties.items() if getattr(config, field)]
    found["tokenizer"] = list(checkpoint.files)
    if (training := checkpoint.training) is not None:
        epoch, batch = training.position
        found["training"] = {"update": training.update, "epoch": epoch, "batch": batch, "seed": training.seed}
        found["optimiser"] = {"name": training.run.training.optimizer, "updates": training.count}
    found["sha256 of weights"] = checksum(arrays)
    return found


def _settings(config: Mapping[str, Any]) -> list[str]:
    """Fields that are not the defaults'."""
    own = [(f.name, f.default) for f in fields(TransformerConfig) if f.name not in _SIZES]
    return [f"{name}={config[name]!r}" for name, default in own if config[name] != default]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(v)}" for name, v in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _config(path: str) -> tuple[TransformerConfig | str, Checkpoint | None]:
    """(a config in a JSON file, that of another checkpoint, or a published system's name; that checkpoint)."""
    if path.partition(":")[0] in PUBLISHED:
        return path, None
    if Path(path).suffix != ".json":
        checkpoint = convert.load(Path(path))
        return checkpoint.config, checkpoint
    if not Path(path).is_file():
        raise UsageError(f"--config {path}: there is no such file")
    values = read_json(Path(path))
    try:
        return TransformerConfig.from_dict(values.get("model", values)), None  # a run's has the model's in it
    except (ConfigError, TypeError, AttributeError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from None


def _tokenizer_files(
    checkpoint: Checkpoint, paths: Sequence[str], languages: Sequence[str]
) -> tuple[dict[str, bytes], str]:
    """(files of one tokenizer for both sides or of two, as a checkpoint holds them; a vocabulary's pre-tokenization).

    Raises:
        UsageError: the checkpoint has a tokenizer that can be used.
        DataError: a tokenizer cannot be read, or is not of this model.
    """
    config = checkpoint.config
    if checkpoint.files and _has_tokenizer(checkpoint):
        raise UsageError(
            f"--tokenizer {paths[0]}: the checkpoint has {', '.join(checkpoint.files)}, which can be used; omit it"
        )
    if len(paths) > 2:
        raise UsageError(f"--tokenizer {' '.join(paths)}: give one, or the source's and the target's")
    system = checkpoint.system or system_of(config)
    if languages and not any(path.endswith(".txt") for path in paths):
        raise UsageError(
            f"--languages {' '.join(languages)}: is for a vocabulary (.txt); {paths[0]} brings its own rules"
        )
    how = RECIPES[system].tokenizer if system else TokenizerConfig()
    if languages:
        how = replace(how, kind="word", languages=tuple(languages), split="whitespace")
    # One vocabulary that both sides share is two tokenizers where spaCy splits each by its own rules.
    sides = [paths[0], paths[-1]] if how.languages and paths[0].endswith(".txt") else paths
    found = Tokenizers.of([load_for_model(path, config, how, side) for side, path in enumerate(sides)])
    for side, of_side in zip(("src", "tgt"), found, strict=True):
        check_fits(config, of_side, side)
    pretokenization = ""
    if any(path.endswith(".txt") for path in paths) and (system or languages):
        rule = f"spaCy, {' and '.join(how.languages)}" if how.languages else how.split
        pretokenization = rule if languages or system is None else f"{rule}, as in {system}"
    with TemporaryDirectory() as folder:
        found.save(Path(folder))
        files = [path for path in Path(folder).glob("*/*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}, pretokenization


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether its files are a tokenizer that twinax can read, of its model."""
    try:
        return bool(Translator(checkpoint).tokenizers)
    except (CheckpointError, DataError):
        return False


def _with_tokenizer(carried: Mapping[str, bytes], given: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files that a checkpoint carries and those of a tokenizer for it, which alone is read from then on."""
    return {name: content for name, content in carried.items() if Path(name).name != FILE} | dict(given)


def _changes(carried: Mapping[str, bytes], given: Mapping[str, bytes], files: Mapping[str, bytes]) -> str:
    """What became of the tokenizer files that a checkpoint carries, where others were given."""
    groups = {
        "added": [name for name in given if name not in carried],
        "replaced": [name for name in given if name in carried],
        "kept, not read": [name for name in carried if name in files and name not in given],
        "left out": [name for name in carried if name not in files],
    }
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in groups.items() if names)


def _optimizer_came_back(checkpoint: Checkpoint, back: Checkpoint) -> tuple[str, bool]:
    """(what to say, whether nothing is wrong)."""
    ours, theirs = checkpoint.training, back.training
    if ours is None:
        states = [name for name in checkpoint.skipped if "optim" in name]
        return f"{states[0]} ignored: the file has no run to resume" if states else "none", True
    if theirs is None:
        return f"left out, with the run and its {ours.update:,} updates: there is no place for it", True
    same = all(checksum(getattr(ours, key)) == checksum(getattr(theirs, key)) for key in MOMENTS)
    same &= replace(theirs, exp_avg={}, exp_avg_sq={}) == replace(ours, exp_avg={}, exp_avg_sq={})
    verdict = "came back bit-identical" if same else "[bold red]came back DIFFERENT[/]"
    return f"{ours.run.training.optimizer} after {ours.count:,} updates: {verdict}", same


def _bytes(array: np.ndarray | None) -> Any:
    return None if array is None else (array.dtype, array.shape, np.ascontiguousarray(array).tobytes())


def _numbers(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(array.size for array in arrays.values())
