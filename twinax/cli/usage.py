"""Shared by the commands: the compilation cache, one-line errors and notes on assumed settings."""

import errno
import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from os.path import exists
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ..backend.errors import MissingPackageError
from .process.importing import import_without_gc

if TYPE_CHECKING:
    from ..convert import Checkpoint

# Files and folders of checkpoints and runs, of all layouts.
_PART = re.compile(
    r"_.*|.*config\.json|.*tokenizer.*\.json|.*vocab.*\.(json|txt)|merges\.txt|dict.*\.txt|added_tokens\.json|"
    r"special_tokens_map\.json|(args|checksums|data|model|source|trainer_state|twinax)\.json|metrics.*\.jsonl|lock|"
    r"commit_success\.txt|manifest\.ocdbt|array_metadatas|.*\.(pth?|bin|safetensors|npz|msgpack|model|spm|ya?ml|index\.json)"
)
_FOLDERS = {"averaged", "checkpoints", "run", "state", "weights", "tokenizer", "source_tokenizer", "target_tokenizer"}
WEIGHTS = (".pt", ".pth", ".bin", ".safetensors", ".npz", ".msgpack")  # endings of files that are no text

CheckpointPath = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")]


class UsageError(Exception):
    """The command line cannot be used; the message is the one line that is printed."""


def check_exists(*paths: str) -> None:
    """Raises: UsageError if a path does not exist, before imports that take seconds."""
    for path in paths:
        if not exists(path):
            raise UsageError(f"{path}: there is no such file or directory{download_hint(path)}")


def download_hint(path: str) -> str:
    """How to download a model, for a path that may be a name of the Hugging Face Hub; else empty."""
    owner, _, name = path.partition("/")
    if not re.fullmatch(r"[A-Za-z0-9][\w-]*/[\w-][\w.-]*", path) or exists(owner) or owner == "runs":
        return ""
    return f"; for a model of the Hugging Face Hub, run: hf download {path} --local-dir {name}"


def check_outputs(outputs: Iterable[str | None], inputs: Iterable[str | None] = ()) -> None:
    """Raises: UsageError if a file cannot be written, is or would change an input, or would be written twice."""
    places = [Path(path).absolute() for path in inputs if path]
    used = {_resolve(str(place)): "an input" for place in places}
    folders = {folder for place in places if place.is_dir() for folder in (place, place.resolve())}
    weights = [place for place in places if place.suffix in WEIGHTS]
    beside = {folder for place in weights for folder in (place.parent, place.resolve().parent)}
    blobs = {folder.parent.parent / "blobs" for folder in folders if folder.parent.name == "snapshots"}  # of the hub
    for path in filter(None, outputs):
        target = _resolve(path)
        if target.is_char_device() or target.is_fifo():
            continue
        if not target.parent.is_dir():
            raise UsageError(f"{path}: there is no directory {Path(path).parent}")
        if (role := used.get(target)) is not None:
            raise UsageError(f"{path}: is {role} of this command; name another file to write")
        if target.is_dir():
            raise UsageError(f"{path}: is a directory; pass a file name")
        names = (target, Path(path).absolute())
        if target.is_file() and (target.parent in blobs or any(_is_part(name, folders, beside) for name in names)):
            raise UsageError(f"{path}: is part of an input of this command; name another file to write")
        if not os.access(target if target.exists() else target.parent, os.W_OK):
            raise UsageError(f"{path}: cannot be written: {os.strerror(errno.EACCES)}")
        used[target] = "another output"


def _is_part(path: Path, folders: Collection[Path], beside: Collection[Path]) -> bool:
    """Whether a file in these folders, or beside weights, may be a part of a checkpoint or a run, by its name."""
    folder = next((folder for folder in path.parents if folder in folders), None)
    if folder is not None and not _FOLDERS.isdisjoint(path.relative_to(folder).parts[:-1]):
        return True
    return (folder is not None or path.parent in beside) and _PART.fullmatch(path.name) is not None


def _resolve(path: str) -> Path:
    try:
        target = Path(path).resolve()
    except (RuntimeError, ValueError) as error:  # a cycle of symbolic links, before Python 3.13
        raise UsageError(f"{path!a}: cannot be used: {error}") from None
    if target.is_symlink():
        raise UsageError(f"{path!a}: cannot be used: its symbolic links form a cycle")
    return target


def is_standard_output(path: str) -> bool:
    """Whether a path below /dev or /proc is standard output."""
    return path.startswith(("/dev/", "/proc/")) and os.path.samestat(os.stat(path), os.fstat(1))


def write_text(path: str, text: str) -> None:
    """Atomically write a text to a file; to standard output by its name below /dev. Raises: UsageError."""
    from ..convert.io.atomic_io import replace_file

    try:
        if is_standard_output(path):
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode())
        else:
            replace_file(Path(path), text)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror}") from None


def write_json(path: str, document: Any) -> None:
    """Atomically write JSON values to a file. Raises: UsageError if it cannot be written."""
    write_text(path, json.dumps(document, indent=2) + "\n")


def check_picture(flag: str, path: str | None) -> None:
    """Raises: UsageError if a file has no suffix of a picture."""
    if path is not None and Path(path).suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"{flag} {path}: must end in .png, .pdf or .svg")


def check_report(path: str | None) -> None:
    """Raises: UsageError if the file of a report has no suffix of a page."""
    if path is not None and Path(path).suffix not in (".html", ".htm"):
        raise UsageError(f"--report {path}: must end in .html")


def report_assumed(name: str, checkpoint: "Checkpoint") -> None:
    """Print one line each: what is doubtful about a checkpoint, what its names lost, and what was assumed about it."""
    from ..convert.load_warnings import describe_not_finite, load_warning

    for warning in filter(None, (load_warning(checkpoint), describe_not_finite(checkpoint.arrays))):
        print(f"twinax: {name}: {warning}", file=sys.stderr)
    if checkpoint.stripped:
        from ..convert.weight_files.wrappers import describe_stripped

        print(f"twinax: {describe_stripped(name, checkpoint)}", file=sys.stderr)
    if checkpoint.assumed:
        from ..convert.formats.file_layouts import describe_assumed

        print(f"twinax: {describe_assumed(name, checkpoint)}", file=sys.stderr)


def enable_compilation_cache() -> None:
    """Enable the compilation cache; `import twinax` alone does not change JAX's settings."""
    import_without_gc("twinax.backend.compilation_cache").use_compilation_cache()


@contextmanager
def one_line_errors(place: str = "a file") -> Iterator[None]:
    """Turn errors about files and settings into a UsageError, which is printed as one line.

    `place`: what is named if the operating system does not name a file.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or place}: {error.strerror or error}") from None
    except MissingPackageError as error:
        raise UsageError(str(error)) from None
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the output is {error.encoding}, which has no {error.object[error.start]!a}; set PYTHONIOENCODING=utf-8"
        ) from None
    except ValueError as error:
        if not type(error).__module__.startswith("twinax."):
            raise
        raise UsageError(str(error)) from None
