"""Time, rate, memory and exactness of `twinax convert`, form by form, and beside `cp`; writes the tables into a page.

`python -m benchmarks.conversion.conversion_speed PAGE FOLDER [TABLE …]`: about 20 GB are written into the folder, and
removed at the end. The tables are forms, dtype and large; by default all.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from rich.progress import track

from benchmarks.pages import write_table
from twinax import convert
from twinax.configs.schema import TransformerConfig
from twinax.convert import Checkpoint
from twinax.convert.arrays.lazy import LazyArrays
from twinax.convert.port import flax_specs

SHARD = 10**9
FORMS = {  # form -> (suffix of its name, flags that write it)
    "directory": ("", ("--layout", "bart")),
    "directory, shards of 1 GB": ("-shards", ("--layout", "bart", "--max-shard-size", "1GB")),
    ".safetensors": (".safetensors", ()),
    ".pt": (".pt", ()),
    "orbax": ("-orbax", ()),
}
LARGE = (  # conversions of the large model
    ("directory", ".safetensors"),
    (".safetensors", "directory"),
    ("directory", "directory, shards of 1 GB"),
    ("directory, shards of 1 GB", "directory"),
)
ROUNDS = 3
_PRINTED = re.compile(r"written in (\S+) s \((\S+) MB, (\S+) MB/s\); read back and compared in (\S+) s")
_POLL = 0.005  # seconds between readings of the memory


class Measurement(NamedTuple):
    """One conversion."""

    seconds: float
    rate: float  # MB/s of the file or directory that was written
    compared: float  # seconds
    peak: float  # anonymous memory of the process, MB
    exact: bool


def sizes(name: str) -> TransformerConfig:
    """The config of a model of float32: "small" has 0.7 GB, "large" 6 GB, "tiny" 100 kB."""
    width, layers, tokens = {"tiny": (16, 1, 100), "small": (1024, 4, 50_000), "large": (2048, 11, 100_000)}[name]
    settings = {"d_model": width, "vocab_size": tokens, "encoder_attention_heads": 16, "decoder_attention_heads": 16}
    for side in ("encoder", "decoder"):
        settings |= {f"{side}_layers": layers, f"{side}_ffn_dim": 4 * width}
    return convert.family("bart").config({**settings, "max_position_embeddings": 512}, "float32")


def write_model(name: str, path: Path, shard: int | None) -> float:
    """Write a directory with random weights, one array at a time; the size of the largest array in MB."""
    config = sizes(name)
    specs = flax_specs(config)
    arrays = LazyArrays(specs, lambda n: np.random.default_rng(len(n)).random(specs[n].shape, np.float32))
    convert.save(Checkpoint(config, arrays), path, layout="bart", max_shard_size=shard)
    return max(spec.size for spec in specs.values()) * 4 / 1e6


def measure(source: Path, target: Path, flags: tuple[str, ...]) -> Measurement:
    """Run the command, and remove what it wrote."""
    command = [str(Path(sys.executable).with_name("twinax")), "convert", str(source), str(target), *flags]
    environment = {**os.environ, "COLUMNS": "400"}  # no line of the table is broken
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        peak = 0.0
        while process.poll() is None:
            peak = max(peak, _anonymous(process.pid))
            time.sleep(_POLL)
        output.seek(0)
        text = output.read()
    if (match := _PRINTED.search(text)) is None:
        raise RuntimeError(text)
    seconds, _, rate, compared = (float(number.replace(",", "")) for number in match.groups())
    exact = process.returncode == 0 and "bit-identical after reading back" in text
    return Measurement(seconds, rate, compared, peak, exact)


def _anonymous(process: int) -> float:
    """The anonymous memory of a process in MB, 0 if it has ended."""
    try:
        match = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return 0.0
    return int(match[1]) / 1000 if match else 0.0


def copy_rate(source: Path, target: Path) -> float:
    """MB/s of `cp --reflink=never` and fsync of every file."""
    start = time.monotonic()
    subprocess.run(["cp", "--reflink=never", "-r", str(source), str(target)], check=True)
    files = [target] if target.is_file() else list(target.iterdir())
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds, size = time.monotonic() - start, sum(file.stat().st_size for file in files)
    remove(target)
    return size / 1e6 / seconds


def remove(path: Path) -> None:
    """Remove a file or a directory."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def forms_table(folder: Path, base: float) -> list[tuple[str, ...]]:
    """Every form to every form, of the small model."""
    write_model("small", folder / "small", None)
    paths = {"directory": folder / "small"}
    for form, (suffix, flags) in FORMS.items():
        if form not in paths:
            paths[form] = folder / f"small{suffix}"
            measure(paths["directory"], paths[form], flags)
    rows = []
    for source, target in track(list(product(FORMS, repeat=2)), "form by form"):
        suffix, flags = FORMS[target]
        result = measure(paths[source], folder / f"new{suffix}", flags)
        remove(folder / f"new{suffix}")
        rows.append((source, target, *_cells(result, base)))
    for path in paths.values():
        remove(path)
    return rows


