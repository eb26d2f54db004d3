"""The file of a recorded model: safetensors with its values; the metadata `twinax.trace` is JSON with its operations.

Nothing in the file is executed when it is read. A diagnosis computes operations anew: those of ATen and JAX's
primitives, which the file names, and nothing else.
"""

import hashlib
import importlib.util
import json
import linecache
import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .arrays import Arrays, narrowed
from .encoding import decoded, encoded
from .recording import Recording
from .source_lines import surroundings
from .trace import CaptureError, Code, Operation, Trace

VERSION = 1
_KEY, _DIGEST = "twinax.trace", "twinax.digest"
_DTYPES = {
    **{"bool": "BOOL", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64"},
    **{f"{sign}int{n}": f"{sign.upper() or 'I'}{n}" for sign in ("", "u") for n in (8, 16, 32, 64)},
}
_ORDER = ("forward", "backward")


def write_recording(path: str | os.PathLike[str], recording: Recording) -> None:
    """Write a recording atomically. Equal values are stored once, and as float32 where that loses nothing."""
    arrays = _Arrays()
    traces = [_described(t, arrays) for t in (recording.forward, recording.backward) if t is not None]
    lines = {line for t in traces for _, place in t["places"] for line in place}
    document = {
        "version": VERSION,
        "about": dict(recording.about),
        "inputs": encoded(recording.inputs, arrays.key),
        "source": surroundings(lines),
        **dict(zip(_ORDER, traces, strict=False)),
    }
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    entries = arrays.entries()
    metadata = {_KEY: text, _DIGEST: _digest([text, json.dumps(entries)], arrays.stored)}
    header = json.dumps({"__metadata__": metadata, **entries}).encode()
    header += b" " * (-len(header) % 8)
    path = Path(path).resolve()  # a symbolic link is kept
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for array in arrays.stored:
                file.write(array.tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_recording(path: str | os.PathLike[str]) -> Recording:
    """Read a recording.

    Raises:
        CaptureError: the file is damaged, or of a later version.
    """
    name = os.fspath(path)
    try:
        document, arrays = _contents(Path(path))
        version = document["version"]
        if version != VERSION:
            raise CaptureError(f"{name}: has version {version} of the format, this twinax reads {VERSION}")
        traces = [_trace(document[kind], arrays) if kind in document else None for kind in _ORDER]
        inputs = decoded(document["inputs"], arrays)
        about = {str(key): str(value) for key, value in document["about"].items()}
        source = {str(f): {int(n): str(text) for n, text in lines.items()} for f, lines in document["source"].items()}
    except CaptureError:
        raise
    except FileNotFoundError:
        raise CaptureError(f"{name}: there is no such file") from None
    except OSError as error:
        raise CaptureError(f"{name}: cannot be read: {error.strerror or error}") from None
    except (KeyError, ValueError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:80]
        raise CaptureError(f"{name}: is not a recorded model, or is damaged ({text}); record it again") from None
    if traces[0] is None:
        raise CaptureError(f"{name}: has no trace of the outputs; record it again")
    for file, lines in source.items():
        text = [lines.get(number, "") + "\n" for number in range(1, max(lines, default=0) + 1)]
        linecache.cache.setdefault(file, (sum(map(len, text)), None, text, file))
    return Recording(traces[0], traces[1], inputs, about, name)


class _Arrays:
    """The arrays of a file; equal ones are stored once."""

    def __init__(self) -> None:
        self.stored: list[np.ndarray] = []
        self.numbers: dict[tuple[str, bytes], int] = {}
        self.keys: dict[int, tuple[Any, str]] = {}  # id -> (the array, so that its id stays its own; its key)

    def key(self, array: np.ndarray, exact: bool = True) -> Any:
        """The description of an array in the JSON: [number, shape], and the dtype where it is stored narrower."""
        array = np.asarray(array)
        narrow = array if exact else narrowed(array)
        flat = np.ascontiguousarray(narrow).reshape(-1)
        if flat.dtype.kind == "c":
            flat = flat.astype(np.complex128).view(np.float64)
        name = (flat.dtype.name, hashlib.blake2b(flat.tobytes(), digest_size=16).digest())
        if flat.dtype.name not in _DTYPES:
            raise CaptureError(f"arrays of {array.dtype} cannot be stored")
        if name not in self.numbers:
            self.numbers[name] = len(self.stored)
            self.stored.append(flat)
        return [self.numbers[name], [*array.shape], array.dtype.name]

    def entries(self) -> dict[str, Any]:
        """What the header of the file says of each array."""
        entries: dict[str, Any] = {}
        ends = [0]
        for array in self.stored:
            ends.append(ends[-1] + array.nbytes)
        for number, (array, offsets) in enumerate(zip(self.stored, pairwise(ends), strict=True)):
            dtype = _DTYPES[array.dtype.name]
            entries[str(number)] = {"dtype": dtype, "shape": [array.size], "data_offsets": offsets}
        return entries


def _contents(path: Path) -> tuple[Any, "_Stored"]:
    """(the JSON, the arrays) of a file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError("its header is not that of a safetensors file")
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__")
    data = np.asarray(np.memmap(path, np.uint8, "r", 8 + length)) if size > 8 + length else np.zeros(0, np.uint8)
    if _digest([metadata[_KEY], json.dumps(header)], [data]) != metadata[_DIGEST]:
        raise ValueError("its contents do not have the digest that was written")
    return json.loads(metadata[_KEY]), _Stored(header, data)


def _digest(texts: Sequence[str], arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=16)
    for array in arrays:
        digest.update(array.view(np.uint8).data)
    return digest.hexdigest()


class _Stored:
    """The arrays of a file that is read."""

    def __init__(self, header: Mapping[str, Any], data: np.ndarray):
        self.header, self.data = header, data

    def __call__(self, key: Sequence[Any]) -> np.ndarray:
        number, shape, dtype = key
        entry = self.header[str(number)]
        start, end = entry["data_offsets"]
        if not 0 <= start <= end <= self.data.size:
            raise ValueError(f"it is cut off: array {number} ends at byte {end} of {self.data.size}")
        stored = {code: name for name, code in _DTYPES.items()}[entry["dtype"]]
        flat = self.data[start:end].view(stored)
        if np.dtype(dtype).kind == "c":
            flat = flat.view(np.complex128)
        return flat.astype(dtype).reshape(shape)


def _described(trace: Trace, arrays: _Arrays) -> dict[str, Any]:
    """A trace for the JSON; its values are described by `_Arrays.key`."""
    places: dict[tuple[str, tuple[str, ...]], int] = {}
    operations = []
    for operation in trace.operations:
        place = places.setdefault((operation.module, operation.lines), len(places))
        settings = encoded(dict(operation.settings), arrays.key)
        compute = operation.compute
        description = getattr(compute, "description", None)
        how = encoded(description(), arrays.key) if description is not None else None
        operations.append([operation.name, operation.inputs, operation.outputs, place, settings, how])
    names = ("parameters", "inputs", "outputs", "gradients", "names")
    return {
        "framework": trace.framework,
        "values": [arrays.key(value, exact=False) for value in trace.values],
        "operations": operations,
        "places": list(places),
        **{name: dict(getattr(trace, name)) for name in names},
        "buffers": sorted(trace.buffers),
        "random": sorted(trace.random),
        "derived": sorted(trace.derived),
        "branches": trace.branches,
        "notes": trace.notes,
        "code": {path: [code.file, code.lines.start, code.lines.stop] for path, code in trace.code.items()},
    }


def _repeated(framework: str) -> Any:
    """The function that makes an operation of this framework anew; without PyTorch, its operations stay as they are."""
    if framework == "JAX":
        from .jax_trace import repeated
    elif framework == "PyTorch" and importlib.util.find_spec("torch") is not None:
        from .torch_trace import repeated
    elif framework == "PyTorch":
        return lambda name, settings, description: None
    else:
        raise ValueError(f"{framework} is not a framework")
    return repeated


def _trace(description: Mapping[str, Any], arrays: _Stored) -> Trace:
    values = Arrays(arrays(key) for key in description["values"])
    places = [(str(module), tuple(map(str, lines))) for module, lines in description["places"]]
    framework = description["framework"]
    repeated = _repeated(framework)
    operations = []
    for name, inputs, outputs, place, settings, how in description["operations"]:
        settings = decoded(settings, arrays)
        if not all(0 <= number < len(values) for number in (*inputs, *outputs)):
            raise ValueError(f"{name} names a value that is not in the file")
        compute = repeated(str(name), settings, decoded(how, arrays))
        module, lines = places[place]
        operations.append(Operation(str(name), tuple(inputs), tuple(outputs), module, lines, settings, compute))
    parameters, inputs, outputs, gradients = (
        {str(key): range(len(values))[number] for key, number in description[name].items()}
        for name in ("parameters", "inputs", "outputs", "gradients")
    )
    return Trace(
        framework,
        values,
        operations,
        parameters=parameters,
        inputs=inputs,
        outputs=outputs,
        gradients=gradients,
        buffers=frozenset(description["buffers"]),
        names={str(key): str(value) for key, value in description["names"].items()},
        random=frozenset(description["random"]),
        derived={range(len(values))[number] for number in description.get("derived", ())},
        branches=[str(line) for line in description["branches"]],
        notes=[str(line) for line in description.get("notes", ())],  # which older files lack
        code={path: Code(file, range(start, stop)) for path, (file, start, stop) in description["code"].items()},
    )
