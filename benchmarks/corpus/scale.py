"""Seconds, memory and tokens per second of corpora of 1 and 10 million pairs, and of an order of 100 million.

`python -m benchmarks.corpus.scale PAGE` generates the corpora below a temporary folder, measures each phase in a fresh
process, and writes tables into PAGE; `--tables dropout` writes one. `--phase NAME FOLDER` runs one phase in this
process and prints JSON.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

import numpy as np

from benchmarks.corpus.text import write_corpus
from benchmarks.pages import write_between, write_table

SIZES = (1_000_000, 10_000_000)
HUGE = 100_000_000  # pairs, of which only the lengths are made
KILLS, KILLED_PAIRS = 20, 300_000
BATCHES = (4_096, 16_384, 65_536)  # tokens per side
DROPOUT, DROPOUT_PAIRS = 0.1, 50_000
TURNS, TURN_TOKENS = 5, 400_000  # of batches with and without BPE-dropout; fewer than an epoch has
_HELD_OUT, _VOCABULARY = 1000, 32_000


@contextmanager
def memory() -> Iterator[Callable[[], float]]:
    """Yield a function that gives the peak of this process's own memory in GB, mapped files not counted."""
    peak, finished = 0, Event()

    def own() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1])
        return 0

    def watch() -> None:
        nonlocal peak
        while not finished.wait(0.02):
            peak = max(peak, own())

    Thread(target=watch, daemon=True).start()
    try:
        yield lambda: peak / 1e6
    finally:
        finished.set()


def run_of(folder: Path, tokens: int | None = None, dropout: float = 0.0) -> Any:
    """The run of a corpus, with a small model."""
    from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
    from twinax.configs.run import RunConfig

    return RunConfig(
        corpus=CorpusConfig(src=str(folder / "src"), tgt=str(folder / "tgt"), held_out=_HELD_OUT),
        tokenizer=TokenizerConfig(vocab_size=_VOCABULARY, bpe_dropout=dropout),
        batches=BatchConfig(tokens=tokens),
    )


def train_tokenizer(folder: Path) -> dict[str, Any]:
    """Count the pairs, and train the tokenizer as a run does."""
    from twinax.train.data.parts import contents_of, parts_of
    from twinax.train.data.tokenizer_pair import make_tokenizers

    run = run_of(folder)
    begin = time.monotonic()
    contents_of(run.corpus)
    counted = time.monotonic()
    part, _ = parts_of(run.corpus, False)
    make_tokenizers(run.tokenizer, [part], print_error)
    return {"counting": counted - begin, "tokenizer": time.monotonic() - counted}


def raw(folder: Path) -> dict[str, Any]:
    """Encode the same text by `tokenizers.encode_batch` alone, in the order of a run."""
    from twinax.train.data.parts import parts_of
    from twinax.train.data.tokenizer_pair import make_tokenizers
    from twinax.train.text.tokenization import FastTokenizer

    run, seconds = run_of(folder), 0.0
    tokenizer = make_tokenizers(run.tokenizer, [parts_of(run.corpus, False)[0]], print_error).src
    assert isinstance(tokenizer, FastTokenizer)
    with (folder / "src").open() as src, (folder / "tgt").open() as tgt:
        while pairs := list(islice(zip(src, tgt, strict=True), 10_000)):
            for side in (0, 1):
                texts = [pair[side].rstrip("\n") for pair in pairs]
                begin = time.monotonic()
                tokenizer.fast.encode_batch(texts)
                seconds += time.monotonic() - begin
    return {"encode_batch": seconds}


def prepare_all(folder: Path) -> dict[str, Any]:
    """Prepare the run, and make its first batch."""
    from twinax.train.data.prepare import prepare

    begin = time.monotonic()
    prepared = prepare(run_of(folder), say=print_error)
    seconds = time.monotonic() - begin
    prepared.batches()[0]
    size = sum(path.stat().st_size for path in prepared.train.folder.iterdir())
    counts = prepared.train.counts
    return {
        "prepare": seconds,
        "first batch": time.monotonic() - begin - seconds,
        "bytes": size,
        "kept": counts.kept,
        "tokens": sum(counts.tokens),
        "fingerprint": prepared.train.fingerprint(),
    }


