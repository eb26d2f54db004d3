"""`twinax convert`: convert checkpoints between formats and layouts."""

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from ... import convert
from ...backend.errors import ConfigError
from ...backend.torch_package import require_torch
from ...configs import TransformerConfig
from ...convert import Checkpoint
from ...convert.arrays.dtypes import to_dtype
from ...convert.checkpoint import CONFIG
from ...convert.formats import ctranslate2, fairseq
from ...convert.formats.file_layouts import PUBLISHED
from ...convert.formats.hugging_face import LAYOUTS, describe_fitting, holds_weights_of, read_directory
from ...convert.formats.lora import read_adapter
from ...convert.formats.registry import describe, describe_verification, is_layout, layouts
from ...convert.formats.single_file import TORCH_SUFFIXES
from ...convert.io.atomic_io import check_new
from ...convert.optimizers.trainer import has_state
from ...convert.privacy import without_paths
from ...convert.weight_files.reading import read_json
from ..flags.checkpoints import Convert
from ..process.importing import import_without_gc
from ..usage import UsageError, report_assumed
from .convert_report import print_report
from .convert_tokenizer import describe_changes, tokenizer_files, with_tokenizer
from .convert_writing import write_and_compare
from .model_card import model_card, read_scores, run_of
from .trainer_command import describe_arguments, run_config

EXPORTED = ".stablehlo"  # suffix of an exported model
_UNITS = {"": 1, **{f"{prefix}B": 1000**i for i, prefix in enumerate("KMG", 1)}}
_UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMG", 1)}


def convert_checkpoint(flags: Convert) -> int:
    """Write `dst`, read it back and print a comparison. Exit status: 1 if something differs; nothing is written."""
    src, dst, layout = Path(flags.src), Path(flags.dst), flags.layout
    exports = dst.suffix.lower() == EXPORTED
    _check_layout(layout, flags.quantize, flags.scores)
    if exports:
        _check_export(flags)
    check_new(dst)
    _check_torch(dst, layout, flags.dtype)
    shard_bytes = None if flags.max_shard_size is None else _bytes_of(flags.max_shard_size)
    score_documents = read_scores(flags.scores)
    original = _read(src, flags.config, flags.adapter, flags.run, flags.dtype)
    original = original if flags.with_paths else without_paths(original)
    checkpoint, new_files, pretokenization = original, {}, ""
    if flags.tokenizer:
        new_files, pretokenization = tokenizer_files(checkpoint, flags.tokenizer, flags.languages)
        checkpoint = replace(checkpoint, files=with_tokenizer(original.files, new_files))
    elif flags.languages:
        raise UsageError(f"--languages {' '.join(flags.languages)}: needs --tokenizer, the vocabularies of both sides")
    if flags.weights_only:
        checkpoint = replace(checkpoint, training=None)
    if flags.dtype is not None:
        checkpoint = to_dtype(checkpoint, flags.dtype, layout)

    def card(result: Checkpoint, checksum: str) -> str:
        return model_card(dst.name, result, checksum, run=run_of(src), scores=score_documents, arguments=sys.argv[1:])

    if exports:
        checkpoint = replace(checkpoint, unused={})
        write_export = import_without_gc("twinax.cli.checkpoints.export_writing").write_and_compare_export
        outcome, written = write_export(checkpoint, original, dst, flags.dtype)
    else:
        outcome, written = write_and_compare(
            checkpoint,
            original,
            dst,
            layout=layout,
            dtype=flags.dtype,
            max_shard_size=shard_bytes,
            quantization=flags.quantize,
            card=card if layout in LAYOUTS else None,
        )
    rows = {
        "read": f"{describe(src)}; {describe_verification(src)}",
        "adapter, merged": str(read_adapter(Path(flags.adapter))) if flags.adapter else "",
        **written,
        "families": "" if layout in LAYOUTS else f"the model {describe_fitting(original.config)} of transformers",
        "weights": outcome.weights,
        "dtype": f"{original.config.param_dtype} → {flags.dtype}: {outcome.movement}" if flags.dtype else "",
        "unused, kept": ", ".join(checkpoint.unused),
        "optimizer": outcome.optimizer,
        "assumed": "; ".join(checkpoint.optimizer_notes),
        "TrainingArguments": (
            describe_arguments(checkpoint.training.run) if checkpoint.training is not None and has_state(dst) else ""
        ),
        "ignored": ", ".join(checkpoint.skipped),
        "tokenizer": (
            describe_changes(original.files, new_files, checkpoint.files)
            if new_files and outcome.same_files
            else outcome.files
        ),
        "pre-tokenization": pretokenization,
    }
    print_report(f"{src} → {dst}", {name: text for name, text in rows.items() if text})
    report_assumed(str(src), checkpoint)
    return int(not outcome.same)


def _check_layout(layout: str, quantization: str | None, scores: Sequence[str]) -> None:
    """Raises: UsageError if there is no such layout, or it has no such option."""
    if not is_layout(layout):
        raise UsageError(f"--layout {layout}: is not a layout; the layouts are {', '.join(layouts())}")
    if quantization is not None and layout != ctranslate2.LAYOUT:
        raise UsageError(
            f"--quantize {quantization}: needs --layout ctranslate2; other layouts store weights unchanged"
        )
    if scores and layout not in LAYOUTS:
        raise UsageError(f"--scores {scores[0]}: only a family's directory has a model card; omit it")


def _check_export(flags: Convert) -> None:
    """Raises: UsageError if a flag is for checkpoints, which an exported model is not."""
    given = {"--layout": flags.layout != "twinax", "--max-shard-size": flags.max_shard_size, "--run": flags.run}
    if unusable := next((name for name, value in given.items() if value), None):
        raise UsageError(f"{unusable}: has no meaning for {flags.dst}, an exported model; omit it")


def _check_torch(dst: Path, layout: str, dtype: str | None) -> None:
    """Import PyTorch if the conversion needs it, so that its seconds are not the conversion's.

    Raises:
        MissingPackageError: it is not installed.
    """
    if dtype is not None:
        require_torch(f"--dtype {dtype}: the comparison of logits")
    elif layout == "torch_nn":
        require_torch(f"--layout {layout}")
    elif dst.suffix.lower() in TORCH_SUFFIXES or layout == fairseq.LAYOUT:
        require_torch(f"{dst}: writing it")
    else:
        return
    import_module("torch")


def _read(src: Path, config: str | None, adapter: str | None, run: str | None, dtype: str | None) -> Checkpoint:
    """The checkpoint, memory-mapped; of bare tensors, with the assumptions and the tokenizer of their config."""
    alone = adapter is None and run is None and src.is_file()
    if config is not None and alone and (Path(config) / CONFIG).is_file() and holds_weights_of(Path(config), src):
        return read_directory(Path(config), file=src)
    model, config_checkpoint = (None, None) if config is None else _config(config)
    training_run = None if run is None else run_config(run)
    checkpoint = convert.load(src, model, adapter=adapter, run=training_run, memory_map=True, dtype=dtype)
    if config_checkpoint is None:
        return checkpoint
    files = checkpoint.files or config_checkpoint.files
    return replace(checkpoint, assumed=config_checkpoint.assumed, files=files)


def _bytes_of(size: str) -> int:
    """The number of bytes of a size such as 5GB or 500MiB."""
    match = re.fullmatch(r"(\d+)([KMG]i?B)?", size.strip())
    if match is None or int(match[1]) == 0:
        raise UsageError(f"--max-shard-size {size}: must be a number of bytes, KB, MB, GB, KiB, MiB or GiB, as in 5GB")
    return int(match[1]) * _UNITS[match[2] or ""]


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
