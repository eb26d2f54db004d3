"""What sentences a run reads, and how they become batches of ids."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from .errors import ConfigError
from .validation import check_field_types

_FILES = (".tsv", ".csv", ".json", ".jsonl", ".parquet", ".txt")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Where sentence pairs are: two parallel text files, or something with two columns; and those of validation.

    Raises:
        ConfigError: neither or both are given, or a column is missing.
    """

    src: str | None = None  # text file, one sentence per line; .gz too
    tgt: str | None = None  # the same sentences in the other language
    dataset: str | None = None  # file (.tsv .csv .json .jsonl .parquet, or .txt as SCAN's), directory, or hub name
    subset: str | None = None  # of a hub name or a directory, as "de-en" of opus_books
    split: str = "train"  # of these, for training
    src_column: str | None = None  # column, or language in a column `translation`
    tgt_column: str | None = None  # None: .tsv files have no header and these two are the first

    valid_src: str | None = None  # text files of validation
    valid_tgt: str | None = None  # and its other side
    valid_dataset: str | None = None  # None: with a split, that of `dataset`
    valid_split: str | None = None  # of these, for validation
    held_out: int | None = None  # pairs of the corpus for validation where none are given; None: 5 %, at most 1,000

    def __post_init__(self) -> None:
        check_field_types(self)
        for src, tgt in (("src", "tgt"), ("valid_src", "valid_tgt")):
            if (getattr(self, src) is None) != (getattr(self, tgt) is None):
                given, missing = (src, tgt) if getattr(self, tgt) is None else (tgt, src)
                raise ConfigError(f"{given}={getattr(self, given)!r}: needs {missing} too, the other side's file")
        if (self.src is None) == (self.dataset is None):
            raise ConfigError(f"dataset={self.dataset!r}: give either src and tgt, or dataset")
        if (self.src_column is None) != (self.tgt_column is None):
            raise ConfigError(f"src_column={self.src_column!r}, tgt_column={self.tgt_column!r}: give both or neither")
        if self.valid_src is not None and (self.valid_dataset or self.valid_split):
            raise ConfigError(f"valid_src={self.valid_src!r}: give either two files or a dataset for validation")
        _check_unused(self)
        if self.valid_split is not None and self.dataset is None and self.valid_dataset is None:
            raise ConfigError(f"valid_split={self.valid_split!r}: needs dataset or valid_dataset")
        if self.held_out is not None and self.held_out < 1:
            raise ConfigError(f"held_out={self.held_out}: must be at least 1")
        if self.held_out is not None and self.validation is not None:
            raise ConfigError(f"held_out={self.held_out}: validation pairs are given too; leave one of them out")

    @property
    def validation(self) -> "CorpusConfig | None":
        """Where the pairs of validation are; None: they are held out from the corpus."""
        if self.valid_src is not None:
            return CorpusConfig(src=self.valid_src, tgt=self.valid_tgt)
        if self.valid_dataset is None and self.valid_split is None:
            return None
        return CorpusConfig(
            dataset=self.valid_dataset or self.dataset,
            subset=self.subset,
            split=self.valid_split or self.split,
            src_column=self.src_column,
            tgt_column=self.tgt_column,
        )


def is_file(dataset: str) -> bool:
    """Whether a dataset is a single file, by its name."""
    return dataset.removesuffix(".gz").endswith(_FILES)


def _check_unused(config: CorpusConfig) -> None:
    """Raises: ConfigError where a field would change nothing."""
    columns = {"src_column": config.src_column, "subset": config.subset, "split": config.split}
    if config.src is not None and config.valid_dataset is None:
        for name, value in columns.items():
            if value not in (None, "train"):
                raise ConfigError(f"{name}={value!r}: text files have no such thing; leave it away, or give dataset")
    for name, split in (("dataset", config.split), ("valid_dataset", config.valid_split)):
        dataset = getattr(config, name)
        if dataset is None or not is_file(dataset):
            continue
        if name == "dataset" and config.valid_dataset is None and config.valid_split is not None:
            split = config.valid_split
        if split not in (None, "train") or config.subset is not None:
            raise ConfigError(
                f"{name}={dataset!r}: a single file has no split ({split}) or subset ({config.subset}); give "
                "validation its own file as valid_dataset"
            )


