"""What each setting costs or gains on Multi30k: one seed, similar time, on the validation set.

`python -m benchmarks.multi30k_ablation FOLDER [NAME ...]`: FOLDER has train and val, .de and .en (.gz too); NAMEs
select rows. With one training per core and other load, ten rows took 24 to 37 minutes each.
Rows in docs/multi30k/results.json are not trained again. p is the p-value of the paired bootstrap of BLEU against the
base setting, whose translations are in docs/multi30k.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.marked_case import write_marked_case
from benchmarks.multi30k import seeded_training
from benchmarks.multi30k_runs import (
    OUT,
    RESULTS,
    TEST,
    VALIDATION,
    Training,
    alone,
    check_files,
    describe_minutes,
    one_core_each,
    record,
    scores_by_name,
    text,
    train_and_score,
)
from benchmarks.pages import marks, write_table
from twinax.train.data.corpus import read_lines
from twinax.train.scores import compare_systems

PAGE, NAME = Path("docs/measurements/multi30k-ablation.md"), "multi30k-ablation"
PREFIX, MARKED_CASE = "ablation-", OUT / "marked_case"
UPDATES = 5600  # of the base setting, in about 20 minutes on one core of an AMD EPYC
HEADER = ("setting", "updates", "minutes", "target tokens per second", "perplexity", "BLEU", "BLEU, lower case", "p")
LENGTHS_NAME, CURVE = "multi30k-minutes", "multi30k-minutes.png"
# The settings of the final runs; of those, vocabulary, warm-up and length differ.
BASE = {
    "training.consistency": "none",
    "tokenizer.bpe-dropout": "0.0",
    "tokenizer.vocab-size": "3000",
    "model.embedding-dropout": "0.15",
    "model.residual-dropout": "0.15",
    "training.optimizer": "adamw",
    "training.weight-decay": "0.1",
    "training.learning-rate": "3e-3",
    "training.warmup-updates": "1200",
    "batches.tokens": "1024",
    "loop.epochs": "None",
    "loop.validate-every": "1400",
    "loop.translations": "0",
}


@dataclass(frozen=True)
class Setting:
    """A row: what differs from the base, and the share of its updates that takes as many minutes."""

    name: str
    label: str
    changes: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()
    share: float = 1.0
    parts: tuple[str, ...] = (VALIDATION,)

    @property
    def training(self) -> Training:
        """The training of the row, English to German, scored on the validation set."""
        values = BASE | {"loop.updates": str(round(self.share * UPDATES))} | dict(self.changes)
        flags = [word for name, value in values.items() for word in (f"--{name}", value)]
        arguments = ("multi30k_en_de", *flags, *self.flags)
        return Training(f"{PREFIX}{self.name}", ("en", "de"), arguments, parts=self.parts)


def _dropout(rate: str) -> tuple[tuple[str, str], ...]:
    return (("model.embedding-dropout", rate), ("model.residual-dropout", rate))


FINAL_VOCABULARY = Setting("vocab_6000", "vocabulary of 6,000", (("tokenizer.vocab-size", "6000"),), share=0.97)
SETTINGS = (
    Setting("base", "pre-norm, cased vocabulary of 3,000, dropout 0.15, 4+4 layers of width 128, weight decay 0.1"),
    Setting("lower", "lowercase vocabulary", flags=("--tokenizer.lowercase",)),
    Setting(
        "marked_case",
        "vocabulary of 3,000 lowercase pieces, with marks for upper case",
        (("tokenizer.vocab-size", "None"), ("tokenizer.split", "whitespace"), ("tokenizer.load", str(MARKED_CASE))),
        share=0.9,
    ),
    FINAL_VOCABULARY,
    Setting("vocab_10000", "vocabulary of 10,000", (("tokenizer.vocab-size", "10000"),), share=0.94),
    Setting(
        "post_norm",
        "post-norm, learning rate 1.5e-3",
        (("model.norm-placement", "post"), ("training.learning-rate", "1.5e-3")),
        ("--model.no-final-norm",),
    ),
    Setting("simcut", "SimCut", (("training.consistency", "simcut"),), share=0.5),
    Setting("r_drop", "R-Drop", (("training.consistency", "r_drop"),), share=0.5),
    Setting("bpe_dropout", "BPE-dropout 0.1", (("tokenizer.bpe-dropout", "0.1"),), share=0.85),
    Setting("dropout_0.1", "dropout 0.1", _dropout("0.1")),
    Setting("dropout_0.2", "dropout 0.2", _dropout("0.2")),
    Setting("deep", "6+6 layers", (("model.num-encoder-layers", "6"), ("model.num-decoder-layers", "6")), share=0.75),
    Setting("wide", "width 256", (("model.d-model", "256"), ("model.d-ff", "512")), share=0.4),
    Setting("average", "average of the last 5 checkpoints", (("loop.validate-every", "300"), ("loop.average", "5"))),
)
BASE_TRANSLATIONS = RESULTS.with_name(f"{PREFIX}base.txt")
# The vocabulary of the final runs in other lengths.
LENGTHS = tuple(replace(FINAL_VOCABULARY, name=f"updates_{n}", share=n / UPDATES) for n in (2716, 10_864))
# 72 epochs, with more dropout; scored on the test set too.
LONGEST = Setting(
    "updates_37152_dropout_0.2",
    "72 epochs, dropout 0.2",
    (*FINAL_VOCABULARY.changes, *_dropout("0.2")),
    share=37_152 / UPDATES,
    parts=(VALIDATION, TEST),
)
FINAL = seeded_training("en_de", 0)
KNOWN = (*SETTINGS, *LENGTHS, LONGEST)


def main(folder: Path, names: Sequence[str]) -> None:
    """Train the missing rows, then write the table."""
    marks(PAGE, NAME)
    marks(PAGE, LENGTHS_NAME)
    check_files(folder, ("de", "en"))
    chosen = [setting for setting in KNOWN if not names or setting.name in names]
    missing = [setting.training for setting in chosen if setting.training.recorded is None]
    with alone(), one_core_each() as map_on_cores:
        if not MARKED_CASE.is_dir():
            train_text = [s for path in text(folder, "train", ("de", "en")) for s in read_lines(str(path))]
            write_marked_case(MARKED_CASE, 3000, train_text)
        list(map_on_cores(lambda training: train_and_score(training, folder), missing))
    _compare([setting.training for setting in SETTINGS], *text(folder, VALIDATION, ("en", "de"))[1:])
    rows = [(s.label, *_row(entry)) for s in SETTINGS if (entry := s.training.recorded) is not None]
    write_table(PAGE, NAME, HEADER, rows)
    trainings = (*(setting.training for setting in (*LENGTHS, FINAL_VOCABULARY)), FINAL)
    entries = [entry for training in trainings if (entry := training.recorded) is not None]
    entries.sort(key=lambda entry: entry["updates"])
    others = [entry] if (entry := LONGEST.training.recorded) is not None else []
    dropouts = ["0.15"] * len(entries) + ["0.2"] * len(others)
    rows = [(dropout, *_row(e)[:-1]) for dropout, e in zip(dropouts, [*entries, *others], strict=True)]
    write_table(PAGE, LENGTHS_NAME, ("dropout", *HEADER[1:-1]), rows)
    if entries:
        _plot(entries)


def _compare(trainings: Sequence[Training], reference: Path) -> None:
    """Record the p-value of each BLEU against that of the first training, as far as the translations are here."""
    base, *others = trainings
    ending = f"{VALIDATION}.txt"
    if base.file(ending).is_file():
        shutil.copy(base.file(ending), BASE_TRANSLATIONS)
    if not BASE_TRANSLATIONS.is_file():
        return
    references = [list(read_lines(str(reference)))]
    for training in others:
        path = training.file(ending)
        if training.recorded is not None and path.is_file():
            systems = {name: list(read_lines(str(file))) for name, file in (("", BASE_TRANSLATIONS), ("other", path))}
            (bleu, *_) = compare_systems(systems, references)["other"]
            assert bleu.p_value is not None  # only the first system has none
            record(training.name, p_value=round(bleu.p_value, 4))


def _row(entry: Mapping[str, Any]) -> tuple[str, ...]:
    values = scores_by_name(entry, VALIDATION)
    numbers = f"{entry['updates']:,}", describe_minutes(entry), f"{entry['target_tokens_per_second']:,}"
    scores = (f"{values[name]:.1f}" for name in ("BLEU", "BLEU, lower case"))
    p_value = f"{entry['p_value']:.3f}" if "p_value" in entry else "–"
    return (*numbers, f"{entry['validation_perplexity']:.2f}", *scores, p_value)


def _plot(entries: Sequence[Mapping[str, Any]]) -> None:
    """Plot BLEU over minutes: each point is a training of its own, because the schedule ends with it."""
    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    for name in ("BLEU", "BLEU, lower case"):
        points = sorted((entry["minutes"], scores_by_name(entry, VALIDATION)[name]) for entry in entries)
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.set(xlabel="minutes on one core", ylabel="BLEU on the validation set", xscale="log")
    minutes = [entry["minutes"] for entry in entries]
    axes.set_xticks(minutes, [f"{m:.0f}" for m in minutes])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(PAGE.with_name(CURVE), dpi=120)


if __name__ == "__main__":
    known = [setting.name for setting in KNOWN]
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir() or not {*sys.argv[2:]} <= {*known}:
        sys.exit(f"usage: python -m benchmarks.multi30k_ablation FOLDER [{'|'.join(known)} ...]")
    main(Path(sys.argv[1]), sys.argv[2:])
