"""`twinax convert`: convert checkpoints between formats and layouts."""

import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from twinax import convert
from twinax.configs import TransformerConfig
from twinax.configs.data import TokenizerConfig
from twinax.configs.errors import CheckpointError, ConfigError, DataError
from twinax.convert import Checkpoint, checksum
from twinax.convert.atomic_io import check_new, replace_file
from twinax.convert.checkpoint import FOLDERS, MOMENTS
from twinax.convert.dtypes import logit_movement, to_dtype
from twinax.convert.file_layouts import PUBLISHED, system_of
from twinax.convert.files import read_json
from twinax.convert.formats import TOOLKITS, describe, is_layout, layouts
from twinax.convert.hugging_face import LAYOUTS
from twinax.convert.lora import read_adapter
from twinax.convert.progress import listening
from twinax.convert.safetensors_files import size_of
from twinax.convert.single_file import has_suffix
from twinax.convert.trainer import has_state
from twinax.convert.verification import Comparison, compare_checkpoints, number_of
from twinax.published.registry import RECIPES
from twinax.train.data.prepare import Tokenizers, check_fits
from twinax.train.data.pretrained import load_for_model
from twinax.train.data.tokenization import FILE
from twinax.train.tracking.progress import progress_bar
from twinax.train.translator import Translator

from .model_card import CARD, model_card, read_scores, run_of
from .trainer_command import describe_arguments, read_back, run_config
from .usage import UsageError, report_assumed

_UNITS = {"": 1, **{f"{prefix}B": 1000**i for i, prefix in enumerate("KMG", 1)}}
_UNITS |= {f"{prefix}iB": 1024**i for i, prefix in enumerate("KMG", 1)}


def convert_checkpoint(
    src: Path,
    dst: Path,
    *,
    layout: str,
    weights_only: bool,
    dtype: str | None,
    max_shard_size: str | None,
    config: str | None,
    tokenizer: Sequence[str],
    languages: Sequence[str],
    scores: Sequence[str],
    adapter: str | None,
    run: str | None,
) -> int:
    """Writes `dst`, reads it back and prints a comparison. Exit status: 1 if a weight differs."""
    if not is_layout(layout):
        raise UsageError(f"--layout {layout}: is not a layout; the layouts are {', '.join(layouts())}")
    check_new(dst)
    shard_bytes = None if max_shard_size is None else _bytes_of(max_shard_size)
    score_documents = read_scores(scores)
    if scores and layout not in LAYOUTS:
        raise UsageError(f"--scores {scores[0]}: only a family's directory has a model card; omit it")
    model, config_checkpoint = (None, None) if config is None else _config(config)
    original = convert.load(src, model, adapter=adapter, run=None if run is None else run_config(run), memory_map=True)
    if config_checkpoint is not None:  # the assumptions belong to the config
        original = replace(original, assumed=config_checkpoint.assumed)
        original = replace(original, files=original.files or config_checkpoint.files)
    checkpoint, new_files, pretokenization = original, {}, ""
    if tokenizer:
        new_files, pretokenization = _tokenizer_files(checkpoint, tokenizer, languages)
        checkpoint = replace(checkpoint, files=_with_tokenizer(original.files, new_files))
    elif languages:
        raise UsageError(f"--languages {' '.join(languages)}: needs --tokenizer, the vocabularies of both sides")
    if weights_only:
        checkpoint = replace(checkpoint, training=None)
    if dtype is not None:
        checkpoint = to_dtype(checkpoint, dtype, layout)
    if has_suffix(dst):
        import_module("torch")  # which takes seconds that are not the conversion's
    written, verified = _Timer(), _Timer()
    with written, _byte_progress(f"writing {dst}", checkpoint):
        convert.save(checkpoint, dst, layout=layout, max_shard_size=shard_bytes)
    with verified, _byte_progress(f"comparing {dst}", checkpoint):
        result = read_back(dst, checkpoint)
        comparison = compare_checkpoints(checkpoint, result)
    if layout in LAYOUTS:
        card = model_card(
            *(dst.name, result, comparison.checksum),
            run=run_of(src),
            scores=score_documents,
            arguments=sys.argv[1:],
        )
        replace_file(dst / CARD, card)
    rows = {"read": describe(src)}
    if adapter is not None:
        rows["adapter, merged"] = str(read_adapter(Path(adapter)))
    rows["written"] = f"{describe(dst)}, layout {layout}"
    rows["time"] = f"written in {written.rate(dst)}; read back and compared in {verified.seconds:.1f} s"
    rows["weights"], same = _weights(checkpoint, comparison, layout)
    if dtype is not None:
        rows["dtype"] = f"{original.config.param_dtype} → {dtype}: {logit_movement(original, result)}"
    if checkpoint.unused:
        rows["unused, kept"] = ", ".join(checkpoint.unused)
    rows["optimizer"], same_optimizer = _compare_optimizers(replace(checkpoint, training=original.training), result)
    if checkpoint.training is not None and has_state(dst):
        rows["TrainingArguments"] = describe_arguments(checkpoint.training.run)
    if checkpoint.skipped:
        rows["ignored"] = ", ".join(checkpoint.skipped)
    rows["tokenizer"], same_files = _tokenizers(checkpoint, result, layout)
    if new_files and same_files:
        rows["tokenizer"] = _changes(original.files, new_files, checkpoint.files)
    if pretokenization:
        rows["pre-tokenization"] = pretokenization
    table = Table("", "", show_header=False, title=escape(f"{src} → {dst}"), title_justify="left")
    for name, text in rows.items():
        table.add_row(name, Text(text, "bold red" if "DIFFERENT" in text else ""))
    Console().print(table)
    report_assumed(str(src), checkpoint)
    return int(not (same and same_optimizer and same_files))


