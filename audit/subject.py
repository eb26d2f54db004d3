"""What is audited: a module, how it is asked for its outputs, and token ids to ask with.

Letters: B batch, S source length, T target length, V vocabulary.
"""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from .instrumentation import Seen, watch

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (module, sources (B, S), targets (B, T)) -> (B, T, V)
# The largest change that counts as none, as a share of the largest output.
_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4}
# Of sources and targets; primes, so that no width is taken for a length. One length where a module takes no other.
_LENGTHS = ((11, 7), (7, 5), (7, 7), (5, 5))
# Positions of padding that are added. With 3, a source of 11 would be twice a target of 7, as ProphetNet's keys are.
PADDED = 2
_SHORTEST = 7


class AuditError(ValueError):
    """A module cannot be audited; the text says why and what to do."""


@dataclass
class Subject:
    """A copy of a module, on the CPU and in the dtype that it is judged in."""

    module: nn.Module
    forward: Forward
    vocabularies: tuple[int, int]
    pad_id: int
    lengths: tuple[int, int]
    dtype: torch.dtype
    avoid: frozenset[int]  # ids that are never drawn
    seed: int
    dtype_reason: str = ""  # why it is not judged in float64
    moved: list[str] = field(default_factory=list)  # buffers that the last call changed
    drew: bool = False  # whether Python's or NumPy's generator was used by it
    edited: bool = False  # whether it wrote into the ids

    @property
    def dtype_name(self) -> str:
        """As `float64`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def bound(self) -> float:
        """The largest change that counts as none, as a share of the largest output."""
        return _BOUNDS[self.dtype]

    @property
    def one_length(self) -> bool:
        """Whether targets must be as long as sources."""
        return self.lengths[0] == self.lengths[1]

    def copy(self, dtype: torch.dtype | None = None) -> "Subject":
        """The same of another copy of the module, in a dtype of its own if one is given."""
        dtype = dtype or self.dtype
        return replace(self, module=_copy(self.module).to(dtype), dtype=dtype)

    def tokens(self, side: int, rows: int = 1, salt: int = 0) -> Tensor:
        """Random ids (rows, length) of a side: 0 source, 1 target; no padding among them."""
        rng, vocabulary = np.random.default_rng([self.seed, side, salt]), self.vocabularies[side]
        allowed = [i for i in range(vocabulary) if i not in self.avoid] or [
            i for i in range(vocabulary) if i != self.pad_id
        ]
        return torch.from_numpy(rng.choice(allowed, (rows, self.lengths[side])))

    def other(self, tokens: Tensor, side: int) -> Tensor:
        """Other ids than the given ones, everywhere."""
        more = self.tokens(side, len(tokens), 1)[:, : tokens.shape[1]]
        spare = self.tokens(side, len(tokens), 2)[:, : tokens.shape[1]]
        following = (tokens + 1) % self.vocabularies[side]
        following = torch.where(following == self.pad_id, (following + 1) % self.vocabularies[side], following)
        return torch.where(more != tokens, more, torch.where(spare != tokens, spare, following))

    def pad(self, tokens: Tensor) -> Tensor:
        """The same with padding behind it."""
        return torch.nn.functional.pad(tokens, (0, PADDED), value=self.pad_id)

    def logits(self, src: Tensor, tgt: Tensor, *, training: bool = False) -> Tensor:
        """What the module returns; from the same random numbers and buffers each time.

        Raises:
            AuditError: its shape is not (B, T, V).
        """
        ids = src.clone(), tgt.clone()
        with self.mode(training), torch.no_grad():
            found = self.forward(self.module, *ids).detach()
        self.edited = not (torch.equal(ids[0], src) and torch.equal(ids[1], tgt))
        expected = (*tgt.shape, self.vocabularies[1])
        if tuple(found.shape) != expected:
            raise AuditError(
                f"{type(self.module).__name__}: returns {tuple(found.shape)} and should return (batch, target, "
                f"vocabulary), here {expected}; give `forward`, a function of (module, sources, targets)"
            )
        return found

    def seen(self, src: Tensor, tgt: Tensor, *, training: bool = False, operations: bool = False) -> Seen:
        """What happens inside."""
        with self.mode(training), torch.no_grad(), watch(self.module, operations=operations) as seen:
            self.forward(self.module, src.clone(), tgt.clone())
        return seen

    def not_finite(self) -> tuple[float, str] | None:
        """(share of outputs, first part) that are NaN or infinite in evaluation, without padding; None: all are finite.

        A logit of -inf, which forbids a token, counts as finite where another token of its position is finite.
        """
        src, tgt = self.tokens(0, 2), self.tokens(1, 2)
        logits = self.logits(src, tgt)
        broken = _broken(logits) | ~logits.isfinite().any(-1, keepdim=True)
        if not broken.any():
            return None
        calls = self.seen(src, tgt).calls
        path = next((c.path for c in calls if _any_broken(c.outputs) and not _any_broken(c.inputs)), "")
        return float(broken.double().mean()), path or "the whole model"

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Training or evaluation, from one state of buffers and of all generators of random numbers.

        Behind it, `moved` names the buffers that changed, and `drew` says whether Python or NumPy drew.
        """
        before = {name: value.clone() for name, value in self.module.named_buffers()}
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            random.seed(self.seed)
            np.random.seed(self.seed)
            began = repr((random.getstate(), np.random.get_state()))
            self.module.train(training)
            try:
                yield
            finally:
                self.drew = repr((random.getstate(), np.random.get_state())) != began
                random.setstate(states[0])
                np.random.set_state(states[1])
                buffers = dict(self.module.named_buffers())
                self.moved = [n for n, value in before.items() if n in buffers and not same(value, buffers[n])]
                with torch.no_grad():
                    for name in self.moved:
                        buffers[name].copy_(before[name])

    def changed(self, a: Tensor, b: Tensor) -> float:
        """The largest difference of two outputs, in outputs' units; 0 where it is within rounding."""
        apart = difference(a, b)
        return apart if apart > self.bound * largest(a) else 0.0


