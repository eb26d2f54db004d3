"""What a port is, how its project is copied and imported, and how its parameters are set."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import invalidate_caches
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from flax import linen, traverse_util
from torch import nn

from benchmarks.external_pairs.pair import Pair

Build = Callable[[Path], Pair]  # from the folder that contains the project's package
Changes = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Port:
    """A port, the file in which mistakes are made, and the functions or classes of it that its forward pass runs."""

    build: Build
    project: str  # the folder into which the project is unpacked
    file: str  # from that folder
    functions: tuple[str, ...]
    changes: Changes = ()  # texts of the package that are replaced in the copy; no line moves
    beside: tuple[str, ...] = ()  # other packages of the project that it imports

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages that are copied and imported; a module beside no others is one."""
        return self.file.split("/")[0].removesuffix(".py"), *self.beside

    def copy(self, projects: Path, place: Path) -> None:
        """Copy the packages, changed, from the folder of all projects."""
        for name in self.packages:
            package = projects / self.project / name
            if package.is_dir():
                shutil.copytree(package, place / name, ignore=shutil.ignore_patterns("tests", "*.ipynb"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(package.with_suffix(".py"), place)
        for file in place.rglob("*.py") if self.changes else ():
            text = file.read_text()
            for old, new in self.changes:
                text = text.replace(old, new)
            file.write_text(text)


@contextmanager
def imported_from(folder: Path, packages: Sequence[str]) -> Iterator[None]:
    """Import packages from this folder, even if other copies of them have been imported."""
    _forget(packages)
    sys.path.insert(0, str(folder))
    invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _forget(packages)


def _forget(packages: Sequence[str]) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in packages]:
        del sys.modules[name]


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Import modules that no forward pass uses though they are not installed; their decorators change nothing."""
    stub = mock.MagicMock(typechecked=lambda function: function)
    missing = {name: stub for name in names if name not in sys.modules}
    sys.modules.update(missing)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def random_tokens(vocab_size: int, length: int = 7) -> np.ndarray:
    """Two sequences of tokens other than 0."""
    return np.random.default_rng(0).integers(1, vocab_size, (2, length))


def random_statistics(module: nn.Module) -> None:
    """Draw the running statistics of every batch normalization anew; variances are positive."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in module.named_buffers():
        if name.endswith("running_mean"):
            tensor.copy_(0.4 * torch.randn(tensor.shape, generator=generator))
        elif name.endswith("running_var"):
            tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))


def renamed(name: str, changes: Sequence[tuple[str, str]]) -> str:
    """The name of a parameter after substitutions of regular expressions."""
    for pattern, replacement in changes:
        name = re.sub(pattern, replacement, name)
    return name


class _Called(linen.Module):
    """A Linen module that is called by a function."""

    inner: linen.Module
    call: Callable[..., Any]

    def __call__(self, *inputs: Any) -> Any:
        return self.call(self.inner, *inputs)


def linen_called(
    inner: linen.Module, arrays: Mapping[str, Any], call: Callable[..., Any]
) -> tuple[linen.Module, dict[str, Any]]:
    """A Linen module that is called by a function, and its variables; arrays have dotted names."""
    tree = traverse_util.unflatten_dict({tuple(name.split(".")): np.asarray(a) for name, a in arrays.items()})
    return _Called(inner, call), {"params": {"inner": tree}}


def transposed(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """The arrays of tensors; matrices named kernel are transposed."""
    arrays = {name: tensor.detach().numpy() for name, tensor in tensors.items()}
    return {name: array.T if name.endswith("kernel") else array for name, array in arrays.items()}
