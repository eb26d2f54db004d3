"""Greedy and beam search, and sampling, with a key-value cache.

The decoder processes the K hypotheses of a sentence as K positions, (B, K, D), so that they share one encoder output.
The cache stores the keys and values of every beam slot at every step and is never reordered. `ancestors` selects the
slots that a hypothesis attends to.

Letters: B sentences, S source length, K beam size, T length of the cache, N heads, H and U their widths.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from ...configs.decoding import DecodingConfig
from ...configs.schema import TransformerConfig
from ...formulas.decoding import Decoded, check_sources, collect, plan, without_cache
from ...formulas.sampling import draws_of
from ...formulas.sentence_rules import sentence_rules
from ..attention import CROSS_MASKS, KeysValues
from ..inputs import check_inputs
from ..layers import count_positions
from ..model import Transformer, UpdateCache
from ..module import at_least_float32, named_arrays, on_host
from ..xla_cpu.maxima import log_softmax
from .state import Search, start
from .steps import advance

# Cache lengths and padded source lengths start here and double.
SHORTEST = 16
# A batch with at most this many hypotheses starts at twice that: more keys cost less than another compilation.
FEW = 16

Given = tuple[np.ndarray, np.ndarray]  # (uniform numbers of samples, rules of sentences), by n
Put = Callable[[np.ndarray], Any]  # an array (B, ...) -> the same on devices


class Past(NamedTuple):
    """The key-value cache of the earlier positions."""

    layers: list[KeysValues]  # (B, N, H, T·K) and (B, N, T·K, U), by step and beam slot
    ancestors: Int[Array, "B K T"]  # beam slot of each hypothesis at each step; -1: not yet reached


def generate(
    model: Transformer,
    src_tokens: ArrayLike,
    config: DecodingConfig | None = None,
    src_mask: ArrayLike | None = None,
    put: Put = lambda rows: rows,
    sentences: ArrayLike | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Decoded:
    """Translate a batch of sentences (B, S) by beam search or sampling, as `DecodingConfig` defines it.

    `sentences` (B,): their numbers, on which samples depend; by default 0 to B - 1. `prefixes`: ids with which each
    translation begins.
    `put` divides the rows of an array over the devices that hold the model, if there are several.

    Compiles once per batch size, source length and cache length. Both lengths are rounded up to 16, 32, 64 and so on,
    at most `max_length`; with at most 16 hypotheses in a batch, the cache starts at 32. Without a cache it compiles
    once per batch size, source length and target length.

    Raises:
        ValueError: the batch is empty, a sentence is empty or too long, or an id is outside the vocabulary.
        ConfigError: the model cannot be decoded with `config`.
    Source: `transformers`, `generate`.
    """
    config = config or DecodingConfig()
    plan(model.config, config)
    src, keep = prepare_sources(model.config, src_tokens, src_mask)
    cache = without_cache(model.config) is None if config.cache is None else config.cache
    given = (
        draws_of(config, model.config, sentences, len(src)),
        sentence_rules(config, model.config, keep, prefixes),
    )
    search = (_with_cache if cache else _without_cache)(model, config.without_seed(), src, keep, given, put)
    return collect(on_host(search.finished), on_host(search.scores), model.config, config)


def prepare_sources(
    config: TransformerConfig, src_tokens: ArrayLike, src_mask: ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
    """(sources, mask of their tokens). Raises: ValueError, as `generate`."""
    if any(isinstance(array, jax.core.Tracer) for array in (src_tokens, src_mask)):
        raise ValueError("src_tokens: is traced; decoding compiles its own programs, so call it outside jax.jit")
    src, keep = np.asarray(src_tokens), None if src_mask is None else np.asarray(src_mask)
    check_inputs("src", src, keep, config.src_vocab_size, config.max_length, None)
    keep = src != config.pad_id if keep is None else keep
    check_sources(keep)
    return src.astype(np.int32), keep


def _with_cache(
    model: Transformer, config: DecodingConfig, src: np.ndarray, keep: np.ndarray, given: Given, put: Put
) -> Search:
    arrays, longest = named_arrays(model), config.max_length or model.config.max_length
    src, keep = put(lengthen(src, model.config, model.config.pad_id)), put(lengthen(keep, model.config, False))
    prefill, extend = search_programs(model.config, config)
    memory, search, past = prefill(arrays, src, keep, *map(put, given))
    while int(search.length) < longest and not bool(search.done.all()):
        past = grow(past, _round_up(int(search.length) + 1, longest))
        search, past = extend(arrays, memory, src, keep, search, past)
    return search


@lru_cache(maxsize=16)
def search_programs(model_config: TransformerConfig, config: DecodingConfig) -> tuple[Callable[..., Any], ...]:
    """Two compiled functions: (encoder and initial state, search until it is done or the cache is full)."""
    steps, beam_size = plan(model_config, config), config.beam_size
    longest = config.max_length or model_config.max_length
    slots = np.arange(beam_size, dtype=np.int32)

    def prefill(
        arrays: Mapping[str, Array],
        src: Int[Array, "B S"],
        keep: Bool[Array, "B S"],
        draws: Float[Array, "B K _"],
        rules: Int[Array, "B _"],
    ) -> tuple[list[KeysValues], Search, Past]:
        model = Transformer.from_arrays(model_config, arrays)
        memory = model.decoder.keys_values(model.encode(src, keep))
        layers = [KeysValues(k[..., :0], v[..., :0, :]) for k, v in memory]
        past = Past(layers, jnp.zeros((len(src), beam_size, 0), jnp.int32))
        capacity = 2 * SHORTEST if len(src) * beam_size <= FEW else SHORTEST
        return memory, _start(model_config, config, draws, rules), grow(past, min(capacity, longest))

    def extend(
        arrays: Mapping[str, Array],
        memory: list[KeysValues],
        src: Int[Array, "B S"],
        keep: Bool[Array, "B S"],
        search: Search,
        past: Past,
    ) -> tuple[Search, Past]:
        model = Transformer.from_arrays(model_config, arrays)
        cross_mask = CROSS_MASKS[model_config.cross_mask](keep, beam_size)
        capacity = past.ancestors.shape[-1]

        def step(state: tuple[Search, Past]) -> tuple[Search, Past]:
            search, (layers, ancestors) = state
            layers, time = list(layers), search.length
            ancestors = ancestors.at[:, :, time].set(slots)
            self_mask = (ancestors[..., None] == slots).reshape(len(keep), 1, beam_size, capacity * beam_size)
            distances = jnp.broadcast_to(
                jnp.repeat(jnp.arange(capacity, dtype=jnp.int32), beam_size) - time, self_mask.shape[2:]
            )

            def update_cache(layer: int, new: KeysValues) -> KeysValues:
                layers[layer] = _write(layers[layer], new, time * beam_size)
                return layers[layer]

            log_probs = _next(model, search, memory, self_mask, cross_mask, update_cache, distances)
            search, parents = advance(search, log_probs, src, steps, model_config.eos_id)
            return search, Past(layers, jnp.take_along_axis(ancestors, parents[..., None], axis=1))

        def unfinished(state: tuple[Search, Past]) -> Bool[Array, ""]:
            return (state[0].length < capacity) & ~state[0].done.all()

        return jax.lax.while_loop(unfinished, step, (search, past))

    return jax.jit(prefill), jax.jit(extend, donate_argnames=("search", "past"))


def _write(cache: KeysValues, new: KeysValues, start: Int[Array, ""]) -> KeysValues:
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


def _without_cache(
    model: Transformer, config: DecodingConfig, src: np.ndarray, keep: np.ndarray, given: Given, put: Put
) -> Search:
    encode, step = _compiled_without_cache(model.config, config)
    src, keep = put(src), put(keep)
    arrays, longest = named_arrays(model), config.max_length or model.config.max_length
    memory, search = encode(arrays, src, keep), _start(model.config, config, *map(put, given))
    for length in range(1, longest + 1):
        search = step(arrays, memory, src, keep, search, length)
        if bool(search.done.all()):
            break
    return search


@lru_cache(maxsize=16)
def _compiled_without_cache(model_config: TransformerConfig, config: DecodingConfig) -> tuple[Callable[..., Any], ...]:
    """Two compiled functions: (encoder, one search step with a full decoder pass over the hypotheses)."""
    steps = plan(model_config, config)

    def encode(arrays: Mapping[str, Array], src: Int[Array, "B S"], keep: Bool[Array, "B S"]) -> Float[Array, "B S D"]:
        return Transformer.from_arrays(model_config, arrays).encode(src, keep)

    def step(
        arrays: Mapping[str, Array],
        memory: Float[Array, "B S D"],
        src: Int[Array, "B S"],
        keep: Bool[Array, "B S"],
        search: Search,
        length: int,
    ) -> Search:
        model = Transformer.from_arrays(model_config, arrays)
        prefixes = search.tokens[:, :, :length].reshape(-1, length)
        memory, keep = (jnp.repeat(a, config.beam_size, axis=0) for a in (memory, keep))
        logits = model.decode(prefixes, memory, keep)[:, -1].reshape(*search.sums.shape, -1)
        return advance(search, log_softmax(at_least_float32(logits)), src, steps, model_config.eos_id)[0]

    return jax.jit(encode), jax.jit(step, static_argnames="length")


def _start(model: TransformerConfig, config: DecodingConfig, draws: ArrayLike, rules: ArrayLike) -> Search:
    dtype = jnp.promote_types(model.compute_dtype, jnp.float32)
    longest = config.max_length or model.max_length
    assert model.decoder_start_id is not None  # `plan` raises otherwise
    given = jnp.asarray(draws), jnp.asarray(rules)
    return start(*given, config.beam_groups, longest, model.decoder_start_id, model.pad_id, dtype)


def _round_up(length: int, longest: int) -> int:
    """The smallest cache length, or padded source length, of at least `length`."""
    return min(max(SHORTEST, 1 << (length - 1).bit_length()), longest)


def lengthen(values: np.ndarray, config: TransformerConfig, fill: int | bool) -> np.ndarray:
    """The values (B, L), padded to one of the compiled lengths."""
    extra = _round_up(values.shape[1], config.max_length) - values.shape[1]
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

    layers = [KeysValues(pad(k, -1, extra * beam_size), pad(v, -2, extra * beam_size)) for k, v in past.layers]
    return Past(layers, pad(past.ancestors, -1, extra, fill=-1))
