"""Writes the generated parts of docs/measurements/multi30k.md from docs/multi30k: tables, translations and pictures."""

from collections.abc import Mapping, Sequence
from io import StringIO
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

import twinax
from benchmarks.multi30k.runs import RESULTS, TEST, VALIDATION, Training, describe_minutes, scores_by_name, text
from benchmarks.pages import write_between, write_table
from twinax.inference.attention_plot import attention_plot
from twinax.parity import report
from twinax.parity.coverage import Coverage
from twinax.parity.harness import Report
from twinax.parity.ladder import Ladder, Rung
from twinax.parity.search import translations
from twinax.train.text.corpus import read_lines

PAGE = Path("docs/measurements/multi30k.md")
PARTS = ("multi30k", "multi30k-seeds", "multi30k-signatures", "multi30k-proof", "multi30k-translations")
CURVES, LADDER, ATTENTION = "multi30k.png", "parity.png", "attention.png"
METRICS = ("BLEU", "BLEU, lower case", "chrF", "TER")
HEADER = ("run", *METRICS, "validation BLEU", "perplexity", "updates", "minutes", "target tokens per second")
SEEDS = ("direction", "seeds", *METRICS)
PROOF = (
    "run",
    "family",
    "ladder in float64",
    "beam",
    "compared",
    "identical sentences",
    "within rounding",
    "tokens",
    "score difference",
)
EXAMPLE, EXAMPLES = "de_en-0", 5  # the training whose first translations are shown


def write_page(trainings: Sequence[Training], folder: Path) -> None:
    """Fill the page from the records of those trainings that are recorded; `folder` has the corpus."""
    entries = {training.name: entry for training in trainings if (entry := training.recorded) is not None}
    write_table(PAGE, "multi30k", HEADER, [_scores(name, entry) for name, entry in entries.items()])
    write_table(PAGE, "multi30k-seeds", SEEDS, [*_seeds(entries)])
    signatures = {score["name"]: score["signature"] for entry in entries.values() for score in entry["scores"][TEST]}
    write_between(
        PAGE, "multi30k-signatures", "\n".join(f"- {name}: `{signature}`" for name, signature in signatures.items())
    )
    rows = [row for name, entry in entries.items() if "proof" in entry for row in _proof(name, entry)]
    write_table(PAGE, "multi30k-proof", PROOF, rows)
    for training in trainings:
        if training.name == EXAMPLE and EXAMPLE in entries:
            write_between(PAGE, "multi30k-translations", _translations(training, folder))
            if "proof" in entries[EXAMPLE]:
                draw_text(proof_text(EXAMPLE, entries[EXAMPLE]["proof"]), PAGE.with_name(LADDER))
    if entries:
        plot({name: entry["curve"] for name, entry in entries.items()}, PAGE.with_name(CURVES))


def _translations(training: Training, folder: Path) -> str:
    """The first test sentences, their translations and references, as a block of Markdown."""
    src, tgt = text(folder, TEST, training.languages)
    files = (src, RESULTS.with_name(f"{training.name}.txt"), tgt)
    sides = [list(read_lines(str(path)))[:EXAMPLES] for path in files]
    lines = [f"source      {s}\ntranslation {t}\nreference   {r}\n" for s, t, r in zip(*sides, strict=True)]
    return "\n".join(["```", "\n".join(lines).rstrip(), "```"])


def _scores(name: str, entry: Mapping[str, Any]) -> tuple[str, ...]:
    """A run's row."""
    values = scores_by_name(entry, TEST)
    numbers = [f"{values[metric]:.2f}" for metric in METRICS]
    validation = f"{scores_by_name(entry, VALIDATION)['BLEU']:.2f}", f"{entry['validation_perplexity']:.2f}"
    cost = f"{entry['updates']:,}", describe_minutes(entry), f"{entry['target_tokens_per_second']:,}"
    return (name, *numbers, *validation, *cost)


