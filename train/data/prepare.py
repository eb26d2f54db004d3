"""From a run's config to what training needs: tokenizers, ids, shapes of batches, and the config with all sizes."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from ...configs.data import TokenizerConfig
from ...configs.errors import DataError
from ...configs.run import RunConfig
from ...configs.schema import TransformerConfig
from ...convert.atomic_io import write_files
from .buckets import Bucket, choose_buckets, count_batches, square_buckets
from .corpus import read_pairs
from .dataset import Batches, Counts, Encoded, Sides, encode_pairs
from .pretrained import load_tokenizer
from .tokenization import FILE, Tokenizer, train_tokenizers

Pairs = list[tuple[str, str]]
Say = Callable[[str], None]
# Sides of a run directory or checkpoint: one folder for both, or one each.
_JOINT, _SEPARATE = ("tokenizer",), ("source_tokenizer", "target_tokenizer")
# Fields of the model that are not chosen: the tokenizers have them.
FROM_TOKENIZERS = (
    *("src_vocab_size", "tgt_vocab_size", "pad_id", "bos_id", "eos_id"),
    *("decoder_start_id", "forced_bos_id", "forced_eos_id"),
)
_HELD_OUT = 1000  # pairs at most, where nothing is said
_MANY = 0.05  # share of pairs that are dropped above which it is said so


class Tokenizers(NamedTuple):
    """Those of both sides; one and the same where they are joint."""

    src: Tokenizer
    tgt: Tokenizer

    def save(self, directory: Path) -> None:
        """Writes them as `transformers` loads them: into tokenizer, or source_tokenizer and target_tokenizer.

        What an interrupted beginning has left there goes first.
        """
        for name in (*_JOINT, *_SEPARATE):
            shutil.rmtree(directory / name, ignore_errors=True)
        for name, tokenizer in zip(_JOINT if self.src is self.tgt else _SEPARATE, self, strict=False):
            tokenizer.save(directory / name)

    @classmethod
    def load(cls, directory: Path) -> "Tokenizers | None":
        """Those that `save` wrote into a directory. Raises: DataError where one is damaged."""
        names = next((names for names in (_JOINT, _SEPARATE) if (directory / names[0]).is_dir()), None)
        return names and cls.of([Tokenizer.load(directory / name) for name in names])

    @classmethod
    def of_files(cls, files: Mapping[str, bytes], config: TokenizerConfig, name: str) -> "Tokenizers | None":
        """Those that a checkpoint holds; `config` names special tokens where the files do not.

        Raises:
            DataError: one is damaged; begins with `name`.
        """
        with TemporaryDirectory() as folder:
            write_files(Path(folder), files)
            try:
                if (Path(folder) / _JOINT[0] / FILE).is_file():
                    return cls.of([load_tokenizer(str(Path(folder) / _JOINT[0]), config)])
                return cls.load(Path(folder)) if f"{_SEPARATE[0]}/{FILE}" in files else None
            except DataError as error:
                raise DataError(str(error).replace(folder, name)) from None

    @classmethod
    def of(cls, tokenizers: Sequence[Tokenizer]) -> "Tokenizers":
        """From one for both sides, or two."""
        return cls(tokenizers[0], tokenizers[-1])


class Prepared(NamedTuple):
    """All that stands fixed before the first update."""

    run: RunConfig  # with all sizes
    tokenizers: Tokenizers
    train: Encoded
    valid: Encoded
    references: list[str]  # texts of the targets of `valid`
    buckets: list[Bucket]
    counts: dict[str, Counts]  # of train and valid

    def batches(self) -> Batches:
        """The run's batches in their order."""
        assert self.run.loop.updates is not None  # `prepare` has put it in
        return Batches(self.train, self.buckets, self.run.model.pad_id, self.run.training.seed, self.run.loop.updates)


def prepare(
    run: RunConfig,
    tokenizers: Tokenizers | None = None,
    buckets: Sequence[Bucket] | None = None,
    sizes: TransformerConfig | None = None,
    say: Say = lambda line: None,
) -> Prepared:
    """Reads the corpus and makes what is not given: `tokenizers`, `buckets`, `sizes` (of weights that exist).

    Raises:
        DataError: the corpus or a tokenizer cannot be used, or has more tokens than `sizes`.
        ConfigError: the run does not fit what was found.
    """
    pairs, held_out = _split(run)
    say(f"the first pair: {pairs[0][0][:100]!r} and {pairs[0][1][:100]!r}")
    run = replace(run, tokenizer=run.tokenizer.sized(len(pairs)))
    tokenizers = tokenizers or _make_tokenizers(run.tokenizer, pairs, say)
    if sizes is None:
        fitted = with_tokenizers(run.model, tokenizers)
    else:
        for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
            check_fits(sizes, tokenizer, side)
        fitted = run.model.replace(**{name: getattr(sizes, name) for name in FROM_TOKENIZERS})
    run = replace(run, model=fitted)
    if fitted.decoder_start_id is None:
        raise DataError("decoder_start_id=None: the model's config must say with which token a target starts")
    longest = (
        run.batches.max_src_length or run.model.max_length,
        run.batches.max_tgt_length or run.model.max_length,
    )
    sides = Sides(*tokenizers, fitted.decoder_start_id, longest)
    name = run.corpus.dataset or f"{run.corpus.src}, {run.corpus.tgt}"
    train, kept, train_counts = encode_pairs(pairs, sides, name)
    say(describe_tokens(run.tokenizer, train_counts, [pairs[i] for i in kept]))
    valid, valid_kept, valid_counts = encode_pairs(held_out, sides, "validation")
    counts = {"train": train_counts, "valid": valid_counts}
    for part, found in counts.items():
        say(describe_counts(part, found, longest))
        if (dropped := 1 - found.kept / found.read) > _MANY:
            say(f"attention: {dropped:.0%} of the pairs of {part} are dropped; see whether its files are what you mean")
    run = replace(run, batches=run.batches.sized(int(train.lengths.sum(0).max())))
    if buckets is None:
        say("choosing shapes of batches")
    buckets = list(buckets or buckets_of(run, train.lengths, run.batches.shapes))
    run = run.resolved(count_batches(train.lengths, buckets))
    references = [held_out[i][1] for i in valid_kept]
    return Prepared(run, tokenizers, train, valid, references, buckets, counts)


