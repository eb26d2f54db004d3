"""What a person sees of long work: a bar on a terminal, lines elsewhere."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_RECENT = 20  # updates over which speed is measured
_WIDTH = 120  # characters of a sample that are shown
_QUIET = 30.0  # seconds between lines where there is no terminal to draw a bar on


@contextmanager
def counted() -> Iterator[Callable[[str, int, int], None]]:
    """On standard error, `show(what, done, total)`: a bar that goes at the end; elsewhere a line every half minute."""
    console, said = Console(stderr=True), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar = Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        redirect_stdout=sys.stdout.isatty(),  # a file must not get what is printed on the bar's terminal instead
    )

    def show(what: str, done: int, total: int) -> None:
        nonlocal said
        bar.update(task, description=what, completed=done, total=total)
        if bar.disable and time.monotonic() - said > _QUIET:
            said = time.monotonic()
            console.print(f"{what}: {done:,} of {total:,}", markup=False, highlight=False, soft_wrap=True)

    with bar:
        task = bar.add_task("", total=None)
        yield show


class TrainingProgress:
    """The loss, the speed and the time left of a training, and lines that stay."""

    def __init__(self, console: Console, update: int, total: int):
        self._console, self._total = console, total
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # (when, tokens)
        self._said, self._compiling = time.monotonic(), 0.0
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[what]}"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=total, completed=update, what="compiling")

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing, and show the cursor again."""
        self._bar.stop()

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(self, update: int, loss: float, rate: float, tokens: int) -> None:
        """After an update."""
        now = time.monotonic()
        self._recent.append((now, tokens))
        if len(self._recent) < 2:
            self._bar.update(self._task, completed=update)
            return
        (since, _), passed = self._recent[0], sum(tokens for _, tokens in list(self._recent)[1:])
        speed = passed / max(now - since, 1e-9)
        left = (self._total - update) * (now - since) / (len(self._recent) - 1) + self._compiling
        what = f"loss {loss:.3f} · rate {rate:.2e} · {speed:,.0f} tokens/s · {_duration(left)} left"
        self._bar.update(self._task, completed=update, what=what)
        if self._bar.disable and now - self._said > _QUIET:
            self._said = now
            self.say(f"update {update:,} of {self._total:,} · {what}")

    def compiled(self, shape: tuple[int, ...], seconds: Mapping[tuple[int, ...], float], shapes: int) -> None:
        """A shape is ready; `seconds` that each one took so far, of `shapes` in all."""
        rows, src, tgt = shape
        self.say(f"shape {len(seconds)} of {shapes}, {rows}×({src}+{tgt}), ready in {seconds[shape]:.1f} s")
        self.pause(compiling=(shapes - len(seconds)) * sum(seconds.values()) / len(seconds))

    def validated(self, what: str, scores: Mapping[str, Any], seconds: float) -> None:
        """What validation scores, and some translations."""
        bleu = f", BLEU {scores['bleu']:.2f}" if "bleu" in scores else ""
        loss = f"validation loss {scores['loss']:.4f}, perplexity {scores['perplexity']:.2f}{bleu}"
        self.say(f"{what}: {loss} ({seconds:.1f} s)")
        for src, reference, text in scores.get("samples", [])[:2]:
            for line in (f"    source     {src}", f"    reference  {reference}", f"    prediction {text}"):
                self.say(line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…")

    def pause(self, compiling: float | None = None) -> None:
        """Where something is no update: its time does not count as speed. `compiling`: seconds of it still to come."""
        self._recent.clear()
        self._compiling = self._compiling if compiling is None else compiling


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