def dtype_table(folder: Path) -> list[tuple[str, ...]]:
    """The small model in other dtypes; how far the logits move is computed too."""
    largest = write_model("small", folder / "small", None)
    write_model("tiny", folder / "tiny-dtype", None)
    rows = []
    for form, dtype in product(("directory", ".safetensors"), ("bfloat16", "float16")):
        suffix, flags = FORMS[form]
        flags = (*flags, "--dtype", dtype)
        base = measure(folder / "tiny-dtype", folder / f"base{suffix}", flags).peak
        result = measure(folder / "small", folder / f"new{suffix}", flags)
        remove(folder / f"base{suffix}")
        remove(folder / f"new{suffix}")
        seconds, _, compared, peak, exact = _cells(result, base)
        rows.append((form, dtype, seconds, compared, f"{peak} of {3 * largest + 500:,.0f} MB", exact))
    remove(folder / "small")
    return rows


def large_table(folder: Path, base: float) -> list[tuple[str, ...]]:
    """The conversions of the large model, beside copies in turn."""
    rows = []
    paths = {form: folder / f"large{FORMS[form][0]}" for form in {source for source, _ in LARGE}}
    largest = write_model("large", paths["directory"], None)
    for form, path in paths.items():
        if form != "directory":
            measure(paths["directory"], path, FORMS[form][1])
    for source, target in track(LARGE, "6 GB"):
        suffix, flags = FORMS[target]
        ratios, results = [], []
        for _ in range(ROUNDS):
            rate = copy_rate(paths[source], folder / f"copy{FORMS[source][0]}")
            results.append(measure(paths[source], folder / f"new{suffix}", flags))
            remove(folder / f"new{suffix}")
            ratios.append(results[-1].rate / rate)
        result = Measurement(*map(median, list(zip(*results, strict=True))[:-1]), all(r.exact for r in results))
        peak = max(*(r.peak - base for r in results), 0)
        bound = f"{peak:,.0f} MB of {3 * largest + 500:,.0f} MB"
        *times, _, exact = _cells(result, base)
        rows.append((source, target, *times, f"{median(ratios):.2f}", bound, exact))
    return rows


def _cells(result: Measurement, base: float) -> tuple[str, ...]:
    exact = "yes" if result.exact else "NO"
    peak = f"{max(result.peak - base, 0):,.0f} MB"
    return f"{result.seconds:.1f} s", f"{result.rate:,.0f} MB/s", f"{result.compared:.1f} s", peak, exact


def main() -> None:
    """Measure and write the tables."""
    page, parent = (Path(argument) for argument in sys.argv[1:3])
    tables = sys.argv[3:] or ["forms", "dtype", "large"]
    with tempfile.TemporaryDirectory(dir=parent) as name:
        folder = Path(name)
        write_model("tiny", folder / "tiny", None)
        base = measure(folder / "tiny", folder / "tiny.safetensors", ()).peak
        columns = ("from", "to", "written in", "rate", "compared in", "memory", "exact")
        if "forms" in tables:
            write_table(page, "conversion-forms", columns, forms_table(folder, base))
        if "dtype" in tables:
            columns_of_dtype = ("to", "dtype", "written in", "compared in", "memory of bound", "exact")
            write_table(page, "conversion-dtype", columns_of_dtype, dtype_table(folder))
        if "large" in tables:
            columns = (*columns[:5], "rate / rate of `cp`", "memory of bound", "exact")
            write_table(page, "conversion-large", columns, large_table(folder, base))


if __name__ == "__main__":
    main()
