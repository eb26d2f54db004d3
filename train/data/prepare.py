"""Prepares a run: tokenizers, encoded pairs, batch shapes, and the config with all sizes."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers as library

from ...backend.cache_directory import cache_directory
from ...backend.errors import DataError
from ...configs.data import TokenizerConfig
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ...convert.io.checksums import checksum_of_json
from ..text.unknown_tokens import unknown_warning
from .bpe_dropout import BpeDropout, check_merges
from .buckets import Bucket, choose_buckets, count_batches, square_buckets
from .corpus_store import TRAIN, VALID, CorpusStore
from .dataset import Batches
from .encoding import Counts, Sides
from .fitting import (
    FROM_TOKENIZERS,
    check_both_directions,
    check_fits,
    check_language,
    with_target_language,
    with_tokenizers,
)
from .parts import Part, parts_of
from .store import StoredPairs
from .store_writing import Request, stored_pairs
from .tokenizer_pair import Tokenizers, make_tokenizers

Say = Callable[[str], None]
_DROPPED_WARNING = 0.05  # share of dropped pairs above which a warning is printed


class PreparedRun(NamedTuple):
    """Everything that is determined before the first update."""

    run: RunConfig  # with all sizes filled in
    tokenizers: Tokenizers
    train: StoredPairs
    valid: StoredPairs
    references: list[str]  # texts of the targets of `valid`, without the swapped pairs, which come last
    buckets: list[Bucket]
    bpe_dropout: BpeDropout | None
    is_gradual: bool  # whether shapes begin one after the other; False in runs of earlier versions

    @property
    def counts(self) -> dict[str, Counts]:
        """What was read, kept and dropped of train and valid."""
        return {"train": self.train.counts, "valid": self.valid.counts}

    def batches(self, rows: Sequence[np.ndarray] | None = None) -> Batches:
        """The run's batches in order; `rows` are those to read from the batches of each bucket, by default all."""
        run = self.run
        assert run.loop.updates is not None  # `prepare` has set it
        pad_id, seed = run.model.pad_id, run.training.seed
        return Batches(
            self.train, self.buckets, pad_id, seed, run.loop.updates, rows, self.bpe_dropout, self.is_gradual
        )


def prepare(
    run: RunConfig,
    tokenizers: Tokenizers | None = None,
    buckets: Sequence[Bucket] | None = None,
    sizes: TransformerConfig | None = None,
    say: Say = lambda line: None,
    is_gradual: bool = True,
    store: Path | None = None,
) -> PreparedRun:
    """Encode the corpus, or read what was encoded; make `tokenizers` and choose `buckets` unless they are passed.

    `sizes`: the config of existing weights, whose vocabulary sizes and special ids the model takes over; `store`: the
    folder for the encoded pairs, instead of the user's cache.

    Raises:
        DataError: the corpus or a tokenizer cannot be used, or a tokenizer has tokens beyond `sizes`.
        ConfigError: the config is inconsistent with the corpus.
    """
    if run.corpus.store is not None:
        run, corpus = _read(run, Path(run.corpus.store), tokenizers, sizes)
    else:
        run, corpus = _encode(run, tokenizers, sizes, store, say)
    tokenizers, train, valid = corpus.tokenizers, corpus.train, corpus.valid
    say(describe_tokens(run.tokenizer, train.counts))
    warning = unknown_warning(tokenizers.src, train.counts.unknown[0], train.counts.tokens[0])
    if warning is not None and (run.init_from is not None or run.tokenizer.load):
        say(f"warning: {warning}")
    for name, part in {"train": train, "valid": valid}.items():
        _check_ids(part, run.model, tokenizers, name)
        say(describe_counts(name, part.counts, corpus.longest))
        if (share := 1 - part.counts.kept / part.counts.read) > _DROPPED_WARNING:
            say(f"warning: {share:.0%} of the {name} pairs are dropped; check the files and the length limits")
    run = replace(run, batches=run.batches.sized(int(train.lengths.sum(0).max())))
    bpe_dropout, lengths = None, train.lengths
    if rate := run.tokenizer.bpe_dropout:
        bpe_dropout = BpeDropout(tokenizers, train, rate, run.training.seed)
        first_epoch = bpe_dropout.epoch(0, [Bucket(*corpus.longest, 1)])
        lengths = np.maximum(first_epoch.lengths, lengths)  # a shape must hold a pair without dropout
    if buckets is None:
        say("choosing batch shapes")
    buckets = list(buckets or buckets_of(run, lengths, run.batches.shapes))
    run = run.resolved(count_batches(lengths, buckets))
    references = [target for _, target in valid.texts(corpus.originals)]
    return PreparedRun(run, tokenizers, train, valid, references, buckets, bpe_dropout, is_gradual)


def _read(
    run: RunConfig, folder: Path, tokenizers: Tokenizers | None, sizes: TransformerConfig | None
) -> tuple[RunConfig, CorpusStore]:
    """(the run with the sizes of its model, the store of its corpus).

    Raises:
        DataError: the store is damaged, or its pairs are not encoded as the model needs them.
        ConfigError: the run sets another tokenizer.
    """
    corpus = CorpusStore.read(folder)
    for own, other in zip(corpus.tokenizers, tokenizers or corpus.tokenizers, strict=True):
        if own.vocabulary() != other.vocabulary():
            raise DataError(f"{folder}: its tokenizer is not the run's; prepare it again with that one")
    run, _ = _fitted(corpus.applied_to(run), corpus.tokenizers, sizes)
    sides = _sides(run, corpus.tokenizers)
    if list(sides.first_ids) != corpus.first_ids:
        raise DataError(
            f"{folder}: its targets begin with the ids {corpus.first_ids}, the model's with {list(sides.first_ids)}; "
            "prepare it again with this model"
        )
    for side, longest, limit in zip(("source", "target"), corpus.train.lengths.max(0), sides.longest, strict=True):
        if longest > limit:
            raise DataError(
                f"{folder}: has a {side} of {longest} tokens, and the limit of this run is {limit}; prepare it again "
                "with the run's flags"
            )
    return run, corpus


