"""The compiled programs of decoding: encoders and first state, search with a cache, one step without it.

The decoder processes the K hypotheses of a sentence as K positions, (B, K, D), so that they share one encoder output.
The cache stores the keys and values of every beam slot at every step and is never reordered. `ancestors` selects the
slots that a hypothesis attends to.

Letters: B sentences, S source length, K beam size, T length of the cache, N heads, H and U their widths.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from ...configs.decoding import DecodingConfig
from ...configs.schema import TransformerConfig
from ...formulas.decoding import plan
from ..attention import CROSS_MASKS, KeysValues
from ..layers import count_positions
from ..model import Transformer, UpdateCache
from ..module import at_least_float32
from ..xla_cpu.maxima import log_softmax
from .ensembles import combine
from .state import Search, start
from .steps import advance

# Cache lengths and padded source lengths start here and double.
SHORTEST = 16
# A batch with at most this many hypotheses starts at twice that: more keys cost less than another compilation.
FEW = 64


class Past(NamedTuple):
    """The key-value cache of the earlier positions."""

    layers: list[list[KeysValues]]  # by model: (B, N, H, T·K) and (B, N, T·K, U), by step and beam slot
    ancestors: Int[Array, "B K T"]  # beam slot of each hypothesis at each step; -1: not yet reached


@lru_cache(maxsize=16)
def search_programs(
    configs: tuple[TransformerConfig, ...], config: DecodingConfig
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two compiled functions: (encoders and initial state, search until it is done or pauses).

    It pauses when the cache is full, at length `until`, and where at most `few` sentences are unfinished.
    """
    first, beam_size = configs[0], config.beam_size
    steps = plan(first, config)
    longest = config.max_length or first.max_length
    slots, pauses = np.arange(beam_size, dtype=np.int32), pause_lengths(longest)

    def prefill(
        arrays: Sequence[Mapping[str, Array]],
        sources: Sequence[tuple[Int[Array, "B _"], Bool[Array, "B _"]]],
        draws: Float[Array, "B K _"],
        rules: Int[Array, "B _"],
    ) -> tuple[list[list[KeysValues]], Search, Past]:
        memories = []
        for model_config, own, (src, keep) in zip(configs, arrays, sources, strict=True):
            model = Transformer.from_arrays(model_config, own)
            memories.append(model.decoder.keys_values(model.encode(src, keep)))
        layers = [[KeysValues(k[..., :0], v[..., :0, :]) for k, v in memory] for memory in memories]
        batch = len(draws)
        past = Past(layers, jnp.zeros((batch, beam_size, 0), jnp.int32))
        capacity = 2 * SHORTEST if batch * beam_size <= FEW else SHORTEST
        return memories, first_state(first, config, draws, rules), grow(past, min(capacity, longest))

    def extend(
        arrays: Sequence[Mapping[str, Array]],
        memories: Sequence[list[KeysValues]],
        sources: Sequence[tuple[Int[Array, "B _"], Bool[Array, "B _"]]],
        search: Search,
        past: Past,
        until: Int[Array, ""],
        few: Int[Array, ""],
    ) -> tuple[Search, Past]:
        models = [Transformer.from_arrays(*given) for given in zip(configs, arrays, strict=True)]
        cross_masks = [
            CROSS_MASKS[model_config.cross_mask](keep, beam_size)
            for model_config, (_, keep) in zip(configs, sources, strict=True)
        ]
        capacity = past.ancestors.shape[-1]

        def step(state: tuple[Search, Past]) -> tuple[Search, Past]:
            search, (all_layers, ancestors) = state
            all_layers, time = [list(layers) for layers in all_layers], search.length
            ancestors = ancestors.at[:, :, time].set(slots)
            self_mask = (ancestors[..., None] == slots).reshape(len(ancestors), 1, beam_size, capacity * beam_size)
            distances = jnp.broadcast_to(
                jnp.repeat(jnp.arange(capacity, dtype=jnp.int32), beam_size) - time, self_mask.shape[2:]
            )

            def next_of(i: int) -> Float[Array, "B K V"]:
                def update_cache(layer: int, new: KeysValues) -> KeysValues:
                    all_layers[i][layer] = write_to_cache(all_layers[i][layer], new, time * beam_size)
                    return all_layers[i][layer]

                return _next(models[i], search, memories[i], self_mask, cross_masks[i], update_cache, distances)

            log_probs = combine([next_of(i) for i in range(len(models))], config.log_linear)
            search, parents = advance(search, log_probs, sources[0][0], steps, first.eos_id)
            return search, Past(all_layers, jnp.take_along_axis(ancestors, parents[..., None], axis=1))

        def unfinished(state: tuple[Search, Past]) -> Bool[Array, ""]:
            length, number = state[0].length, jnp.sum(~state[0].settled)
            stays = number > jnp.where(jnp.asarray(pauses)[length], few, 0)
            return (length < jnp.minimum(capacity, until)) & stays

        return jax.lax.while_loop(unfinished, step, (search, past))

    return jax.jit(prefill), jax.jit(extend, donate_argnames=("search", "past"))


