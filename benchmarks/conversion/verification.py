"""What comparing checksums adds to the time of reading a checkpoint; writes the table into a page.

`python -m benchmarks.conversion.verification PAGE FOLDER`: 5 GB are written into the folder, and removed at the end.
"""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.progress import track

from benchmarks.conversion.conversion_speed import sizes, write_model
from benchmarks.pages import marks, write_table
from twinax import TransformerConfig, convert

NAME = "verification"
HEADER = ("form", "compared with", "size", "from", "reading", "comparing adds", "spread of rounds")
ROUNDS = 8


def main(page: Path, folder: Path) -> None:
    """Measure all forms, with and without comparing in turn."""
    marks(page, NAME)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        paths = write_forms(Path(name))
        rows = [row for form, path in track(paths.items(), "forms") for row in measure(form, path)]
    write_table(page, NAME, HEADER, rows)


def write_forms(folder: Path) -> dict[str, Path]:
    """The same model of 0.7 GB in each form."""
    write_model("small", folder / "directory", None)
    checkpoint = convert.load(folder / "directory")
    for name in ("x.safetensors", "x.pt", "orbax"):
        convert.save(checkpoint, folder / name)
    torch.save(checkpoint.to_torch().state_dict(), folder / "bare.pt")
    return {
        "directory of a family": folder / "directory",
        ".safetensors": folder / "x.safetensors",
        ".pt": folder / "x.pt",
        ".pt of another program": folder / "bare.pt",
        "checkpoint of a run": folder / "orbax",
    }


def measure(form: str, path: Path) -> list[tuple[str, ...]]:
    """Two rows: the median time of reading from the disk and from the page cache, and what comparing adds to it."""
    config = sizes("small") if path.name == "bare.pt" else None
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    by = "CRC-32" if config is not None else "checksums"
    size = f"{sum(file.stat().st_size for file in files) / 1e6:,.0f} MB"
    rows = []
    for source, before in SOURCES.items():
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for verify in (True, False, False, True) * (ROUNDS // 2):
            gc.collect()  # pages that are still mapped stay in the page cache
            before(files)
            start = time.perf_counter()
            with convert.verifying(verify):
                read(path, config)
            seconds[verify].append(time.perf_counter() - start)
        ratios = [a / b - 1 for a, b in zip(seconds[True], seconds[False], strict=True)]
        spread = f"{min(ratios):+.0%} to {max(ratios):+.0%}"
        rows.append((form, by, size, source, f"{median(seconds[False]):.2f} s", f"{median(ratios):+.0%}", spread))
    return rows


def read(path: Path, config: TransformerConfig | None) -> None:
    """Copy all arrays of a checkpoint into memory, one at a time: they are mapped, so loading alone reads little."""
    for array in convert.load(path, config).tensors.values():
        np.array(array)


def evict(files: Sequence[Path]) -> None:
    """Remove files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)  # only written pages can be removed
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cache(files: Sequence[Path]) -> None:
    """Read files into the page cache."""
    for file in files:
        file.read_bytes()


SOURCES = {"disk": evict, "page cache": cache}


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[2]).is_dir():
        sys.exit("usage: python -m benchmarks.conversion.verification PAGE FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
