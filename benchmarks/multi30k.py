"""Multi30k, all of it: trained both ways, fine-tuned, scored, proven; written into docs/results.md.

`python -m benchmarks.multi30k FOLDER [SEEDS [ARGUMENT ...]]`: FOLDER has train, val and test_2016_flickr, .de, .en and
.fr (.gz too); SEEDS are those of English to German; further arguments are those of `twinax train` on the whole corpus.
Hours: as many trainings at once as there are cores, each on one. What is there in runs/multi30k is not done again, so
that the same command goes on.
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
# What the Marian family of transformers computes, for a model that is to be exported as one.
MARIAN = (
    *("--model.norm-placement", "post", "--model.no-final-norm", "--model.embedding-padding", "frozen"),
    *("--model.positions", "sinusoidal_half", "--model.output-bias", "stored"),
)


@dataclass(frozen=True)
class Training:
    """One model: its run, and what it is trained with."""

    name: str
    languages: tuple[str, str]
    arguments: tuple[str, ...]  # of `twinax train`
    pairs: int | None = None  # the first so many of the training pairs; None: all

    @property
    def run(self) -> Path:
        """Its directory."""
        return OUT / self.name


def main(folder: Path, seeds: int, arguments: Sequence[str]) -> None:
    """Does what is missing, then writes tables and pictures."""
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
    # Somebody's own corpus: no argument but its files, and then the weights to start from.
    trainings.append(Training("fr_en", ("fr", "en"), (), OWN_PAIRS))
    tuned = Training("fr_en-tuned", ("fr", "en"), ("--init-from", str(german.run)), OWN_PAIRS)
    with one_core_each() as do:
        list(do(lambda training: train(training, folder), trainings))
        list(do(lambda training: train(training, folder), [tuned]))
    trainings.append(tuned)
    scores = {training.name: evaluate(training, folder) for training in trainings}
    proofs = {training.name: prove(training.run, training, folder) for training in (german, english[0])}
    proofs["marian"] = prove_marian(marian, folder)
    write_page(OUT, scores, proofs, (german.run, *text(folder, "test_2016_flickr", german.languages)))


@contextmanager
def one_core_each() -> Iterator[Any]:
    """A `map` whose calls run at once, each with a core of its own for the processes that it starts."""
    cores: SimpleQueue[int] = SimpleQueue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put(core)

    def on_a_core(function: Any, item: Any) -> Any:
        core = cores.get()
        try:
            os.sched_setaffinity(0, {core})  # of this thread; its children inherit it
            return function(item)
        except SystemExit:
            pool.shutdown(wait=False, cancel_futures=True)  # those that run end as they are; no other begins
            raise
        finally:
            cores.put(core)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield lambda function, items: pool.map(lambda item: on_a_core(function, item), items)


def text(folder: Path, part: str, languages: tuple[str, str], pairs: int | None = None) -> list[Path]:
    """Source and target file of a part of the corpus; of its first pairs, copies."""
    found = []
    for language in languages:
        plain = folder / f"{part}.{language}"
        found.append(plain if plain.is_file() else plain.with_name(f"{plain.name}.gz"))
    if pairs is None:
        return found
    return [first_lines(path, pairs) for path in found]


def check_files(folder: Path) -> None:
    """Raises: SystemExit where a file is missing, before hours have gone by."""
    parts, languages = ("train", "val", "test_2016_flickr"), ("de", "en", "fr")
    found = [path for part in parts for a in languages for path in text(folder, part, (a, a))]
    if missing := sorted({str(path) for path in found if not path.is_file()}):
        sys.exit(f"{folder}: has no {', '.join(missing)}")


def first_lines(path: Path, number: int) -> Path:
    """A file of the first lines of another."""
    name = path.name.removesuffix(".gz")
    copy = OUT / f"{name.split('.')[0]}-{number}.{name.split('.')[-1]}"
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline="\n") as file:
        copy.write_text("".join(line for _, line in zip(range(number), file, strict=False)), encoding="utf-8")
    return copy


def train(training: Training, folder: Path) -> None:
    """Trains to the end; adds the seconds to those of earlier calls.

    Raises:
        SystemExit: what is there was trained with other arguments.
    """
    run, flags = training.run, []
    for part, pairs, prefix in (("train", training.pairs, ""), ("val", None, "valid-")):
        for side, path in zip(("src", "tgt"), text(folder, part, training.languages, pairs), strict=True):
            flags += [f"--{prefix}{side}", str(path)]
    clock, done, said = run.with_suffix(".seconds"), run.with_suffix(".done"), " ".join([*training.arguments, *flags])
    if done.is_file():
        if done.read_text() != said:
            sys.exit(f"{run}: was trained with {done.read_text()} and not {said}; remove {run}* to train it anew")
        return
    before, began = float(clock.read_text()) if clock.is_file() else 0.0, time.monotonic()
    try:
        call("train", *training.arguments, *flags, "--out", str(run), log=run.with_suffix(".log"))
    finally:
        write(clock, str(before + time.monotonic() - began))
    write(done, said)


def write(path: Path, content: str) -> None:
    """Puts a file in place as a whole."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(content)
    temporary.replace(path)


