"""The subject of an audit: a copy of a module, the function that calls it, and token ids for its inputs.

Letters: B batch, S source length, T target length, V vocabulary.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .instrumentation import Recording, record

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (module, sources (B, S), targets (B, T)) -> (B, T, V)
# The largest change that counts as zero, relative to the largest output.
_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4}
# Lengths of (source, target): primes, to tell them from widths. Equal lengths for modules that require them.
_LENGTHS = ((11, 7), (7, 5), (7, 7), (5, 5))
# Number of added padding tokens. With 3, a source of 11 + 3 would be twice a target of 7, as ProphetNet's keys are.
PADDED = 2
_SHORTEST = 7


class AuditError(ValueError):
    """A module cannot be audited; the message states why, and what to do."""


@dataclass
class Subject:
    """A copy of a module, on the CPU and in the dtype of the audit."""

    module: nn.Module
    forward: Forward
    vocabularies: tuple[int, int]
    pad_id: int
    lengths: tuple[int, int]
    dtype: torch.dtype
    excluded: frozenset[int]  # ids that are never sampled
    seed: int
    dtype_reason: str = ""  # reason why the dtype is not float64
    changed_buffers: list[str] = field(default_factory=list)  # buffers that the last call changed
    uses_generators: bool = False  # whether the last call used Python's or NumPy's generator
    writes_ids: bool = False  # whether the last call wrote into the ids

    @property
    def dtype_name(self) -> str:
        """The name of the dtype, such as `float64`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def bound(self) -> float:
        """The largest change that counts as zero, relative to the largest output."""
        return _BOUNDS[self.dtype]

    @property
    def one_length(self) -> bool:
        """Whether targets must be as long as sources."""
        return self.lengths[0] == self.lengths[1]

    def copy(self, dtype: torch.dtype | None = None) -> "Subject":
        """A subject with another copy of the module, by default in the same dtype."""
        dtype = dtype or self.dtype
        return replace(self, module=_copy(self.module).to(dtype), dtype=dtype)

    def tokens(self, side: int, rows: int = 1, salt: int = 0) -> Tensor:
        """Random ids (rows, length) of a side, 0 for source, 1 for target, without padding."""
        rng, vocabulary = np.random.default_rng([self.seed, side, salt]), self.vocabularies[side]
        allowed = [i for i in range(vocabulary) if i not in self.excluded] or [
            i for i in range(vocabulary) if i != self.pad_id
        ]
        return torch.from_numpy(rng.choice(allowed, (rows, self.lengths[side])))

    def other_tokens(self, tokens: Tensor, side: int) -> Tensor:
        """Ids that differ from `tokens` at every position."""
        first = self.tokens(side, len(tokens), 1)[:, : tokens.shape[1]]
        second = self.tokens(side, len(tokens), 2)[:, : tokens.shape[1]]
        third = (tokens + 1) % self.vocabularies[side]
        third = torch.where(third == self.pad_id, (third + 1) % self.vocabularies[side], third)
        return torch.where(first != tokens, first, torch.where(second != tokens, second, third))

    def pad(self, tokens: Tensor) -> Tensor:
        """The tokens, followed by padding."""
        return torch.nn.functional.pad(tokens, (0, PADDED), value=self.pad_id)

    def logits(self, src: Tensor, tgt: Tensor, *, training: bool = False) -> Tensor:
        """The module's logits, with the same random numbers and buffers in each call.

        Raises:
            AuditError: their shape is not (B, T, V).
        """
        ids = src.clone(), tgt.clone()
        with self.mode(training), torch.no_grad():
            logits = self.forward(self.module, *ids).detach()
        self.writes_ids = not (torch.equal(ids[0], src) and torch.equal(ids[1], tgt))
        expected = (*tgt.shape, self.vocabularies[1])
        if tuple(logits.shape) != expected:
            raise AuditError(
                f"{type(self.module).__name__}: returns {tuple(logits.shape)} and should return (batch, target, "
                f"vocabulary), here {expected}; give `forward`, a function of (module, sources, targets)"
            )
        return logits

    def record(self, src: Tensor, tgt: Tensor, *, training: bool = False, operations: bool = False) -> Recording:
        """A recording of a forward pass."""
        with self.mode(training), torch.no_grad(), record(self.module, operations=operations) as recording:
            self.forward(self.module, src.clone(), tgt.clone())
        return recording

    def not_finite(self) -> tuple[float, str] | None:
        """(share of NaN or infinite outputs in evaluation without padding, first such part); None: all are finite.

        A logit of -inf, which forbids a token, counts as finite if another logit of its position is finite.
        """
        src, tgt = self.tokens(0, 2), self.tokens(1, 2)
        logits = self.logits(src, tgt)
        broken = _broken(logits) | ~logits.isfinite().any(-1, keepdim=True)
        if not broken.any():
            return None
        calls = self.record(src, tgt).calls
        path = next((c.path for c in calls if _any_broken(c.outputs) and not _any_broken(c.inputs)), "")
        return float(broken.double().mean()), path or "the whole model"

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Training or evaluation mode, with fixed buffers and seeds of all random number generators.

        Afterwards, `changed_buffers` and `uses_generators` describe the call.
        """
        parts = [*self.module.named_modules()]  # once, because a walk takes as long as a small model's forward pass
        before = {name: value.clone() for name, value in _buffers(parts)}
        states = random.getstate(), np.random.get_state()
        with torch.random.fork_rng(devices=[]):
            self._seed_torch()
            random.seed(self.seed)
            np.random.seed(self.seed)
            seeded = _generator_states()
            if any(part.training != training for _, part in parts):
                self.module.train(training)
            try:
                yield
            finally:
                self.uses_generators = _generator_states() != seeded
                random.setstate(states[0])
                np.random.set_state(states[1])
                buffers = dict(_buffers(parts))
                self.changed_buffers = [n for n, v in before.items() if n in buffers and not same(v, buffers[n])]
                with torch.no_grad():
                    for name in self.changed_buffers:
                        buffers[name].copy_(before[name])

    def _seed_torch(self) -> None:
        """Seed the generators of all devices; of the CPU alone for a module on it, which is a hundred times faster."""
        parameter = next(self.module.parameters(), None)
        if parameter is not None and parameter.device.type == "cpu":
            torch.default_generator.manual_seed(self.seed)
        else:
            torch.manual_seed(self.seed)

    def change(self, a: Tensor, b: Tensor) -> float:
        """The largest absolute difference of two outputs; 0 if it is within rounding."""
        value = difference(a, b)
        return value if value > self.bound * largest(a) else 0.0


def _buffers(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    for path, part in parts:
        yield from part.named_buffers(path, recurse=False)


def _generator_states() -> tuple[Any, ...]:
    """States of Python's and numpy's global generators, comparable with ==."""
    name, keys, *position = np.random.get_state()
    return random.getstate(), name, np.asarray(keys).tobytes(), *position


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
    """The subject for a module, in the first dtype with finite outputs, else in the last dtype that does not raise.

    Raises:
        AuditError: the module does not accept two tensors of ids, or does not return (B, T, V).
    """
    if min(vocabularies) < 4 or (max_length is not None and max_length < _SHORTEST):
        raise AuditError(
            f"max_length={max_length}, vocabularies of {vocabularies[0]} and {vocabularies[1]}: an audit needs at "
            f"least {_SHORTEST} positions and 4 tokens"
        )
    limit = max_length - PADDED if max_length is not None else _LENGTHS[0][0]
    lengths = [pair for pair in _LENGTHS if max(pair) <= limit]
    lengths += [] if any(s != t for s, t in lengths) else [(limit, limit - 1)]
    lengths += [] if any(s == t for s, t in lengths) else [(limit, limit)]
    forward = forward or (lambda m, src, tgt: m(src, tgt))
    excluded = frozenset({pad_id, *special_ids})
    lengths.sort(key=lambda pair: pair[0] == pair[1])
    errors: list[Exception] = []
    broken, reason = None, ""
    for dtype in _BOUNDS:
        copy = _copy(module).to(dtype)
        subject = Subject(copy, forward, vocabularies, pad_id, lengths[0], dtype, excluded, seed, reason)
        if (error := _set_lengths(subject, lengths)) is not None:
            errors.append(error)
            text = " ".join(str(error).split())[:100]
            reason = f"{subject.dtype_name} raises {type(error).__name__}: {text}"
            continue
        if not subject.record(subject.tokens(0), subject.tokens(1)).calls:
            raise AuditError(f"{type(module).__name__}: `forward` must call the module that it receives, a copy")
        if (failure := subject.not_finite()) is None:
            return subject
        broken, reason = subject, f"the outputs are not finite in {subject.dtype_name}, first in {failure[1]}"
    if broken is not None:
        return broken
    text = " ".join(str(errors[0]).split())[:300]
    raise AuditError(
        f"{type(module).__name__}: cannot be called with sources and targets: {type(errors[0]).__name__}: {text}; "
        "give `forward`, a function of (module, sources, targets), or max_length"
    )


def _set_lengths(subject: Subject, lengths: Sequence[tuple[int, int]]) -> Exception | None:
    """Set the first lengths that the module accepts. If there are none, return the exception of the first pair."""
    errors: list[Exception] = []
    for subject.lengths in lengths:
        if (error := _call_error(subject)) is None:
            return None
        errors.append(error)
    return errors[0]


def _call_error(subject: Subject) -> Exception | None:
    """The exception of a module called with one or two sentences of its lengths; None if there is none."""
    try:
        for rows in (2, 1):
            src, tgt = subject.tokens(0, rows), subject.tokens(1, rows)
            subject.logits(src, tgt)
            subject.logits(subject.pad(src), subject.pad(tgt) if subject.one_length else tgt)
    except AuditError:
        raise
    except Exception as error:  # the module may raise anything
        return error
    return None


def _copy(module: nn.Module) -> nn.Module:
    """A copy on the CPU. Tensors with a graph, stored in attributes by the last step, are detached."""
    tensors = (v for part in module.modules() for v in part.__dict__.values() if isinstance(v, Tensor))
    try:
        return copy.deepcopy(module, {id(v): v.detach().clone() for v in tensors if v.grad_fn is not None}).cpu()
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise AuditError(f"{type(module).__name__}: cannot be copied: {type(error).__name__}: {text}") from None


def difference(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference in the overlap of two tensors; NaN counts as infinite."""
    if a.ndim != b.ndim:
        return float("inf")
    common = tuple(slice(0, min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
    errors = torch.where(a[common] == b[common], 0, (a[common] - b[common]).abs())  # equal infinities are equal
    return float(torch.nan_to_num(errors, nan=float("inf")).max()) if errors.numel() else 0.0


def _broken(a: Tensor) -> Tensor:
    """The mask of elements that are NaN or +inf; -inf is allowed, because it marks masked or forbidden tokens."""
    return a.isnan() | a.isposinf()


def _any_broken(tensors: Sequence[Tensor]) -> bool:
    return any(bool(_broken(a).any()) for a in tensors)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, with NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def largest(a: Tensor) -> float:
    """The largest finite absolute value; 1 if there is none."""
    finite = a[a.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 1.0
