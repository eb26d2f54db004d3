"""The attention weights of both models in one sentence, which the ladder keeps for its page."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .functions import Batch
from .harness import Report

LONGEST = 32  # positions of a side
_WEIGHTS = ".weights"


@dataclass(frozen=True)
class AttentionMap:
    """The weights of one attention: the mean of its heads, and the head with the largest difference."""

    path: str  # of the module
    heads: int
    head: int  # with the largest difference
    pytorch: np.ndarray  # (2, T, S): the mean, that head
    flax: np.ndarray
    error: float  # the largest difference of any head, also in positions that are not kept
    tolerance: float  # of an element
    sides: tuple[int, int]  # of queries and keys: 0 for the source, 1 for the target


@dataclass(frozen=True)
class Attention:
    """The attention weights in one sentence. Sides are (source, target)."""

    sentence: int  # its row in the batch
    tokens: tuple[tuple[int, ...], tuple[int, ...]]  # ids in the positions that are kept
    lengths: tuple[int, int]  # positions of the sentence, of which at most LONGEST are kept
    maps: tuple[AttentionMap, ...]


def attention_in(
    pytorch: Mapping[str, Any], flax: Mapping[str, Any], batch: Batch, pad_id: int, report: Report
) -> Attention:
    """The attention weights in the sentence where they first differ, or in the first sentence if they are equal.

    Padding at the end of the sentence is left out, unless the first difference is there.
    """
    findings = [f for f in report.findings if f.path.endswith(_WEIGHTS) and not f.problem]
    failure = next((finding for finding in findings if not finding.ok), None)
    row = failure.index[0] if failure is not None else 0
    tokens = batch.src_tokens[row], batch.tgt_tokens[row]
    lengths = [int(np.flatnonzero([True, *(side[1:] != pad_id)])[-1]) + 1 for side in tokens]
    if failure is not None:
        for side, position in zip(_sides(failure.path), failure.index[2:], strict=True):
            lengths[side] = max(lengths[side], position + 1)
    src, tgt = (side[: min(length, LONGEST)] for side, length in zip(tokens, lengths, strict=True))
    maps = []
    for finding in findings:
        both = [np.asarray(outputs[finding.path])[row] for outputs in (pytorch, flax)]  # (N, T, S)
        errors = np.abs(both[0] - both[1]).max((1, 2))
        head = int(np.argmax(errors))
        sides = _sides(finding.path)
        queries, keys = ((len(src), len(tgt))[side] for side in sides)
        both = [weights[:, :queries, :keys] for weights in both]
        one, other = (np.stack([weights.mean(0), weights[head]]) for weights in both)
        path = finding.path.removesuffix(_WEIGHTS)
        maps.append(AttentionMap(path, len(errors), head, one, other, float(errors[head]), finding.tolerance, sides))
    ids = tuple(src.tolist()), tuple(tgt.tolist())
    return Attention(row, ids, (lengths[0], lengths[1]), tuple(maps))


def _sides(path: str) -> tuple[int, int]:
    """The sides of the queries and of the keys of attention weights: 0 for the source, 1 for the target."""
    in_decoder = path.startswith("decoder.")
    return int(in_decoder), int(in_decoder and ".self_attention." in path)
