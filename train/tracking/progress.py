"""Progress of long work: a bar on a terminal, otherwise a line every half minute."""

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Event, Thread
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from ..data.buckets import Bucket

_RECENT = 20  # updates over which speed is measured
_WIDTH = 120  # characters per line of a sample
_QUIET = 30.0  # seconds between lines if standard error is not a terminal
_POLL = 1.0  # seconds between checks whether a line is due, so that a long step prints lines too
_KERNEL = "JPY_PARENT_PID"  # variable that Jupyter sets for a kernel, and so for the commands that a cell runs


def _can_draw(console: Console) -> bool:
    """Whether a bar can be drawn: not into a file, although FORCE_COLOR makes rich take it for a terminal.

    Nor into a cell, whose `!command` has a terminal, but of whose control codes a notebook knows only the colors.
    """
    return console.is_interactive and console.file.isatty() and _KERNEL not in os.environ


@contextmanager
def progress_bar(*, in_bytes: bool = False) -> Iterator[Callable[[str, int, int | None], None]]:
    """Yield `show(label, completed, total)`: a transient bar on standard error, or a line there every half minute.

    `in_bytes`: the numbers are bytes, shown in larger units and with their rate.
    """
    console = Console(stderr=True)
    line, last_time = "", time.monotonic()
    finished = Event()
    numbers = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    columns = TextColumn("{task.description}"), BarColumn(), *numbers, TimeElapsedColumn()
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not _can_draw(console),
        redirect_stdout=sys.stdout.isatty(),  # otherwise what is printed to a file would go to the terminal
    )

    def show(label: str, completed: int, total: int | None) -> None:
        nonlocal line
        bar.update(task, description=label, completed=completed, total=total)
        numbers = (completed,) if total is None else (completed, total)
        counts = (f"{n / 1e6:,.0f} MB" if in_bytes else f"{n:,}" for n in numbers)
        line = f"{label}: {' of '.join(counts)}"
        print_if_due()

    def print_if_due() -> None:
        nonlocal last_time
        if bar.disable and line and time.monotonic() - last_time > _QUIET:
            last_time = time.monotonic()
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def poll() -> None:
        while not finished.wait(_POLL):
            print_if_due()

    poller = Thread(target=poll, name="progress", daemon=True)
    with bar:
        task = bar.add_task("", total=None)
        poller.start()
        try:
            yield show
        finally:
            finished.set()
            poller.join()


def spinner(text: str) -> AbstractContextManager[Any]:
    """A text beside a spinner on a terminal, on standard error; elsewhere nothing."""
    console = Console(stderr=True)
    return console.status(text) if _can_draw(console) else nullcontext()


class TrainingProgress:
    """Loss, speed and remaining time of a training; messages are printed above the bar."""

    def __init__(self, console: Console, update: int, total: int):
        self._console, self._total = console, total
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # (time, tokens)
        self._last_line, self._compiling = time.monotonic(), 0.0
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not _can_draw(console))
        self._task = self._bar.add_task("", total=total, completed=update, status="compiling")

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing and show the cursor again."""
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(self, update: int, loss: float, rate: float, tokens: int) -> None:
        """Show an update and estimate speed and remaining time."""
        now = time.monotonic()
        self._recent.append((now, tokens))
        if len(self._recent) < 2:
            self._bar.update(self._task, completed=update)
            return
        (start, _), recent_tokens = self._recent[0], sum(tokens for _, tokens in list(self._recent)[1:])
        speed = recent_tokens / max(now - start, 1e-9)
        remaining = (self._total - update) * (now - start) / (len(self._recent) - 1) + self._compiling
        status = f"loss {loss:.3f} · rate {rate:.2e} · {speed:,.0f} tokens/s · {_duration(remaining)} left"
        self._bar.update(self._task, completed=update, status=status)
        if self._bar.disable and now - self._last_line > _QUIET:
            self._last_line = now
            self.say(f"update {update:,} of {self._total:,} · {status}")

    def compiled(self, bucket: Bucket, seconds: Mapping[int, float], shapes: int) -> None:
        """Print that a batch shape is compiled; `seconds` of those so far, this one last, of `shapes` in total."""
        src, tgt, rows = bucket
        last = [*seconds.values()][-1]
        self.say(f"batch shape {len(seconds)} of {shapes}, {rows}×({src}+{tgt}), compiled in {last:.1f} s")
        self.pause(compiling=(shapes - len(seconds)) * sum(seconds.values()) / len(seconds))

    def validated(self, label: str, scores: Mapping[str, Any], seconds: float) -> None:
        """Print the scores of a validation and sample translations."""
        bleu = f", BLEU {scores['bleu']:.2f}" if "bleu" in scores else ""
        loss = f"validation loss {scores['loss']:.4f}, perplexity {scores['perplexity']:.2f}{bleu}"
        self.say(f"{label}: {loss} ({seconds:.1f} s)")
        for src, reference, text in scores.get("samples", [])[:2]:
            for line in (f"    source     {src}", f"    reference  {reference}", f"    prediction {text}"):
                self.say(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…")

    def pause(self, compiling: float | None = None) -> None:
        """Exclude time outside updates from the speed. `compiling`: estimated seconds of compilation that remain."""
        self._recent.clear()
        self._compiling = self._compiling if compiling is None else compiling


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