def make_subject(
    module: nn.Module,
    forward: Forward | None,
    vocabularies: tuple[int, int],
    pad_id: int,
    *,
    special_ids: tuple[int, ...] = (),
    max_length: int | None = None,
    seed: int = 0,
) -> Subject:
    """The module's copy and what to feed it, in the first dtype that gives finite outputs.

    If none does, in the last dtype that does not raise.

    Raises:
        AuditError: the module does not take two tensors of ids, or does not return (B, T, V).
    """
    if min(vocabularies) < 4 or (max_length is not None and max_length < _SHORTEST):
        raise AuditError(
            f"max_length={max_length}, vocabularies of {vocabularies[0]} and {vocabularies[1]}: an audit needs at "
            f"least {_SHORTEST} positions and 4 tokens"
        )
    most = max_length - PADDED if max_length is not None else _LENGTHS[0][0]
    lengths = [pair for pair in _LENGTHS if max(pair) <= most]
    lengths += [] if any(s != t for s, t in lengths) else [(most, most - 1)]
    lengths += [] if any(s == t for s, t in lengths) else [(most, most)]
    how, avoid = forward or (lambda m, src, tgt: m(src, tgt)), frozenset({pad_id, *special_ids})
    lengths.sort(key=lambda pair: pair[0] == pair[1])
    errors: list[Exception] = []
    broken, reason = None, ""
    for dtype in _BOUNDS:
        subject = Subject(_copy(module).to(dtype), how, vocabularies, pad_id, lengths[0], dtype, avoid, seed, reason)
        if (error := _set_lengths(subject, lengths)) is not None:
            errors.append(error)
            said = " ".join(str(error).split())[:100]
            reason = f"{subject.dtype_name} raises {type(error).__name__}: {said}"
            continue
        if not subject.seen(subject.tokens(0), subject.tokens(1)).calls:
            raise AuditError(f"{type(module).__name__}: `forward` must call the module that it is given: a copy")
        if (where := subject.not_finite()) is None:
            return subject
        broken, reason = subject, f"the outputs are not finite in {subject.dtype_name}, first in {where[1]}"
    if broken is not None:
        return broken
    said = " ".join(str(errors[0]).split())[:300]
    raise AuditError(
        f"{type(module).__name__}: cannot be called with sources and targets: {type(errors[0]).__name__}: {said}; "
        "give `forward`, a function of (module, sources, targets), or max_length"
    )


def _set_lengths(subject: Subject, lengths: Sequence[tuple[int, int]]) -> Exception | None:
    """Keeps the first lengths that the module takes. Returns what it raises with the first pair if it takes none."""
    errors: list[Exception] = []
    for subject.lengths in lengths:
        if (error := _refusal(subject)) is None:
            return None
        errors.append(error)
    return errors[0]


def _refusal(subject: Subject) -> Exception | None:
    """What a module raises where it is called with one sentence or two, of its lengths."""
    try:
        for rows in (2, 1):
            src, tgt = subject.tokens(0, rows), subject.tokens(1, rows)
            subject.logits(src, tgt)
            subject.logits(subject.pad(src), subject.pad(tgt) if subject.one_length else tgt)
    except AuditError:
        raise
    except Exception as error:  # the module's own, whatever it is
        return error
    return None


def _copy(module: nn.Module) -> nn.Module:
    """A copy on the CPU; of tensors that a module keeps from its last step, the numbers."""
    kept = (v for part in module.modules() for v in part.__dict__.values() if isinstance(v, Tensor))
    try:
        return copy.deepcopy(module, {id(v): v.detach().clone() for v in kept if v.grad_fn is not None}).cpu()
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise AuditError(f"{type(module).__name__}: cannot be copied: {type(error).__name__}: {said}") from None


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference where two tensors of different sizes overlap; NaN counts as infinite."""
    if a.ndim != b.ndim:
        return float("inf")
    common = tuple(slice(0, min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
    apart = torch.where(a[common] == b[common], 0, (a[common] - b[common]).abs())  # equal infinities are equal
    return float(torch.nan_to_num(apart, nan=float("inf")).max()) if apart.numel() else 0.0


def _broken(a: Tensor) -> Tensor:
    """Which elements are NaN or +inf; -inf is how masks and forbidden tokens are written."""
    return a.isnan() | a.isposinf()


def _any_broken(tensors: Sequence[Tensor]) -> bool:
    return any(bool(_broken(a).any()) for a in tensors)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, nan to nan."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def largest(a: Tensor) -> float:
    """The largest finite size."""
    finite = a[a.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 1.0
