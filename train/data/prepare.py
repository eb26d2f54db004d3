"""Prepares a run: tokenizers, encoded pairs, batch shapes, and the config with all sizes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers as library

from ...backend.cache_directory import cache_directory
from ...backend.errors import ConfigError, DataError
from ...configs.data import CleaningConfig, TokenizerConfig
from ...configs.mixture import Mixture, MixtureCorpus
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ...convert.io.checksums import checksum_of_json
from ..text.corpus import read_pairs
from ..text.glossary import Glossary
from ..text.unknown_tokens import unknown_warning
from .bpe_dropout import BpeDropout, check_merges
from .buckets import Bucket, choose_buckets, count_batches, square_buckets
from .cleaning import REASONS, Cleaning
from .corpus_store import TRAIN, VALID, CorpusStore, EncodedCorpus, new_folders, with_tags
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
from .mixture import Corpus, MixedCorpus
from .parts import Part, parts_of
from .store import StoredPairs
from .store_writing import Request, stored_pairs
from .tokenizer_pair import Tokenizers, make_tokenizers

Say = Callable[[str], None]
Fitted = tuple[RunConfig, Tokenizers]
_LANGUAGES = ("src_lang", "tgt_lang")
_DROPPED_WARNING = 0.05  # share of dropped pairs above which a warning is printed


class ValidationPart(NamedTuple):
    """The validation pairs of a corpus."""

    name: str  # of the corpus in a mixture; else empty
    pairs: StoredPairs
    references: list[str]  # texts of the targets, without the swapped pairs, which come last
    model: TransformerConfig  # with the languages of the corpus


class PreparedRun(NamedTuple):
    """Everything that is determined before the first update."""

    run: RunConfig  # with all sizes filled in
    tokenizers: Tokenizers
    train: Corpus
    valid: list[ValidationPart]
    buckets: list[Bucket]
    is_gradual: bool  # whether shapes begin one after the other; False in runs of earlier versions

    @property
    def counts(self) -> dict[str, Counts]:
        """What was read, kept and dropped of train and valid."""
        valid = Counts()
        for part in self.valid:
            valid = valid.plus(part.pairs.counts)
        return {"train": self.train.counts, "valid": valid}

    def fingerprint(self) -> str:
        """Hashes of all ids, of the training and of the validation pairs."""
        valid = MixedCorpus([part.pairs for part in self.valid], [1] * len(self.valid))
        return f"{self.train.fingerprint()} {valid.fingerprint()}"

    def batches(self, rows: Sequence[np.ndarray] | None = None) -> Batches:
        """The run's batches in order; `rows` are those to read from the batches of each bucket, by default all."""
        run = self.run
        assert run.loop.updates is not None  # `prepare` has set it
        pad_id, seed = run.model.pad_id, run.training.seed
        return Batches(self.train, self.buckets, pad_id, seed, run.loop.updates, rows, self.is_gradual)


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
        fitted, encoded = _read(run, Path(run.corpus.store), tokenizers, sizes)
    else:
        fitted, encoded = _encode(run, tokenizers, sizes, store, say)
    run, tokenizers = fitted[0]
    mixture, corpora = encoded.mixture, encoded.corpora
    train = _mixed(run, tokenizers, encoded, say)
    say(describe_tokens(run.tokenizer, train.counts))
    warning = unknown_warning(tokenizers.src, train.counts.unknown[0], train.counts.tokens[0])
    if warning is not None and (run.init_from is not None or run.tokenizer.load):
        say(f"warning: {warning}")
    valid = []
    for member, (own_run, _), corpus in zip(mixture.corpora, fitted, corpora, strict=True):
        prefix = f"{member.name}, " if len(corpora) > 1 else ""
        for name, pairs in {"train": corpus.train, "valid": corpus.valid}.items():
            _check_ids(pairs, run.model, tokenizers, f"{prefix}{name}")
            say(describe_counts(f"{prefix}{name}", pairs.counts, encoded.longest))
            if name == "train" and member.corpus.glossary is not None and not pairs.counts.annotated:
                say(f"warning: {member.corpus.glossary}: no pair has a term with its target term; no source shows one")
            if (share := (pairs.counts.empty + pairs.counts.too_long) / pairs.counts.read) > _DROPPED_WARNING:
                say(f"warning: {share:.0%} of the {name} pairs are dropped; check the files and the length limits")
        references = [target for _, target in corpus.valid.texts(corpus.originals)]
        valid.append(ValidationPart(prefix and member.name, corpus.valid, references, own_run.model))
    if store is not None and run.corpus.store is None:
        encoded.write_description(store, say)
    run = replace(run, batches=run.batches.sized(int(train.lengths.sum(0).max())))
    lengths = train.epoch(0, [Bucket(*encoded.longest, 1)]).lengths
    if run.tokenizer.bpe_dropout:  # a shape must hold a pair without dropout
        plain = MixedCorpus([corpus.train for corpus in corpora], _copies(encoded))
        lengths = np.maximum(plain.epoch(0, []).lengths, lengths)
    if buckets is None:
        say("choosing batch shapes")
        longest = train.lengths.max(0)
        shaped = lengths  # and the longest pair, which may be in a later epoch only
        if (lengths.max(0) < longest).any():
            shaped = np.vstack([lengths, longest])
        buckets = buckets_of(run, shaped, run.batches.shapes)
    buckets = list(buckets)
    run = run.resolved(count_batches(lengths, buckets))
    return PreparedRun(run, tokenizers, train, valid, buckets, is_gradual)


