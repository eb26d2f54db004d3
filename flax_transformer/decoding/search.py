"""Greedy and beam search, and sampling, of one batch or of many.

Of many, the sentences that are finished leave their batch, and those that are not continue together: batches remain
full, and no further program is compiled.

Letters: B sentences, S source length, K beam size, T length of the cache.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...backend.errors import NotFiniteError
from ...configs.decoding import DecodingConfig
from ...configs.schema import TransformerConfig
from ...formulas.decoding import Decoded, check_sources, collect, together, without_cache
from ...formulas.sampling import draws_of
from ...formulas.sentence_rules import sentence_rules
from ..inputs import check_inputs
from ..model import Transformer
from ..module import named_arrays
from .programs import (
    compiled_length,
    first_state,
    grow,
    lengthen,
    pause_lengths,
    programs_without_cache,
    search_programs,
)
from .regrouping import SMALL, DecodingBatch, Finished, finished, regrouped
from .threads import compiling_once, in_threads

Put = Callable[[np.ndarray], Any]  # an array (B, ...) -> the same on devices


class Sentences(NamedTuple):
    """A batch of sentences, which begin together."""

    sources: Sequence[ArrayLike]  # by model: tokens (B, S)
    numbers: ArrayLike | None = None  # (B,), on which samples depend; None: 0 to B - 1
    prefixes: Sequence[Sequence[int]] | None = None  # ids with which each translation begins
    mask: ArrayLike | None = None  # of the tokens of a single model's sources
    num_sentences: int | None = None  # the rows after these repeat others, to fill the batch; they are not returned


def generate(
    model: Transformer,
    src_tokens: ArrayLike,
    config: DecodingConfig | None = None,
    src_mask: ArrayLike | None = None,
    put: Put | None = None,
    sentences: ArrayLike | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Decoded:
    """Translate a batch of sentences (B, S) by beam search or sampling, as `DecodingConfig` defines it.

    `sentences` (B,): their numbers, on which samples depend; by default 0 to B - 1. `prefixes`: ids with which each
    translation begins.
    `put` divides the rows of an array over the devices that hold the model, if there are several.

    Compiles once per batch size, source length and cache length. Both lengths are rounded up to 16, 32, 64 and so on,
    at most `max_length`; with at most 64 hypotheses in a batch, the cache starts at 32. Without a cache it compiles
    once per batch size, source length and target length.

    Raises:
        ValueError: the batch is empty, a sentence is empty or too long, or an id is outside the vocabulary.
        ConfigError: the model cannot be decoded with `config`.
    Source: `transformers`, `generate`.
    """
    return generate_together([model], [src_tokens], config, src_mask, put, sentences, prefixes)


def generate_together(
    models: Sequence[Transformer],
    src_tokens: Sequence[ArrayLike],
    config: DecodingConfig | None = None,
    src_mask: ArrayLike | None = None,
    put: Put | None = None,
    sentences: ArrayLike | None = None,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> Decoded:
    """As `generate`, with an ensemble: models of one target vocabulary, each with its own tokens of the sources.

    The probability of a token is the mean over the models (`DecodingConfig.log_linear`: the normalized exponential of
    the mean log-probability). `src_mask` is that of a single model; lengths and n-grams of the source are the first
    model's.

    Raises:
        ValueError, ConfigError: as `generate`; or the models differ in their target vocabulary or special ids.
    """
    batch = Sentences(src_tokens, sentences, prefixes, src_mask)
    config, parts = _search(models, [batch], config, put)
    places, tokens, scores = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(places)
    return collect(tokens[order], scores[order], models[0].config, config)


def generate_batches(
    models: Sequence[Transformer],
    batches: Iterable[Sentences],
    config: DecodingConfig | None = None,
    threads: int = 1,
    arrays: Sequence[Mapping[str, jax.Array]] | None = None,
) -> Iterator[tuple[np.ndarray, Decoded]]:
    """As `generate_together`, of several batches: (places, translations) of sentences as they are finished.

    A place counts the sentences from the first batch on. Batches that follow each other should have one size and one
    compiled source length: only such batches share what becomes free. `threads` decode at the same time. `arrays`:
    `named_arrays` of each model, for many calls with few sentences.

    Raises:
        ValueError, ConfigError: as `generate_together`.
        NotFiniteError: a sentence's logits are NaN; its `row` is the sentence's place.
    """
    config, parts = _search(models, batches, config, None, threads, arrays)
    for places, tokens, scores in parts:
        try:
            yield places, collect(tokens, scores, models[0].config, config)
        except NotFiniteError as error:
            raise NotFiniteError(str(error), int(places[error.row])) from None


def _search(
    models: Sequence[Transformer],
    batches: Iterable[Sentences],
    config: DecodingConfig | None,
    put: Put | None,
    threads: int = 1,
    arrays: Sequence[Mapping[str, jax.Array]] | None = None,
) -> tuple[DecodingConfig, Iterator[Finished]]:
    """(the settings of all models, what is finished)."""
    configs = tuple(model.config for model in models)
    config = together(configs, config or DecodingConfig())
    cache = not any(map(without_cache, configs)) if config.cache is None else config.cache
    decode = _with_cache if cache else _without_cache
    starts, settings = _numbered(configs, config, batches), config.without_seed()
    compiled = tuple(model.replace(forced_bos_id=None) for model in configs)  # one program for all target languages
    given = compiled, [named_arrays(model) for model in models] if arrays is None else arrays, settings
    if threads == 1:
        return config, decode(*given, starts, put)
    if cache:
        _programs(compiled, settings)  # before several threads ask for them
    return config, in_threads(lambda own: decode(*given, own, put), starts, threads)


class _Start(NamedTuple):
    """What the decoding of a batch begins with."""

    places: np.ndarray  # as in `DecodingBatch`
    sources: list[tuple[np.ndarray, np.ndarray]]  # by model: tokens (B, S), and their mask
    draws: np.ndarray  # uniform numbers of samples, by n
    rules: np.ndarray  # rules of sentences, by n


def _numbered(
    configs: Sequence[TransformerConfig], config: DecodingConfig, batches: Iterable[Sentences]
) -> Iterator[_Start]:
    first = 0
    for batch in batches:
        masks = [batch.mask] if len(configs) == 1 else [None] * len(configs)
        sources = [prepare_sources(*given) for given in zip(configs, batch.sources, masks, strict=True)]
        src, keep = sources[0]
        count = len(src) if batch.num_sentences is None else batch.num_sentences
        places = np.where(np.arange(len(src)) < count, first + np.arange(len(src)), -1)
        draws = draws_of(config, configs[0], batch.numbers, len(src))
        yield _Start(places, sources, draws, sentence_rules(config, configs[0], keep, batch.prefixes))
        first += count


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


def _without_cache(
    configs: tuple[TransformerConfig, ...],
    arrays: Sequence[Mapping[str, jax.Array]],
    config: DecodingConfig,
    starts: Iterable[_Start],
    put: Put | None,
) -> Iterator[Finished]:
    put = put or (lambda rows: rows)
    encode, step = programs_without_cache(configs, config)
    longest = config.max_length or configs[0].max_length
    for start in starts:
        sources = [(put(src), put(keep)) for src, keep in start.sources]
        memories = encode(arrays, sources)
        search = first_state(configs[0], config, put(start.draws), put(start.rules))
        for length in range(1, longest + 1):
            search = step(arrays, memories, sources, search, length)
            if bool(search.settled.all()):
                break
        yield finished(start.places, search)


@lru_cache(maxsize=16)
def _programs(
    configs: tuple[TransformerConfig, ...], config: DecodingConfig
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`search_programs`, each compiled by one thread."""
    prefill, extend = search_programs(configs, config)
    return compiling_once(prefill), compiling_once(extend)


