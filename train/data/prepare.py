"""Prepares a run: tokenizers, ids, batch shapes, and the config with all sizes."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...backend.errors import DataError
from ...configs.data import TokenizerConfig
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ...convert.checkpoint import CONFIG, Checkpoint
from ..text.corpus import read_pairs
from ..text.pretrained import load_tokenizer, tokenizer_of_files
from ..text.tokenization import train_tokenizers
from ..text.tokenizer import Tokenizer
from ..text.unknown_tokens import unknown_warning
from .bpe_dropout import BpeDropout
from .buckets import Bucket, choose_buckets, count_batches, square_buckets
from .dataset import Batches, Counts, EncodedPairs, Sides, encode_pairs

Pairs = list[tuple[str, str]]
Say = Callable[[str], None]
# Tokenizer folders of a run directory or checkpoint: one for both sides, or one per side.
_JOINT, _SEPARATE = ("tokenizer",), ("source_tokenizer", "target_tokenizer")
# Fields of the model that the tokenizers determine.
FROM_TOKENIZERS = (
    *("src_vocab_size", "tgt_vocab_size", "pad_id", "bos_id", "eos_id"),
    *("decoder_start_id", "forced_bos_id", "forced_eos_id"),
)
_MAX_HELD_OUT = 1000  # pairs, if the config does not set held_out
_DROPPED_WARNING = 0.05  # share of dropped pairs above which a warning is printed


class Tokenizers(NamedTuple):
    """The source and the target tokenizer; the same object if they are joint."""

    src: Tokenizer
    tgt: Tokenizer

    def save(self, directory: Path) -> None:
        """Write them as `transformers` loads them: into tokenizer, or source_tokenizer and target_tokenizer.

        Folders left by an interrupted start are removed first.
        """
        for name in (*_JOINT, *_SEPARATE):
            shutil.rmtree(directory / name, ignore_errors=True)
        for name, tokenizer in zip(_JOINT if self.src.target is self.tgt else _SEPARATE, self, strict=False):
            tokenizer.save(directory / name)

    def with_languages(self, source: str | None, target: str | None) -> "Tokenizers":
        """The same tokenizers for other languages, by code. Raises: DataError if a tokenizer has no such language."""
        src = self.src.with_languages(source, target)
        joint = self.src.target is self.tgt
        return Tokenizers(src, src.target if joint else self.tgt.with_languages(source, target))

    @property
    def target_language(self) -> tuple[str, int] | None:
        """(config field of the target language's token, its id); None if the language is not set, or in the source.

        Raises:
            DataError: the tokenizer of targets lacks the language's token.
        """
        languages = self.tgt.languages if self.src.languages is None else self.src.languages
        if languages is None or languages.target is None or languages.role == "source_prefix":
            return None
        field = "decoder_start_id" if languages.role == "decoder_start" else "forced_bos_id"
        token = languages.tokens[languages.target]
        if (number := self.tgt.id_of(token)) is None:
            raise DataError(f"tgt_lang={languages.target!r}: the target tokenizer has no token {token!r}")
        return field, number

    @classmethod
    def load(cls, directory: Path) -> "Tokenizers | None":
        """The tokenizers that `save` wrote into a directory, or None. Raises: DataError if one is damaged."""
        names = next((names for names in (_JOINT, _SEPARATE) if (directory / names[0]).is_dir()), None)
        return names and cls.of([load_tokenizer(str(directory / name), TokenizerConfig()) for name in names])

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, config: TokenizerConfig, name: str) -> "Tokenizers | None":
        """The tokenizers of a checkpoint, or None; `config` sets special tokens that the files do not define.

        Raises:
            DataError: one is damaged; the message begins with `name`.
        """
        content: dict[str, dict[str, bytes]] = {}
        for path, data in checkpoint.files.items():
            folder, _, file = path.rpartition("/")
            content.setdefault(folder, {})[file] = data
        folders = next((folders for folders in (_JOINT, _SEPARATE) if folders[0] in content), ())
        model = checkpoint.documents.get(CONFIG, {})
        tokenizers: list[Tokenizer] = []
        for folder in folders:
            # in a directory of `transformers`, the tokenizer's files are not in a folder of their own
            place = name if checkpoint.layout is not None else f"{name}/{folder}"
            tokenizer = tokenizer_of_files(content.get(folder, {}), place, config, model)
            if tokenizer is None:
                return None
            tokenizers.append(tokenizer)
        return cls.of(tokenizers) if tokenizers else None

    @classmethod
    def of(cls, tokenizers: Sequence[Tokenizer]) -> "Tokenizers":
        """From one tokenizer for both sides, or from two."""
        return cls(tokenizers[0], tokenizers[-1].target)


class PreparedRun(NamedTuple):
    """Everything that is determined before the first update."""

    run: RunConfig  # with all sizes filled in
    tokenizers: Tokenizers
    train: EncodedPairs
    valid: EncodedPairs
    references: list[str]  # texts of the targets of `valid`, without the swapped pairs, which come last
    buckets: list[Bucket]
    counts: dict[str, Counts]  # of train and valid
    bpe_dropout: BpeDropout | None
    is_gradual: bool  # whether shapes begin one after the other; False in runs of earlier versions

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
) -> PreparedRun:
    """Read the corpus; train `tokenizers` and choose `buckets` unless they are passed.

    `sizes`: the config of existing weights, whose vocabulary sizes and special ids the model takes over.

    Raises:
        DataError: the corpus or a tokenizer cannot be used, or a tokenizer has tokens beyond `sizes`.
        ConfigError: the config is inconsistent with the corpus.
    """
    pairs, held_out = _split(run)
    say(f"first pair: {pairs[0][0][:100]!r} and {pairs[0][1][:100]!r}")
    run = replace(run, tokenizer=run.tokenizer.sized(len(pairs)))
    tokenizers = tokenizers or _make_tokenizers(run.tokenizer, pairs, say)
    originals = len(held_out)
    if run.both_directions:
        _check_both_directions(tokenizers)
        pairs, held_out = _with_swapped(pairs), _with_swapped(held_out)
    if sizes is None:
        fitted = with_tokenizers(run.model, tokenizers)
    else:
        for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
            check_fits(sizes, tokenizer, side)
        fitted = run.model.replace(**{name: getattr(sizes, name) for name in FROM_TOKENIZERS})
    if run.tokenizer.src_lang is not None or run.tokenizer.tgt_lang is not None:
        tokenizers = tokenizers.with_languages(run.tokenizer.src_lang, run.tokenizer.tgt_lang)
        fitted = with_target_language(fitted, tokenizers)
    _check_language(fitted, tokenizers)
    run = replace(run, model=fitted)
    if fitted.decoder_start_id is None:
        raise DataError("decoder_start_id=None: the model's config must set the start token of the decoder")
    longest = (
        run.batches.max_src_length or run.model.max_length,
        run.batches.max_tgt_length or run.model.max_length,
    )
    first_ids = [i for i in (fitted.decoder_start_id, fitted.forced_bos_id) if i is not None]
    sides = Sides(*tokenizers, first_ids, longest)
    name = run.corpus.dataset or f"{run.corpus.src}, {run.corpus.tgt}"
    train, train_indices, train_counts = encode_pairs(pairs, sides, name)
    _check_ids(train, fitted, tokenizers, name)
    say(describe_tokens(run.tokenizer, train_counts, [pairs[i] for i in train_indices]))
    warning = unknown_warning(tokenizers.src, train_counts.unknown[0], train_counts.tokens[0])
    if warning is not None and (run.init_from is not None or run.tokenizer.load):
        say(f"warning: {warning}")
    valid, valid_indices, valid_counts = encode_pairs(held_out, sides, "validation")
    _check_ids(valid, fitted, tokenizers, "validation")
    counts = {"train": train_counts, "valid": valid_counts}
    for part, part_counts in counts.items():
        say(describe_counts(part, part_counts, longest))
        if (share := 1 - part_counts.kept / part_counts.read) > _DROPPED_WARNING:
            say(f"warning: {share:.0%} of the {part} pairs are dropped; check the files and the length limits")
    run = replace(run, batches=run.batches.sized(int(train.lengths.sum(0).max())))
    bpe_dropout, lengths = None, train.lengths
    if rate := run.tokenizer.bpe_dropout:
        kept_pairs = [pairs[i] for i in train_indices]
        bpe_dropout = BpeDropout(tokenizers, kept_pairs, train, rate, run.training.seed)
        first_epoch = bpe_dropout.epoch(0, [Bucket(*longest, 1)])
        lengths = np.maximum(first_epoch.lengths, lengths)  # a shape must hold a pair without dropout
    if buckets is None:
        say("choosing batch shapes")
    buckets = list(buckets or buckets_of(run, lengths, run.batches.shapes))
    run = run.resolved(count_batches(lengths, buckets))
    references = [held_out[i][1] for i in valid_indices if i < originals]
    return PreparedRun(run, tokenizers, train, valid, references, buckets, counts, bpe_dropout, is_gradual)


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


def describe_tokens(config: TokenizerConfig, counts: Counts, pairs: Pairs) -> str:
    """One line with the tokens per word; a tokenizer of another language gives many."""
    unit = "sentence" if config.split == "unspaced" else "word"
    units = [len(pairs) if unit == "sentence" else sum(len(pair[side].split()) for pair in pairs) for side in (0, 1)]
    src, tgt = (tokens / n for tokens, n in zip(counts.tokens, units, strict=True))
    return f"tokens per {unit}: {src:.2f} in sources, {tgt:.2f} in targets{', lowercased' * config.lowercase}"


def _with_swapped(pairs: Pairs) -> Pairs:
    """The pairs, then the same with source and target swapped.

    Source: Ding et al. 2021, "Improving Neural Machine Translation by Bidirectional Training", section 2.
    """
    return pairs + [(target, source) for source, target in pairs]


def _check_both_directions(tokenizers: Tokenizers) -> None:
    """Raises: DataError if a tokenizer is for one language."""
    if tokenizers.src is not tokenizers.tgt or tokenizers.src.languages is not None:
        raise DataError(
            "both_directions=True: each side has sentences of both languages, but these tokenizers have a language per "
            "side; use one tokenizer for both sides, without languages"
        )


def _split(run: RunConfig) -> tuple[Pairs, Pairs]:
    """(training pairs, validation pairs)."""
    pairs = list(read_pairs(run.corpus))
    validation = run.corpus.validation
    if validation is not None:
        return pairs, list(read_pairs(validation))
    number = run.corpus.held_out or min(_MAX_HELD_OUT, max(1, len(pairs) // 20))
    if number >= len(pairs):
        raise DataError(
            f"{run.corpus.dataset or run.corpus.src}: has {len(pairs)} pairs, of which {number} are held out for "
            "validation; no training pair remains"
        )
    # Independent of the run's seed: runs with different seeds have the same validation set.
    indices = np.random.default_rng([0, len(pairs)]).permutation(len(pairs))[:number]
    mask = np.zeros(len(pairs), bool)
    mask[indices] = True
    return [pairs[i] for i in np.flatnonzero(~mask)], [pairs[i] for i in np.flatnonzero(mask)]


def _make_tokenizers(config: TokenizerConfig, pairs: Pairs, say: Say) -> Tokenizers:
    if config.load:
        return Tokenizers.of([load_tokenizer(path, config) for path in config.load])
    say(f"training the tokenizer{'' if config.joint else 's'}: {config.kind}, at most {config.vocab_size:,} tokens")
    return Tokenizers.of(train_tokenizers(config, [pair[0] for pair in pairs], [pair[1] for pair in pairs]))


def with_tokenizers(model: TransformerConfig, tokenizers: Tokenizers) -> TransformerConfig:
    """The model with the tokenizers' sizes and special ids; an id that equalled a special id follows it."""
    tgt = tokenizers.tgt
    if tokenizers.src.pad_id != tgt.pad_id:
        raise DataError(
            f"the tokenizers have padding {tokenizers.src.pad_id} and {tgt.pad_id}: they must have the same id"
        )
    roles = {model.eos_id: tgt.eos_id, model.pad_id: tgt.pad_id, model.bos_id: tgt.bos_id}
    derived_ids = ("decoder_start_id", "forced_bos_id", "forced_eos_id")
    return model.replace(
        src_vocab_size=tokenizers.src.vocab_size,
        tgt_vocab_size=tgt.vocab_size,
        **{role: getattr(tgt, role) for role in ("pad_id", "bos_id", "eos_id")},
        **{name: roles.get(getattr(model, name), getattr(model, name)) for name in derived_ids},
    )


def with_target_language(model: TransformerConfig, tokenizers: Tokenizers) -> TransformerConfig:
    """The model with the token of the tokenizers' target language. Raises: DataError if the model lacks it."""
    if tokenizers.target_language is None:
        return model
    field, number = tokenizers.target_language
    if number >= model.tgt_vocab_size:
        raise DataError(
            f"tgt_lang: the model lacks {tokenizers.tgt.token_of(number)!r}, the tokenizer's id {number:,}: it has "
            f"{model.tgt_vocab_size:,} tokens; use the model's own tokenizer, or another language"
        )
    return model.replace(**{"forced_bos_id": None, field: number})


def lacks_language(model: TransformerConfig, tokenizers: Tokenizers, multilingual: bool = False) -> bool:
    """Whether a translation must begin with a language's token and the model sets none.

    `multilingual`: whether its family is, for a tokenizer that does not know its languages.
    """
    languages = tokenizers.src.languages
    if model.forced_bos_id is not None:
        return False
    if languages is None:
        return multilingual and model.decoder_start_id == model.eos_id
    if languages.role == "source_prefix":
        return False
    if languages.role == "decoder_start":
        return model.decoder_start_id not in {tokenizers.tgt.id_of(token) for token in languages.tokens.values()}
    return model.decoder_start_id in (None, model.eos_id)


def _check_ids(pairs: EncodedPairs, model: TransformerConfig, tokenizers: Tokenizers, name: str) -> None:
    """Raises: DataError if a text has a special token that the model lacks."""
    sides = (pairs.src, model.src_vocab_size), (pairs.tgt, model.tgt_vocab_size)
    for (ids, size), tokenizer in zip(sides, tokenizers, strict=True):
        if (number := int(ids.max())) >= size:
            token = tokenizer.token_of(number)
            raise DataError(f"{name}: has the token {token!r} (id {number}), but the model has {size:,} tokens")


def _check_language(model: TransformerConfig, tokenizers: Tokenizers) -> None:
    if lacks_language(model, tokenizers):
        assert tokenizers.src.languages is not None
        example = [*tokenizers.src.languages.tokens][:2][-1]
        raise DataError(f"tgt_lang=None: the model is multilingual; set --tokenizer.tgt-lang, as in {example}")


def check_fits(model: TransformerConfig, tokenizer: Tokenizer, side: str) -> None:
    """Raises: DataError if the tokenizer does not match existing weights."""
    size = getattr(model, f"{side}_vocab_size")
    if excess_tokens := tokenizer.tokens_beyond(size):
        number, token = excess_tokens[0]
        raise DataError(
            f"the {side} tokenizer has {len(excess_tokens):,} tokens beyond the model's {size:,} (the first: "
            f"{token!r}, id {number}): use the model's own tokenizer"
        )
    ids = {"pad_id": model.pad_id, "eos_id": model.eos_id}
    for name, expected in ids.items():
        if getattr(tokenizer, name) != expected:
            raise DataError(
                f"the {side} tokenizer has {name}={getattr(tokenizer, name)} but the model has {expected}: use "
                "the model's own tokenizer, or set the special tokens"
            )
