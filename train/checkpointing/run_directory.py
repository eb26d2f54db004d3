"""The directory of a run: one process at a time, one config, one corpus.

config.json, tokenizer/ (or source_tokenizer/ and target_tokenizer/), data.json (shapes of batches, hash of the ids),
checkpoints/, averaged/, metrics.jsonl, tensorboard/, loss.png, lock.
"""

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ...configs.errors import CheckpointError, DataError, RunError
from ...configs.run import RunConfig, differences
from ...convert.atomic_io import replace_file
from ..data.buckets import Bucket
from ..data.prepare import Prepared, Tokenizers, prepare
from ..warm_start import Initial
from .checkpoints import CONFIG, read_run

_DATA, _LOCK = "data.json", "lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Makes the directory and keeps other processes out. Raises: RunError where one is in it."""
    try:
        made = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise RunError(f"{directory}: cannot be used as a run directory: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # given back by the system, however the process ends
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(directory / _LOCK)):
                raise OSError  # it was taken away at that moment
        except OSError:
            file.seek(0)
            raise RunError(
                f"{directory}: is in use by another process ({file.read().strip() or 'unknown'}); wait for it, stop "
                "it, or choose another directory"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            if [p.name for p in directory.iterdir()] == [_LOCK]:  # nothing came of it: leave nothing behind
                (directory / _LOCK).unlink()
                for path in made:
                    if not any(path.iterdir()):
                        path.rmdir()


def has_begun(directory: Path) -> bool:
    """Whether there is a run to go on with."""
    return (directory / CONFIG).is_file()


def prepare_in(directory: Path, run: RunConfig, initial: Initial | None, say: Callable[[str], None]) -> Prepared:
    """What `prepare` makes, with the tokenizers and shapes that the directory has; written there where it has none.

    Raises:
        RunError: the directory belongs to a run with other settings or another corpus, or is no run's.
    """
    if has_begun(directory):
        prepared = prepare_again(directory, run, say)
    else:
        if strange := [p.name for p in directory.iterdir() if p.name != _LOCK and not _is_ours(p)]:
            raise RunError(f"{directory}: has no {CONFIG} and is not empty ({strange[0]}); choose another directory")
        tokenizers = initial.tokenizers if initial is not None and not run.tokenizer.load else None
        prepared = prepare(run, tokenizers, sizes=initial and initial.config, say=say)
        prepared.tokenizers.save(directory)
        replace_file(directory / _DATA, _describe(prepared))
    replace_file(directory / CONFIG, prepared.run.to_json())  # last: with it, all is there
    return prepared


def prepare_again(directory: Path, run: RunConfig, say: Callable[[str], None]) -> Prepared:
    """The same of a run that has begun, from its directory's tokenizers and shapes; writes nothing.

    Raises:
        RunError: the directory belongs to a run with other settings or another corpus.
    """
    began = _read_config(directory)
    try:
        found = json.loads((directory / _DATA).read_text(encoding="utf-8"))
        buckets, said = [Bucket(*shape) for shape in found["shapes"]], found["ids"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{directory / _DATA}: cannot be read ({error}); a run cannot go on without it") from None
    saved = Tokenizers.load(directory)
    if saved is None:
        raise RunError(f"{directory}: has no tokenizer; a run cannot go on without it")
    try:
        prepared = prepare(_as_begun(run, began), saved, buckets, began.model, say)
    except DataError as error:
        raise DataError(
            f"{error} (where the corpus of {directory} is elsewhere now, give its files anew; another run needs "
            "another directory)"
        ) from None
    if (now := _fingerprint(prepared)) != said:
        part = "training" if now.split()[0] != said.split()[0] else "validation"
        now_kept = ", ".join(f"{count.kept:,} of {name}" for name, count in prepared.counts.items())
        raise RunError(
            f"{directory}: began with another corpus: the {part} pairs have changed (now {now_kept}; {_DATA} has what "
            "they were); give the same, or choose another directory"
        )
    # How long, how often and with how many workers may change: no update depends on it. Of the corpus, the ids decide.
    workers = replace(prepared.run.batches, workers=began.batches.workers)
    same = replace(prepared.run, loop=began.loop, batches=workers, corpus=began.corpus)
    if changed := differences(same, began):
        raise RunError(f"{directory}: began with other settings: {'; '.join(changed)}; choose another directory")
    end, updates = began.training.total_updates, prepared.run.loop.updates
    if began.training.schedule == "cosine" and began.loop.updates == end and updates != end:
        raise RunError(
            f"{directory}: cannot go to {updates} updates: its rate comes down until update {end}; choose another "
            f"directory, and --init-from {directory} to start from these weights"
        )
    return prepared


def _as_begun(run: RunConfig, began: RunConfig) -> RunConfig:
    """The run with what was left open for the corpus to decide as it was decided then."""
    if run.batches.tokens is None:
        run = replace(run, batches=replace(run.batches, tokens=began.batches.tokens))
    if run.training.schedule == "cosine" and run.training.total_updates is None:
        run = replace(run, training=replace(run.training, total_updates=began.training.total_updates))
    return run


def _read_config(directory: Path) -> RunConfig:
    try:
        return read_run(directory)
    except CheckpointError as error:
        raise RunError(str(error)) from None


def _is_ours(path: Path) -> bool:
    """Whether it is what an interrupted beginning leaves behind."""
    return path.name in (_DATA, "tokenizer", "source_tokenizer", "target_tokenizer") or path.suffix == ".tmp"


def _fingerprint(prepared: Prepared) -> str:
    return f"{prepared.train.fingerprint()} {prepared.valid.fingerprint()}"


def _describe(prepared: Prepared) -> str:
    counts = {name: found._asdict() for name, found in prepared.counts.items()}
    shapes = [list(bucket) for bucket in prepared.buckets]
    return json.dumps({"shapes": shapes, "ids": _fingerprint(prepared), "counts": counts}, indent=2) + "\n"