def _mixture_of(run: RunConfig) -> Mixture:
    """The corpora of a run."""
    if run.corpus.mixture is not None:
        return Mixture.read(run.corpus.mixture)
    return Mixture(corpora=(MixtureCorpus(name="corpus", corpus=run.corpus),))


def _copies(encoded: CorpusStore) -> list[float]:
    members = zip(encoded.mixture.corpora, encoded.corpora, strict=True)
    return [*encoded.mixture.copies({member.name: len(corpus.train) for member, corpus in members}).values()]


def _mixed(run: RunConfig, tokenizers: Tokenizers, encoded: CorpusStore, say: Say) -> Corpus:
    """The training pairs of all corpora, with BPE-dropout if the run has it."""
    parts: list[Corpus] = [corpus.train for corpus in encoded.corpora]
    if rate := run.tokenizer.bpe_dropout:
        seeds = (run.training.seed + 2**32 * i for i in range(len(parts)))
        pairs = zip(encoded.corpora, seeds, strict=True)
        parts = [BpeDropout(tokenizers, corpus.train, rate, seed) for corpus, seed in pairs]
    copies = _copies(encoded)
    if all(len(part.lengths) * number < 1 for part, number in zip(parts, copies, strict=True)):
        raise ConfigError("copies: some epochs have no pair; set enough that a corpus has a pair in every epoch")
    if len(parts) == 1 and copies == [1]:
        return parts[0]
    for member, part, number in zip(encoded.mixture.corpora, parts, copies, strict=True):
        tag = "" if member.tag is None else f", with {member.tag}"
        say(f"{member.name}: {part.counts.kept:,} pairs, {number:g} times per epoch{tag}")
    return MixedCorpus(parts, copies)


def _read(
    run: RunConfig, folder: Path, tokenizers: Tokenizers | None, sizes: TransformerConfig | None
) -> tuple[list[Fitted], CorpusStore]:
    """(the run and the tokenizers as each corpus of a store needs them, the store).

    Raises:
        DataError: the store is damaged, or its pairs are not encoded as the model needs them.
        ConfigError: the run sets another tokenizer.
    """
    encoded = CorpusStore.read(folder)
    for own, other in zip(encoded.tokenizers, tokenizers or encoded.tokenizers, strict=True):
        if own.vocabulary() != other.vocabulary():
            raise DataError(f"{folder}: its tokenizer is not the run's; prepare it again with that one")
    run = encoded.applied_to(run)
    fitted = [_fitted(run, encoded.tokenizers, sizes, _languages(member)) for member in encoded.mixture.corpora]
    for (own_run, own_tokenizers), corpus in zip(fitted, encoded.corpora, strict=True):
        sides = _sides(own_run, own_tokenizers)
        if list(sides.first_ids) != corpus.first_ids:
            raise DataError(
                f"{corpus.train.folder.parent}: its targets begin with the ids {corpus.first_ids}, the model's with "
                f"{list(sides.first_ids)}; prepare it again with this model"
            )
        longest = corpus.train.lengths.max(0)
        for side, length, limit in zip(("source", "target"), longest, sides.longest, strict=True):
            if length > limit:
                raise DataError(
                    f"{corpus.train.folder.parent}: has a {side} of {length} tokens, and the limit of this run is "
                    f"{limit}; prepare it again with the run's flags"
                )
    return fitted, encoded


