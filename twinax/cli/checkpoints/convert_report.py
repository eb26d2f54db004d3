"""The report of `twinax convert`: what was read back, and how long it took."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ...configs.printing import escape_lines
from ...convert import Checkpoint, checksum
from ...convert.arrays.verification import Comparison, number_of
from ...convert.checkpoint import FOLDERS, MOMENTS
from ...convert.formats import ctranslate2
from ...convert.formats.file_layouts import PUBLISHED
from ...convert.formats.hugging_face import LAYOUTS, family
from ...convert.formats.registry import TOOLKITS
from ...convert.formats.single_file import OPTIMIZERS
from ...convert.io.progress import listening
from ...convert.io.safetensors_files import size_of
from ...convert.optimizers.trainer import FILES, unsupported_training
from ...train.tracking.progress import progress_bar


class Timer:
    """Seconds within a context."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.seconds = time.monotonic() - self._start

    def rate(self, path: Path, without: "Timer") -> str:
        """The seconds, less those of another timer, and the rate for a file or directory."""
        files = [path] if path.is_file() else path.rglob("*")
        size, seconds = sum(file.stat().st_size for file in files if file.is_file()), self.seconds - without.seconds
        return f"{seconds:.1f} s ({size / 1e6:,.1f} MB, {size / 1e6 / seconds:,.0f} MB/s)"


@contextmanager
def byte_progress(checkpoint: Checkpoint) -> Iterator[Callable[[str], None]]:
    """A progress bar with bytes and rate, where the format writes or reads one array at a time.

    Yields `begin(label)`, which begins at 0 bytes.
    """
    label, completed, total = "", 0, sum(map(size_of, checkpoint.tensors.specs.values()))

    def begin(new_label: str) -> None:
        nonlocal label, completed
        label, completed = new_label, 0
        show(label, completed, total)

    def add(size: int) -> None:
        nonlocal completed
        completed += size
        show(label, completed, total)

    with progress_bar(in_bytes=True) as show, listening(add):
        yield begin


def describe_weights(
    checkpoint: Checkpoint, comparison: Comparison, dst: Path, layout: str, quantization: str | None
) -> tuple[str, bool]:
    """(one line on the weights after reading back, whether they are those of the checkpoint)."""
    arrays = replace(checkpoint, training=None).tensors
    line = f"{len(arrays)} arrays, {number_of(arrays):,} numbers: "
    if quantization is not None:
        error = ctranslate2.largest_error(checkpoint, dst, quantization)
        verdict = f"{line}{quantization}, largest error {error:.3f} of half a step; above 1 would be wrong"
        return (verdict, True) if error <= 1 else (f"{verdict}, DIFFERENT after reading back", False)
    has_own_tables = layout in (*LAYOUTS, *TOOLKITS) or (
        layout in PUBLISHED and PUBLISHED[layout].tables(checkpoint.config)
    )
    different = comparison.different
    recomputed = [name for name in different if name.endswith(".table") and has_own_tables]
    if len(different) > len(recomputed):
        return f"{line}{len(different)} DIFFERENT after reading back, first {different[0]}", False
    line += f"bit-identical after reading back, sha256 {comparison.checksum[:16]}"
    verb = "stores without unused rows" if layout == ctranslate2.LAYOUT else "recomputes"
    return line + (f", except {', '.join(recomputed)}, which {layout} {verb}" if recomputed else ""), True


def describe_optimizers(
    original: Checkpoint, checkpoint: Checkpoint, result: Checkpoint, dtype: str | None
) -> tuple[str, bool]:
    """(one line on the optimizer, whether nothing is wrong); `checkpoint`: the original after `--dtype` and so on."""
    before, after = original.training, result.training
    if before is None:
        states = [name for name in checkpoint.skipped if "optim" in name]
        resumable = any(name in (*OPTIMIZERS, *FILES) for name in states)
        advice = ": pass --run, the run that resumes from it" if resumable else ""
        return f"{states[0]} ignored{advice}" if states else "none", True
    if after is None:
        reason: str | None = "this format does not store them"
        if checkpoint.training is None:
            reason = f"{'--weights-only' if dtype is None else '--dtype'} converts the weights alone"
        elif result.layout in LAYOUTS:
            reason = unsupported_training(checkpoint, family(result.layout))
        omitted = f"omitted, with the run and its {before.update:,} updates"
        return f"{omitted}: {reason}" if reason else omitted, True
    same = all(checksum(getattr(before, key)) == checksum(getattr(after, key)) for key in MOMENTS)
    same &= replace(after, exp_avg={}, exp_avg_sq={}) == replace(before, exp_avg={}, exp_avg_sq={})
    verdict = "bit-identical after reading back" if same else "[bold red]DIFFERENT after reading back[/]"
    return f"{before.run.training.optimizer} after {before.count:,} updates: {verdict}", same


def describe_tokenizers(checkpoint: Checkpoint, result: Checkpoint, layout: str) -> tuple[str, bool]:
    """(one line on the tokenizer, whether it is what the layout can store of the checkpoint's)."""
    if checkpoint.files == result.files:
        prefix = f"{FOLDERS[0]}/" if layout in LAYOUTS else ""  # a family's directory has them at its top
        return ", ".join(name.removeprefix(prefix) for name in checkpoint.files) or "none", True
    if layout in TOOLKITS:
        stored = "vocabulary only: this format does not store the segmentation"
        return stored if result.files else "omitted: this format does not store tokenizers", True
    return "DIFFERENT after reading back", False


def print_report(title: str, rows: Mapping[str, str]) -> None:
    """Print a table of the rows; what differs is in red."""
    table = Table("", "", show_header=False, title=escape(title), title_justify="left")
    for name, text in rows.items():
        table.add_row(name, Text(escape_lines(text), "bold red" if "DIFFERENT" in text else ""))
    Console().print(table)
