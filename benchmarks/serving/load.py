"""Load `twinax serve` and the same server with CTranslate2, and kill and restart it.

`python -m benchmarks.serving.load PAGE FOLDER RUN`: FOLDER has Multi30k in German and English, RUN is a run on it,
which is trained if it does not exist (12 minutes). The page receives four tables. Half an hour.
"""

import asyncio
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx2
import psutil

from benchmarks.conversion.text_matrix import lines
from benchmarks.decoding.ctranslate2_matrix import train_run
from benchmarks.multi30k.runs import describe_machine
from benchmarks.pages import marks, write_between, write_table
from benchmarks.serving.clients import Clients, Record
from twinax import convert
from twinax.inference.translator import load

SECONDS, WARM_UP, ROUNDS = 60.0, 20.0, 3
CLIENTS = (1, 8, 200)
MINUTES = (1, 2, 4, 8, 16)  # of load, after which the memory is read
NAMES = ("load", "requests under load", "memory under load", "restart", "load, machine")
PROGRAM = str(Path(sys.executable).with_name("twinax"))


def main(page: Path, folder: Path, run: Path) -> None:
    """Measure and write."""
    for name in NAMES:
        marks(page, name)
    train_run(folder, run)
    sources = lines(folder, "test_2016_flickr", "de")
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        environment = os.environ | {"XDG_CACHE_HOME": str(place / "cache")}
        translations = _translations(place, run, sources, environment)
        convert.save(load(str(run)).checkpoint, place / "ct2", layout="ctranslate2")
        tokenizer = str(run / "tokenizer" / "tokenizer.json")
        peer = [sys.executable, "-m", "benchmarks.serving.ctranslate2_server", str(place / "ct2"), tokenizer, "0"]
        systems = {
            "`twinax serve`": ([PROGRAM, "serve", str(run), "--port", "0"], translations),
            "CTranslate2 in the same server": (peer, None),
        }
        with _server(systems["`twinax serve`"][0], environment) as (_, address):  # fills the compilation cache
            for number in CLIENTS:
                asyncio.run(Clients(address, sources, translations).run(number, WARM_UP))
        rows, record = [], Record()
        for name, (command, expected) in systems.items():
            for number in CLIENTS:
                with _server(command, environment) as (process, address):
                    record_of, memory = _load(process, address, number, sources, expected)
                rows.append(_row(name, number, record_of, memory))
                print(*rows[-1], record_of.answers, record_of.wrong[:3], record_of.lost[:3], file=sys.stderr)
                if expected is not None and number == max(CLIENTS):
                    record = record_of
        header = ("server", "clients", "sentences per second", "p50 (s)", "p99 (s)", "memory at 30 s, at the end")
        write_table(page, "load", header, rows)
        kinds = [(kind.replace("_", " "), f"{count:,}") for kind, count in sorted(record.answers.items())]
        kinds += [("refused with 503, and sent again", f"{record.refused:,}")]
        kinds += [("**wrong answers**", f"{len(record.wrong):,}"), ("**without an answer**", f"{len(record.lost):,}")]
        write_table(page, "requests under load", ("requests of 200 clients", "number"), kinds)
        write_memory(page, systems["`twinax serve`"][0], environment, sources, translations)
        restarts = _restarts(systems["`twinax serve`"][0], run, sources[0], environment)
        rows = [(name, ", ".join(f"{s:.1f}" for s in seconds)) for name, seconds in restarts.items()]
        write_table(page, "restart", ("from start to", "seconds"), rows)
    write_between(page, "load, machine", describe_machine(f"{os.cpu_count()} cores, shared with the clients,") + ".")


