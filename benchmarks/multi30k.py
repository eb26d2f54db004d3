"""All Multi30k experiments: both directions, fine-tuning, scores and proofs, written into docs/results.md.

`python -m benchmarks.multi30k FOLDER [SEEDS [ARGUMENT ...]]`: FOLDER has train, val and test_2016_flickr, .de, .en and
.fr (.gz too); SEEDS is the number of seeds for English to German; further arguments go to `twinax train` on the whole
corpus. It takes hours, with one training per core. Results in runs/multi30k are reused, so that the same command
resumes.
"""

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from shutil import rmtree
from typing import Any

from benchmarks.multi30k_page import PAGE, PARTS, write_page
from benchmarks.pages import marks

OUT, OWN_PAIRS, MARIAN_SENTENCES = Path("runs/multi30k"), 2000, 200
# Settings of the Marian family of transformers, for a model that is exported to it.
MARIAN = (
    *("--model.norm-placement", "post", "--model.no-final-norm", "--model.embedding-padding", "frozen"),
    *("--model.positions", "sinusoidal_half", "--model.output-bias", "stored"),
)


@dataclass(frozen=True)
class Training:
    """A model to train: its run, languages and arguments."""

    name: str
    languages: tuple[str, str]
    arguments: tuple[str, ...]  # of `twinax train`
    pairs: int | None = None  # number of training pairs from the start; None: all

    @property
    def run(self) -> Path:
        """The run directory."""
        return OUT / self.name


def main(folder: Path, seeds: int, arguments: Sequence[str]) -> None:
    """Runs the missing trainings and proofs, then writes tables and pictures."""
    for name in PARTS:
        marks(PAGE, name)
    check_files(folder)
    OUT.mkdir(parents=True, exist_ok=True)
    german = Training("de_en", ("de", "en"), ("multi30k_de_en", *arguments))
    marian = Training("marian", ("de", "en"), ("multi30k_de_en", *MARIAN, *arguments))
    english = [
        Training(f"en_de-{seed}", ("en", "de"), ("multi30k_en_de", "--training.seed", str(seed), *arguments))
        for seed in range(seeds)
    ]
    trainings = [german, *english, marian]
    # A corpus of one's own: only its files as arguments, then also the initial weights.
    trainings.append(Training("fr_en", ("fr", "en"), (), OWN_PAIRS))
    tuned = Training("fr_en-tuned", ("fr", "en"), ("--init-from", str(german.run)), OWN_PAIRS)
    with one_core_each() as run_all:
        list(run_all(lambda training: train(training, folder), trainings))
        list(run_all(lambda training: train(training, folder), [tuned]))
    trainings.append(tuned)
    scores = {training.name: evaluate(training, folder) for training in trainings}
    proofs = {training.name: prove(training.run, training, folder) for training in (german, english[0])}
    proofs["marian"] = prove_marian(marian, folder)
    write_page(OUT, scores, proofs, (german.run, *text(folder, "test_2016_flickr", german.languages)))


@contextmanager
def one_core_each() -> Iterator[Any]:
    """Yields a parallel `map` whose calls start their processes on one core each."""
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def on_a_core(function: Any, item: Any) -> Any:
        core = cores.get()
        try:
            os.sched_setaffinity(0, {core})  # of this thread; its children inherit it
            return function(item)
        except SystemExit:
            pool.shutdown(wait=False, cancel_futures=True)  # running calls finish; no other starts
            raise
        finally:
            cores.put(core)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield lambda function, items: pool.map(lambda item: on_a_core(function, item), items)


def text(folder: Path, part: str, languages: tuple[str, str], pairs: int | None = None) -> list[Path]:
    """Source and target file of a part of the corpus, or copies of its first pairs."""
    paths = []
    for language in languages:
        path = folder / f"{part}.{language}"
        paths.append(path if path.is_file() else path.with_name(f"{path.name}.gz"))
    if pairs is None:
        return paths
    return [first_lines(file, pairs) for file in paths]


def check_files(folder: Path) -> None:
    """Raises: SystemExit if a file is missing, before hours of work."""
    parts, languages = ("train", "val", "test_2016_flickr"), ("de", "en", "fr")
    paths = [path for part in parts for a in languages for path in text(folder, part, (a, a))]
    if missing := sorted({str(path) for path in paths if not path.is_file()}):
        sys.exit(f"{folder}: has no {', '.join(missing)}")


def first_lines(path: Path, number: int) -> Path:
    """Copies the first lines of a file; returns the copy."""
    name = path.name.removesuffix(".gz")
    copy = OUT / f"{name.split('.')[0]}-{number}.{name.split('.')[-1]}"
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline="\n") as file:
        copy.write_text("".join(line for _, line in zip(range(number), file, strict=False)), encoding="utf-8")
    return copy


