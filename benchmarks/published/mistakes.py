"""Measures the cost of the published systems' mistakes: small models on Multi30k, for docs/measurements/mistakes.md.

`python -m benchmarks.published.mistakes FOLDER [UPDATES]`: FOLDER has train and val, .de and .en (.gz too). One
training runs per core. Results in runs/mistakes are reused, and interrupted trainings are resumed.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.multi30k.runs import one_core_each, text, write
from benchmarks.pages import marks, write_between, write_table
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.published.registry import RECIPES, SYSTEMS, recipe
from twinax.train.tracking.metrics import read_metrics, validations

PAGE, OUT, PICTURE = Path("docs/measurements/mistakes.md"), Path("runs/mistakes"), "mistakes.png"
TOKENS, UPDATES, POINTS, WARM_UP, PEAK = 1024, 2000, 10, 400, 1e-3
SIZES = {"d_model": 64, "d_ff": 128, "num_heads": 4, "num_encoder_layers": 2, "num_decoder_layers": 2}
LONGEST = 64  # tokens of a translation
HEADER = ("system", "variant", "validation loss", "validation BLEU", "minutes")
ABLATED = "lucky_glass"
ABLATED_LABELS = {"model repaired": "all model repairs", "repaired": "all repairs, schedule included"}


@dataclass(frozen=True)
class Variant:
    """A system as published, with some of its mistakes repaired."""

    system: str
    name: str
    model: dict[str, Any] = field(default_factory=dict)  # repairs
    training: dict[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in the table and the plot; `name` is that of the run directory."""
        return ABLATED_LABELS.get(self.name, self.name) if self.system == ABLATED else self.name

    @property
    def run(self) -> Path:
        """The run directory."""
        return OUT / f"{self.system}-{self.name.replace(' ', '_')}"

    def config(self, folder: Path, updates: int) -> RunConfig:
        """The run: loss, optimizer and schedule of the system; sizes, tokenizer, batches and peak rate are common."""
        base = recipe(self.system, as_published=True)
        (src, tgt), valid = (text(folder, part, ("de", "en")) for part in ("train", "val"))
        files = {"src": str(src), "tgt": str(tgt), "valid_src": str(valid[0]), "valid_tgt": str(valid[1])}
        heads = {"head_dim": 16, "v_head_dim": 16} if base.model.head_dim else {}
        training = replace(base.training, **self.training)
        return RunConfig(
            corpus=CorpusConfig(**files),
            tokenizer=TokenizerConfig(
                split="bytes",
                vocab_size=3000,
                lowercase=True,
                special_order=base.tokenizer.special_order,
                source_bos=base.tokenizer.source_bos,
            ),
            batches=BatchConfig(tokens=TOKENS, shapes=3),
            model=base.model.replace(**SIZES, **heads, **self.model),
            training=replace(training, **_rates(training.schedule)),
            loop=LoopConfig(updates=updates, validate_every=max(updates // POINTS, 1), translations=0),
        )


def _rates(schedule: str) -> dict[str, Any]:
    """Settings of a schedule for a small model and a short training: its highest rate is PEAK."""
    if schedule.startswith("noam"):
        return {"warmup_updates": WARM_UP, "learning_rate": PEAK * (SIZES["d_model"] * WARM_UP) ** 0.5}
    return {"learning_rate": PEAK} | ({"final_learning_rate": PEAK / 10} if schedule == "cosine" else {})


def variants() -> Iterator[Variant]:
    """All systems as published and repaired; for ABLATED also each repair alone, and all repairs of the model."""
    for system in SYSTEMS:
        yield Variant(system, "as published")
        if system == ABLATED:
            for name, value in RECIPES[system].repairs.items():
                yield Variant(system, f"{name} repaired", {name: value})
            yield Variant(system, "schedule repaired", {}, RECIPES[system].training_repairs)
            yield Variant(system, "model repaired", RECIPES[system].repairs)
        yield Variant(system, "repaired", RECIPES[system].repairs, RECIPES[system].training_repairs)


def main(folder: Path, updates: int) -> None:
    """Run the missing trainings, then write table and plot."""
    for name in ("mistakes", "mistakes-pictures"):
        marks(PAGE, name)
    missing = [path for part in ("train", "val") for path in text(folder, part, ("de", "en")) if not path.is_file()]
    if missing:
        sys.exit(f"{folder}: has no {', '.join(map(str, missing))}")
    OUT.mkdir(parents=True, exist_ok=True)
    all_variants = list(variants())
    start = time.monotonic()
    with one_core_each() as run_all:
        for number, _ in enumerate(run_all(lambda variant: _in_a_process(variant, folder, updates), all_variants), 1):
            print(
                f"{number} of {len(all_variants)} variants, {(time.monotonic() - start) / 60:.0f} minutes", flush=True
            )
    results = [json.loads(variant.run.with_suffix(".json").read_text()) for variant in all_variants]
    write_table(PAGE, "mistakes", HEADER, [_row(*pair) for pair in zip(all_variants, results, strict=True)])
    _draw(all_variants)
    write_between(PAGE, "mistakes-pictures", f"![Validation loss over updates]({PICTURE})")


def _in_a_process(variant: Variant, folder: Path, updates: int) -> None:
    """Train and measure a variant in a separate process, on the core of this thread."""
    result, log = variant.run.with_suffix(".json"), variant.run.with_suffix(".log")
    if result.is_file():
        if (updates_of_result := json.loads(result.read_text())["updates"]) != updates:
            sys.exit(f"{result}: has {updates_of_result} updates and not {updates}; remove {OUT} to start again")
        return
    command = [sys.executable, "-m", __spec__.name, str(folder), str(updates), variant.run.name]
    with log.open("a") as file:
        if subprocess.run(command, check=False, stderr=file).returncode:
            message = f"{variant.run}: failed, see {log}"
            print(message, file=sys.stderr, flush=True)
            sys.exit(message)


def measure(variant: Variant, folder: Path, updates: int) -> None:
    """Train or resume a variant and write its validation scores; seconds add up over starts."""
    from twinax.inference.scores import corpus_scores
    from twinax.inference.translator import load
    from twinax.train.loop.loop import train

    clock = variant.run.with_suffix(".seconds")
    start = time.monotonic()
    earlier_seconds = float(clock.read_text()) if clock.is_file() else 0.0
    config = variant.config(folder, updates)
    try:
        outcome = train(config, variant.run)
    finally:
        write(clock, str(earlier_seconds + time.monotonic() - start))
    if outcome.stopped_by is not None or outcome.validation is None:
        sys.exit(1)
    results: dict[str, Any] = {"updates": updates, "loss": outcome.validation["loss"], "bleu": None}
    if config.model.cross_mask != "encoder":
        src, tgt = (_lines(path) for path in text(folder, "val", ("de", "en")))
        decoding = {"beam_size": 1, "max_length": min(LONGEST, config.model.max_length)}
        translations = load(variant.run).translate(src, framework="torch", **decoding)  # torch needs no compilation
        scores = {score.name: score.value for score in corpus_scores(translations, [tgt])}
        results["bleu"] = scores["BLEU, lower case"]
    results["minutes"] = float(clock.read_text()) / 60
    write(variant.run.with_suffix(".json"), json.dumps(results))


def _lines(path: Path) -> list[str]:
    from twinax.train.text.corpus import read_lines

    return list(read_lines(str(path)))


def _row(variant: Variant, results: dict[str, Any]) -> tuple[str, ...]:
    bleu = "cannot translate" if results["bleu"] is None else f"{results['bleu']:.1f}"
    return f"`{variant.system}`", variant.label, f"{results['loss']:.2f}", bleu, f"{results['minutes']:.0f}"


def _draw(all_variants: list[Variant]) -> None:
    """Plot validation loss over updates: all systems, and the single repairs of ABLATED."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    colors = {system: f"C{i}" for i, system in enumerate(SYSTEMS)}
    for variant in all_variants:
        scores = validations(read_metrics(variant.run))
        curve = list(scores), [v["loss"] for v in scores.values()]
        if variant.name in ("as published", "repaired"):
            style = "--" if variant.name == "as published" else "-"
            left.plot(*curve, style, color=colors[variant.system], label=f"{variant.system}, {variant.name}")
        if variant.system == ABLATED:
            right.plot(*curve, marker="o", ms=3, label=variant.label)
    left.set(title="as published and repaired", ylabel="validation loss in nats per token")
    right.set(title=f"{ABLATED}: repaired alone and together")
    for axes in (left, right):
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)
    figure.savefig(PAGE.with_name(PICTURE), dpi=120)


if __name__ == "__main__":
    corpus, number, *name = [*sys.argv[1:], *[str(UPDATES)] * (len(sys.argv) == 2)] or ["", ""]
    if not Path(corpus).is_dir() or not number.isdigit() or not int(number):
        sys.exit("usage: python -m benchmarks.published.mistakes FOLDER [UPDATES]")
    if name:  # the process that `_in_a_process` starts
        (variant,) = [variant for variant in variants() if [variant.run.name] == name]
        measure(variant, Path(corpus), int(number))
    else:
        main(Path(corpus), int(number))
