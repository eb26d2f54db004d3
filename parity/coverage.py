"""What the inputs of a comparison cover: without padding, it proves nothing about padding."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .functions import Batch


@dataclass(frozen=True)
class Coverage:
    """Which cases inputs and arrays cover: padding, ragged lengths, nonzero biases, norm scales other than 1."""

    sentences: int
    src_padding: int  # positions
    tgt_padding: int
    src_lengths: int  # number of distinct lengths
    tgt_lengths: int
    masked_sources: int  # sources without a token to attend to
    biases: int
    zero_biases: int  # biases that are all 0
    scales: int
    unit_scales: int  # scales that are all 1

    @property
    def gaps(self) -> tuple[str, ...]:
        """Cases that the inputs do not cover, so that a mistake could pass."""
        missing = {
            "no padding in sources": self.src_padding == 0,
            "no padding in targets": self.tgt_padding == 0,
            "sources of one length": self.src_lengths < 2,
            "targets of one length": self.tgt_lengths < 2,
            f"{self.zero_biases} of {self.biases} biases are all 0": self.zero_biases > 0,
            f"{self.unit_scales} of {self.scales} norm scales are all 1": self.unit_scales > 0,
        }
        return tuple(text for text, is_missing in missing.items() if is_missing)

    def check(self) -> None:
        """Raises: AssertionError that lists the cases that the inputs do not cover."""
        if self.gaps:
            raise AssertionError(f"the inputs do not cover everything: {'; '.join(self.gaps)}")

    def __str__(self) -> str:
        return (
            f"{_count(self.sentences, 'sentence')}; {_count(self.src_lengths, 'source length')}, "
            f"{_count(self.tgt_lengths, 'target length')}; padding: {_count(self.src_padding, 'source position')}, "
            f"{_count(self.tgt_padding, 'target position')}; {_count(self.masked_sources, 'source')} without a token; "
            f"{self.biases - self.zero_biases} of {self.biases} biases not 0, "
            f"{self.scales - self.unit_scales} of {self.scales} norm scales not 1"
        )


def coverage(batch: Batch, arrays: Mapping[str, np.ndarray], pad_id: int) -> Coverage:
    """The coverage of a batch and a model's arrays by name. Lengths do not count padding."""
    src_keep = batch.src_tokens != pad_id if batch.src_mask is None else batch.src_mask
    tgt_keep = batch.tgt_tokens != pad_id
    biases = [np.asarray(array) for name, array in arrays.items() if name.endswith(".bias")]
    scales = [np.asarray(array) for name, array in arrays.items() if name.endswith(".scale")]
    return Coverage(
        sentences=len(batch.labels),
        src_padding=int((~src_keep).sum()),
        tgt_padding=int((~tgt_keep).sum()),
        src_lengths=len({*src_keep.sum(1).tolist()} - {0}),
        tgt_lengths=len({*tgt_keep.sum(1).tolist()}),
        masked_sources=int((~src_keep.any(1)).sum()),
        biases=len(biases),
        zero_biases=sum(not array.any() for array in biases),
        scales=len(scales),
        unit_scales=sum(bool((array == 1).all()) for array in scales),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
