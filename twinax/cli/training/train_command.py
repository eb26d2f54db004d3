"""`twinax train`."""

import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from ...backend.errors import CheckpointError
from ...presets.runs import RUN_NAMES
from ...train.processes.process_group import FLAGS, ProcessGroup, Worker, take_flags
from ...train.processes.supervisor import fork
from ..flags.run_arguments import parse
from ..process.importing import import_without_gc
from ..process.messages import DEFECT, describe_defect, one_line
from ..usage import UsageError, one_line_errors

_DESCRIPTION = f"""Train a model on a predefined run ({RUN_NAMES}) or on your own parallel text, or resume a run.

Examples: twinax train --src train.de --tgt train.en --valid-src val.de --valid-tgt val.en --out runs/de_en;
twinax train multi30k_de_en --model.d-model 256; twinax train runs/de_en

The run directory contains checkpoints, tokenizers, metrics.jsonl, TensorBoard files and loss.png. Ctrl-C and SIGTERM
save and stop; the same command, or the directory alone, resumes (on a CPU bit-exactly). The flags of the corpus also
work without their prefix "corpus.": --src, --tgt, --dataset, --valid-src, and so on.

On several machines, run the same command everywhere with --coordinator HOST:PORT --num-processes N --process-id I, or
start it with srun or mpirun; Open MPI 5 needs --coordinator too (docs/scaling.md)."""


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit status: 0 finished, 128 + n saved and stopped by signal n."""
    with one_line_errors():
        arguments, launch = take_flags(arguments)
    if launch is None:
        return _train(arguments, ProcessGroup())
    worker = fork()
    try:
        with one_line_errors():
            worker.join(launch)
        status = _train(arguments, worker)
        worker.finish()
        return status
    except UsageError as error:
        # orbax cannot write a checkpoint if another process has ended
        follows = isinstance(error.__context__, CheckpointError)
        _leave(worker, str(error), 2, f"twinax: {one_line(str(error))}", follows=follows)
    except KeyboardInterrupt:
        _leave(worker, "was interrupted", 130, "twinax: interrupted")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        _leave(worker, f"ended with status {code}", code)
    except Exception as error:
        line = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        _leave(worker, line, DEFECT, follows=True, defect=error)


def _leave(
    worker: Worker,
    line: str,
    status: int,
    printed: str = "",
    *,
    follows: bool = False,
    defect: Exception | None = None,
) -> NoReturn:
    """Report why this process fails, and end it at once: at exit, JAX would wait for the other processes."""
    if worker.fail(line, follows=follows):
        printed = printed if defect is None else f"twinax: {describe_defect(defect)}"
        print(printed, end="\n" if printed else "", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _train(arguments: Sequence[str], group: ProcessGroup) -> int:
    parsed = parse(arguments, "twinax train", _DESCRIPTION, FLAGS)
    if parsed.print_config:
        print(parsed.run.to_json(), end="")
        print(
            "twinax: the corpus determines null values, vocabulary sizes and special ids when training starts; the run "
            "directory's config.json then has them",
            file=sys.stderr,
        )
        return 0
    train = import_without_gc("twinax.train.loop.loop").train
    previous_handler = signal.signal(signal.SIGTERM, _exit_on_signal)  # until the loop installs its own handler
    try:
        with one_line_errors(str(parsed.out)):
            outcome = train(parsed.run, parsed.out, group=group)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
    return 0 if outcome.stopped_by is None else 128 + outcome.stopped_by


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    print("twinax: terminated before the first update; run the same command to start again", file=sys.stderr)
    sys.exit(128 + number)