def _encode(
    run: RunConfig, tokenizers: Tokenizers | None, sizes: TransformerConfig | None, store: Path | None, say: Say
) -> tuple[list[Fitted], CorpusStore]:
    """(the run and the tokenizers as each of its corpora needs them, the encoded corpora)."""
    mixture = _mixture_of(run)
    _check_languages(run, mixture)
    glossaries = _glossaries(run, mixture)
    parts = [parts_of(member.corpus, run.both_directions) for member in mixture.corpora]
    for member in mixture.corpora:
        first_pair = next(read_pairs(member.corpus))
        say(f"first pair: {first_pair[0][:100]!r} and {first_pair[1][:100]!r}")
    run = replace(run, tokenizer=run.tokenizer.sized(sum(part.originals for part, _ in parts)))
    run = with_tags(run, mixture)
    tokenizers = tokenizers or make_tokenizers(run.tokenizer, [part for part, _ in parts], say)
    if run.both_directions:
        check_both_directions(tokenizers)
    fitted = [_fitted(run, tokenizers, sizes, _languages(member)) for member in mixture.corpora]
    sides = [_sides(*own, member.tag) for own, member in zip(fitted, mixture.corpora, strict=True)]
    glossaries = [glossary and glossary.for_tokenizer(tokenizers.src) for glossary in glossaries]
    folders = [None] * len(parts) if store is None else new_folders(store, len(parts))
    if len(parts) > 1:
        parts = [
            (replace(part, name=f"{member.name}, {part.name}"), replace(valid, name=f"{member.name}, {valid.name}"))
            for member, (part, valid) in zip(mixture.corpora, parts, strict=True)
        ]
    # All validation pairs first: they take seconds, and show an error before hours of encoding.
    valid = [
        _stored(part, own, CleaningConfig(), say, folder and folder / VALID, texts=True)
        for (_, part), own, folder in zip(parts, sides, folders, strict=True)
    ]
    train = [
        _stored(
            part,
            own._replace(glossary=glossary),
            run.cleaning,
            say,
            folder and folder / TRAIN,
            bool(run.tokenizer.bpe_dropout),
        )
        for (part, _), own, glossary, folder in zip(parts, sides, glossaries, folders, strict=True)
    ]
    corpora = [
        EncodedCorpus(pairs, valid_pairs, part.originals, list(own.first_ids))
        for pairs, valid_pairs, (_, part), own in zip(train, valid, parts, sides, strict=True)
    ]
    settings = run.tokenizer, run.cleaning, run.both_directions
    return fitted, CorpusStore(mixture, corpora, sides[0].longest, tokenizers, *settings)


def _glossaries(run: RunConfig, mixture: Mixture) -> list[Glossary | None]:
    """The glossary of each corpus.

    Raises:
        DataError: one cannot be read.
        ConfigError: the run has a setting that would change the annotated sources.
    """
    paths = [member.corpus.glossary for member in mixture.corpora]
    for name, value in (("both_directions", run.both_directions), ("bpe_dropout", run.tokenizer.bpe_dropout)):
        if value and (path := next(filter(None, paths), None)):
            reason = "has one direction" if value is True else "annotates sources with one segmentation"
            raise ConfigError(f"{name}={value!r}: the glossary {path} {reason}; omit one of them")
    return [None if path is None else Glossary.of(path) for path in paths]


def _languages(member: MixtureCorpus) -> dict[str, str]:
    """The languages that a corpus sets."""
    codes = {name: getattr(member, name) for name in _LANGUAGES}
    return {name: code for name, code in codes.items() if code is not None}


