"""The directory of a run: one process at a time, one config, one corpus.

config.json, tokenizer/ (or source_tokenizer/ and target_tokenizer/), data.json (shapes of batches, hash of the ids),
checkpoints/, averaged/, metrics.jsonl, tensorboard/, loss.png, lock; in some runs also source.json, damaged/,
metrics-damaged*.jsonl and SwanLab's files.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from ...backend.errors import CheckpointError, DataError, RunError
from ...configs.json_text import parse_json
from ...configs.run import RunConfig, differences
from ...configs.training import ENDING
from ...convert.formats.run import CONFIG, DATA, LOCK
from ...convert.io.atomic_io import is_temporary, replace_file
from ..data.buckets import Bucket
from ..data.prepare import PreparedRun, prepare
from ..data.tokenizer_pair import Tokenizers
from ..loop.warm_start import InitialWeights
from ..processes.process_group import ProcessGroup
from ..step.partitioning import Placement
from .checkpoints import SOURCE, read_run

_SHARED = "lock of the run directory (must be on shared storage)"
_STORAGE_SECONDS = 15  # until shared storage must show a file that another process wrote


@contextmanager
def locked(directory: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Make the directory and lock it; where files cannot be locked, say so. Raises: RunError if it is in use."""
    try:
        new_directories = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{directory}: cannot be used as a run directory: {error.strerror}") from None
    with file:
        if not _lock(file, directory, say):
            file.seek(0)
            raise RunError(
                f"{directory}: is in use by another process ({file.read().strip() or 'unknown'}); wait for it, stop "
                "it, or choose another directory"
            )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        os.fsync(file.fileno())
        try:
            yield
        finally:
            if [p.name for p in directory.iterdir()] == [LOCK]:  # failed before writing anything: remove the directory
                (directory / LOCK).unlink()
                for path in new_directories:
                    if not any(path.iterdir()):
                        path.rmdir()


