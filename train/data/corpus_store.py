"""A corpus in one folder, without its text: encoded training and validation pairs, and their tokenizers."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...backend.errors import ConfigError, DataError
from ...configs.data import CleaningConfig, TokenizerConfig
from ...configs.run import RunConfig, differences
from ...convert.io.atomic_io import replace_file
from ...convert.io.checksums import checksum_of_json
from .store import FORMAT, StoredPairs, read_checked
from .tokenizer_pair import Tokenizers

_DESCRIPTION = "store.json"  # written last
TRAIN, VALID = "train", "valid"  # folders of the pairs
_REMEDY = "copy the folder again, or prepare it again"


class CorpusStore(NamedTuple):
    """What a folder holds."""

    tokenizers: Tokenizers
    train: StoredPairs
    valid: StoredPairs
    originals: int  # number of validation pairs read, without swapped ones
    first_ids: list[int]  # what the decoder reads before a target
    longest: tuple[int, int]  # tokens of a source and of a target, at most
    tokenizer: TokenizerConfig
    cleaning: CleaningConfig
    both_directions: bool

    @classmethod
    def read(cls, folder: Path) -> "CorpusStore":
        """Raises: DataError if the folder is no complete store, is damaged, or is of another version of twinax."""
        path = folder / _DESCRIPTION
        if not path.is_file():
            reason = "is no store"
            if (folder / TRAIN).is_dir():
                reason = "is not complete; start `twinax data --store` again"
            raise DataError(f"{folder}: {reason if folder.is_dir() else 'there is no such folder'}")
        values = read_checked(path, _REMEDY)
        settings = TokenizerConfig(**values["tokenizer"]), CleaningConfig(**values["cleaning"])
        tokenizers = Tokenizers.load(folder)
        if tokenizers is None or tokenizers.digest() != values["tokenizers"]:
            raise DataError(f"{folder}: its tokenizer is missing or damaged; {_REMEDY}")
        return cls(
            tokenizers,
            StoredPairs(folder / TRAIN),
            StoredPairs(folder / VALID),
            values["originals"],
            values["first_ids"],
            (values["longest"][0], values["longest"][1]),
            *settings,
            values["both_directions"],
        )

    def write_description(self, folder: Path) -> None:
        """Complete a folder that has the pairs of both parts."""
        self.tokenizers.save(folder)
        values: dict[str, Any] = {name: getattr(self, name) for name in ("originals", "first_ids", "both_directions")}
        values |= {"format": FORMAT, "longest": list(self.longest), "tokenizer": asdict(self.tokenizer)}
        values["cleaning"] = asdict(self.cleaning)
        values["tokenizers"] = self.tokenizers.digest()
        values["checksum"] = checksum_of_json(values)
        replace_file(folder / _DESCRIPTION, json.dumps(values, indent=1) + "\n")

    def applied_to(self, run: RunConfig) -> RunConfig:
        """The run with the store's tokenizer and directions. Raises: ConfigError if it sets others."""
        tokenizer = replace(self.tokenizer, bpe_dropout=run.tokenizer.bpe_dropout)
        default = TokenizerConfig(bpe_dropout=run.tokenizer.bpe_dropout)
        if run.tokenizer not in (tokenizer, default):
            changes = "; ".join(differences(run.tokenizer, tokenizer, "tokenizer."))
            raise ConfigError(f"{changes}: the store's pairs are encoded with its own tokenizer; omit the setting")
        if run.cleaning not in (self.cleaning, CleaningConfig()):
            changes = "; ".join(differences(run.cleaning, self.cleaning, "cleaning."))
            raise ConfigError(f"{changes}: the store's pairs were cleaned when it was prepared; omit the setting")
        if run.both_directions and not self.both_directions:
            raise ConfigError("both_directions=True: the store has one direction; prepare it again with both")
        return replace(run, tokenizer=tokenizer, cleaning=self.cleaning, both_directions=self.both_directions)
