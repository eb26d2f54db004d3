"""`twinax inspect`: print the contents of a checkpoint, or why twinax cannot read it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from ... import convert
from ...backend.errors import CheckpointError, ConversionError, DataError
from ...configs import TransformerConfig
from ...configs.printing import escape_lines
from ...convert import Checkpoint, checksum
from ...convert.arrays.lazy import lazy, specs_of
from ...convert.arrays.verification import number_of
from ...convert.formats import ctranslate2
from ...convert.formats.file_layouts import is_published
from ...convert.formats.hugging_face import fitting_families
from ...convert.formats.registry import describe, describe_verification, is_single_file
from ...convert.formats.run import is_run_or_checkpoint
from ...convert.formats.single_file import Parts, read_parts
from ...convert.identify.unreadable import UnreadableError, printable
from ...convert.port import flax_specs
from ...inference.translator import Translator
from ..flags.checkpoints import Inspect
from ..usage import check_outputs, report_assumed, write_json

_SIZES = (
    "d_model",
    "num_heads",
    "d_ff",
    "num_encoder_layers",
    "num_decoder_layers",
    "src_vocab_size",
    "tgt_vocab_size",
)


def inspect_checkpoint(flags: Inspect) -> int:
    """Print the contents of a checkpoint, or why twinax cannot read it. Exit status: 2 if it cannot."""
    check_outputs([flags.json_file], [flags.path])
    path = Path(flags.path)
    rows: dict[str, Any] = {}
    status, arrays = 2, {}
    try:
        rows, arrays = _contents(path)
        status = 0
    except UnreadableError as error:
        rows = dict(zip(("type", "obstacle", "what to do"), astuple(error.unsupported), strict=True))
    except (CheckpointError, ConversionError) as error:
        rows = {"type": describe(path), "obstacle": str(error).removeprefix(f"{path}: ")}
    shown_arrays = arrays if flags.tensors or flags.json_file else {}
    details = {
        n: {"shape": list(a.shape), "dtype": str(a.dtype), "sha256": checksum({n: a})} for n, a in shown_arrays.items()
    }
    if flags.json_file is not None:
        document = {"path": str(path), **rows, "tensors": details}
        write_json(flags.json_file, document)
    title = escape(printable(str(path)))
    table = Table("", Column("", overflow="fold"), show_header=False, title=title, title_justify="left")
    for name, value in rows.items():
        if name == "families":
            rows_by_fit = sorted(value.items(), key=lambda item: item[1] != "")
            table.add_row(name, escape("\n".join(f"{layout}: {reason or 'fits'}" for layout, reason in rows_by_fit)))
        elif name != "config":
            table.add_row(name, escape(escape_lines(_text(value))))
        else:
            table.add_row("sizes", ", ".join(f"{field} {value[field]}" for field in _SIZES))
            table.add_row("settings", "; ".join(_settings(value)) or "the defaults")
    console = Console()
    console.print(table)
    if flags.tensors and arrays:
        listing = Table(Column("array", overflow="fold"), "shape", "dtype", "sha256")
        for name, detail in details.items():
            listing.add_row(
                escape(escape_lines(name)), "×".join(map(str, detail["shape"])), detail["dtype"], detail["sha256"][:16]
            )
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
        checkpoint, contents = convert.load(path, memory_map=True), None
        layout = "twinax" if is_run_or_checkpoint(path) else checkpoint.layout
        layout = ctranslate2.LAYOUT if ctranslate2.recognizes(path) else layout
        arrays = checkpoint.tensors
    if checkpoint is not None:
        report_assumed(str(path), checkpoint)
    rows: dict[str, Any] = {"format": describe(path), "verified": describe_verification(path), "layout": layout}
    rows |= ({"holds": contents} if contents else {}) | (_describe(checkpoint) if checkpoint else {})
    rows["arrays"] = dict(Counter(spec.dtype for spec in specs_of(arrays).values()))
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
    trained = lazy(arrays).select(list(flax_specs(config, trained_only=True)))
    rows: dict[str, Any] = {"source layout": checkpoint.layout} if checkpoint.layout else {}
    rows |= {"config": config.to_dict(), "trained parameters": number_of(trained)}
    rows["non-trainable numbers"] = number_of(arrays) - number_of(trained)
    rows |= {"assumed": list(checkpoint.assumed)} if checkpoint.assumed else {}
    rows |= {"ignored": list(checkpoint.skipped)} if checkpoint.skipped else {}
    rows["unused numbers"] = number_of(checkpoint.unused)
    rows |= {"unused, kept": list(checkpoint.unused)} if checkpoint.unused else {}
    ties = {"shared_embeddings": "source and target embedding", "tied_output": "target embedding and output layer"}
    rows["ties"] = [text for field, text in ties.items() if getattr(config, field)]
    rows["tokenizer"] = list(checkpoint.files)
    rows |= _tokenizer_obstacle(checkpoint)
    rows["families"] = fitting_families(config)
    if (training := checkpoint.training) is not None:
        epoch, batch = training.position
        rows["training"] = {"update": training.update, "epoch": epoch, "batch": batch, "seed": training.seed}
        rows["optimizer"] = {"name": training.run.training.optimizer, "updates": training.count}
    rows["sha256 of weights"] = checksum(arrays)
    return rows


def _tokenizer_obstacle(checkpoint: Checkpoint) -> dict[str, str]:
    """A row on the reason why the tokenizer files cannot be used; none if they can."""
    try:
        _ = Translator(checkpoint, "tokenizer").tokenizers if checkpoint.files else None
    except (CheckpointError, DataError) as error:
        return {"tokenizer obstacle": str(error)}
    return {}


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