def _encode(
    run: RunConfig, tokenizers: Tokenizers | None, sizes: TransformerConfig | None, store: Path | None, say: Say
) -> tuple[RunConfig, CorpusStore]:
    """(the run with the sizes of its model, its corpus as a store)."""
    part, valid_part = parts_of(run.corpus, run.both_directions)
    first_pair = next(iter(part))
    say(f"first pair: {first_pair[0][:100]!r} and {first_pair[1][:100]!r}")
    run = replace(run, tokenizer=run.tokenizer.sized(part.originals))
    tokenizers = tokenizers or make_tokenizers(run.tokenizer, part, say)
    if run.both_directions:
        check_both_directions(tokenizers)
    run, tokenizers = _fitted(run, tokenizers, sizes)
    sides = _sides(run, tokenizers)
    key = {
        "tokenizers": tokenizers.digest(),
        "first_ids": list(sides.first_ids),
        "longest": list(sides.longest),
        "version": library.__version__,
    }

    def stored(pairs: Part, name: str, **needs: bool) -> StoredPairs:
        part_key = {**pairs.key(), **key, **needs}
        request = Request(pairs.name, pairs, len(pairs), sides, part_key, **needs)
        folder = cache_directory("corpora") / checksum_of_json(part_key) if store is None else store / name
        return stored_pairs(folder, request, say)

    train = stored(part, TRAIN, word_starts=bool(run.tokenizer.bpe_dropout))
    valid = stored(valid_part, VALID, texts=True)
    settings = list(sides.first_ids), sides.longest, run.tokenizer, run.both_directions
    corpus = CorpusStore(tokenizers, train, valid, valid_part.originals, *settings)
    if store is not None:
        corpus.write_description(store)
    return run, corpus


def _fitted(run: RunConfig, tokenizers: Tokenizers, sizes: TransformerConfig | None) -> tuple[RunConfig, Tokenizers]:
    """(the run with the sizes and ids of its model, the tokenizers with its languages)."""
    if sizes is None:
        model = with_tokenizers(run.model, tokenizers)
    else:
        for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
            check_fits(sizes, tokenizer, side)
        model = run.model.replace(**{name: getattr(sizes, name) for name in FROM_TOKENIZERS})
    if run.tokenizer.src_lang is not None or run.tokenizer.tgt_lang is not None:
        tokenizers = tokenizers.with_languages(run.tokenizer.src_lang, run.tokenizer.tgt_lang)
        model = with_target_language(model, tokenizers)
    check_language(model, tokenizers)
    if run.tokenizer.bpe_dropout:
        check_merges(tokenizers)
    return replace(run, model=model), tokenizers


def _sides(run: RunConfig, tokenizers: Tokenizers) -> Sides:
    """How the pairs are encoded. Raises: DataError if the model has no start token for the decoder."""
    model = run.model
    if model.decoder_start_id is None:
        raise DataError("decoder_start_id=None: the model's config must set the start token of the decoder")
    longest = run.batches.max_src_length or model.max_length, run.batches.max_tgt_length or model.max_length
    first_ids = [i for i in (model.decoder_start_id, model.forced_bos_id) if i is not None]
    return Sides(*tokenizers, first_ids, longest)


def buckets_of(run: RunConfig, lengths: np.ndarray, shapes: int) -> list[Bucket]:
    """Batch shapes for pairs of these lengths (P, 2) that the run's model accepts."""
    assert run.batches.tokens is not None  # `prepare` has set it
    buckets = choose_buckets(lengths, run.batches.tokens, shapes)
    return square_buckets(buckets) if run.model.cross_mask == "encoder" else buckets


def describe_counts(part: str, counts: Counts, longest: tuple[int, int]) -> str:
    """One line on the pairs read and dropped."""
    return (
        f"{part}: {counts.kept:,} of {counts.read:,} pairs; dropped {counts.empty:,} with an empty side and "
        f"{counts.too_long:,} longer than {longest[0]} source or {longest[1]} target tokens"
    )


def describe_tokens(config: TokenizerConfig, counts: Counts) -> str:
    """One line with the tokens per word; a tokenizer of another language gives many."""
    unit = "sentence" if config.split == "unspaced" else "word"
    units = (counts.kept, counts.kept) if unit == "sentence" else counts.words
    src, tgt = (tokens / n for tokens, n in zip(counts.tokens, units, strict=True))
    return f"tokens per {unit}: {src:.2f} in sources, {tgt:.2f} in targets{', lowercased' * config.lowercase}"


def _check_ids(pairs: StoredPairs, model: TransformerConfig, tokenizers: Tokenizers, name: str) -> None:
    """Raises: DataError if a text has a special token that the model lacks."""
    sizes = model.src_vocab_size, model.tgt_vocab_size
    for number, size, tokenizer in zip(pairs.largest_ids, sizes, tokenizers, strict=True):
        if number >= size:
            token = tokenizer.token_of(number)
            raise DataError(f"{name}: has the token {token!r} (id {number}), but the model has {size:,} tokens")
