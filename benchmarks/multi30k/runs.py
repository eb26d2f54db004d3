"""Trains and scores models on Multi30k, one training per core, and records what came out of each in docs/multi30k.

A recorded training is not repeated: results.json states its arguments, and its translations are beside it.
"""

import fcntl
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from typing import Any

from twinax.backend.environment import processor
from twinax.train.tracking.metrics import best_update, read_metrics, validations

OUT, RESULTS = Path("runs/multi30k"), Path("docs/multi30k/results.json")
VALIDATION, TEST = "val", "test_2016_flickr"
_RESULTS_LOCK = Lock()


@dataclass(frozen=True)
class Training:
    """A model to train: its run, languages and arguments, and the parts of the corpus that score it."""

    name: str
    languages: tuple[str, str]
    arguments: tuple[str, ...]  # of `twinax train`
    pairs: int | None = None  # number of training pairs from the start; None: all
    parts: tuple[str, ...] = (VALIDATION, TEST)  # of the corpus, that score it
    initial: "Training | None" = None  # whose weights it starts from

    @property
    def all_arguments(self) -> tuple[str, ...]:
        """The arguments of `twinax train`, initial weights included."""
        return (*self.arguments, *(("--init-from", str(self.initial.run)) if self.initial is not None else ()))

    @property
    def earlier(self) -> list["Training"]:
        """The trainings that its weights come from, the last one first."""
        return [] if self.initial is None else [self.initial, *self.initial.earlier]

    @property
    def commands(self) -> list[str]:
        """The arguments that determine its weights: its own, then those of the earlier trainings."""
        return [" ".join(training.all_arguments) for training in (self, *self.earlier)]

    @property
    def run(self) -> Path:
        """The run directory."""
        return OUT / self.name

    @property
    def recorded(self) -> dict[str, Any] | None:
        """What results.json has of this training; None: nothing, or it had other arguments."""
        entry = read_results().get(self.name)
        return entry if entry is not None and entry["commands"] == self.commands else None

    @property
    def is_finished(self) -> bool:
        """Whether its run is here and complete."""
        return self.file("done").is_file()

    def file(self, ending: str) -> Path:
        """A file beside the run."""
        return self.run.with_name(f"{self.name}.{ending}")


def read_results() -> dict[str, Any]:
    """The recorded trainings by name."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}


def record(name: str, **values: Any) -> None:
    """Add values to a training's record; values with `commands` are a new training and replace it."""
    with _RESULTS_LOCK:
        results = read_results()
        results[name] = values if "commands" in values else results.get(name, {}) | values
        write(RESULTS, json.dumps(dict(sorted(results.items())), indent=1, ensure_ascii=False) + "\n")


@contextmanager
def alone() -> Iterator[None]:
    """Hold the lock of runs/multi30k. Raises: SystemExit if another process holds it."""
    OUT.mkdir(parents=True, exist_ok=True)
    with (OUT / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"{OUT}: another process trains here; wait for it")
        yield


def scores_by_name(entry: Mapping[str, Any], part: str) -> dict[str, float]:
    """The recorded scores of a training on a part of the corpus."""
    return {score["name"]: score["value"] for score in entry["scores"][part]}


def describe_minutes(entry: Mapping[str, Any]) -> str:
    """The minutes of a recorded training, then those of the trainings that its weights come from."""
    return " + ".join(f"{minutes:.0f}" for minutes in (entry["minutes"], *entry["earlier_minutes"]))


def train_and_score(training: Training, folder: Path) -> None:
    """Train a model, score it, and record both with its translations."""
    seconds = train(training, folder)
    scores = {part: evaluate(training, part, folder) for part in training.parts}
    records = read_metrics(training.run)
    curve = validations(records)
    averaged = [r["validation"] for r in records if r.get("averaged")]
    # The scored checkpoint is the averaged one, else the best.
    scored = averaged[-1] if averaged else curve[best_update(curve, "loss") or 0]
    RESULTS.parent.mkdir(exist_ok=True)
    tokens = sum(r["tokens"] for r in records if "tokens" in r)
    if TEST in training.parts:
        shutil.copy(training.file(f"{TEST}.txt"), RESULTS.with_name(f"{training.name}.txt"))
    record(
        training.name,
        commands=training.commands,
        machine=describe_machine(),
        updates=max(r["update"] for r in records),
        minutes=round(seconds / 60, 1),
        earlier_minutes=[round(_seconds_of(earlier) / 60, 1) for earlier in training.earlier],
        target_tokens_per_second=round(tokens / seconds),
        validation_perplexity=round(scored["perplexity"], 3),
        scores=scores,
        curve=[[u, round(v["loss"], 4), v.get("bleu") and round(v["bleu"], 2)] for u, v in curve.items()],
    )