def buckets_of(run: RunConfig, lengths: np.ndarray, shapes: int) -> list[Bucket]:
    """Shapes of batches that the run's model takes, for pairs of these lengths (P, 2)."""
    assert run.batches.tokens is not None  # `prepare` has put them in
    found = choose_buckets(lengths, run.batches.tokens, shapes)
    return square_buckets(found) if run.model.cross_mask == "encoder" else found


def describe_counts(part: str, counts: Counts, longest: tuple[int, int]) -> str:
    """What was read and dropped, in a line."""
    return (
        f"{part}: {counts.kept:,} of {counts.read:,} pairs; dropped {counts.empty:,} with an empty side and "
        f"{counts.too_long:,} longer than {longest[0]} source or {longest[1]} target tokens"
    )


def describe_tokens(config: TokenizerConfig, counts: Counts, kept: Pairs) -> str:
    """How finely the tokenizers cut words, in a line: those of another language cut them to pieces."""
    unit = "sentence" if config.split == "unspaced" else "word"
    units = [len(kept) if unit == "sentence" else sum(len(pair[side].split()) for pair in kept) for side in (0, 1)]
    src, tgt = (tokens / n for tokens, n in zip(counts.tokens, units, strict=True))
    return f"tokens a {unit}: {src:.2f} in sources, {tgt:.2f} in targets{', in lower case' * config.lowercase}"


def _split(run: RunConfig) -> tuple[Pairs, Pairs]:
    """(pairs to train on, pairs of validation)."""
    pairs, elsewhere = list(read_pairs(run.corpus)), run.corpus.validation
    if elsewhere is not None:
        return pairs, list(read_pairs(elsewhere))
    number = run.corpus.held_out or min(_HELD_OUT, max(1, len(pairs) // 20))
    if number >= len(pairs):
        raise DataError(
            f"{run.corpus.dataset or run.corpus.src}: has {len(pairs)} pairs, of which {number} are held out for "
            "validation; nothing is left to train on"
        )
    chosen = np.random.default_rng([0, len(pairs)]).permutation(len(pairs))[:number]
    # whatever the run's seed: runs that differ in it are compared on one validation set
    is_out = np.zeros(len(pairs), bool)
    is_out[chosen] = True
    return [p for p, out in zip(pairs, is_out, strict=True) if not out], [pairs[i] for i in np.flatnonzero(is_out)]


def _make_tokenizers(config: TokenizerConfig, pairs: Pairs, say: Say) -> Tokenizers:
    if config.load:
        return Tokenizers.of([load_tokenizer(path, config) for path in config.load])
    say(f"training the tokenizer{'' if config.joint else 's'}: {config.kind}, at most {config.vocab_size:,} tokens")
    return Tokenizers.of(train_tokenizers(config, [pair[0] for pair in pairs], [pair[1] for pair in pairs]))


def with_tokenizers(model: TransformerConfig, tokenizers: Tokenizers) -> TransformerConfig:
    """The same model with the sizes and special ids of the tokenizers; ids that were equal to one stay equal to it."""
    tgt = tokenizers.tgt
    if tokenizers.src.pad_id != tgt.pad_id:
        raise DataError(f"the tokenizers have padding {tokenizers.src.pad_id} and {tgt.pad_id}: it must be one id")
    roles = {model.eos_id: tgt.eos_id, model.pad_id: tgt.pad_id, model.bos_id: tgt.bos_id}
    others = ("decoder_start_id", "forced_bos_id", "forced_eos_id")
    return model.replace(
        src_vocab_size=tokenizers.src.vocab_size,
        tgt_vocab_size=tgt.vocab_size,
        **{role: getattr(tgt, role) for role in ("pad_id", "bos_id", "eos_id")},
        **{name: roles.get(getattr(model, name), getattr(model, name)) for name in others},
    )


def check_fits(model: TransformerConfig, tokenizer: Tokenizer, side: str) -> None:
    """Raises: DataError where the tokenizer does not go with weights that exist."""
    size = getattr(model, f"{side}_vocab_size")
    if tokenizer.vocab_size > size:
        raise DataError(
            f"the {side} tokenizer has {tokenizer.vocab_size} tokens and the model {size}: take the model's own "
            "tokenizer"
        )
    ids = {"pad_id": model.pad_id, "eos_id": model.eos_id}
    for name, own in ids.items():
        if getattr(tokenizer, name) != own:
            raise DataError(
                f"the {side} tokenizer has {name}={getattr(tokenizer, name)} and the model {own}: take the model's own "
                "tokenizer, or name its special tokens"
            )
