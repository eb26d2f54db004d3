"""What sentences a run reads."""

from dataclasses import dataclass
from typing import Literal

from .validation import ConfigError, check_field_types


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Where sentence pairs are: two parallel text files, or something with two columns.

    Raises:
        ConfigError: neither or both are given, or a column is missing.
    """

    src: str | None = None  # text file, a sentence a line; .gz too
    tgt: str | None = None
    dataset: str | None = None  # file (.tsv .csv .json .jsonl .parquet, or .txt as SCAN's), directory, or hub name
    subset: str | None = None  # of a hub name or a directory, as "de-en" of opus_books
    split: str = "train"  # of these
    src_column: str | None = None  # column, or language in a column `translation`
    tgt_column: str | None = None  # None: .tsv files have no header and these two are the first

    def __post_init__(self) -> None:
        check_field_types(self)
        if (self.src is None) != (self.tgt is None):
            given, missing = ("src", "tgt") if self.tgt is None else ("tgt", "src")
            raise ConfigError(f"{given}={getattr(self, given)!r}: needs {missing} too, the other side's file")
        if (self.src is None) == (self.dataset is None):
            raise ConfigError(f"dataset={self.dataset!r}: give either src and tgt, or dataset")
        if (self.src_column is None) != (self.tgt_column is None):
            raise ConfigError(f"src_column={self.src_column!r}, tgt_column={self.tgt_column!r}: give both or neither")


TokenizerKind = Literal["word", "bpe", "unigram"]
Split = Literal["whitespace", "punctuation", "unspaced", "bytes"]
Normalization = Literal["none", "nfc", "nfkc"]
ROLES = ("pad", "bos", "eos", "unk")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes ids, learnt from the training sentences.

    Raises:
        ConfigError: a field has a value that it may not have.
    """

    kind: TokenizerKind = "bpe"
    vocab_size: int = 8000  # at most; special tokens count
    min_frequency: int = 1  # of a word, or of a pair that bpe joins; unigram does not count
    joint: bool = True  # one tokenizer for both languages
    split: Split = "whitespace"  # what no token crosses; punctuation: whitespace and that; unspaced: Chinese, Japanese
    lowercase: bool = False
    normalization: Normalization = "nfc"
    pad_token: str = "<pad>"
    bos_token: str = "<s>"
    eos_token: str = "</s>"
    unk_token: str = "<unk>"
    special_order: tuple[str, ...] = ROLES  # the roles of ids 0, 1, 2, 3
    source_bos: bool = False  # whether a source starts with it
    source_eos: bool = True  # and ends with that

    def __post_init__(self) -> None:
        object.__setattr__(self, "special_order", tuple(self.special_order))
        check_field_types(self)
        if sorted(self.special_order) != sorted(ROLES):
            raise ConfigError(f"special_order={self.special_order!r}: must be an order of {', '.join(ROLES)}")
        tokens = self.special_tokens
        if len(set(tokens)) < len(tokens) or "" in tokens:
            raise ConfigError(f"special tokens {', '.join(map(repr, tokens))}: must differ, and none may be empty")
        if self.vocab_size <= len(tokens):
            raise ConfigError(f"vocab_size={self.vocab_size}: must be above {len(tokens)}, the special tokens")
        if self.min_frequency < 1:
            raise ConfigError(f"min_frequency={self.min_frequency}: must be at least 1")
        if self.split == "bytes" and self.kind != "bpe":
            raise ConfigError(f"split='bytes': needs kind='bpe', not {self.kind!r}")

    @property
    def special_tokens(self) -> list[str]:
        """Texts of ids 0, 1, 2, 3."""
        return [getattr(self, f"{role}_token") for role in self.special_order]
