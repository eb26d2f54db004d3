"""How long a user waits at the beginning: until the first updates, the first validation, and one translation.

`python -m benchmarks.training.startup PAGE FOLDER`: FOLDER has Multi30k's train and val, .de and .en (.gz too). Each
command starts with an empty compilation cache, then again with the cache that it has written. About five minutes.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.progress import track

from benchmarks.multi30k.runs import VALIDATION, check_files, describe_machine, text
from benchmarks.pages import marks, write_table

NAME, HEADER = "start-up", ("from the command to", "empty cache, seconds", "filled cache, seconds", "machine")
ROUNDS, UPDATES, TENTH = 3, 40, 10
SETTINGS = (
    *("--loop.epochs", "None", "--loop.updates", str(UPDATES), "--loop.validate-every", str(UPDATES)),
    *("--training.warmup-updates", str(TENTH)),
)
SENTENCE, LONGEST = "A small house stands beside the river .", 20
POLL = 0.05  # seconds


def main(page: Path, folder: Path) -> None:
    """Measures, and writes the table into the page."""
    marks(page, NAME)
    check_files(folder, ("de", "en"))
    seconds: dict[str, tuple[list[float], list[float]]] = {}
    for _ in track(range(ROUNDS), "start-up"):
        with TemporaryDirectory() as temporary:
            for i in (0, 1):  # empty cache, filled cache
                run = Path(temporary, f"run{i}")
                for label, value in {
                    **_train(folder, run, Path(temporary)),
                    **_translate(run, Path(temporary)),
                }.items():
                    seconds.setdefault(label, ([], []))[i].append(value)
    machine = describe_machine(f"{os.cpu_count()} cores")
    rows = [(label, *map(_spread, columns), machine) for label, columns in seconds.items()]
    write_table(page, NAME, HEADER, rows)


def _environment(cache: Path) -> dict[str, str]:
    """The environment of a user: an own compilation cache, and Python's bytecode cache, which some machines disable."""
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(cache / "cache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    return environment


def _train(folder: Path, run: Path, cache: Path) -> dict[str, float]:
    """Seconds until an update and the validation are recorded, in a run of the preset that ends with it."""
    train, valid = (text(folder, part, ("en", "de")) for part in ("train", VALIDATION))
    files = dict(zip(("--src", "--tgt", "--valid-src", "--valid-tgt"), (*train, *valid), strict=True))
    flags = [str(word) for pair in files.items() for word in pair]
    command = ("train", "multi30k_en_de", *flags, *SETTINGS, "--out", str(run))
    begin, metrics, tenth = time.monotonic(), run / "metrics.jsonl", None
    with subprocess.Popen(_command(*command), env=_environment(cache), stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            time.sleep(POLL)
            lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []
            if tenth is None and len(lines) >= TENTH:
                tenth = time.monotonic() - begin
            if "validation" in "".join(lines[-1:]):
                break
        validated = time.monotonic() - begin
        if process.wait() or tenth is None:
            sys.exit(f"twinax {' '.join(command)}: failed with status {process.returncode}")
    return {
        f"update {TENTH} of a training run": tenth,
        f"the validation after update {UPDATES}, with its scores": validated,
    }


def _translate(run: Path, cache: Path) -> dict[str, float]:
    """Seconds of `twinax translate` of one sentence."""
    begin = time.monotonic()
    command = _command("translate", str(run), "--max-length", str(LONGEST))
    subprocess.run(command, env=_environment(cache), input=f"{SENTENCE}\n", text=True, check=True, capture_output=True)
    return {f"the translation of one sentence, {LONGEST} tokens": time.monotonic() - begin}


def _command(*arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("twinax")), *arguments]


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[2]).is_dir():
        sys.exit("usage: python -m benchmarks.training.startup PAGE FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