def _translations(place: Path, run: Path, sources: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What `twinax translate` prints."""
    (place / "sources").write_text("".join(f"{line}\n" for line in sources), encoding="utf-8")
    command = [PROGRAM, "translate", str(run), str(place / "sources")]
    result = subprocess.run(command, capture_output=True, check=True, encoding="utf-8", env=environment)
    return result.stdout.splitlines()


@contextmanager
def _server(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """(process, address) of a server that listens; SIGTERM must end it."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        found = None
        while found is None:
            line = process.stderr.readline()
            if not line:
                raise RuntimeError(f"{command}: ended")
            found = re.search(r"http://\S+", line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, found[0]
        process.terminate()
        if process.wait(180):
            raise RuntimeError(f"{command}: ended with {process.returncode}")
    finally:
        process.kill()


def _load(
    process: subprocess.Popen[str], address: str, number: int, sources: Sequence[str], expected: Sequence[str] | None
) -> tuple[Record, tuple[int, int]]:
    """(what the clients saw, bytes of memory after half of the time and at the end)."""
    asyncio.run(Clients(address, sources, expected).run(number, WARM_UP))
    clients = Clients(address, sources, expected)

    async def run() -> int:
        task = asyncio.create_task(clients.run(number, SECONDS, only_valid=number < max(CLIENTS)))
        await asyncio.sleep(SECONDS / 2)
        size = psutil.Process(process.pid).memory_info().rss
        await task
        return size

    half = asyncio.run(run())
    return clients.record, (half, psutil.Process(process.pid).memory_info().rss)


def write_memory(
    page: Path, command: Sequence[str], environment: Mapping[str, str], sources: Sequence[str], expected: Sequence[str]
) -> None:
    """Load a server for the last of `MINUTES`, and write its memory."""
    rows, clients = [], Clients("", sources, expected)

    async def run() -> None:
        begin = time.monotonic()
        task = asyncio.create_task(clients.run(max(CLIENTS), 60.0 * MINUTES[-1]))
        for minutes in MINUTES:
            await asyncio.sleep(begin + 60 * minutes - time.monotonic())
            size, answers = psutil.Process(process.pid).memory_info().rss, clients.record.answers.total()
            metrics = (await asyncio.to_thread(httpx2.get, f"{clients.address}/metrics", timeout=60)).text
            programs = [line.split()[1] for line in metrics.splitlines() if line.startswith("twinax_programs_total ")]
            rows.append((str(minutes), f"{answers:,}", f"{float(programs[0]):.0f}", f"{size / 1e6:,.0f} MB"))
            print(*rows[-1], file=sys.stderr)
        await task

    with _server(command, environment) as (process, clients.address):
        asyncio.run(run())
    if clients.record.wrong or clients.record.lost:
        raise RuntimeError(f"wrong: {clients.record.wrong[:3]}, without an answer: {clients.record.lost[:3]}")
    header = (f"minutes of load by {max(CLIENTS)} clients", "requests answered", "compiled programs", "memory")
    write_table(page, "memory under load", header, rows)


def _row(name: str, number: int, record: Record, memory: tuple[int, int]) -> tuple[str, ...]:
    median = statistics.median(record.seconds)
    last = statistics.quantiles(record.seconds, n=100)[98]
    speed = record.sentences / SECONDS
    sizes = ", ".join(f"{size / 1e6:,.0f} MB" for size in memory)
    return name, str(number), f"{speed:.1f}", f"{median:.2f}", f"{last:.2f}", sizes


def _restarts(
    command: Sequence[str], run: Path, source: str, environment: Mapping[str, str]
) -> Mapping[str, list[float]]:
    """Seconds from a start to the first translation: of a killed server, and of the command, in turns."""
    served = "the first answer after the server was killed and started again"
    translated = "the end of `twinax translate`"
    seconds: dict[str, list[float]] = {served: [], translated: []}
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        assert process.stderr is not None
        address = None
        while address is None:
            address = re.search(r"http://\S+", process.stderr.readline())
        httpx2.post(f"{address[0]}/translate", json={"q": source}, timeout=60).raise_for_status()
        seconds[served].append(time.perf_counter() - begin)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        begin = time.perf_counter()
        translate = [PROGRAM, "translate", str(run)]
        subprocess.run(translate, input=source, text=True, capture_output=True, check=True, env=environment)
        seconds[translated].append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: python -m benchmarks.serving.load PAGE FOLDER RUN")
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
