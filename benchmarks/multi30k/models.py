"""The best model of each direction of Multi30k as a float16 file, and its SHA-256 in docs/measurements/models.md.

`python -m benchmarks.multi30k.models FOLDER`: FOLDER has train and val, .de and .en (.gz too). The best seed has the
lowest validation perplexity in docs/multi30k/results.json; its training is repeated unless it is in runs/multi30k. The
files are written to runs/multi30k/DIRECTION.safetensors. Fails if a file on the same machine and jaxlib has another
SHA-256 than recorded.
"""

import sys
from hashlib import sha256
from pathlib import Path

from benchmarks.multi30k.results import DIRECTIONS, seeded_training
from benchmarks.multi30k.runs import (
    OUT,
    Training,
    alone,
    call,
    check_files,
    describe_machine,
    one_core_each,
    read_results,
    record,
    train,
)
from benchmarks.pages import marks, write_table

PAGE, NAME = Path("docs/measurements/models.md"), "multi30k-models"
HEADER = ("model", "run", "size", "SHA-256", "machine")


def main(folder: Path) -> int:
    """Write the files and the table. Exit status: 1 if a file differs from the recorded one."""
    marks(PAGE, NAME)
    check_files(folder, ("de", "en"))
    trainings = [best_seed(direction) for direction in DIRECTIONS]
    with alone(), one_core_each() as map_on_cores:
        list(map_on_cores(lambda training: train(training, folder), trainings))
    statuses = [_write(training) for training in trainings]
    rows = [
        (model["file"], name, model["size"], f"`{model['sha256']}`", model["machine"])
        for name, entry in read_results().items()
        for model in entry.get("models", [])
    ]
    write_table(PAGE, NAME, HEADER, rows)
    return max(statuses)


def best_seed(direction: str) -> Training:
    """The recorded training of a direction with the lowest validation perplexity. Raises: SystemExit if none is."""
    names = [name for name in read_results() if name.rpartition("-")[0] == direction]
    seeds = [int(seed) for name in names if (seed := name.rpartition("-")[2]).isdigit()]
    trainings = [seeded_training(direction, seed) for seed in seeds]
    perplexities = {t: t.recorded["validation_perplexity"] for t in trainings if t.recorded is not None}
    if not perplexities:
        sys.exit(f"docs/multi30k/results.json: has no {direction}-0 of today's settings; run make multi30k first")
    return min(perplexities, key=lambda training: perplexities[training])


def _write(training: Training) -> int:
    """Write and record a model; 1 if the recorded one of this machine differs."""
    path = OUT / f"{training.name.rpartition('-')[0]}.safetensors"
    path.unlink(missing_ok=True)
    call("convert", str(training.run), str(path), "--dtype", "float16", "--weights-only")
    size, checksum = f"{path.stat().st_size / 1e6:.1f} MB", sha256(path.read_bytes()).hexdigest()
    machine = describe_machine()
    models = read_results()[training.name].get("models", [])
    for model in models:
        if model["machine"] == machine and model["sha256"] != checksum:
            print(f"{path}: has SHA-256 {checksum}, recorded is {model['sha256']}", file=sys.stderr)
            return 1
    others = [model for model in models if model["machine"] != machine]
    written = {"file": path.name, "size": size, "sha256": checksum, "machine": machine}
    record(training.name, models=[*others, written])
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("usage: python -m benchmarks.multi30k.models FOLDER")
    sys.exit(main(Path(sys.argv[1])))
