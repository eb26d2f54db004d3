"""What comparing checksums adds to the time of reading a checkpoint; writes the table into a page.

`python -m benchmarks.verification PAGE FOLDER`: 5 GB are written into the folder, and removed at the end. Files are in
the page cache, where the share of the checksums is largest.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from rich.progress import track

from benchmarks.conversion_speed import sizes, write_model
from benchmarks.pages import marks, write_table
from twinax import convert

NAME, HEADER = "verification", ("form", "compared with", "size", "reading", "comparing adds", "spread of rounds")
ROUNDS = 7


def main(page: Path, folder: Path) -> None:
    """Measures all forms, with and without comparing in turn."""
    marks(page, NAME)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        paths = write_forms(Path(name))
        rows = [measure(form, path) for form, path in track(paths.items(), "forms")]
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


def measure(form: str, path: Path) -> tuple[str, ...]:
    """A row: the median time of reading, and what comparing adds to it."""
    config = sizes("small") if path.name == "bare.pt" else None
    without, ratios = [], []
    for _ in range(ROUNDS + 1):  # the first reads the files from the disk
        seconds = {}
        for verify in (True, False):
            start = time.perf_counter()
            with convert.verifying(verify):
                convert.load(path, config)
            seconds[verify] = time.perf_counter() - start
        without.append(seconds[False])
        ratios.append(seconds[True] / seconds[False] - 1)
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    by = "CRC-32" if config is not None else "checksums"
    added, spread = median(ratios[1:]), f"{min(ratios[1:]):+.0%} to {max(ratios[1:]):+.0%}"
    return form, by, f"{size / 1e6:,.0f} MB", f"{median(without[1:]):.2f} s", f"{added:+.0%}", spread


if __name__ == "__main__":
    if len(sys.argv) != 3 or not Path(sys.argv[2]).is_dir():
        sys.exit("usage: python -m benchmarks.verification PAGE FOLDER")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