def _seeds(entries: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Mean and standard deviation over the seeds of a direction."""
    rows = []
    seeded = sorted(name for name in entries if name.rpartition("-")[2].isdigit())
    for direction, names in groupby(seeded, key=lambda name: name.rpartition("-")[0]):
        values = [scores_by_name(entries[name], TEST) for name in names]
        if len(values) > 1:
            columns = [[scores[metric] for scores in values] for metric in METRICS]
            rows.append((direction, str(len(values)), *(f"{mean(c):.2f} ± {stdev(c):.2f}" for c in columns)))
    return rows


def _proof(name: str, entry: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A run's rows: one per search and beam size."""
    proof = entry["proof"]
    worst = max(rung["error"] for rung in proof["rungs"])
    ladder = f"{'equal' if all(rung['ok'] for rung in proof['rungs']) else 'DIFFERENT'}, {worst:.1e}"
    rows = []
    for t in proof["translations"]:
        sentences = t["equal"] + len(t["ties"]) + len(t["different"])
        within_rounding = ", ".join(f"line {line}: {margin:.1e}" for line, margin in t["ties"].items()) or "none"
        equal = f"{t['equal']:,} of {sentences:,}" + (" DIFFERENT" if t["different"] else "")
        cells = (str(t["beam_size"]), f"{t['search']} to PyTorch", equal, within_rounding, f"{t['tokens']:,}")
        sums = f"{t['score_error']:.1e}" if t["search"] == "Flax" else "–"  # generate returns no scores for a beam of 1
        rows.append((name, entry["layout"], ladder, *cells, sums))
    return rows


def plot(curves: Mapping[str, Sequence[Sequence[Any]]], path: Path) -> None:
    """Plot validation loss and BLEU over updates, one line per run; runs of one kind have one color."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    kinds = list(dict.fromkeys(name.split("-")[0] for name in curves))
    for column, axes in enumerate(figure.subplots(1, 2), start=1):
        for name, points in curves.items():
            kind = name.split("-")[0]
            is_tuned = name.endswith("tuned")
            label = name if is_tuned else kind if name in (kind, f"{kind}-0") else None
            updates, values = [point[0] for point in points], [point[column] for point in points]
            color = f"C{kinds.index(kind)}"
            axes.plot(updates, values, "--" if is_tuned else "-", color=color, linewidth=1, label=label)
        axes.set(xlabel="updates", ylabel=("loss in nats per token", "BLEU, greedy, 200 sentences")[column - 1])
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", nbins=5)
    lowest = min(point[1] for points in curves.values() for point in points)
    figure.axes[0].set_ylim(0.9 * lowest, 3 * lowest)  # cuts off the first updates
    figure.axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw_attention(training: Training, folder: Path) -> None:
    """Draw the attention weights of the first test sentence (last layer, mean of heads)."""
    example = [next(iter(read_lines(str(path)))) for path in text(folder, TEST, training.languages)]
    attention = twinax.load(str(training.run)).attention(example[0], example[1])
    attention_plot(attention.weights, attention.targets, attention.sources, PAGE.with_name(ATTENTION))


def proof_text(name: str, proof: Mapping[str, Any]) -> str:
    """A recorded proof as `twinax parity` shows it on a terminal."""
    ladder = Ladder(
        report=Report((), ()),
        coverage=Coverage(**proof["inputs"]),
        oracle_reports={},
        rungs=tuple(Rung(**rung) for rung in proof["rungs"]),
        product_ratio=proof["product_ratio"],
        sum_ratio=proof["sum_ratio"],
        inputs=proof["pooled_inputs"],
        ratios_decide=proof["ratios_decide"],
    )
    oracle = proof["translations"][-1]["search"]
    output = StringIO()
    terminal = Console(width=80, file=output)
    terminal.print(f"twinax parity {name} --src test --tgt test --translations")
    terminal.print(report.table("", ladder, oracle))
    terminal.print(report.caption(ladder, oracle))
    terminal.print(translations.table(proof["translations"]))
    terminal.print("equal" if proof["equal"] else "DIFFERENT")
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def draw_text(text: str, path: Path) -> None:
    """Draw the output of a command as in a terminal."""
    figure = Figure(figsize=(8, 4))  # cropped to the text on saving
    figure.text(0.01, 0.99, text, family="monospace", fontsize=9, linespacing=1.0, va="top", parse_math=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
