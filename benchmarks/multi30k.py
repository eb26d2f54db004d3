"""All Multi30k results: both directions, exported, fine-tuned, scored and proven, written into docs/results.md.

`python -m benchmarks.multi30k FOLDER [SEEDS [ARGUMENT ...]]`: FOLDER has train, val and test_2016_flickr, .de, .en and
.fr (.gz too); SEEDS is the number of seeds per direction; further arguments go to every `twinax train`. It takes hours,
with one training per core. Trainings in docs/multi30k/results.json are not repeated, and what is in runs/multi30k is
continued.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

from benchmarks.multi30k_page import EXAMPLE, PAGE, PARTS, draw_proof, write_page
from benchmarks.multi30k_runs import (
    OUT,
    Training,
    call,
    check_files,
    document,
    one_core_each,
    record,
    text,
    train_and_score,
    train_starts,
)
from benchmarks.pages import marks

OWN_PAIRS = 2000
DIRECTIONS = ("de_en", "en_de")
LAYOUTS = {"de_en-0": "pegasus", "en_de-0": "pegasus", "marian": "marian"}  # of the models that are exported and proven
LANGUAGES = {"de_en": ("de", "en"), "en_de": ("en", "de"), "both": ("en", "de")}
# Settings of the Marian family of transformers, for a model that is exported to it.
MARIAN = ("--model.norm-placement", "post", "--model.no-final-norm", "--training.learning-rate", "1.5e-3")


def main(folder: Path, seeds: int, arguments: Sequence[str]) -> None:
    """Runs the missing trainings and proofs, seed by seed, and writes tables and pictures after each step."""
    for name in PARTS:
        marks(PAGE, name)
    check_files(folder)
    OUT.mkdir(parents=True, exist_ok=True)
    steps = trainings_by_step(seeds, arguments)
    for step in steps:
        missing = [training for training in step if training.recorded is None]
        with one_core_each() as run_all:
            train_starts(run_all, missing, folder)
            list(run_all(lambda training: train_and_score(training, folder), missing))
        for training in step:
            if training.name in LAYOUTS:
                prove(training, LAYOUTS[training.name], folder)
        write_page([training for step in steps for training in step], folder)


def trainings_by_step(seeds: int, arguments: Sequence[str]) -> list[list[Training]]:
    """All trainings; those of a step may start from those of earlier steps."""
    # A corpus of one's own: only its files as arguments, then also the initial weights.
    own = Training("fr_en", ("fr", "en"), (), OWN_PAIRS)
    steps = []
    for seed in range(seeds):
        both = seeded_training("both", seed, None, *arguments)
        steps += [[both], [seeded_training(name, seed, both, *arguments) for name in DIRECTIONS]]
    steps[0].append(own)
    marian = Training("marian", LANGUAGES["de_en"], ("multi30k_de_en", *MARIAN, *arguments))
    steps.insert(2, [marian, replace(own, name="fr_en-tuned", start=steps[1][0])])
    return steps


def seeded_training(name: str, seed: int, start: Training | None = None, *arguments: str) -> Training:
    """The training of a ready-made run with this seed."""
    arguments = (f"multi30k_{name}", "--training.seed", str(seed), *arguments)
    return Training(f"{name}-{seed}", LANGUAGES[name], arguments, start=start)


def prove(training: Training, layout: str, folder: Path) -> None:
    """Exports a model, runs the ladder on the test set, and compares all translations with those of transformers.

    The proof is recorded, and that of the first model drawn; nothing is done if it is recorded already.
    """
    if "proof" in (training.recorded or {}):
        return
    directory = training.run.with_name(f"{training.name}-{layout}")
    marker = directory.with_name(f"{directory.name}.done")
    if not marker.is_file():
        rmtree(directory, ignore_errors=True)
        call("convert", str(training.run), str(directory), "--layout", layout)
        marker.touch()
    src, tgt = text(folder, "test_2016_flickr", training.languages)
    command = ("parity", str(directory), "--src", str(src), "--tgt", str(tgt), "--translations")
    output = directory.with_name(f"{directory.name}.parity.txt")
    proof = document(output.with_suffix(".json"), command, statuses=(0, 1), output=output)
    record(training.name, layout=layout, proof=proof)
    if training.name == EXAMPLE:
        draw_proof(training, output.read_text(encoding="utf-8"), folder)


if __name__ == "__main__":
    seeds = sys.argv[2] if len(sys.argv) > 2 else "3"
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir() or not seeds.isdigit() or not int(seeds):
        sys.exit("usage: python -m benchmarks.multi30k FOLDER [SEEDS [ARGUMENT ...]]")
    main(Path(sys.argv[1]), int(seeds), sys.argv[3:])