def _lock(file: IO[str], directory: Path, say: Callable[[str], None]) -> bool:
    """Lock the file of a run directory; False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system releases it, however the process ends
        return os.path.samestat(os.fstat(file.fileno()), os.stat(directory / LOCK))  # else another has removed it
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as error:  # a network file system without locks
        say(f"{directory}: cannot be locked ({error.strerror}); make sure that no other process trains there")
        return True


def has_begun(directory: Path) -> bool:
    """Whether the directory contains a run to resume."""
    return (directory / CONFIG).is_file()


def prepare_in(
    directory: Path,
    run: RunConfig,
    initial_weights: InitialWeights | None,
    say: Callable[[str], None],
    group: ProcessGroup,
) -> tuple[PreparedRun, Placement]:
    """Prepare a run with the tokenizers and batch shapes of its directory; write them there in a new run.

    Of several processes the first one prepares the run and writes; the others then read the directory and their corpus.

    Raises:
        RunError: the directory belongs to a run with other settings or another corpus, or has other files.
        ConfigError: the mesh does not fit the devices, the model or the batches. Nothing is written then.
    """
    if not group.is_first:
        group.barrier("the run is prepared")
        _wait_for(directory / CONFIG)
        group.barrier(_SHARED, (directory / LOCK).read_text(encoding="utf-8"))
        prepared = prepare_again(directory, run, say)
        return prepared, _placement(prepared)
    is_new = not has_begun(directory)
    if is_new:
        if foreign_names := [p.name for p in directory.iterdir() if p.name != LOCK and not _is_leftover(p)]:
            raise RunError(
                f"{directory}: has no {CONFIG} and is not empty ({foreign_names[0]}); choose another directory"
            )
        tokenizers = initial_weights.tokenizers if initial_weights is not None and not run.tokenizer.load else None
        prepared = prepare(run, tokenizers, sizes=initial_weights and initial_weights.config, say=say)
    else:
        prepared = prepare_again(directory, run, say)
    placement = _placement(prepared)
    if is_new:
        prepared.tokenizers.save(directory)
        if initial_weights is not None and initial_weights.source is not None:
            replace_file(directory / SOURCE, initial_weights.source)
        replace_file(directory / DATA, _describe(prepared))
    replace_file(directory / CONFIG, prepared.run.to_json())  # last: it marks the directory as complete
    group.barrier("the run is prepared")
    group.barrier(_SHARED, (directory / LOCK).read_text(encoding="utf-8"))
    return prepared, placement


def _placement(prepared: PreparedRun) -> Placement:
    """The mesh of a run. Raises: ConfigError, as `prepare_in`."""
    placement = Placement.of(prepared.run.sharding, prepared.run.model)
    placement.check_rows(min(bucket.sentences for bucket in prepared.buckets))
    return placement


def _wait_for(path: Path) -> None:
    """Wait for a file that another process has written. Raises: RunError if it does not appear here."""
    for _ in range(_STORAGE_SECONDS):
        if path.is_file():
            return
        time.sleep(1)  # network file systems show new files late
    raise RunError(f"{path}: process 0 has written it, but it is not here; the run directory must be on shared storage")


def prepare_again(
    directory: Path, run: RunConfig, say: Callable[[str], None], store: Path | None = None
) -> PreparedRun:
    """Prepare a run that was started before, with its directory's tokenizers and batch shapes; write nothing there.

    `store`: as `prepare`.

    Raises:
        RunError: the directory belongs to a run with other settings or another corpus.
    """
    first_run = _read_config(directory)
    buckets, first_fingerprint, is_gradual = read_data(directory)
    tokenizers = Tokenizers.load(directory)
    if tokenizers is None:
        raise RunError(f"{directory}: has no tokenizer; the run cannot be resumed without it")
    try:
        run = _with_first_values(run, first_run)
        prepared = prepare(run, tokenizers, buckets, first_run.model, say, is_gradual, store)
    except DataError as error:
        raise DataError(
            f"{error} (if the corpus of {directory} has moved, pass its new paths; a different run needs "
            "its own directory)"
        ) from None
    if (fingerprint := prepared.fingerprint()) != first_fingerprint:
        part = "training" if fingerprint.split()[0] != first_fingerprint.split()[0] else "validation"
        counts = ", ".join(f"{count.kept:,} of {name}" for name, count in prepared.counts.items())
        raise RunError(
            f"{directory}: was started with another corpus: the {part} pairs have changed (now {counts}; {DATA} has "
            "the earlier counts); use the same corpus or choose another directory"
        )
    # Loop, devices, execution, workers and corpus paths may change: they affect updates by rounding at most.
    workers = replace(prepared.run.batches, workers=first_run.batches.workers)
    comparable_run = replace(
        prepared.run,
        loop=first_run.loop,
        sharding=first_run.sharding,
        execution=first_run.execution,
        batches=workers,
        corpus=first_run.corpus,
    )
    if changes := differences(comparable_run, first_run):
        raise RunError(f"{directory}: was started with other settings: {'; '.join(changes)}; choose another directory")
    end, updates = first_run.training.total_updates, prepared.run.loop.updates
    if first_run.training.schedule in ENDING and first_run.loop.updates == end and updates != end:
        raise RunError(
            f"{directory}: cannot be trained for {updates} updates: its {first_run.training.schedule} schedule ends at "
            f"update {end}; choose another directory, with --init-from {directory} to start from these weights"
        )
    return prepared


def read_data(directory: Path) -> tuple[list[Bucket], str, bool]:
    """(batch shapes of a run, hash of its ids, whether the shapes begin gradually).

    Raises:
        RunError: the run's file cannot be read.
    """
    try:
        if (directory / DATA).exists() and not (directory / DATA).is_file():  # a pipe would wait for its writer
            raise ValueError("is not a file")
        document = parse_json((directory / DATA).read_text(encoding="utf-8"))
        buckets = [Bucket(*shape) for shape in document["shapes"]]
        ids = document["ids"]
        if not buckets or any(type(size) is not int or size < 1 for bucket in buckets for size in bucket):
            raise ValueError("shapes must be lists of three positive integers")
        if not isinstance(ids, str) or len(ids.split()) != 2:
            raise ValueError("ids must be two hashes")
        return buckets, ids, bool(document.get("gradual", False))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{directory / DATA}: cannot be read ({error}); the run cannot be resumed without it") from None


def _with_first_values(run: RunConfig, first_run: RunConfig) -> RunConfig:
    """The run with the values that the corpus determined at the first start, where the config leaves them open."""
    if run.batches.tokens is None:
        run = replace(run, batches=replace(run.batches, tokens=first_run.batches.tokens))
    if run.training.schedule in ENDING and run.training.total_updates is None:
        run = replace(run, training=replace(run.training, total_updates=first_run.training.total_updates))
    return run


def _read_config(directory: Path) -> RunConfig:
    try:
        return read_run(directory)
    except CheckpointError as error:
        raise RunError(str(error)) from None


def _is_leftover(path: Path) -> bool:
    """Whether an interrupted start left this file or folder."""
    return path.name in (DATA, SOURCE, "tokenizer", "source_tokenizer", "target_tokenizer") or is_temporary(path)


def _describe(prepared: PreparedRun) -> str:
    counts = {name: part._asdict() for name, part in prepared.counts.items()}
    shapes = [list(bucket) for bucket in prepared.buckets]
    values = {"shapes": shapes, "gradual": prepared.is_gradual, "ids": prepared.fingerprint(), "counts": counts}
    return json.dumps(values, indent=2) + "\n"