def _with_cache(
    configs: tuple[TransformerConfig, ...],
    arrays: Sequence[Mapping[str, jax.Array]],
    config: DecodingConfig,
    starts: Iterable[_Start],
    put: Put | None,
) -> Iterator[Finished]:
    small = SMALL if put is None else 0  # devices divide whole batches
    put = put or (lambda rows: rows)
    longest = config.max_length or configs[0].max_length
    pauses = pause_lengths(longest)
    prefill, extend = _programs(configs, config)

    def lengthened(start: _Start) -> _Start:
        return start._replace(
            sources=[
                (lengthen(src, model, model.pad_id), lengthen(keep, model, False))
                for model, (src, keep) in zip(configs, start.sources, strict=True)
            ]
        )

    def begin(start: _Start) -> DecodingBatch:
        sources = [(jnp.asarray(put(src)), jnp.asarray(put(keep))) for src, keep in start.sources]
        return DecodingBatch(start.places, sources, *prefill(arrays, sources, put(start.draws), put(start.rules)))

    def go_on(batch: DecodingBatch, until: int, few: int) -> DecodingBatch:
        places, sources, memories, search, past = batch
        while True:
            past = grow(past, compiled_length(int(search.length) + 1, longest))
            search, past = extend(arrays, memories, sources, search, past, until, few)
            length, number = int(search.length), int((~search.settled).sum())
            if not number or length >= until or (number <= few and pauses[length]):
                return DecodingBatch(places, sources, memories, search, past)

    groups = (map(begin, alike) for _, alike in groupby(map(lengthened, starts), key=_shapes))
    yield from regrouped(groups, go_on, longest, [model.pad_id for model in configs], small)


def _shapes(start: _Start) -> Any:
    """Only batches of the same shapes are regrouped."""
    return start.draws.shape, [src.shape for src, _ in start.sources], start.rules.shape
