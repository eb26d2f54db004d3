"""What happens inside a module during one forward pass: what its parts return, attention weights, random draws."""

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
    """One call of a part."""

    path: str
    inputs: list[Tensor]
    outputs: list[Tensor]


class Softmax(NamedTuple):
    """One softmax over a tensor of at least two dimensions."""

    path: str  # of the part that computed it
    weights: Tensor
    over: int  # dimension, from the end: -1 is the last


class Draw(NamedTuple):
    """One use of a generator of random numbers."""

    path: str
    rate: float | None  # of dropout, where it is that


@dataclass
class Seen:
    """What was recorded, in the order in which it ended."""

    calls: list[Call] = field(default_factory=list)
    softmaxes: list[Softmax] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)


@contextmanager
def watch(module: nn.Module, *, operations: bool = True) -> Iterator[Seen]:
    """Records what `module` does inside the `with`. Fused attention is taken apart, so that its weights are seen."""
    seen, stack, given = Seen(), [""], []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            stack.append(path)
            given.append(_tensors((args, kwargs)))  # now: some work in place

        return hook

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.calls.append(Call(path, given.pop(), _tensors(output)))
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
            undo.enter_context(_Operations(seen, stack))
        yield seen


class _Operations(TorchDispatchMode):
    """Sees every operation below the modules."""

    def __init__(self, seen: Seen, stack: list[str]):
        super().__init__()
        self.seen, self.stack = seen, stack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = torch.get_rng_state() if may_draw else None
        found, path = func(*args, **(kwargs or {})), self.stack[-1]
        if func.name().split(".")[0] in _SOFTMAXES and found.ndim > 1:
            over = args[1] - found.ndim if args[1] >= 0 else args[1]
            self.seen.softmaxes.append(Softmax(path, found.detach(), over))
        if before is not None and not torch.equal(before, torch.get_rng_state()):  # some can, and do not
            self.seen.draws.append(Draw(path, _rate(func.name(), args)))
        return found


def _rate(name: str, args: Any) -> float | None:
    """The dropout rate of a draw."""
    if name.startswith("aten::bernoulli_.float"):
        return 1 - args[1]
    return args[1] if name == "aten::native_dropout" else None


def _tensors(values: Any) -> list[Tensor]:
    """The tensors of numbers in some arguments, detached; not nested ones, which have no shape."""
    found = (v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point() and not v.is_nested)
    return [v.detach().clone() for v in found]
