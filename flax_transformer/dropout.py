"""Counter-based dropout: both frameworks compute the same masks by hashing each element's position in the run.

mask = hash(seed, update, site, row in the whole batch, indices in the row) >= rate · 2^32. The mask does not depend on
micro-batches, padding, devices or the framework, so training with dropout can be compared step by step.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, UInt

from ..configs.schema import TransformerConfig
from .module import at_least_float32

SECOND_PASS = -(2**31)  # added to the rows of a second pass, so that its masks differ


class DropoutKey(NamedTuple):
    """The position of a forward pass in a training run. Passing a key switches dropout on."""

    seed: int | Int[Array, ""]
    update: int | Int[Array, ""]  # number of the optimizer update
    rows: Int[Array, " B"]  # row of each sentence in the whole batch; negative in a second pass
    cutoff: float | None = None  # share of the token embeddings of a second pass that are zero


class Site(nnx.Module):
    """A dropout site with its rate and number."""

    def __init__(self, rate: float, generator: str = "counter"):
        self.rate, self.generator = rate, generator
        self.site: int | UInt[Array, ""] | None = None  # the Transformer numbers its sites; in a scan, an array

    def keep(self, key: DropoutKey, rate: float, shape: tuple[int, ...]) -> Bool[Array, "B ..."]:
        """The keep mask of this rate and shape, batch first: True for elements that are kept.

        Raises:
            ValueError: the site has no number.
        """
        if self.site is None:
            raise ValueError("a dropout site has no number: only a complete Transformer numbers its sites")
        return GENERATORS[self.generator](key, self.site, rate, shape)


class Dropout(Site):
    """Zeroes elements with probability `rate` and divides the others by 1 - rate.

    Source: Srivastava et al. 2014, section 4, in the inverted form.
    """

    def __call__(self, x: Float[Array, "B ..."], key: DropoutKey | None) -> Float[Array, "B ..."]:
        if key is None or self.rate == 0:
            return x
        scaled = (at_least_float32(x) / (1 - self.rate)).astype(x.dtype)
        return jnp.where(self.keep(key, self.rate, x.shape), scaled, 0)


class LayerDrop(Site):
    """Skips a layer for the whole batch with probability `rate`: its output is then its input. There is no scaling.

    Source: Fan et al. 2020, "Reducing Transformer Depth on Demand", section 3.
    """

    def __call__(
        self, before: Float[Array, "B L D"], after: Float[Array, "B L D"], key: DropoutKey | None
    ) -> Float[Array, "B L D"]:
        if key is None or self.rate == 0:
            return after
        keep = self.keep(key._replace(rows=jnp.zeros(1, int)), self.rate, (1, 1))
        return jnp.where(keep[..., None], after, before)


class Cutoff(Site):
    """Zeroes the embeddings of whole tokens of a second pass with probability `key.cutoff`, without scaling.

    It never zeroes padding, BOS, EOS and the start of the decoder.

    Source: Shen et al. 2020, "A Simple but Tough-to-Beat Data Augmentation Approach", section 3.1, token cutoff.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__(0.0, config.dropout_generator)
        ids = (config.pad_id, config.bos_id, config.eos_id, config.decoder_start_id)
        self.special_ids = tuple(i for i in ids if i is not None)

    def __call__(
        self, x: Float[Array, "B L D"], tokens: Int[Array, "B L"], key: DropoutKey | None
    ) -> Float[Array, "B L D"]:
        if key is None or key.cutoff is None:
            return x
        special = jnp.isin(tokens, jnp.array(self.special_ids))
        keep = self.keep(key, key.cutoff, tokens.shape) | special | (key.rows >= 0)[:, None]
        return jnp.where(keep[..., None], x, 0)


def threefry_mask(
    key: DropoutKey, site: int | UInt[Array, ""], rate: float, shape: tuple[int, ...]
) -> Bool[Array, "B ..."]:
    """As `dropout_mask`, by JAX's generator: independent of devices and micro-batches, but not of padding.

    Source: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3".
    """
    base = jax.random.key(_word(key.seed), impl="threefry2x32")
    for part in (key.update, site):
        base = jax.random.fold_in(base, _word(part))
    bits = jax.vmap(lambda row: jax.random.bits(jax.random.fold_in(base, row), shape[1:], jnp.uint32))(key.rows)
    return bits >= _threshold(rate)


def dropout_mask(
    key: DropoutKey, site: int | UInt[Array, ""], rate: float, shape: tuple[int, ...]
) -> Bool[Array, "B ..."]:
    """The keep mask of this shape, batch first: True for elements that are kept."""
    return _keep([_word(part) for part in (key.seed, key.update, site, key.rows)], _threshold(rate), shape)


@partial(jax.jit, static_argnames="shape", inline=True)  # traced once, not at each site
def _keep(words: list[Array], threshold: Array, shape: tuple[int, ...]) -> Bool[Array, "B ..."]:
    low, high = jnp.uint32(0x243F6A88), jnp.uint32(0x85A308D3)  # digits of pi; any two different words would do
    for word in words:
        low, high = _absorb(low, high, word)
    for length in shape[1:-1]:  # one dimension at a time, so that padding of another one does not matter
        low, high = _absorb(low[..., None], high[..., None], jnp.arange(length))
    indices = jnp.arange(shape[-1], dtype=jnp.uint32)
    return _mix(_mix(indices ^ low[..., None]) ^ high[..., None]) >= threshold


def _threshold(rate: float) -> UInt[Array, ""]:
    """The smallest 32-bit hash of an element that is kept."""
    return jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _word(part: ArrayLike) -> UInt[Array, "..."]:
    """The low 32 bits of `part`."""
    return jnp.uint32(part & 0xFFFFFFFF) if isinstance(part, int) else jnp.asarray(part).astype(jnp.uint32)


def _absorb(low: UInt[Array, "..."], high: UInt[Array, "..."], part: ArrayLike) -> tuple[Array, Array]:
    """The 64-bit state, in two words, after absorbing one more part of the key."""
    word = _word(part)
    return _mix(low ^ word), _mix(high + word * jnp.uint32(0x9E3779B9))


def _mix(x: UInt[Array, "..."]) -> UInt[Array, "..."]:
    """Mix a 32-bit word bijectively: each input bit flips each output bit with probability about 1/2.

    Source: Wellons 2018, "Prospecting for Hash Functions", lowbias32.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


GENERATORS: dict[str, Callable[..., Array]] = {"counter": dropout_mask, "threefry": threefry_mask}