def train_initial(map_on_cores: Any, trainings: Sequence[Training], folder: Path) -> None:
    """Train the models whose weights these trainings start from, as far as they are not finished."""
    initial = dict.fromkeys(training.initial for training in trainings)
    missing = [training for training in initial if training is not None and not training.is_finished]
    if missing:
        train_initial(map_on_cores, missing, folder)
        list(map_on_cores(lambda training: train(training, folder), missing))


def describe_machine(cores: str = "one core") -> str:
    """Processor, its widest vectors and the version of jaxlib, which determine how XLA rounds."""
    return f"{cores} of {processor()}, jaxlib {version('jaxlib')}"


@contextmanager
def one_core_each() -> Iterator[Any]:
    """Yield a parallel `map` whose calls start their processes on one core each."""
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


def check_files(folder: Path, languages: Sequence[str] = ("de", "en", "fr")) -> None:
    """Raises: SystemExit if a file is missing, before hours of work."""
    parts = ("train", VALIDATION, TEST)
    paths = [path for part in parts for a in languages for path in text(folder, part, (a, a))]
    if missing := sorted({str(path) for path in paths if not path.is_file()}):
        sys.exit(f"{folder}: has no {', '.join(missing)}")


def first_lines(path: Path, number: int) -> Path:
    """Copy the first lines of a file; return the copy."""
    name = path.name.removesuffix(".gz")
    copy = OUT / f"{name.split('.')[0]}-{number}.{name.split('.')[-1]}"
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8", newline="\n") as file:
        copy.write_text("".join(line for _, line in zip(range(number), file, strict=False)), encoding="utf-8")
    return copy


def train(training: Training, folder: Path) -> float:
    """Train a model, or resume it; return its seconds, those of interrupted calls included.

    Raises:
        SystemExit: the existing run was trained with other arguments.
    """
    flags = []
    for part, pairs, prefix in (("train", training.pairs, ""), (VALIDATION, None, "valid-")):
        for side, path in zip(("src", "tgt"), text(folder, part, training.languages, pairs), strict=True):
            flags += [f"--{prefix}{side}", str(path)]
    marker, commands = training.file("arguments"), "\n".join([*training.commands, " ".join(flags)])
    if marker.is_file() and marker.read_text() != commands:
        was = marker.read_text()
        sys.exit(
            f"{training.run}: was trained with\n{was}\nand not\n{commands}\nTo train it again, remove {training.run}*"
        )
    if training.is_finished:
        return _seconds_of(training)
    write(marker, commands)
    earlier_seconds = _seconds_of(training)
    start = time.monotonic()
    try:
        arguments = (*training.all_arguments, *flags, "--out", str(training.run))
        call("train", *arguments, log=training.file("log"))
        training.file("done").touch()
    finally:
        seconds = earlier_seconds + time.monotonic() - start
        write(training.file("seconds"), str(seconds))
    return seconds


def _seconds_of(training: Training) -> float:
    """The seconds that a training has taken so far."""
    clock = training.file("seconds")
    return float(clock.read_text()) if clock.is_file() else 0.0


def write(path: Path, content: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(content, encoding="utf-8")
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
    return json.loads(path.read_text(encoding="utf-8"))


def evaluate(training: Training, part: str, folder: Path) -> list[dict[str, Any]]:
    """The scores on a part of the corpus, with a beam of 5."""
    src, tgt = text(folder, part, training.languages)
    output, path = training.file(f"{part}.txt"), training.file(f"{part}.json")
    if not path.is_file():
        output.unlink(missing_ok=True)
    command = ("evaluate", str(training.run), "--src", str(src), "--tgt", str(tgt), "--output", str(output))
    return [score for score in document(path, command)["scores"] if score["name"] != "exact match"]


def call(*arguments: str, statuses: tuple[int, ...] = (0,), log: Path | None = None) -> None:
    """Run twinax; `log` receives standard error.

    Raises:
        SystemExit: the exit status is not one of `statuses`.
    """
    # One string with its newline, because threads print at the same time.
    print(f"twinax {' '.join(arguments)}{f' 2>> {log}' if log is not None else ''}\n", end="", flush=True)
    command = [str(Path(sys.executable).with_name("twinax")), *arguments]
    with log.open("a") if log is not None else nullcontext() as stream:
        process = subprocess.run(command, check=False, stderr=stream)
    if process.returncode not in statuses:
        message = (
            f"twinax {' '.join(arguments)}: exit status {process.returncode}{f', see {log}' if log is not None else ''}"
        )
        print(message, file=sys.stderr, flush=True)
        sys.exit(message)