def document(path: Path, command: Sequence[str], **how: Any) -> dict[str, Any]:
    """What a command writes with --json; it is run where that is not there yet.

    Raises:
        SystemExit: it failed.
    """
    if not path.is_file():
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        call(*command, "--json", str(temporary), **how)
        if not temporary.is_file():
            sys.exit(f"twinax {' '.join(command)}: failed")
        temporary.replace(path)
    return json.loads(path.read_text())


def evaluate(training: Training, folder: Path) -> list[dict[str, Any]]:
    """sacreBLEU's scores on test_2016, with a beam of 5."""
    src, tgt = text(folder, "test_2016_flickr", training.languages)
    output, path = training.run.with_suffix(".translations"), training.run.with_suffix(".scores.json")
    if not path.is_file():
        output.unlink(missing_ok=True)
    command = ("evaluate", str(training.run), "--src", str(src), "--tgt", str(tgt), "--output", str(output))
    return document(path, command)["scores"]


def prove(model: Path, training: Training, folder: Path, sentences: int | None = None) -> dict[str, Any]:
    """The ladder on the test set, and every translation in both frameworks."""
    src, tgt = text(folder, "test_2016_flickr", training.languages, sentences)
    command = ("parity", str(model), "--src", str(src), "--tgt", str(tgt), "--translations")
    output = model.with_suffix(".parity.txt")
    return document(model.with_suffix(".parity.json"), command, fails=(0, 1), output=output)


def prove_marian(training: Training, folder: Path) -> dict[str, Any]:
    """The same of the model that transformers reads as its own."""
    directory = training.run.with_name("marian-exported")
    done = directory.with_suffix(".done")
    if not done.is_file():
        rmtree(directory, ignore_errors=True)
        call("convert", str(training.run), str(directory), "--layout", "marian")
        done.touch()
    return prove(directory, training, folder, MARIAN_SENTENCES)


def call(*arguments: str, fails: tuple[int, ...] = (0,), log: Path | None = None, output: Path | None = None) -> None:
    """Runs the command; what it says goes to `log`, what it prints to `output`, where they are given.

    Raises:
        SystemExit: it ended otherwise.
    """
    print("twinax", *arguments, f"2>> {log}" if log is not None else "", flush=True)
    command = [str(Path(sys.executable).with_name("twinax")), *arguments]
    with ExitStack() as files:
        to = {"stderr": files.enter_context(log.open("a"))} if log is not None else {}
        to |= {"stdout": files.enter_context(output.open("w"))} if output is not None else {}
        done = subprocess.run(command, check=False, **to)
    if done.returncode not in fails:
        said = f"twinax {' '.join(arguments)}: ended with {done.returncode}{f', see {log}' if log is not None else ''}"
        print(said, file=sys.stderr, flush=True)
        sys.exit(said)


if __name__ == "__main__":
    seeds = sys.argv[2] if len(sys.argv) > 2 else "3"
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir() or not seeds.isdigit() or not int(seeds):
        sys.exit("usage: python -m benchmarks.multi30k FOLDER [SEEDS [ARGUMENT ...]]")
    main(Path(sys.argv[1]), int(seeds), sys.argv[3:])
