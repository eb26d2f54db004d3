"""All Multi30k results: both directions, exported, fine-tuned, scored and proven; writes docs/measurements/multi30k.md.

`python -m benchmarks.multi30k.results FOLDER [SEEDS [ARGUMENT ...]]`: FOLDER has train, val and test_2016_flickr, .de,
.en and .fr (.gz too); SEEDS is the number of seeds per direction; further arguments go to every `twinax train` of a
ready-made run. It takes hours, with one training per core. Trainings in docs/multi30k/results.json are not repeated,
and those in runs/multi30k are resumed.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shutil import rmtree

from benchmarks.multi30k.page import EXAMPLE, PAGE, PARTS, draw_attention, write_page
from benchmarks.multi30k.runs import (
    TEST,
    Training,
    alone,
    call,
    check_files,
    document,
    one_core_each,
    record,
    text,
    train,
    train_and_score,
    train_initial,
)
from benchmarks.pages import marks

OWN_PAIRS = 2000
DIRECTIONS = ("de_en", "en_de")
LAYOUTS = {"de_en-0": "pegasus", "en_de-0": "pegasus", "marian": "marian"}  # of the models that are exported and proven
LANGUAGES = {"de_en": ("de", "en"), "en_de": ("en", "de")}
# Settings of the Marian family of transformers, for a model that is exported to it.
MARIAN = ("--model.norm-placement", "post", "--model.no-final-norm", "--training.learning-rate", "1.5e-3")


def main(folder: Path, seeds: int, arguments: Sequence[str]) -> None:
    """Run the missing trainings and proofs, seed by seed, and write tables and pictures after each step."""
    for name in PARTS:
        marks(PAGE, name)
    check_files(folder)
    steps = trainings_by_step(seeds, arguments)
    trainings = [training for step in steps for training in step]
    with alone(), one_core_each() as map_on_cores:
        for step in steps:
            missing = [training for training in step if training.recorded is None]
            train_initial(map_on_cores, missing, folder)
            list(map_on_cores(lambda training: train_and_score(training, folder), missing))
            write_page(trainings, folder)
    with alone():
        for training in trainings:
            if training.name in LAYOUTS and "proof" not in (training.recorded or {}):
                prove(training, LAYOUTS[training.name], folder)
                write_page(trainings, folder)


def trainings_by_step(seeds: int, arguments: Sequence[str] = ()) -> list[list[Training]]:
    """All trainings; those of the last step may start from the weights of the step before."""
    seeded = [[seeded_training(name, seed, arguments) for name in DIRECTIONS] for seed in range(seeds)]
    marian = Training("marian", LANGUAGES["de_en"], ("multi30k_de_en", *MARIAN, *arguments))
    # A corpus of one's own: only its files as arguments, then also the initial weights.
    own = Training("fr_en", ("fr", "en"), (), OWN_PAIRS)
    tuned = replace(own, name="fr_en-tuned", initial=seeded[-1][0])
    return [*seeded, [marian, own, tuned]]


def seeded_training(direction: str, seed: int, arguments: Sequence[str] = ()) -> Training:
    """The training of a direction's ready-made run with this seed."""
    arguments = (f"multi30k_{direction}", "--training.seed", str(seed), *arguments)
    return Training(f"{direction}-{seed}", LANGUAGES[direction], arguments)


def prove(training: Training, layout: str, folder: Path) -> None:
    """Export a model, run the ladder on the test set, and compare all translations with those of transformers.

    Records the proof, and draws the attention weights of the example. The training is repeated if its run is not here.
    """
    train_initial(map, [training] if not training.is_finished else [], folder)
    train(training, folder)
    directory = training.file(layout)
    marker = training.file(f"{layout}.done")
    if not marker.is_file():
        rmtree(directory, ignore_errors=True)
        call("convert", str(training.run), str(directory), "--layout", layout)
        marker.touch()
    src, tgt = text(folder, TEST, training.languages)
    command = ("parity", str(directory), "--src", str(src), "--tgt", str(tgt), "--translations")
    proof = document(training.file("parity.json"), command, statuses=(0, 1))
    if training.name == EXAMPLE:
        draw_attention(training, folder)
    proof["command"] = proof["command"].replace(f"{folder}/", "FOLDER/")  # without the paths of this machine
    record(training.name, layout=layout, proof=proof)


if __name__ == "__main__":
    seeds = sys.argv[2] if len(sys.argv) > 2 else "3"
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir() or not seeds.isdigit() or not int(seeds):
        sys.exit("usage: python -m benchmarks.multi30k.results FOLDER [SEEDS [ARGUMENT ...]]")
    main(Path(sys.argv[1]), int(seeds), sys.argv[3:])
