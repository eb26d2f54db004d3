"""Recording of a module's forward pass: inputs and outputs of its parts, attention weights, random draws."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_SOFTMAXES = ("aten::_softmax", "aten::_safe_softmax")


class Call(NamedTuple):
    """One call of a submodule."""

    path: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class Softmax(NamedTuple):
    """One softmax over a tensor of at least two dimensions."""

    path: str  # submodule that computed it
    weights: Tensor
    dim: int  # dimension counted from the end: -1 is the last


class Draw(NamedTuple):
    """One use of a random number generator."""

    path: str
    rate: float | None  # dropout rate; None for other draws


@dataclass
class Recording:
    """The records of a forward pass, in order of completion."""

    calls: list[Call] = field(default_factory=list)
    softmaxes: list[Softmax] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)


@contextmanager
def record(module: nn.Module, *, operations: bool = True) -> Iterator[Recording]:
    """Record the calls of `module` inside the `with`.

    `operations`: also record softmaxes and random draws; fused attention is then disabled.
    """
    recording, stack, inputs = Recording(), [""], []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            stack.append(path)
            inputs.append(_tensors((args, kwargs)))  # copied before the call, because some modules work in place

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            recording.calls.append(Call(path, inputs.pop(), _tensors(output)))
            stack.pop()

        return hook

    with ExitStack() as undo:
        for path, part in module.named_modules():
            undo.callback(part.register_forward_pre_hook(enter(path), with_kwargs=True).remove)
            undo.callback(part.register_forward_hook(leave(path)).remove)
        if operations:
            undo.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
            torch.backends.mha.set_fastpath_enabled(False)
            undo.enter_context(sdpa_kernel(SDPBackend.MATH))
            undo.enter_context(_Operations(recording, stack))
        yield recording


class _Operations(TorchDispatchMode):
    """Records softmaxes and random draws among the tensor operations."""

    def __init__(self, recording: Recording, stack: list[str]):
        super().__init__()
        self.recording, self.stack = recording, stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = torch.get_rng_state() if may_draw else None
        output, path = func(*args, **(kwargs or {})), self.stack[-1]
        if func.name().split(".")[0] in _SOFTMAXES and output.ndim > 1:
            dim = args[1] - output.ndim if args[1] >= 0 else args[1]
            self.recording.softmaxes.append(Softmax(path, output.detach(), dim))
        if before is not None and not torch.equal(before, torch.get_rng_state()):  # not every tagged call draws
            self.recording.draws.append(Draw(path, _rate(func.name(), args)))
        return output


def _rate(name: str, args: Any) -> float | None:
    """The dropout rate of a draw; None for other draws."""
    if name.startswith("aten::bernoulli_.float"):
        return 1 - args[1]
    return args[1] if name == "aten::native_dropout" else None


def _tensors(values: Any) -> list[Tensor]:
    """Detached copies of the floating-point tensors in arguments, except nested tensors, which have no shape."""
    tensors = (v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point() and not v.is_nested)
    return [v.detach().clone() for v in tensors]
