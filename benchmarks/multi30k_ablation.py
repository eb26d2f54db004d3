"""What each setting costs or gains on Multi30k, for docs/results.md: one seed, equal minutes, on the validation set.

`python -m benchmarks.multi30k_ablation FOLDER [NAME ...]`: FOLDER has train and val, .de and .en (.gz too); NAMEs
select rows. A row takes at most 25 minutes, with one training per core. Rows in docs/multi30k/results.json are not
trained again. p is the p-value of the paired bootstrap of BLEU against the first row.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.marked_case import write_marked_case
from benchmarks.multi30k_runs import (
    OUT,
    Training,
    check_files,
    describe_minutes,
    one_core_each,
    read_results,
    record,
    text,
    train_and_score,
    train_starts,
)
from benchmarks.pages import marks, write_table
from twinax.train.data.corpus import read_lines
from twinax.train.scores import compare_systems

PAGE, NAME = Path("docs/results.md"), "multi30k-ablation"
PREFIX, MARKED_CASE = "ablation-", OUT / "marked_case"
UPDATES = 5600  # of the base setting, in about 20 minutes on one core of an AMD EPYC
HEADER = ("setting", "updates", "minutes", "target tokens per second", "perplexity", "BLEU", "BLEU, lower case", "p")
# The settings of the runs without what the table measures.
BASE = {
    "training.consistency": "none",
    "tokenizer.bpe-dropout": "0.0",
    "tokenizer.vocab-size": "3000",
    "model.embedding-dropout": "0.2",
    "model.residual-dropout": "0.2",
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
    start: "Setting | None" = None  # whose weights it starts from

    @property
    def training(self) -> Training:
        """The training of the row, English to German, scored on the validation set."""
        values = BASE | {"loop.updates": str(round(self.share * UPDATES))} | dict(self.changes)
        flags = [word for name, value in values.items() for word in (f"--{name}", value)]
        arguments = ("multi30k_en_de", *flags, *self.flags)
        start = self.start and self.start.training
        return Training(f"{PREFIX}{self.name}", ("en", "de"), arguments, scored_on="val", start=start)


def _dropout(rate: str) -> tuple[tuple[str, str], ...]:
    return (("model.embedding-dropout", rate), ("model.residual-dropout", rate))


BOTH = Setting("both", "both directions", (("training.schedule", "constant"),), ("--both-directions",), share=1 / 3)
SETTINGS = (
    Setting("base", "pre-norm, cased vocabulary of 3,000, dropout 0.2, 4+4 layers of width 128, weight decay 0.1"),
    Setting(
        "tokens_2048",
        "batches of 2,048 tokens, learning rate 4e-3",
        (("batches.tokens", "2048"), ("training.learning-rate", "4e-3"), ("training.warmup-updates", "600")),
        share=0.5,
    ),
    Setting("no_decay", "no weight decay", (("training.weight-decay", "0.0"),)),
    Setting("decay_0.3", "weight decay 0.3", (("training.weight-decay", "0.3"),)),
    Setting("lower", "lowercase vocabulary", flags=("--tokenizer.lowercase",)),
    Setting(
        "marked_case",
        "vocabulary of 3,000 lowercase pieces, with marks for upper case",
        (("tokenizer.vocab-size", "None"), ("tokenizer.split", "whitespace"), ("tokenizer.load", str(MARKED_CASE))),
        share=0.9,
    ),
    Setting("vocab_6000", "vocabulary of 6,000", (("tokenizer.vocab-size", "6000"),), share=0.97),
    Setting("vocab_10000", "vocabulary of 10,000", (("tokenizer.vocab-size", "10000"),), share=0.8),
    Setting(
        "post_norm",
        "post-norm, learning rate 1.5e-3",
        (("model.norm-placement", "post"), ("training.learning-rate", "1.5e-3")),
        ("--model.no-final-norm",),
    ),
    Setting(
        "both_first",
        "both directions in the first third of the updates",
        (("training.warmup-updates", "200"),),
        share=2 / 3,
        start=BOTH,
    ),
    Setting("simcut", "SimCut", (("training.consistency", "simcut"),), share=0.5),
    Setting("r_drop", "R-Drop", (("training.consistency", "r_drop"),), share=0.5),
    Setting("bpe_dropout", "BPE-dropout 0.1", (("tokenizer.bpe-dropout", "0.1"),), share=0.85),
    Setting("dropout_0.1", "dropout 0.1", _dropout("0.1")),
    Setting("dropout_0.3", "dropout 0.3", _dropout("0.3")),
    Setting("deep", "6+6 layers", (("model.num-encoder-layers", "6"), ("model.num-decoder-layers", "6")), share=0.75),
    Setting("shallow", "2+2 layers", (("model.num-encoder-layers", "2"), ("model.num-decoder-layers", "2")), share=1.5),
    Setting("wide", "width 256", (("model.d-model", "256"), ("model.d-ff", "512")), share=0.4),
    Setting("average", "average of the last 5 checkpoints", (("loop.validate-every", "300"), ("loop.average", "5"))),
)


def main(folder: Path, names: Sequence[str]) -> None:
    """Trains the missing rows, then writes the table."""
    marks(PAGE, NAME)
    check_files(folder, ("de", "en"))
    OUT.mkdir(parents=True, exist_ok=True)
    if not MARKED_CASE.is_dir():
        write_marked_case(
            MARKED_CASE, 3000, [s for path in text(folder, "train", ("de", "en")) for s in read_lines(str(path))]
        )
    chosen = [setting for setting in SETTINGS if not names or setting.name in names]
    missing = [setting.training for setting in chosen if setting.training.recorded is None]
    with one_core_each() as run_all:
        train_starts(run_all, missing, folder)
        list(run_all(lambda training: train_and_score(training, folder), missing))
    _compare(*text(folder, "val", ("en", "de"))[1:])
    write_table(PAGE, NAME, HEADER, [row for setting in SETTINGS if (row := _row(setting))])


def _compare(reference: Path) -> None:
    """Records the p-value of each row's BLEU against the base's, as far as the translations are in runs/multi30k."""
    base = SETTINGS[0].training
    references = [list(read_lines(str(reference)))]
    for setting in SETTINGS[1:]:
        entry = setting.training.recorded
        files = [OUT / f"{training.name}.translations" for training in (base, setting.training)]
        if entry is not None and "p_value" not in entry and base.recorded and all(map(Path.is_file, files)):
            systems = {str(path): list(read_lines(str(path))) for path in files}
            (bleu, *_) = compare_systems(systems, references)[str(files[1])]
            assert bleu.p_value is not None  # only the first system has none
            record(setting.training.name, p_value=round(bleu.p_value, 4))


def _row(setting: Setting) -> tuple[str, ...] | None:
    entry = read_results().get(setting.training.name)
    if entry is None:
        return None
    values = {score["name"]: score["value"] for score in entry["scores"]}
    numbers = f"{entry['updates']:,}", describe_minutes(entry), f"{entry['target_tokens_per_second']:,}"
    scores = (f"{values[name]:.1f}" for name in ("BLEU", "BLEU, lower case"))
    p_value = f"{entry['p_value']:.3f}" if "p_value" in entry else "–"
    return (setting.label, *numbers, f"{entry['validation_perplexity']:.2f}", *scores, p_value)


if __name__ == "__main__":
    unknown = [name for name in sys.argv[2:] if name not in {setting.name for setting in SETTINGS}]
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir() or unknown:
        sys.exit(f"usage: python -m benchmarks.multi30k_ablation FOLDER [{'|'.join(s.name for s in SETTINGS)} ...]")
    main(Path(sys.argv[1]), sys.argv[2:])
