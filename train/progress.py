"""What a person sees of a training run: a bar with the loss, the speed and the time left, and lines that stay."""

import time
from collections import deque
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_RECENT = 20  # updates over which speed is measured
_QUIET = 30.0  # seconds between lines where there is no terminal to draw a bar on


class TrainingProgress:
    """A bar on a terminal; elsewhere a line every half minute."""

    def __init__(self, console: Console, update: int, total: int):
        self._console, self._total = console, total
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # (when, tokens)
        self._said = time.monotonic()
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
        left = (self._total - update) * (now - since) / (len(self._recent) - 1)
        what = f"loss {loss:.3f} · rate {rate:.2e} · {speed:,.0f} tokens/s · {_duration(left)} left"
        self._bar.update(self._task, completed=update, what=what)
        if self._bar.disable and now - self._said > _QUIET:
            self._said = now
            self.say(f"update {update:,} of {self._total:,} · {what}")

    def pause(self) -> None:
        """Before something that is no update: its time does not count as speed."""
        self._recent.clear()


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
