"""Corpus statistics of a run: tables for a terminal, and a plot of the lengths."""

from collections.abc import Callable
from os import PathLike

import numpy as np
from rich.table import Table

from .cleaning import REASONS
from .encoding import Counts
from .prepare import PreparedRun

_BINS, _WIDTH = 12, 24  # rows of a histogram in the terminal, and characters of its longest bar


def corpus_tables(prepared: PreparedRun) -> list[Table]:
    """Tables of pairs and tokens, of lengths, and of batch shapes with the padding of the first epoch."""
    return [_corpus_table(prepared), _length_table(prepared), _shape_table(prepared)]


def _corpus_table(prepared: PreparedRun) -> Table:
    table = Table("", "train", "validation", title="corpus")
    train, valid = (prepared.counts[name] for name in ("train", "valid"))
    rows = {
        "pairs read": lambda c: f"{c.read:,}",
        "kept": lambda c: f"{c.kept:,}",
        "dropped: an empty side": lambda c: f"{c.empty:,}",
        "dropped: too long": lambda c: f"{c.too_long:,}",
        **{f"dropped: {reason}": _cleaned(i) for i, reason in enumerate(REASONS) if train.cleaned[i]},
        **({"with target terms": lambda c: f"{c.annotated:,}"} if _has_glossary(prepared) else {}),
        "source tokens": lambda c: f"{c.tokens[0]:,}",
        "target tokens": lambda c: f"{c.tokens[1]:,}",
        "unknown in sources": lambda c: f"{c.unknown[0] / c.tokens[0]:.3%}",
        "unknown in targets": lambda c: f"{c.unknown[1] / c.tokens[1]:.3%}",
    }
    for name, text in rows.items():
        table.add_row(name, text(train), text(valid))
    sizes = prepared.run.model
    table.add_row("vocabulary, source and target", f"{sizes.src_vocab_size:,}, {sizes.tgt_vocab_size:,}", "")
    return table


def _has_glossary(prepared: PreparedRun) -> bool:
    """Whether sources are, or could be, annotated."""
    return prepared.run.corpus.glossary is not None or prepared.train.counts.annotated > 0


def _cleaned(i: int) -> Callable[[Counts], str]:
    return lambda counts: f"{counts.cleaned[i]:,}"


def _length_table(prepared: PreparedRun) -> Table:
    """A histogram of sentence lengths."""
    lengths = prepared.train.lengths
    width = -(-int(lengths.max()) // _BINS)
    table = Table("tokens", "sources", "targets", title="lengths, special tokens included")
    counts = [np.bincount(side // width, minlength=_BINS + 1) for side in lengths.T]
    for i in range(_BINS + 1):
        bin_counts = [int(side[i]) for side in counts]
        if any(bin_counts):
            bars = [
                f"{'█' * -(-n * _WIDTH // max(side.max(), 1))} {n:,}"
                for n, side in zip(bin_counts, counts, strict=True)
            ]
            table.add_row(f"{max(i * width, 1)}–{i * width + width - 1}", *bars)
    return table


def _shape_table(prepared: PreparedRun) -> Table:
    """Batch shapes and the padding of the first epoch."""
    first_epoch = prepared.batches()
    plan, lengths = first_epoch.plan(0), first_epoch.pairs(0).lengths
    table = Table("rows", "source", "target", "batches per epoch", "padding", title="shapes", show_footer=True)
    all_positions, all_tokens = 0, 0
    for bucket_index, bucket in enumerate(prepared.buckets):
        batches = [rows for rows, index in zip(plan.batches, plan.buckets, strict=True) if index == bucket_index]
        positions = len(batches) * bucket.sentences * (bucket.src_length + bucket.tgt_length)
        tokens = sum(int(lengths[rows].sum()) for rows in batches)
        all_positions, all_tokens = all_positions + positions, all_tokens + tokens
        shape = (bucket.sentences, bucket.src_length, bucket.tgt_length, len(batches))
        table.add_row(*map(str, shape), f"{1 - tokens / positions:.1%}" if positions else "")
    footers = (
        f"shapes: {len(prepared.buckets)}",
        "",
        "",
        str(len(plan.batches)),
        f"{1 - all_tokens / all_positions:.1%}",
    )
    for column, footer in zip(table.columns, footers, strict=True):
        column.footer = footer
        column.justify = "right"
    return table


def plot_lengths(prepared: PreparedRun, path: str | PathLike[str]) -> None:
    """Save histograms of the lengths of both sides, and a scatter plot of the pairs with the batch shapes."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    lengths = prepared.train.lengths
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    bins = np.arange(1, lengths.max() + 2) - 0.5
    for side, name in zip(lengths.T, ("source", "target"), strict=True):
        left.hist(side, bins, histtype="step", label=name)
    left.set(xlabel="tokens, special ones included", ylabel="sentences", title="lengths")
    left.legend()
    pairs, counts = np.unique(lengths, axis=0, return_counts=True)
    right.scatter(*pairs.T, s=4 * np.sqrt(counts), color="0.7", linewidths=0)
    for bucket in prepared.buckets:
        right.add_patch(
            Rectangle((0, 0), bucket.src_length, bucket.tgt_length, fill=False, edgecolor="C0", linewidth=0.8)
        )
    right.set(xlabel="source tokens", ylabel="target tokens", title=f"pairs and batch shapes: {len(prepared.buckets)}")
    figure.savefig(path, dpi=120)
