"""What is audited: a module, how it is asked for its outputs, and token ids to ask with.

Letters: B batch, S source length, T target length, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .watch import Seen, watch

Forward = Callable[[nn.Module, Tensor, Tensor], Tensor]  # (module, sources (B, S), targets (B, T)) -> (B, T, V)
# The largest change that counts as none, as a share of the largest output.
_BOUNDS = {torch.float64: 1e-6, torch.float32: 1e-4}
_LENGTHS = (11, 7)  # of sources and targets; primes, so that no width is taken for a length
PADDED = 3  # positions of padding that are added


class AuditError(ValueError):
    """A module cannot be audited; the text says why and what to do."""


@dataclass
class Subject:
    """A copy of a module, on the CPU and in float64 where its code lets it."""

    module: nn.Module
    forward: Forward
    vocabularies: tuple[int, int]
    pad_id: int
    lengths: tuple[int, int]
    bound: float  # the largest change that counts as none, as a share of the largest output
    avoid: frozenset[int]  # ids that are never drawn
    seed: int

    @property
    def one_length(self) -> bool:
        """Whether targets must be as long as sources."""
        return self.lengths[0] == self.lengths[1]

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
        """What the module returns; the same random numbers each time."""
        with self.mode(training), torch.no_grad():
            return self.forward(self.module, src, tgt).detach()

    def seen(self, src: Tensor, tgt: Tensor, *, training: bool = False, operations: bool = False) -> Seen:
        """What happens inside."""
        with self.mode(training), torch.no_grad(), watch(self.module, operations=operations) as seen:
            self.forward(self.module, src, tgt)
        return seen

    @contextmanager
    def mode(self, training: bool) -> Iterator[None]:
        """Training or evaluation, from one state of the generators of random numbers."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.module.train(training)
            yield

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
    """The module's copy and what to feed it; it is tried once.

    Raises:
        AuditError: the module does not take two tensors of ids, or does not return (B, T, V).
    """
    longest = max_length if max_length is not None else max(_LENGTHS) + PADDED
    if longest < 2 + PADDED or min(vocabularies) < 4:
        raise AuditError(
            f"max_length={longest}, vocabularies of {vocabularies[0]} and {vocabularies[1]}: an audit needs at least "
            f"{2 + PADDED} positions and 4 tokens"
        )
    src, tgt = (min(length, longest - PADDED) for length in _LENGTHS)
    tgt -= src == tgt
    how, avoid = forward or _forward_of(module), frozenset({pad_id, *special_ids})
    errors: list[Exception] = []
    for dtype, lengths in ((d, n) for d in _BOUNDS for n in ((src, tgt), (tgt, tgt))):
        ours = copy.deepcopy(module).cpu().to(dtype)
        found = Subject(ours, how, vocabularies, pad_id, lengths, _BOUNDS[dtype], avoid, seed)
        try:
            logits = found.logits(found.tokens(0, 2), found.tokens(1, 2))
        except Exception as error:  # the module's own, whatever it is
            errors.append(error)
            continue
        expected = (2, lengths[1], vocabularies[1])
        if tuple(logits.shape) != expected:
            raise AuditError(
                f"{type(module).__name__}: returns {tuple(logits.shape)} and should return (batch, target, "
                f"vocabulary), here {expected}; give `forward`, a function of (module, sources, targets)"
            )
        return found
    said = " ".join(str(errors[0]).split())[:300]
    raise AuditError(
        f"{type(module).__name__}: cannot be called with sources and targets: {type(errors[0]).__name__}: {said}; "
        "give `forward`, a function of (module, sources, targets)"
    )


def _forward_of(module: nn.Module) -> Forward:
    """How a module is called where nothing is said: `module(src, tgt)`, and `transformers`' in their way."""
    config: Any = getattr(module, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        pad_id = config.pad_token_id
        return lambda m, src, tgt: (
            m(input_ids=src, attention_mask=(src != pad_id).long(), decoder_input_ids=tgt, use_cache=False).logits
        )
    return lambda m, src, tgt: m(src, tgt)


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference over what two tensors have in common, each cut to the other's sizes; nan is endless."""
    if a.ndim != b.ndim:
        return float("inf")
    common = tuple(slice(0, min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
    apart = (a[common] - b[common]).abs()
    return float(torch.nan_to_num(apart, nan=float("inf")).max()) if apart.numel() else 0.0


def largest(a: Tensor) -> float:
    """The largest finite size."""
    finite = a[a.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 1.0
