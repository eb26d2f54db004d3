"""What sentences a run reads."""

from dataclasses import dataclass

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
