"""A tokenizer whose pieces are lowercase: a mark before a word or letter says that it is upper case.

" Mann" becomes a mark and " mann". The tokenizer is lossless, and its decoder consists of steps that `tokenizer.json`
can state, so that `AutoTokenizer` loads it. docs/results.md compares it with a cased vocabulary.
"""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from twinax.configs.data import TokenizerConfig
from twinax.train.data.tokenization import FastTokenizer

MARK = "\ue000"  # for private use: no text has it


def marked_case_tokenizer(config: TokenizerConfig, sentences: list[str]) -> FastTokenizer:
    """A byte-level BPE tokenizer of the config's size with marks in place of upper case."""
    letters = sorted({letter for text in sentences for letter in text if _has_one_lowercase(letter)})
    pairs = [(f" {letter}", f"{MARK} {letter.lower()}") for letter in letters]
    pairs += [(letter, f"{MARK}{letter.lower()}") for letter in letters]
    fast = Tokenizer(models.BPE(unk_token=config.unk_token))
    steps = [normalizers.NFC(), normalizers.Prepend(" "), *(normalizers.Replace(*pair) for pair in pairs)]
    fast.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    split = [pre_tokenizers.Split(MARK, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    fast.pre_tokenizer = pre_tokenizers.Sequence(split)  # pyright: ignore[reportAttributeAccessIssue]
    undo = [decoders.Replace(marked, cased) for cased, marked in pairs]
    undo = [decoders.ByteLevel(), decoders.Fuse(), *undo, decoders.Strip(" ", 1, 0)]
    fast.decoder = decoders.Sequence(undo)  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=config.special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(sentences, trainer)
    roles = {role: getattr(config, f"{role}_token") for role in ("pad", "bos", "eos", "unk")}
    return FastTokenizer(fast, roles).frame_sources(config)


def write_marked_case(directory: Path, vocab_size: int, sentences: Iterable[str]) -> None:
    """Train such a tokenizer and write it, as `--tokenizer.load` reads it."""
    marked_case_tokenizer(TokenizerConfig(split="bytes", vocab_size=vocab_size), list(sentences)).save(directory)


def _has_one_lowercase(letter: str) -> bool:
    lower = letter.lower()
    return letter != lower and len(lower) == 1 and lower.upper() == letter
