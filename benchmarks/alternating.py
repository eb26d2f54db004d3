"""Times programs in turn, each in its own process, because their threads would slow each other down."""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from rich.progress import track

Run = Callable[..., Any]  # does the work once, and returns its result


class Program(NamedTuple):
    """A program to time; its process calls `prepare`, which returns what to compare beforehand, and the work."""

    name: str
    prepare: Callable[[], tuple[Any, Run]]
    environment: Mapping[str, str] = {}


class Started(NamedTuple):
    """A program's process."""

    requests: Connection
    about: Any  # what `prepare` returned


@contextmanager
def started(programs: Sequence[Program], label: str, together: bool = False) -> Iterator[dict[str, Started]]:
    """Start all programs, one after the other, and end them. Raises: EOFError if one fails, which prints why.

    `together`: they start at once, and those that fail are left out.
    """
    context = multiprocessing.get_context("spawn")
    running: dict[str, Started] = {}
    processes = []
    try:
        connections: dict[str, Connection] = {}
        for program in track(programs, f"{label}: compiling", transient=True):
            connections[program.name], there = context.Pipe()
            arguments = (program.prepare, program.environment, there)
            processes.append(context.Process(target=_serve, args=arguments, daemon=True))
            processes[-1].start()
            there.close()
            if not together:
                running[program.name] = Started(connections[program.name], connections[program.name].recv())
        for name, connection in connections.items() if together else ():
            with suppress(EOFError):
                running[name] = Started(connection, connection.recv())
        yield running
    finally:
        for program in running.values():
            program.requests.close()
        for process in processes:
            process.join(10)
            process.kill()


def alternate(
    running: Mapping[str, Started], rounds: int, label: str, *arguments: Any, repeats: int = 1, together: bool = False
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """(seconds per round, last result) of each program: the fastest of `repeats` counts, after one that compiles.

    `together`: programs that fail in a round are left out. Otherwise raises EOFError or OSError.
    """
    seconds: dict[str, list[float]] = {name: [] for name in running}
    results: dict[str, Any] = {}
    for number in track(range(rounds + 1), label, transient=True):
        for name in list(seconds):
            requests = running[name].requests
            try:
                requests.send((repeats if number else 1, arguments))
                duration, results[name] = requests.recv()
            except (EOFError, OSError):  # its process has ended
                if not together:
                    raise
                del seconds[name]
                results.pop(name, None)
                continue
            if number:
                seconds[name].append(duration)
    return seconds, results


def spread(seconds: Sequence[float], reference: Sequence[float]) -> str:
    """Median, smallest and largest ratio of a round's times."""
    ratios = [a / b for a, b in zip(seconds, reference, strict=True)]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _serve(prepare: Callable[[], tuple[Any, Run]], environment: Mapping[str, str], requests: Connection) -> None:
    os.environ.update(environment)  # before JAX is imported
    about, run = prepare()
    requests.send(about)
    while True:
        try:
            repeats, arguments = requests.recv()
        except EOFError:
            return
        durations, result = [], None
        for _ in range(repeats):
            begin = time.perf_counter()
            result = run(*arguments)
            durations.append(time.perf_counter() - begin)
        requests.send((min(durations), result))