TokenizerKind = Literal["word", "bpe", "unigram"]
Split = Literal["whitespace", "punctuation", "word_characters", "unspaced", "bytes", "d2l"]
Normalization = Literal["none", "nfc", "nfkc"]
ROLES = ("pad", "bos", "eos", "unk")
_TRAINED = (
    *("kind", "vocab_size", "min_frequency", "joint", "split", "languages", "lowercase", "normalization"),
    "special_order",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """How text becomes ids, learnt from the training sentences.

    Raises:
        ConfigError: a field has a value that it may not have.
    """

    kind: TokenizerKind = "bpe"
    load: tuple[str, ...] = ()  # existing ones instead: a file or directory for both sides, or source's and target's
    vocab_size: int | None = None  # at most, special tokens too; None: 45 · sqrt(pairs), 1,000 to 32,000
    min_frequency: int = 1  # of a word, or of a pair that bpe joins; unigram does not count
    joint: bool = True  # one tokenizer for both languages
    split: Split = "whitespace"  # what no token crosses; punctuation: whitespace and that; unspaced: Chinese, Japanese
    languages: tuple[str, ...] = ()  # of source and target, as de en: words by spaCy's rules; needs twinax[spacy]
    lowercase: bool = False
    normalization: Normalization = "nfc"
    pad_token: str = "<pad>"
    bos_token: str = "<s>"
    eos_token: str = "</s>"
    unk_token: str = "<unk>"
    special_order: tuple[str, ...] = ROLES  # the roles of ids 0, 1, 2, 3
    source_bos: bool = False  # whether a source starts with it; a directory that is loaded says so itself
    source_eos: bool = True  # and ends with that

    def __post_init__(self) -> None:
        for name in ("load", "languages", "special_order"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_field_types(self)
        if sorted(self.special_order) != sorted(ROLES):
            raise ConfigError(f"special_order={self.special_order!r}: must be an order of {', '.join(ROLES)}")
        tokens = self.special_tokens
        if len(set(tokens)) < len(tokens) or "" in tokens:
            raise ConfigError(f"special tokens {', '.join(map(repr, tokens))}: must differ, and none may be empty")
        if self.vocab_size is not None and self.vocab_size <= len(tokens):
            raise ConfigError(f"vocab_size={self.vocab_size}: must be above {len(tokens)}, the special tokens")
        if self.min_frequency < 1:
            raise ConfigError(f"min_frequency={self.min_frequency}: must be at least 1")
        if len(self.load) > 2:
            raise ConfigError(f"load={self.load!r}: must be one tokenizer, or the source's and the target's")
        if self.load:
            self._check_load()
        if self.split == "bytes" and self.vocab_size is not None and self.vocab_size < 256 + len(tokens):
            raise ConfigError(f"vocab_size={self.vocab_size}: split='bytes' needs {256 + len(tokens)}, one a byte")
        if self.split in ("word_characters", "d2l") and self.kind != "word":
            raise ConfigError(f"split={self.split!r}: needs kind='word', not {self.kind!r}")
        if self.languages:
            self._check_languages()
        if self.split == "bytes" and self.kind != "bpe":
            raise ConfigError(f"split='bytes': needs kind='bpe', not {self.kind!r}")

    def _check_languages(self) -> None:
        """Raises: ConfigError where spaCy cannot cut."""
        if len(self.languages) != 2:
            raise ConfigError(f"languages={self.languages!r}: must be two, the source's and the target's")
        for name, needed in (("kind", "word"), ("split", "whitespace")):
            if (value := getattr(self, name)) != needed:
                raise ConfigError(
                    f"{name}={value!r}: languages={self.languages!r} has spaCy cut words, which needs {needed!r}; "
                    "leave one of them out (--tokenizer.languages with nothing behind it)"
                )

    def _check_load(self) -> None:
        """Raises: ConfigError where a field is of tokenizers that are trained here."""
        for f in fields(self):
            if f.name in _TRAINED and getattr(self, f.name) != f.default:
                raise ConfigError(
                    f"{f.name}={getattr(self, f.name)!r}: is for tokenizers that are trained here, and load names "
                    "existing ones; leave one of them out"
                )

    @property
    def special_tokens(self) -> list[str]:
        """Texts of ids 0, 1, 2, 3."""
        return [getattr(self, f"{role}_token") for role in self.special_order]

    def sized(self, pairs: int) -> "TokenizerConfig":
        """The same with the size of the vocabulary that this many pairs bear."""
        size = round(min(max(45 * pairs**0.5, 1000), 32_000), -2)
        return self if self.vocab_size is not None or self.load else replace(self, vocab_size=int(size))


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """How pairs become batches: of few shapes, with at most so many tokens a side.

    Raises:
        ConfigError: a field has a value that it may not have.
    """

    tokens: int | None = None  # of a batch, padding included, on each side; None: 1,024 to 4,096, by the corpus
    shapes: int = 16  # at most; each is compiled once
    max_src_length: int | None = None  # longer pairs are dropped and counted; None: what the model holds
    max_tgt_length: int | None = None  # both with the special tokens
    workers: int = 0  # processes that make batches; 0: threads of this one

    def __post_init__(self) -> None:
        check_field_types(self)
        for name, least in {"tokens": 1, "shapes": 1, "max_src_length": 1, "max_tgt_length": 2, "workers": 0}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name}={value}: must be at least {least}")

    def sized(self, tokens: int) -> "BatchConfig":
        """The same with batches of a hundredth of the corpus' tokens, so that a small one has updates enough."""
        return self if self.tokens is not None else replace(self, tokens=min(max(tokens // 100, 1024), 4096))