def write_to_cache(cache: KeysValues, new: KeysValues, start: Int[Array, ""]) -> KeysValues:
    """The cache with new keys and values at index `start`."""
    keys = jax.lax.dynamic_update_slice_in_dim(cache.keys, new.keys, start, axis=-1)
    return KeysValues(keys, jax.lax.dynamic_update_slice_in_dim(cache.values, new.values, start, axis=-2))


def _next(
    model: Transformer,
    search: Search,
    memory: list[KeysValues],
    self_mask: Bool[Array, "B 1 K L"],
    cross_mask: Bool[Array, "B 1 K S"],
    update_cache: UpdateCache,
    distances: Int[Array, "K L"],
) -> Float[Array, "B K V"]:
    """Log-probabilities of each hypothesis's next token; all hypotheses have equal length."""
    config, time = model.config, search.length
    batch, beam_size, _ = search.tokens.shape
    counts = count_positions(config, search.tokens.reshape(batch * beam_size, -1))[:, time]
    positions = jnp.broadcast_to(counts, batch * beam_size).reshape(batch, beam_size)
    first = jnp.broadcast_to(time == 0, beam_size)
    tokens = search.tokens[:, :, time]
    logits = model.next_logits(
        tokens, positions, first, memory, self_mask, cross_mask, update_cache=update_cache, distances=distances
    )
    return log_softmax(at_least_float32(logits))


@lru_cache(maxsize=16)
def programs_without_cache(
    configs: tuple[TransformerConfig, ...], config: DecodingConfig
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Two compiled functions: (encoders, one search step with a full decoder pass over the hypotheses)."""
    steps = plan(configs[0], config)

    def encode(
        arrays: Sequence[Mapping[str, Array]], sources: Sequence[tuple[Int[Array, "B _"], Bool[Array, "B _"]]]
    ) -> list[Float[Array, "B _ _"]]:
        given = zip(configs, arrays, sources, strict=True)
        return [Transformer.from_arrays(own, values).encode(*source) for own, values, source in given]

    def step(
        arrays: Sequence[Mapping[str, Array]],
        memories: Sequence[Float[Array, "B _ _"]],
        sources: Sequence[tuple[Int[Array, "B _"], Bool[Array, "B _"]]],
        search: Search,
        length: int,
    ) -> Search:
        prefixes, all_log_probs = search.tokens[:, :, :length].reshape(-1, length), []
        for own, values, memory, (_, keep) in zip(configs, arrays, memories, sources, strict=True):
            model = Transformer.from_arrays(own, values)
            memory, keep = (jnp.repeat(a, config.beam_size, axis=0) for a in (memory, keep))
            logits = model.decode(prefixes, memory, keep)[:, -1].reshape(*search.sums.shape, -1)
            all_log_probs.append(log_softmax(at_least_float32(logits)))
        log_probs = combine(all_log_probs, config.log_linear)
        return advance(search, log_probs, sources[0][0], steps, configs[0].eos_id)[0]

    return jax.jit(encode), jax.jit(step, static_argnames="length")


def first_state(model: TransformerConfig, config: DecodingConfig, draws: ArrayLike, rules: ArrayLike) -> Search:
    """The state before the first token."""
    dtype = jnp.promote_types(model.compute_dtype, jnp.float32)
    longest = config.max_length or model.max_length
    assert model.decoder_start_id is not None  # `plan` raises otherwise
    given = jnp.asarray(draws), jnp.asarray(rules)
    return start(*given, config.beam_groups, longest, model.decoder_start_id, model.pad_id, dtype)


def pause_lengths(longest: int) -> np.ndarray:
    """Whether a search may pause at a length, (longest + 1,): at four lengths between a power of two and the next.

    So that the sentences of several batches meet.
    """
    lengths = np.arange(longest + 1)
    octave = 1 << np.maximum(np.log2(np.maximum(lengths, 1)).astype(int), 4)
    return lengths % (octave // 4) == 0


def compiled_length(length: int, longest: int) -> int:
    """The smallest cache length, or padded source length, of at least `length`."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)


def lengthen(values: np.ndarray, config: TransformerConfig, fill: int | bool) -> np.ndarray:
    """The values (B, L), padded to one of the compiled lengths."""
    extra = compiled_length(values.shape[1], config.max_length) - values.shape[1]
    return np.pad(values, ((0, 0), (0, extra)), constant_values=fill)


def grow(past: Past, capacity: int) -> Past:
    """The cache, padded to `capacity` positions; itself if it has them."""
    _, beam_size, length = past.ancestors.shape
    extra = capacity - length
    if extra <= 0:
        return past

    def pad(a: Array, axis: int, width: int, fill: int = 0) -> Array:
        widths = [(0, 0)] * a.ndim
        widths[axis] = (0, width)
        return jnp.pad(a, widths, constant_values=fill)

    layers = [
        [KeysValues(pad(k, -1, extra * beam_size), pad(v, -2, extra * beam_size)) for k, v in layers]
        for layers in past.layers
    ]
    return Past(layers, pad(past.ancestors, -1, extra, fill=-1))