def _check_languages(run: RunConfig, mixture: Mixture) -> None:
    """Raises: ConfigError if only some corpora have a language: a resumed run would not know that of the others."""
    for name in _LANGUAGES:
        missing = [member.name for member in mixture.corpora if name not in _languages(member)]
        if getattr(run.tokenizer, name) is None and 0 < len(missing) < len(mixture.corpora):
            raise ConfigError(
                f"{name}: some corpora of {run.corpus.mixture} set it; set it for {', '.join(missing)} too, or for all "
                f"others by --tokenizer.{name.replace('_', '-')}"
            )


def _stored(
    part: Part,
    sides: Sides,
    cleaning: CleaningConfig,
    say: Say,
    folder: Path | None,
    word_starts: bool = False,
    texts: bool = False,
) -> StoredPairs:
    """The pairs of a part in a folder, by default in the cache; encoded unless they are there."""
    key = {
        **part.key(),
        "tokenizers": Tokenizers(sides.src, sides.tgt).digest(),
        "first_ids": list(sides.first_ids),
        "longest": list(sides.longest),
        "tag": sides.tag,
        "word_starts": word_starts,
        "texts": texts,
        "cleaning": asdict(cleaning),
        "version": library.__version__,
    } | ({} if sides.glossary is None else {"glossary": sides.glossary.digest()})
    drop = None if cleaning == CleaningConfig() else lambda: Cleaning(cleaning, part).reason
    request = Request(part.name, part, len(part), sides, key, word_starts, texts, drop)
    return stored_pairs(folder or cache_directory("corpora") / checksum_of_json(key), request, say)


def _fitted(
    run: RunConfig, tokenizers: Tokenizers, sizes: TransformerConfig | None, languages: Mapping[str, str]
) -> Fitted:
    """(the run with the sizes and ids of its model, the tokenizers with these languages, or with its own)."""
    if sizes is None:
        model = with_tokenizers(run.model, tokenizers)
    else:
        for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
            check_fits(sizes, tokenizer, side)
        model = run.model.replace(**{name: getattr(sizes, name) for name in FROM_TOKENIZERS})
    codes = {**{name: getattr(run.tokenizer, name) for name in _LANGUAGES}, **languages}
    if any(code is not None for code in codes.values()):
        tokenizers = tokenizers.with_languages(codes["src_lang"], codes["tgt_lang"])
        model = with_target_language(model, tokenizers)
    check_language(model, tokenizers)
    if run.tokenizer.bpe_dropout:
        check_merges(tokenizers)
    return replace(run, model=model), tokenizers


def _sides(run: RunConfig, tokenizers: Tokenizers, tag: str | None = None) -> Sides:
    """How the pairs are encoded. Raises: DataError if the model has no start token for the decoder."""
    model = run.model
    if model.decoder_start_id is None:
        raise DataError("decoder_start_id=None: the model's config must set the start token of the decoder")
    longest = run.batches.max_src_length or model.max_length, run.batches.max_tgt_length or model.max_length
    first_ids = [i for i in (model.decoder_start_id, model.forced_bos_id) if i is not None]
    return Sides(*tokenizers, first_ids, longest, tag)


def buckets_of(run: RunConfig, lengths: np.ndarray, shapes: int) -> list[Bucket]:
    """Batch shapes for pairs of these lengths (P, 2) that the run's model accepts."""
    assert run.batches.tokens is not None  # `prepare` has set it
    buckets = choose_buckets(lengths, run.batches.tokens, shapes)
    return square_buckets(buckets) if run.model.cross_mask == "encoder" else buckets


def describe_counts(part: str, counts: Counts, longest: tuple[int, int]) -> str:
    """One line on the pairs read and dropped."""
    cleaned = [f", {n:,} {reason}" for n, reason in zip(counts.cleaned, REASONS, strict=True) if n]
    return (
        f"{part}: {counts.kept:,} of {counts.read:,} pairs; dropped {counts.empty:,} with an empty side and "
        f"{counts.too_long:,} longer than {longest[0]} source or {longest[1]} target tokens{''.join(cleaned)}"
        f"{f'; {counts.annotated:,} have terms of the glossary' if counts.annotated else ''}"
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
