"""Configs of a run's corpus, tokenizers and batches."""

from dataclasses import dataclass, fields, replace
from typing import Literal

from ..backend.errors import ConfigError
from .validation import check_field_types

_FILES = (".tsv", ".csv", ".json", ".jsonl", ".parquet", ".txt")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Location of the training and validation pairs: two parallel text files, a dataset, a store or a mixture.

    Raises:
        ConfigError: none or two of them are set, or a column is missing.
    """

    src: str | None = None  # source text file, one sentence per line; .gz too
    tgt: str | None = None  # target text file, line by line the translation of src
    dataset: str | None = None  # file (.tsv .csv .json .jsonl .parquet, .txt in SCAN's format), directory or hub name
    store: str | None = None  # folder that `twinax data --store` wrote, with the validation pairs and the tokenizer
    mixture: str | None = None  # .toml or .json file of several corpora, with their validation pairs
    subset: str | None = None  # subset of a hub dataset or a directory, such as "de-en" of opus_books
    split: str = "train"  # training split of the dataset
    src_column: str | None = None  # column name, or a language code within a `translation` column
    tgt_column: str | None = None  # None: .tsv files have no header, and the first two columns are used
    glossary: str | None = None  # file of terms (source, tab, target per line), which half of their pairs show

    valid_src: str | None = None  # source text file for validation
    valid_tgt: str | None = None  # target text file for validation
    valid_dataset: str | None = None  # dataset for validation; None: if valid_split is set, the same as `dataset`
    valid_split: str | None = None  # validation split of that dataset
    held_out: int | None = None  # training pairs held out if no validation data is set; None: 5 %, at most 1,000

    def __post_init__(self) -> None:
        check_field_types(self)
        for src, tgt in (("src", "tgt"), ("valid_src", "valid_tgt")):
            if (getattr(self, src) is None) != (getattr(self, tgt) is None):
                name, missing = (src, tgt) if getattr(self, tgt) is None else (tgt, src)
                raise ConfigError(f"{name}={getattr(self, name)!r}: needs {missing} too, the other side's file")
        for name in ("store", "mixture"):
            if getattr(self, name) is not None:
                self._check_alone(name)
                return
        if (self.src is None) == (self.dataset is None):
            raise ConfigError(f"dataset={self.dataset!r}: give src and tgt, or dataset, or store, or mixture")
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
            raise ConfigError(f"held_out={self.held_out}: conflicts with the validation data; omit one of them")

    def _check_alone(self, name: str) -> None:
        """Raises: ConfigError if another field is set beside a store or a mixture."""
        for f in fields(self):
            if f.name != name and (value := getattr(self, f.name)) != f.default:
                raise ConfigError(f"{f.name}={value!r}: {name}={getattr(self, name)!r} has all pairs; omit one of them")

    @property
    def validation(self) -> "CorpusConfig | None":
        """The corpus of the validation pairs; None: they are held out from the training corpus."""
        if self.valid_src is not None:
            return CorpusConfig(src=self.valid_src, tgt=self.valid_tgt)
        if self.valid_dataset is None and self.valid_split is None:
            return None
        is_separate_file = self.valid_dataset is not None and is_file(self.valid_dataset)
        return CorpusConfig(
            dataset=self.valid_dataset or self.dataset,
            subset=None if is_separate_file else self.subset,
            split="train" if is_separate_file else self.valid_split or self.split,
            src_column=self.src_column,
            tgt_column=self.tgt_column,
        )


def is_file(dataset: str) -> bool:
    """Whether the name of a dataset is that of a single file."""
    return dataset.removesuffix(".gz").endswith(_FILES)


def _check_unused(config: CorpusConfig) -> None:
    """Raises: ConfigError if a field would have no effect."""
    columns = {"src_column": config.src_column, "subset": config.subset, "split": config.split}
    if config.src is not None and config.valid_dataset is None:
        for name, value in columns.items():
            if value not in (None, "train"):
                raise ConfigError(f"{name}={value!r}: does not apply to text files; omit it, or give dataset")
    for name, split in (("dataset", config.split), ("valid_dataset", config.valid_split)):
        dataset = getattr(config, name)
        if dataset is None or not is_file(dataset):
            continue
        if name == "dataset" and config.valid_dataset is None and config.valid_split is not None:
            split = config.valid_split
        subset = config.subset if name == "dataset" or config.dataset is None else None  # else the training corpus's
        if split not in (None, "train") or subset is not None:
            raise ConfigError(
                f"{name}={dataset!r}: a single file has no split ({split}) or subset ({subset}); set "
                "valid_dataset to a separate file for validation"
            )


TokenizerKind = Literal["word", "bpe", "unigram"]
Split = Literal["whitespace", "punctuation", "word_characters", "unspaced", "bytes", "d2l"]
Normalization = Literal["none", "nfc", "nfkc"]
ROLES = ("pad", "bos", "eos", "unk")
_TRAINING_FIELDS = (
    *("kind", "vocab_size", "min_frequency", "joint", "split", "languages", "lowercase", "normalization"),
    "special_order",
    "sample",
    "tags",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Tokenizers, trained on the training sentences or loaded.

    Raises:
        ConfigError: a field has an invalid value.
    """

    kind: TokenizerKind = "bpe"
    load: tuple[str, ...] = ()  # existing tokenizers: one file or directory for both sides, or source's and target's
    vocab_size: int | None = None  # maximum, special tokens included; None: 45 · sqrt(pairs), 1,000 to 32,000
    min_frequency: int = 1  # minimum count of a word, or of a pair that bpe merges; unigram ignores it
    sample: int = 2_000_000  # pairs that it is trained on, evenly spaced, of a larger corpus
    joint: bool = True  # one tokenizer for both languages
    split: Split = "whitespace"  # pre-tokenization; punctuation: at whitespace too; unspaced: for Chinese, Japanese
    bpe_dropout: float = 0.0  # probability that a merge is skipped in training, drawn again in every epoch
    languages: tuple[str, ...] = ()  # source and target for spaCy pre-tokenization, such as de en; needs twinax[spacy]
    lowercase: bool = False
    normalization: Normalization = "nfc"
    pad_token: str = "<pad>"
    bos_token: str = "<s>"
    eos_token: str = "</s>"
    unk_token: str = "<unk>"
    special_order: tuple[str, ...] = ROLES  # the roles of ids 0, 1, 2, 3
    tags: tuple[str, ...] = ()  # further special tokens, from id 4 on; those of a mixture and a glossary are added
    source_bos: bool = False  # whether a source starts with BOS; a loaded directory overrides this
    source_eos: bool = True  # whether a source ends with EOS; a loaded directory overrides this
    src_lang: str | None = (
        None  # language of the sources in a multilingual tokenizer, such as deu_Latn; None: its default
    )
    tgt_lang: str | None = None  # language of the targets; None: what the model's config sets

    def __post_init__(self) -> None:
        for name in ("load", "languages", "special_order", "tags"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        check_field_types(self)
        if sorted(self.special_order) != sorted(ROLES):
            raise ConfigError(f"special_order={self.special_order!r}: must be an order of {', '.join(ROLES)}")
        tokens = [*self.special_tokens, *self.tags]
        if len(set(tokens)) < len(tokens) or "" in tokens:
            raise ConfigError(f"special tokens {', '.join(map(repr, tokens))}: must differ, and none may be empty")
        if self.vocab_size is not None and self.vocab_size <= len(tokens):
            raise ConfigError(f"vocab_size={self.vocab_size}: must be above {len(tokens)}, the special tokens")
        for name in ("min_frequency", "sample"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"{name}={value}: must be at least 1")
        if not 0 <= self.bpe_dropout < 1:
            raise ConfigError(f"bpe_dropout={self.bpe_dropout}: must be at least 0 and below 1")
        if self.bpe_dropout and self.kind != "bpe" and not self.load:
            raise ConfigError(f"bpe_dropout={self.bpe_dropout}: needs kind='bpe', not {self.kind!r}")
        if len(self.load) > 2:
            raise ConfigError(f"load={self.load!r}: must be one tokenizer, or the source's and the target's")
        if self.load:
            self._check_load()
        if self.split == "bytes" and self.vocab_size is not None and self.vocab_size < 256 + len(tokens):
            raise ConfigError(f"vocab_size={self.vocab_size}: split='bytes' needs {256 + len(tokens)}, one per byte")
        if self.split in ("word_characters", "d2l") and self.kind != "word":
            raise ConfigError(f"split={self.split!r}: needs kind='word', not {self.kind!r}")
        if self.languages:
            self._check_languages()
        if self.split == "bytes" and self.kind != "bpe":
            raise ConfigError(f"split='bytes': needs kind='bpe', not {self.kind!r}")

    def _check_languages(self) -> None:
        """Raises: ConfigError if spaCy cannot pre-tokenize under these settings."""
        if len(self.languages) != 2:
            raise ConfigError(f"languages={self.languages!r}: must be two, the source's and the target's")
        for name, required in (("kind", "word"), ("split", "whitespace")):
            if (value := getattr(self, name)) != required:
                raise ConfigError(
                    f"{name}={value!r}: languages={self.languages!r} selects spaCy's pre-tokenization, which needs "
                    f"{required!r}; omit one of them (an empty --tokenizer.languages clears it)"
                )

    def _check_load(self) -> None:
        """Raises: ConfigError if a field is set that only affects training a tokenizer."""
        for f in fields(self):
            if f.name in _TRAINING_FIELDS and getattr(self, f.name) != f.default:
                raise ConfigError(
                    f"{f.name}={getattr(self, f.name)!r}: only affects training a tokenizer, but load names existing "
                    "ones; omit one of them"
                )

    @property
    def special_tokens(self) -> list[str]:
        """Texts of ids 0, 1, 2, 3."""
        return [getattr(self, f"{role}_token") for role in self.special_order]

    def sized(self, pairs: int) -> "TokenizerConfig":
        """A copy whose `vocab_size`, if None, follows from the number of pairs."""
        size = round(min(max(45 * pairs**0.5, 1000), 32_000), -2)
        return self if self.vocab_size is not None or self.load else replace(self, vocab_size=int(size))


@dataclass(frozen=True, kw_only=True)
class CleaningConfig:
    """Training pairs that are dropped for their text. By default none is.

    Raises:
        ConfigError: a field has an invalid value.
    """

    duplicates: bool = False  # pairs that are equal to an earlier one, or to a held-out one
    identical: bool = False  # pairs whose sides are equal
    max_ratio: float | None = None  # of the tokens of the longer side to those of the shorter one
    src_script: str | None = None  # Unicode script that half of a source's letters must have, such as Latin, Cyrillic
    tgt_script: str | None = None  # the same for targets

    def __post_init__(self) -> None:
        check_field_types(self)
        if self.max_ratio is not None and not self.max_ratio >= 1:
            raise ConfigError(f"max_ratio={self.max_ratio}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Batches of few shapes, with a maximum number of tokens per side.

    Raises:
        ConfigError: a field has an invalid value.
    """

    tokens: int | None = None  # maximum per batch and side, padding included; None: 1,024 to 4,096, by corpus size
    shapes: int = 16  # maximum number of batch shapes; each is compiled once
    max_src_length: int | None = None  # special tokens included; longer pairs are dropped; None: the model's max_length
    max_tgt_length: int | None = None  # the same for targets
    workers: int = 0  # processes that build batches; 0: threads of this process

    def __post_init__(self) -> None:
        check_field_types(self)
        minima = {"tokens": 1, "shapes": 1, "max_src_length": 1, "max_tgt_length": 2, "workers": 0}
        for name, minimum in minima.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}={value}: must be at least {minimum}")

    def sized(self, tokens: int) -> "BatchConfig":
        """A copy whose `tokens`, if None, is 1 % of the corpus' tokens, at least 1,024 and at most 4,096."""
        return self if self.tokens is not None else replace(self, tokens=min(max(tokens // 100, 1024), 4096))
