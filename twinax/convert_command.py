"""`twinax convert` and `twinax inspect`: convert checkpoints between formats and layouts, and print their contents."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields, replace
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
from twinax.convert.file_layouts import PUBLISHED, is_published, system_of
from twinax.convert.files import read_json
from twinax.convert.formats import TOOLKITS, describe, is_layout, is_single_file, layouts
from twinax.convert.hugging_face import LAYOUTS
from twinax.convert.lora import read_adapter
from twinax.convert.port import flax_specs
from twinax.convert.single_file import Parts, read_parts
from twinax.convert.trainer import has_state
from twinax.convert.unreadable import UnreadableError, printable
from twinax.published.registry import RECIPES
from twinax.train.checkpointing.checkpoints import is_run_or_checkpoint
from twinax.train.data.prepare import Tokenizers, check_fits
from twinax.train.data.pretrained import load_for_model
from twinax.train.data.tokenization import FILE
from twinax.train.translator import Translator

from .trainer_command import describe_arguments, read_back, run_config
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
    adapter: str | None = None,
    run: str | None = None,
) -> int:
    """Writes `dst`, reads it back and prints a comparison. Exit status: 1 if a weight differs."""
    if not is_layout(layout):
        raise UsageError(f"--layout {layout}: is not a layout; the layouts are {', '.join(layouts())}")
    check_new(dst)
    model, config_checkpoint = (None, None) if config is None else _config(config)
    checkpoint = convert.load(src, model, adapter=adapter, run=None if run is None else run_config(run))
    if config_checkpoint is not None:  # the assumptions belong to the config
        checkpoint = replace(checkpoint, assumed=config_checkpoint.assumed)
        checkpoint = replace(checkpoint, files=checkpoint.files or config_checkpoint.files)
    source_files, new_files, pretokenization = checkpoint.files, {}, ""
    if tokenizer:
        new_files, pretokenization = _tokenizer_files(checkpoint, tokenizer, languages)
        checkpoint = replace(checkpoint, files=_with_tokenizer(source_files, new_files))
    elif languages:
        raise UsageError(f"--languages {' '.join(languages)}: needs --tokenizer, the vocabularies of both sides")
    if weights_only:
        checkpoint = replace(checkpoint, training=None)
    convert.save(checkpoint, dst, layout=layout)
    result = read_back(dst, checkpoint)
    table = Table("", "", show_header=False, title=escape(f"{src} → {dst}"), title_justify="left")
    table.add_row("read", escape(describe(src)))
    if adapter is not None:
        table.add_row("adapter, merged", escape(str(read_adapter(Path(adapter)))))
    table.add_row("written", f"{describe(dst)}, layout {layout}")
    arrays, result_arrays = (replace(side, training=None).tensors for side in (checkpoint, result))
    names = {*arrays, *result_arrays}
    different = sorted(name for name in names if _bytes(arrays.get(name)) != _bytes(result_arrays.get(name)))
    has_own_tables = layout in (*LAYOUTS, *TOOLKITS) or (
        layout in PUBLISHED and PUBLISHED[layout].tables(checkpoint.config)
    )
    recomputed = [name for name in different if name.endswith(".table") and has_own_tables]
    weights = f"{len(arrays)} arrays, {_numbers(arrays):,} numbers: "
    if len(different) > len(recomputed):
        weights += f"[bold red]{len(different)} DIFFERENT after reading back, first {different[0]}[/]"
    else:
        weights += f"bit-identical after reading back, sha256 {checksum(checkpoint.arrays)[:16]}"
        weights += f", except {', '.join(recomputed)}, which {layout} recomputes" if recomputed else ""
    table.add_row("weights", weights)
    if checkpoint.unused:
        table.add_row("unused, kept", escape(_text(list(checkpoint.unused))))
    optimizer, same_optimizer = _compare_optimizers(checkpoint, result)
    table.add_row("optimizer", optimizer)
    if checkpoint.optimizer_notes:
        table.add_row("assumed", escape("; ".join(checkpoint.optimizer_notes)))
    if checkpoint.training is not None and has_state(dst):
        table.add_row("TrainingArguments", escape(describe_arguments(checkpoint.training.run)))
    if checkpoint.skipped:
        table.add_row("ignored", escape(", ".join(checkpoint.skipped)))
    files = ", ".join(checkpoint.files) or "none"
    if new_files:
        files = _changes(source_files, new_files, checkpoint.files)
    same_files = checkpoint.files == result.files
    if not same_files and layout in TOOLKITS:
        stored = "vocabulary only: this format does not store the segmentation"
        files, same_files = stored if result.files else "omitted: this format does not store tokenizers", True
    table.add_row("tokenizer", escape(files) if same_files else "[bold red]DIFFERENT after reading back[/]")
    if pretokenization:
        table.add_row("pre-tokenization", escape(pretokenization))
    Console().print(table)
    report_assumed(str(src), checkpoint)
    return int(len(different) > len(recomputed) or not same_optimizer or not same_files)


def inspect_checkpoint(path: Path, tensors: bool, json_file: str | None) -> int:
    """Prints the contents of a checkpoint, or why twinax cannot read it. Exit status: 1 if it cannot."""
    check_folder(json_file)
    rows: dict[str, Any] = {}
    status, arrays = 1, {}
    try:
        rows, arrays = _contents(path)
        status = 0
    except UnreadableError as error:
        rows = dict(zip(("is", "obstacle", "what to do"), astuple(error.obstacle), strict=True))
    except (CheckpointError, ConversionError) as error:
        rows = {"is": describe(path), "obstacle": str(error).removeprefix(f"{path}: ")}
    shown_arrays = arrays if tensors or json_file else {}
    details = {
        n: {"shape": list(a.shape), "dtype": str(a.dtype), "sha256": checksum({n: a})} for n, a in shown_arrays.items()
    }
    if json_file is not None:
        document = {"path": str(path), **rows, "tensors": details}
        Path(json_file).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    title = escape(printable(str(path)))
    table = Table("", Column("", overflow="fold"), show_header=False, title=title, title_justify="left")
    for name, value in rows.items():
        if name != "config":
            table.add_row(name, escape(_text(value)))
        else:
            table.add_row("sizes", ", ".join(f"{field} {value[field]}" for field in _SIZES))
            table.add_row("settings", "; ".join(_settings(value)) or "the defaults")
    console = Console()
    console.print(table)
    if tensors and arrays:
        listing = Table(Column("array", overflow="fold"), "shape", "dtype", "sha256")
        for name, detail in details.items():
            listing.add_row(escape(name), "×".join(map(str, detail["shape"])), detail["dtype"], detail["sha256"][:16])
        console.print(listing)
    return status


def _contents(path: Path) -> tuple[dict[str, Any], Mapping[str, np.ndarray]]:
    """(description of a checkpoint, its arrays). Raises: CheckpointError, ConversionError, as `convert.load`."""
    if path.is_file() and is_single_file(path):
        parts = read_parts(path)
        layout = parts.layout
        checkpoint, contents = _checkpoint_or_contents(parts)
        arrays = parts.content["model"] if checkpoint is None else checkpoint.tensors
    else:
        checkpoint, contents = convert.load(path), None
        layout = "twinax" if is_run_or_checkpoint(path) else checkpoint.layout
        arrays = checkpoint.tensors
    if checkpoint is not None:
        report_assumed(str(path), checkpoint)
    rows: dict[str, Any] = {"form": describe(path), "layout": layout}
    rows |= ({"holds": contents} if contents else {}) | (_describe(checkpoint) if checkpoint else {})
    rows["arrays"] = dict(Counter(str(array.dtype) for array in arrays.values()))
    return rows, arrays


def _checkpoint_or_contents(parts: Parts) -> tuple[Checkpoint | None, str | None]:
    """(the checkpoint in a file, None without a config; a description of bare tensors, else None)."""
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
    rows: dict[str, Any] = {"originally of": checkpoint.layout} if checkpoint.layout else {}
    rows |= {"config": config.to_dict(), "trained parameters": _numbers(trained)}
    rows["fixed numbers"] = _numbers({name: a for name, a in arrays.items() if name not in trained})
    rows |= {"assumed": list(checkpoint.assumed)} if checkpoint.assumed else {}
    rows |= {"ignored": list(checkpoint.skipped)} if checkpoint.skipped else {}
    rows["unused numbers"] = _numbers(checkpoint.unused)
    rows |= {"unused, kept": list(checkpoint.unused)} if checkpoint.unused else {}
    ties = {"shared_embeddings": "source and target embedding", "tied_output": "target embedding and output layer"}
    rows["ties"] = [text for field, text in ties.items() if getattr(config, field)]
    rows["tokenizer"] = list(checkpoint.files)
    if (training := checkpoint.training) is not None:
        epoch, batch = training.position
        rows["training"] = {"update": training.update, "epoch": epoch, "batch": batch, "seed": training.seed}
        rows["optimizer"] = {"name": training.run.training.optimizer, "updates": training.count}
    rows["sha256 of weights"] = checksum(arrays)
    return rows


def _settings(config: Mapping[str, Any]) -> list[str]:
    """Config fields that differ from their defaults."""
    defaults = [(f.name, f.default) for f in fields(TransformerConfig) if f.name not in _SIZES]
    return [f"{name}={config[name]!r}" for name, default in defaults if config[name] != default]


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(v)}" for name, v in value.items())
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _config(path: str) -> tuple[TransformerConfig | str, Checkpoint | None]:
    """(config from a JSON file or checkpoint, or a published system's variant name; the checkpoint or None)."""
    if path.partition(":")[0] in PUBLISHED:
        return path, None
    if Path(path).suffix != ".json":
        checkpoint = convert.load(Path(path))
        return checkpoint.config, checkpoint
    if not Path(path).is_file():
        raise UsageError(f"--config {path}: there is no such file")
    values = read_json(Path(path))
    try:
        return TransformerConfig.from_dict(values.get("model", values)), None  # a run's config contains the model's
    except (ConfigError, TypeError, AttributeError) as error:
        raise UsageError(f"--config {path}: {' '.join(str(error).split())}") from None


def _tokenizer_files(
    checkpoint: Checkpoint, paths: Sequence[str], languages: Sequence[str]
) -> tuple[dict[str, bytes], str]:
    """(tokenizer files as in a checkpoint, for both sides or one each; the pre-tokenization of a vocabulary).

    Raises:
        UsageError: the checkpoint has a usable tokenizer.
        DataError: a tokenizer cannot be read, or does not match the model.
    """
    config = checkpoint.config
    if checkpoint.files and _has_tokenizer(checkpoint):
        raise UsageError(
            f"--tokenizer {paths[0]}: the checkpoint has a tokenizer ({', '.join(checkpoint.files)}); omit the flag"
        )
    if len(paths) > 2:
        raise UsageError(f"--tokenizer {' '.join(paths)}: pass one, or one per side (source, target)")
    system = checkpoint.system or system_of(config)
    if languages and not any(path.endswith(".txt") for path in paths):
        raise UsageError(
            f"--languages {' '.join(languages)}: is for vocabularies (.txt) only; {paths[0]} has its own rules"
        )
    tokenizer_config = RECIPES[system].tokenizer if system else TokenizerConfig()
    if languages:
        tokenizer_config = replace(tokenizer_config, kind="word", languages=tuple(languages), split="whitespace")
    # A shared vocabulary gives two tokenizers if spaCy pre-tokenizes each side with its own rules.
    sides = [paths[0], paths[-1]] if tokenizer_config.languages and paths[0].endswith(".txt") else paths
    tokenizers = Tokenizers.of(
        [load_for_model(path, config, tokenizer_config, side) for side, path in enumerate(sides)]
    )
    for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
        check_fits(config, tokenizer, side)
    pretokenization = ""
    if any(path.endswith(".txt") for path in paths) and (system or languages):
        rule = (
            f"spaCy, {' and '.join(tokenizer_config.languages)}"
            if tokenizer_config.languages
            else tokenizer_config.split
        )
        pretokenization = rule if languages or system is None else f"{rule}, as in {system}"
    with TemporaryDirectory() as folder:
        tokenizers.save(Path(folder))
        files = [path for path in Path(folder).glob("*/*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}, pretokenization


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a tokenizer that twinax can read and that matches its model."""
    try:
        return bool(Translator(checkpoint).tokenizers)
    except (CheckpointError, DataError):
        return False


def _with_tokenizer(source_files: Mapping[str, bytes], new_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a checkpoint and of its new tokenizer, which is the only one read from then on."""
    return {name: content for name, content in source_files.items() if Path(name).name != FILE} | dict(new_files)


def _changes(source_files: Mapping[str, bytes], new_files: Mapping[str, bytes], files: Mapping[str, bytes]) -> str:
    """One line on the tokenizer files that were added, replaced, kept or left out."""
    groups = {
        "added": [name for name in new_files if name not in source_files],
        "replaced": [name for name in new_files if name in source_files],
        "kept, not read": [name for name in source_files if name in files and name not in new_files],
        "left out": [name for name in source_files if name not in files],
    }
    return "; ".join(f"{label}: {', '.join(names)}" for label, names in groups.items() if names)


def _compare_optimizers(checkpoint: Checkpoint, result: Checkpoint) -> tuple[str, bool]:
    """(one line on the optimizer, whether nothing is wrong)."""
    before, after = checkpoint.training, result.training
    if before is None:
        states = [name for name in checkpoint.skipped if "optim" in name]
        return f"{states[0]} ignored: pass --run, the run that resumes from it" if states else "none", True
    if after is None:
        return f"omitted, with the run and its {before.update:,} updates: this format does not store them", True
    same = all(checksum(getattr(before, key)) == checksum(getattr(after, key)) for key in MOMENTS)
    same &= replace(after, exp_avg={}, exp_avg_sq={}) == replace(before, exp_avg={}, exp_avg_sq={})
    verdict = "bit-identical after reading back" if same else "[bold red]DIFFERENT after reading back[/]"
    return f"{before.run.training.optimizer} after {before.count:,} updates: {verdict}", same


def _bytes(array: np.ndarray | None) -> Any:
    return None if array is None else (array.dtype, array.shape, np.ascontiguousarray(array).tobytes())


def _numbers(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(array.size for array in arrays.values())
