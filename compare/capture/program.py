"""Records a model into a file: `twinax capture`, and the program that does the same where twinax is not installed."""

import argparse
import os
import platform
import sys
import zipapp
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from .factories import called, factory_of, import_path, inputs_of, needs_parameters
from .models import capture
from .recording import SEED, SUFFIX, Recording
from .recording_file import write_recording
from .trace import CaptureError, Trace

_PACKAGES = ("torch", "jax", "flax", "equinox", "numpy", "transformers")


@import_path()
def record(
    model: str, inputs: str, out: str, gradients: bool = False, dropout: bool = False, layers: int | None = None
) -> str:
    """Record what `file.py:function` returns on these inputs; the line that says what was written.

    Raises:
        CaptureError: the model or its inputs cannot be used, or the file cannot be written.
    """
    if Path(out).suffix != SUFFIX:
        raise CaptureError(f"{out}: must end in {SUFFIX}")
    if not Path(out).absolute().parent.is_dir():
        raise CaptureError(f"{out}: there is no directory {Path(out).parent}")
    given = inputs_of(inputs)
    factory = factory_of(model, layers)
    if needs_parameters(factory):
        raise CaptureError(f"{model}: takes arguments; record a function without any, with whatever parameters it has")
    built = called(model, factory)
    forward = capture(built, given, random=dropout)
    backward = capture(built, given, factors(forward), dropout) if gradients else None
    versions = {name: metadata.version(name) for name in _PACKAGES if name in sys.modules}
    about = {"model": model, "python": platform.python_version(), **versions}
    try:
        write_recording(out, Recording(forward, backward, given, about))
        size = os.path.getsize(out)
    except OSError as error:
        raise CaptureError(f"{out}: cannot be written: {error.strerror or error}") from None
    parts = f"{len(forward.operations)} operations of {forward.framework}" + (" and gradients" if gradients else "")
    return f"{out}: {parts}, {size / 1e6:.1f} MB"


def factors(trace: Trace) -> dict[str, np.ndarray]:
    """Random cotangents of the outputs."""
    random = np.random.default_rng(SEED)
    values = {name: trace.values[number] for name, number in trace.outputs.items() if name not in trace.buffers}
    return {name: random.standard_normal(value.shape) for name, value in values.items() if value.dtype.kind == "f"}


def write_program(path: str) -> None:
    """Atomically write this folder as one file that `python` runs; it needs NumPy, and PyTorch or JAX."""
    target = Path(path).resolve()  # a symbolic link is kept
    with TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as folder:
        package = Path(folder, "source", "recorder")
        package.mkdir(parents=True)
        for file in Path(__file__).parent.glob("*.py"):
            (package / file.name).write_bytes(file.read_bytes())
        archive = Path(folder, target.name)
        zipapp.create_archive(package.parent, archive, main="recorder.program:main")
        os.replace(archive, target)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description="Record a model for `twinax compare`.")
    parser.add_argument("model", metavar="MODEL.PY:FUNCTION", help="file and function that returns the model")
    parser.add_argument(
        "--inputs", required=True, help=".npz or .npy file, or file.py:function that returns the inputs"
    )
    parser.add_argument("--out", required=True, help=f"file to write; it ends in {SUFFIX}")
    parser.add_argument("--gradients", action="store_true", help="record the gradients of all parameters too")
    parser.add_argument("--dropout", action="store_true", help="the function returns a model in training mode")
    parser.add_argument("--layers", type=int, help="call the function with layers=N, for a smaller model")
    flags: Any = parser.parse_args(arguments)
    try:
        print(record(flags.model, flags.inputs, flags.out, flags.gradients, flags.dropout, flags.layers))
    except CaptureError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