def train(training: Training, folder: Path) -> None:
    """Trains a model; its seconds are added to those of earlier calls.

    Raises:
        SystemExit: the existing run was trained with other arguments.
    """
    run, flags = training.run, []
    for part, pairs, prefix in (("train", training.pairs, ""), ("val", None, "valid-")):
        for side, path in zip(("src", "tgt"), text(folder, part, training.languages, pairs), strict=True):
            flags += [f"--{prefix}{side}", str(path)]
    clock, marker = run.with_suffix(".seconds"), run.with_suffix(".done")
    arguments = " ".join([*training.arguments, *flags])
    if marker.is_file():
        if marker.read_text() != arguments:
            sys.exit(
                f"{run}: was trained with {marker.read_text()} and not {arguments}; remove {run}* to train it again"
            )
        return
    earlier_seconds = float(clock.read_text()) if clock.is_file() else 0.0
    start = time.monotonic()
    try:
        call("train", *training.arguments, *flags, "--out", str(run), log=run.with_suffix(".log"))
    finally:
        write(clock, str(earlier_seconds + time.monotonic() - start))
    write(marker, arguments)


def write(path: Path, content: str) -> None:
    """Writes a file atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(content)
    temporary.replace(path)


def document(path: Path, command: Sequence[str], **options: Any) -> dict[str, Any]:
    """The JSON document of a command, which is run if the file does not exist.

    Raises:
        SystemExit: the command failed.
    """
    if not path.is_file():
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        call(*command, "--json", str(temporary), **options)
        if not temporary.is_file():
            sys.exit(f"twinax {' '.join(command)}: failed")
        temporary.replace(path)
    return json.loads(path.read_text())


def evaluate(training: Training, folder: Path) -> list[dict[str, Any]]:
    """The scores on test_2016 with a beam of 5."""
    src, tgt = text(folder, "test_2016_flickr", training.languages)
    output, path = training.run.with_suffix(".translations"), training.run.with_suffix(".scores.json")
    if not path.is_file():
        output.unlink(missing_ok=True)
    command = ("evaluate", str(training.run), "--src", str(src), "--tgt", str(tgt), "--output", str(output))
    return document(path, command)["scores"]


def prove(model: Path, training: Training, folder: Path, sentences: int | None = None) -> dict[str, Any]:
    """Runs the ladder on the test set and compares all translations of both frameworks."""
    src, tgt = text(folder, "test_2016_flickr", training.languages, sentences)
    command = ("parity", str(model), "--src", str(src), "--tgt", str(tgt), "--translations")
    output = model.with_suffix(".parity.txt")
    return document(model.with_suffix(".parity.json"), command, statuses=(0, 1), output=output)


def prove_marian(training: Training, folder: Path) -> dict[str, Any]:
    """The same for a model exported to transformers."""
    directory = training.run.with_name("marian-exported")
    marker = directory.with_suffix(".done")
    if not marker.is_file():
        rmtree(directory, ignore_errors=True)
        call("convert", str(training.run), str(directory), "--layout", "marian")
        marker.touch()
    return prove(directory, training, folder, MARIAN_SENTENCES)


def call(
    *arguments: str, statuses: tuple[int, ...] = (0,), log: Path | None = None, output: Path | None = None
) -> None:
    """Runs twinax; `log` receives standard error, `output` standard output.

    Raises:
        SystemExit: the exit status is not one of `statuses`.
    """
    print("twinax", *arguments, f"2>> {log}" if log is not None else "", flush=True)
    command = [str(Path(sys.executable).with_name("twinax")), *arguments]
    with ExitStack() as files:
        streams = {"stderr": files.enter_context(log.open("a"))} if log is not None else {}
        streams |= {"stdout": files.enter_context(output.open("w"))} if output is not None else {}
        process = subprocess.run(command, check=False, **streams)
    if process.returncode not in statuses:
        message = (
            f"twinax {' '.join(arguments)}: exit status {process.returncode}{f', see {log}' if log is not None else ''}"
        )
        print(message, file=sys.stderr, flush=True)
        sys.exit(message)


if __name__ == "__main__":
    seeds = sys.argv[2] if len(sys.argv) > 2 else "3"
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir() or not seeds.isdigit() or not int(seeds):
        sys.exit("usage: python -m benchmarks.multi30k FOLDER [SEEDS [ARGUMENT ...]]")
    main(Path(sys.argv[1]), int(seeds), sys.argv[3:])
