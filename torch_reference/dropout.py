"""Counter-based dropout: both frameworks compute the same masks by hashing each element's position in the run.

mask = hash(seed, update, site, row in the whole batch, indices in the row) >= rate · 2^32. The mask does not depend on
micro-batches, padding, devices or the framework, so training with dropout can be compared step by step.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..configs.schema import TransformerConfig
from .module import at_least_float32

_WORD = 0xFFFFFFFF  # torch lacks unsigned 32-bit arithmetic: int64, truncated to 32 bits


SECOND_PASS = -(2**31)  # added to the rows of a second pass, so that its masks differ


class DropoutKey(NamedTuple):
    """The position of a forward pass in a training run. Passing a key switches dropout on."""

    seed: int
    update: int  # number of the optimizer update
    rows: Int[Tensor, " B"]  # row of each sentence in the whole batch; negative in a second pass
    cutoff: float | None = None  # share of the token embeddings of a second pass that are zero


class Site(nn.Module):
    """A dropout site with its rate and number."""

    def __init__(self, rate: float, generator: str = "counter"):
        super().__init__()
        self.rate, self.generator = rate, generator
        self.site: int | None = None  # the Transformer numbers its sites

    def keep(self, key: DropoutKey, rate: float, shape: tuple[int, ...]) -> Bool[Tensor, "B ..."]:
        """The keep mask of this rate and shape, batch first: True for elements that are kept.

        Raises:
            ValueError: the site has no number, or its generator exists in JAX only.
        """
        if self.site is None:
            raise ValueError("a dropout site has no number: only a complete Transformer numbers its sites")
        if self.generator not in GENERATORS:
            raise ValueError(f"dropout_generator={self.generator!r}: is available in JAX only; use 'counter'")
        return GENERATORS[self.generator](key, self.site, rate, shape)


class Dropout(Site):
    """Zeroes elements with probability `rate` and divides the others by 1 - rate.

    Source: Srivastava et al. 2014, section 4, in the inverted form.
    """

    def forward(self, x: Float[Tensor, "B ..."], key: DropoutKey | None) -> Float[Tensor, "B ..."]:
        if key is None or self.rate == 0:
            return x
        scaled = (at_least_float32(x) / (1 - self.rate)).to(x.dtype)
        return torch.where(self.keep(key, self.rate, tuple(x.shape)), scaled, 0)


class LayerDrop(Site):
    """Skips a layer for the whole batch with probability `rate`: its output is then its input. There is no scaling.

    Source: Fan et al. 2020, "Reducing Transformer Depth on Demand", section 3.
    """

    def forward(
        self, before: Float[Tensor, "B L D"], after: Float[Tensor, "B L D"], key: DropoutKey | None
    ) -> Float[Tensor, "B L D"]:
        if key is None or self.rate == 0:
            return after
        keep = self.keep(key._replace(rows=torch.zeros_like(key.rows[:1])), self.rate, (1, 1))
        return torch.where(keep[..., None], after, before)


class Cutoff(Site):
    """Zeroes the embeddings of whole tokens of a second pass with probability `key.cutoff`, without scaling.

    It never zeroes padding, BOS, EOS and the start of the decoder.

    Source: Shen et al. 2020, "A Simple but Tough-to-Beat Data Augmentation Approach", section 3.1, token cutoff.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__(0.0, config.dropout_generator)
        ids = (config.pad_id, config.bos_id, config.eos_id, config.decoder_start_id)
        self.special_ids = tuple(i for i in ids if i is not None)

    def forward(
        self, x: Float[Tensor, "B L D"], tokens: Int[Tensor, "B L"], key: DropoutKey | None
    ) -> Float[Tensor, "B L D"]:
        if key is None or key.cutoff is None:
            return x
        special = torch.isin(tokens, tokens.new_tensor(self.special_ids))
        keep = self.keep(key, key.cutoff, tuple(tokens.shape)) | special | (key.rows >= 0)[:, None]
        return torch.where(keep[..., None], x, 0)


def dropout_mask(key: DropoutKey, site: int, rate: float, shape: tuple[int, ...]) -> Bool[Tensor, "B ..."]:
    """The keep mask of this shape, batch first: True for elements that are kept."""
    rows, device = key.rows.to(torch.int64), key.rows.device
    low, high = torch.tensor(0x243F6A88, device=device), torch.tensor(0x85A308D3, device=device)  # digits of pi
    for part in (key.seed, key.update, site, rows):
        low, high = _absorb(low, high, part)
    for length in shape[1:-1]:  # one dimension at a time, so that padding of another one does not matter
        low, high = _absorb(low[..., None], high[..., None], torch.arange(length, device=device))
    indices = torch.arange(shape[-1], device=device)
    return _mix(_mix(indices ^ low[..., None]) ^ high[..., None]) >= min(round(rate * 2**32), 2**32 - 1)


def _absorb(low: Tensor, high: Tensor, part: int | Tensor) -> tuple[Tensor, Tensor]:
    """The 64-bit state, in two words, after absorbing one more part of the key."""
    word = part & _WORD
    return _mix(low ^ word), _mix((high + word * 0x9E3779B9) & _WORD)


def _mix(x: Tensor) -> Tensor:
    """Mix a 32-bit word bijectively: each input bit flips each output bit with probability about 1/2.

    Source: Wellons 2018, "Prospecting for Hash Functions", lowbias32.
    """
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _WORD
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _WORD
    return x ^ (x >> 16)


GENERATORS: dict[str, Callable[..., Tensor]] = {"counter": dropout_mask}