def _weights(checkpoint: Checkpoint, comparison: Comparison, layout: str) -> tuple[str, bool]:
    """(one line on the weights after reading back, whether they are those of the checkpoint)."""
    has_own_tables = layout in (*LAYOUTS, *TOOLKITS) or (
        layout in PUBLISHED and PUBLISHED[layout].tables(checkpoint.config)
    )
    different = comparison.different
    recomputed = [name for name in different if name.endswith(".table") and has_own_tables]
    arrays = replace(checkpoint, training=None).tensors
    line = f"{len(arrays)} arrays, {number_of(arrays):,} numbers: "
    if len(different) > len(recomputed):
        return f"{line}{len(different)} DIFFERENT after reading back, first {different[0]}", False
    line += f"bit-identical after reading back, sha256 {comparison.checksum[:16]}"
    return line + (f", except {', '.join(recomputed)}, which {layout} recomputes" if recomputed else ""), True


def _tokenizers(checkpoint: Checkpoint, result: Checkpoint, layout: str) -> tuple[str, bool]:
    """(one line on the tokenizer, whether it is what the layout can store of the checkpoint's)."""
    if checkpoint.files == result.files:
        prefix = f"{FOLDERS[0]}/" if layout in LAYOUTS else ""  # a family's directory has them at its top
        return ", ".join(name.removeprefix(prefix) for name in checkpoint.files) or "none", True
    if layout in TOOLKITS:
        stored = "vocabulary only: this format does not store the segmentation"
        return stored if result.files else "omitted: this format does not store tokenizers", True
    return "DIFFERENT after reading back", False


class _Timer:
    """Seconds within a context."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.seconds = time.monotonic() - self._start

    def rate(self, path: Path) -> str:
        """The seconds, and the rate for a file or directory."""
        files = [path] if path.is_file() else path.rglob("*")
        size = sum(file.stat().st_size for file in files if file.is_file())
        return f"{self.seconds:.1f} s ({size / 1e6:,.1f} MB, {size / 1e6 / self.seconds:,.0f} MB/s)"


@contextmanager
def _byte_progress(label: str, checkpoint: Checkpoint) -> Iterator[None]:
    """A progress bar with bytes and rate, where the format writes or reads one array at a time."""
    completed, total = 0, sum(map(size_of, checkpoint.tensors.specs.values()))

    def add(size: int) -> None:
        nonlocal completed
        completed += size
        show(label, completed, total)

    with progress_bar(in_bytes=True) as show, listening(add):
        show(label, 0, total)
        yield


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