def read_batches(folder: Path) -> dict[str, Any]:
    """Target and source tokens per second of batches in the order of a run, in one process."""
    from twinax.train.data.prepare import prepare

    rates = {}
    for size in BATCHES:
        batches = prepare(run_of(folder, size), say=print_error).batches()
        batches[0]
        rates[str(size)] = _rate(batches.read(1), 40_000_000 // size)
    return {"rates": rates}


def _rate(batches: Iterable[Any], number: int) -> float:
    """Tokens per second of some batches."""
    begin, tokens = time.monotonic(), 0
    for batch in islice(batches, number):
        tokens += int((batch.arrays.src_tokens != 0).sum() + (batch.arrays.labels != 0).sum())
    return tokens / (time.monotonic() - begin)


def read_with_dropout(folder: Path) -> dict[str, Any]:
    """Tokens per second of batches without and with BPE-dropout, in turns; seconds to plan an epoch with it."""
    from twinax.train.data.prepare import prepare

    rates, plan = {}, 0.0
    for size in BATCHES:
        ways = [prepare(run_of(folder, size, rate), say=print_error).batches() for rate in (0.0, DROPOUT)]
        turns: list[list[float]] = [[], []]
        for way in ways:
            way.plan(0)
        for turn in range(TURNS):
            for way, own in zip(ways, turns, strict=True):
                number = max(2, TURN_TOKENS // (2 * size))
                reader = way.read(turn * number)
                next(reader)  # starts the thread
                own.append(_rate(reader, number))
                reader.close()
        rates[str(size)] = [median(own) for own in turns]
        begin = time.monotonic()
        ways[1].plan(1)
        plan = time.monotonic() - begin
    return {"rates": rates, "plan": plan}


def order_of_many(folder: Path) -> dict[str, Any]:
    """Choose shapes for 100 million pairs, and plan two epochs."""
    from twinax.train.data.buckets import choose_buckets, count_batches, introduce_gradually, plan_epoch

    lengths = np.empty((HUGE, 2), np.uint16)
    rng = np.random.default_rng(0)
    for start in range(0, HUGE, 1_000_000):
        base = rng.lognormal(3.1, 0.55, 1_000_000)
        for side in (0, 1):
            lengths[start : start + 1_000_000, side] = np.clip(base * rng.uniform(0.85, 1.15, len(base)), 1, 256)
    begin = time.monotonic()
    buckets = choose_buckets(lengths, 4096, 16)
    number = count_batches(lengths, buckets)
    chosen = time.monotonic()
    first = introduce_gradually(plan_epoch(lengths, buckets, 0, 0))
    planned = time.monotonic()
    second = plan_epoch(lengths, buckets, 0, 1)
    assert len(first.batches) == len(second.batches) == number
    return {"shapes": chosen - begin, "first plan": planned - chosen, "next plan": time.monotonic() - planned}


PHASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    f.__name__: f for f in (train_tokenizer, raw, prepare_all, read_batches, read_with_dropout, order_of_many)
}


def print_error(line: str) -> None:
    """Progress, apart from the JSON."""
    print(line, file=sys.stderr, flush=True)


def phase(name: str, folder: Path, cache: Path) -> dict[str, Any]:
    """Run a phase in a process of its own; its results, and the peak of its memory in GB."""
    command = [sys.executable, "-m", "benchmarks.corpus.scale", "--phase", name, str(folder)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(output.splitlines()[-1])


def killed(folder: Path, cache: Path) -> int:
    """SIGKILL a preparation at random moments until it ends; the number of kills."""
    command = [sys.executable, "-m", "benchmarks.corpus.scale", "--phase", "prepare_all", str(folder)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu"}
    rng, kills = random.Random(0), 0
    while kills < KILLS:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(rng.uniform(1, 8))
            shutil.rmtree(cache / "twinax" / "corpora")  # it has ended: again
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    return kills


def write_sizes(page: Path, root: Path) -> None:
    """The tables of corpora of several sizes."""
    sizes, rates = [], []
    for pairs in SIZES:
        folder, cache = _corpus(root, pairs), root / f"cache-{pairs}"
        trained = phase("train_tokenizer", folder, cache)
        alone = phase("raw", folder, cache)["encode_batch"]
        start, resumed = (phase("prepare_all", folder, cache) for _ in range(2))
        read = phase("read_batches", folder, cache)
        ratio = f"{start['prepare'] / alone:.2f}"
        memories = [f"{x['memory']:.2f}" for x in (trained, start, resumed, read)]
        seconds = [f"{s:.0f}" for s in (trained["counting"], trained["tokenizer"], alone, start["prepare"])]
        resume = f"{resumed['prepare'] + resumed['first batch']:.1f}"
        sizes.append((f"{pairs:,}", *seconds, ratio, resume, f"{start['bytes'] / start['kept']:.0f}", *memories))
        rates.append((f"{pairs:,}", *(f"{read['rates'][str(size)] / 1e6:.2f}" for size in BATCHES)))
    header = (
        *("pairs", "counting (s)", "tokenizer (s)", "encode_batch alone (s)", "first start (s)"),
        *("first start / encode_batch", "second start with first batch (s)", "bytes per pair"),
        *("memory: tokenizer (GB)", "first start", "second start", "batches"),
    )
    write_table(page, "corpus-scale", header, sizes)
    write_table(page, "corpus-scale-batches", ("pairs", *(f"{size:,} tokens per side" for size in BATCHES)), rates)


def write_dropout(page: Path, root: Path) -> None:
    """The table of batches without and with BPE-dropout."""
    read = phase("read_with_dropout", _corpus(root, DROPOUT_PAIRS), root / "cache-dropout")
    rows = [
        (f"{size:,}", *(f"{rate / 1e6:.2f}" for rate in rates), f"{rates[1] / rates[0]:.2f}")
        for size, rates in ((size, read["rates"][str(size)]) for size in BATCHES)
    ]
    write_table(page, "corpus-scale-dropout", ("tokens per side", "without", f"with {DROPOUT}", "ratio"), rows)
    text = (
        f"{DROPOUT_PAIRS:,} pairs; medians of {TURNS} turns. With BPE-dropout, planning an epoch takes "
        f"{read['plan']:.1f} s, because every pair is segmented to know its length; this time grows with the corpus."
    )
    write_between(page, "corpus-scale-dropout-epoch", text)


def write_order(page: Path, root: Path) -> None:
    """The table of the order of 100 million pairs."""
    huge = phase("order_of_many", root, root)
    header = ("pairs", "shapes (s)", "plan of the first epoch (s)", "plan of the next (s)", "memory (GB)")
    seconds = [f"{huge[name]:.1f}" for name in ("shapes", "first plan", "next plan")]
    write_table(page, "corpus-scale-order", header, [(f"{HUGE:,}", *seconds, f"{huge['memory']:.2f}")])


def write_kills(page: Path, root: Path) -> None:
    """What a preparation that is killed again and again gives."""
    folder, caches = _corpus(root, KILLED_PAIRS), [root / "cache-killed", root / "cache-whole"]
    kills = killed(folder, caches[0])
    results = [phase("prepare_all", folder, cache)["fingerprint"] for cache in caches]
    outcome = "the same ids" if results[0] == results[1] else "OTHER IDS"
    text = f"SIGKILL at {kills} random moments of the preparation of {KILLED_PAIRS:,} pairs: {outcome} at the end."
    write_between(page, "corpus-scale-kills", text)
    print(text)


def _corpus(root: Path, pairs: int) -> Path:
    """The folder of a new corpus."""
    folder = root / str(pairs)
    folder.mkdir()
    write_corpus(folder, pairs)
    return folder


TABLES: dict[str, Callable[[Path, Path], None]] = {
    "sizes": write_sizes,
    "dropout": write_dropout,
    "order": write_order,
    "kills": write_kills,
}


def main() -> None:
    """Measure and write, or run one phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--phase", choices=PHASES)
    parser.add_argument("--tables", choices=TABLES, nargs="+", default=[*TABLES])
    arguments = parser.parse_args()
    if arguments.phase:
        with memory() as peak:
            print(json.dumps({**PHASES[arguments.phase](arguments.page), "memory": peak()}))
        return
    for name in arguments.tables:
        with tempfile.TemporaryDirectory() as root:
            TABLES[name](arguments.page, Path(root))


if __name__ == "__main__":
    main()
