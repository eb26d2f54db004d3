"""Writes the generated parts of docs/results.md for multi30k.py: tables, translations and pictures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

import twinax
from benchmarks.pages import write_between, write_table
from twinax.attention_plot import attention_plot
from twinax.train.data.corpus import read_lines
from twinax.train.tracking.metrics import best_update, read_metrics, validations

PAGE = Path("docs/results.md")
PARTS = ("multi30k", "multi30k-signatures", "multi30k-proof", "multi30k-translations", "multi30k-pictures")
PICTURES = {
    "multi30k.png": "Validation loss and BLEU of the runs",
    "parity.png": "The ladder and the translations of the German-English model, on the test set",
    "attention.png": "Attention weights of the translation of the first test sentence",
}
METRICS = ("BLEU, lower case", "BLEU", "chrF", "TER")
HEADER = ("run", *METRICS, "validation perplexity", "updates", "minutes on one core")
PROOF = (
    "run",
    "ladder in float64",
    "beam",
    "compared",
    "identical sentences",
    "within rounding",
    "tokens",
    "score difference",
)
EXAMPLES = 5  # translations


def write_page(
    out: Path,
    scores: Mapping[str, Sequence[Mapping[str, Any]]],
    proofs: Mapping[str, Mapping[str, Any]],
    example_files: tuple[Path, Path, Path],
) -> None:
    """Fills the page. `scores` and `proofs` by run; `example_files`: run, source and target of the examples."""
    write_table(PAGE, "multi30k", HEADER, [_scores(out / name, run_scores) for name, run_scores in scores.items()])
    signatures = {score["name"]: score["signature"] for run_scores in scores.values() for score in run_scores}
    write_between(PAGE, "multi30k-signatures", "\n".join(f"- {name}: `{text}`" for name, text in signatures.items()))
    write_table(PAGE, "multi30k-proof", PROOF, [row for name, proof in proofs.items() for row in _proof(name, proof)])
    run, src, tgt = example_files
    sides = [list(read_lines(str(path)))[:EXAMPLES] for path in (src, run.with_suffix(".translations"), tgt)]
    lines = [f"source      {s}\ntranslation {t}\nreference   {r}\n" for s, t, r in zip(*sides, strict=True)]
    write_between(PAGE, "multi30k-translations", "\n".join(["```", "\n".join(lines).rstrip(), "```"]))
    curves = {name: validations(read_metrics(out / name)) for name in scores}
    graph, ladder, attention = (PAGE.with_name(name) for name in PICTURES)
    plot(curves, graph)
    printed = run.with_suffix(".parity.txt").read_text()
    command = (
        f"twinax parity {run} --src test.{src.name.split('.')[1]} --tgt test.{tgt.name.split('.')[1]} --translations"
    )
    draw_text(f"{command}\n{printed[printed.index('┏') :]}", ladder)  # without the paths of this machine
    draw(run, sides[0][0], sides[1][0], attention)
    pictures = [f"{text}:\n\n![{text}]({name})" for name, text in PICTURES.items()]
    write_between(PAGE, "multi30k-pictures", "\n\n".join(pictures))


def _scores(run: Path, scores: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """A run's row."""
    records, values = read_metrics(run), {score["name"]: score["value"] for score in scores}
    validation_scores = validations(records)
    # The scored checkpoint is the averaged one, else the best.
    averaged = [record["validation"] for record in records if record.get("averaged")]
    scored = averaged[-1] if averaged else validation_scores[best_update(validation_scores, "loss") or 0]
    minutes = float(run.with_suffix(".seconds").read_text()) / 60
    updates = max(record["update"] for record in records)
    numbers = [f"{values[name]:.2f}" for name in METRICS]
    return (run.name, *numbers, f"{scored['perplexity']:.2f}", f"{updates:,}", f"{minutes:.0f}")


def _proof(name: str, proof: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A run's rows: one per search and beam size."""
    worst = max(rung["error"] for rung in proof["rungs"])
    ladder = f"{'equal' if all(rung['ok'] for rung in proof['rungs']) else 'DIFFERENT'}, {worst:.1e}"
    rows = []
    for t in proof["translations"]:
        sentences = t["equal"] + len(t["ties"]) + len(t["different"])
        within_rounding = ", ".join(f"line {line}: {margin:.1e}" for line, margin in t["ties"].items()) or "none"
        equal = f"{t['equal']:,} of {sentences:,}" + (" DIFFERENT" if t["different"] else "")
        cells = (str(t["beam_size"]), f"{t['search']} to PyTorch", equal, within_rounding, f"{t['tokens']:,}")
        sums = f"{t['score_error']:.1e}" if t["search"] == "Flax" else "–"  # generate returns no scores for a beam of 1
        rows.append((name, ladder, *cells, sums))
    return rows


def plot(curves: Mapping[str, Mapping[int, Mapping[str, Any]]], path: Path) -> None:
    """Plots validation loss and BLEU over updates, one line per run; runs of one kind have one colour."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    kinds = list(dict.fromkeys(name.split("-")[0] for name in curves))
    for axes, metric in zip(figure.subplots(1, 2), ("loss", "bleu"), strict=True):
        for name, scores in curves.items():
            kind = name.split("-")[0]
            label = kind if name in (kind, f"{kind}-0") else None
            style = "--" if name.endswith("tuned") else "-"
            label = name if name.endswith("tuned") else label
            color = f"C{kinds.index(kind)}"
            axes.plot(list(scores), [v[metric] for v in scores.values()], style, color=color, linewidth=1, label=label)
        axes.set(
            xlabel="updates", ylabel="loss in nats per token" if metric == "loss" else "BLEU, greedy, 200 sentences"
        )
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", nbins=5)
    lowest = min(v["loss"] for scores in curves.values() for v in scores.values())
    figure.axes[0].set_ylim(0.9 * lowest, 3 * lowest)  # cuts off the first updates
    figure.axes[1].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def draw(run: Path, source: str, translation: str, path: Path) -> None:
    """Plots the attention weights of a translation: last layer, mean of its heads."""
    attention = twinax.load(str(run)).attention(source, translation)
    attention_plot(attention.weights, attention.targets, attention.sources, path)


def draw_text(text: str, path: Path) -> None:
    """Draws the output of a command as in a terminal."""
    lines = [line.rstrip() for line in text.strip("\n").splitlines()]
    figure = Figure(figsize=(8, 4))  # cropped to the text on saving
    figure.text(
        0.01, 0.99, "\n".join(lines), family="monospace", fontsize=9, linespacing=1.0, va="top", parse_math=False
    )
    figure.savefig(path, dpi=120, bbox_inches="tight")
