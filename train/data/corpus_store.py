"""The corpora of a run in one folder, without their text: encoded pairs and tokenizers.

A store of one corpus has the folders train and valid, one of several corpora has them in corpus-0, corpus-1 and so on.
"""

import json
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from ...backend.errors import ConfigError, DataError
from ...configs.data import CleaningConfig, CorpusConfig, TokenizerConfig
from ...configs.mixture import Mixture, MixtureCorpus
from ...configs.run import RunConfig, differences
from ...convert.io.atomic_io import replace_file
from ...convert.io.checksums import checksum_of_json
from ..text.glossary import TAGS
from .store import StoredPairs, read_checked
from .store_writing import Say, writing
from .tokenizer_pair import Tokenizers

FORMAT = 2  # of the description; format 1 has no mixture
TRAIN, VALID = "train", "valid"  # folders of the pairs of a corpus
_DESCRIPTION = "store.json"  # written last
_REMEDY = "copy the folder again, or prepare it again"
_SETTINGS = ("name", "copies", "tag", "src_lang", "tgt_lang")  # of a corpus of a mixture


class EncodedCorpus(NamedTuple):
    """The pairs of a corpus."""

    train: StoredPairs
    valid: StoredPairs
    originals: int  # number of validation pairs read, without swapped ones
    first_ids: list[int]  # what the decoder reads before a target

    @property
    def fingerprints(self) -> list[str]:
        """Hashes of the ids of both parts."""
        return [self.train.fingerprint(), self.valid.fingerprint()]


class CorpusStore(NamedTuple):
    """The encoded corpora of a run: those of a mixture, or one."""

    mixture: Mixture
    corpora: list[EncodedCorpus]
    longest: tuple[int, int]  # tokens of a source and of a target, at most
    tokenizers: Tokenizers
    tokenizer: TokenizerConfig
    cleaning: CleaningConfig
    both_directions: bool

    @classmethod
    def read(cls, folder: Path) -> "CorpusStore":
        """Raises: DataError if the folder is no complete store, is damaged, or is of another version of twinax."""
        path = folder / _DESCRIPTION
        if not path.is_file():
            reason = "is not complete; start `twinax data --store` again" if _parts(folder) else "is no store"
            raise DataError(f"{folder}: {reason if folder.is_dir() else 'there is no such folder'}")
        values = read_checked(path, _REMEDY, range(1, FORMAT + 1))
        if values["format"] == 1:
            own = {name: values[name] for name in ("originals", "first_ids")}
            values |= {"corpora": [{"name": "corpus", **own}], "temperature": None}
        tokenizers = Tokenizers.load(folder)
        if tokenizers is None or tokenizers.digest() != values["tokenizers"]:
            raise DataError(f"{folder}: its tokenizer is missing or damaged; {_REMEDY}")
        members, corpora = [], []
        for entry, place in zip(values["corpora"], _folders(folder, len(values["corpora"])), strict=True):
            settings = {name: entry[name] for name in _SETTINGS if name in entry}
            members.append(MixtureCorpus(corpus=CorpusConfig(store=str(folder)), **settings))
            pairs = StoredPairs(place / TRAIN), StoredPairs(place / VALID)
            corpora.append(EncodedCorpus(*pairs, entry["originals"], entry["first_ids"]))
            if entry.get("fingerprints", corpora[-1].fingerprints) != corpora[-1].fingerprints:
                raise DataError(f"{place}: is of another store than {path}; {_REMEDY}")
        return cls(
            Mixture(corpora=tuple(members), temperature=values["temperature"]),
            corpora,
            (values["longest"][0], values["longest"][1]),
            tokenizers,
            TokenizerConfig(**values["tokenizer"]),
            CleaningConfig(**values["cleaning"]),
            values["both_directions"],
        )

    def write_description(self, folder: Path, say: Say) -> None:
        """Complete a folder that has the pairs of all corpora. Raises: DataError if it cannot be written."""
        entries = [
            {
                **{name: getattr(member, name) for name in _SETTINGS},
                "originals": corpus.originals,
                "first_ids": corpus.first_ids,
                "fingerprints": corpus.fingerprints,
            }
            for member, corpus in zip(self.mixture.corpora, self.corpora, strict=True)
        ]
        values: dict[str, Any] = {
            "format": FORMAT,
            "temperature": self.mixture.temperature,
            "corpora": entries,
            "longest": list(self.longest),
            "tokenizers": self.tokenizers.digest(),
            "tokenizer": asdict(self.tokenizer),
            "cleaning": asdict(self.cleaning),
            "both_directions": self.both_directions,
        }
        text = json.dumps({**values, "checksum": checksum_of_json(values)}, indent=1) + "\n"
        if self._is_complete(folder, text):
            return
        with writing(folder, say):
            if not self._is_complete(folder, text):  # unless another process has completed it meanwhile
                self.tokenizers.save(folder)
                replace_file(folder / _DESCRIPTION, text)

    def _is_complete(self, folder: Path, description: str) -> bool:
        """Whether a folder has this description and the tokenizers."""
        with suppress(OSError, ValueError):
            tokenizers = Tokenizers.load(folder)
            if tokenizers is not None and tokenizers.digest() == self.tokenizers.digest():
                return (folder / _DESCRIPTION).read_text(encoding="utf-8") == description
        return False

    def applied_to(self, run: RunConfig) -> RunConfig:
        """The run with the store's tokenizer and directions. Raises: ConfigError if it sets others."""
        tokenizer = replace(self.tokenizer, bpe_dropout=run.tokenizer.bpe_dropout)
        default = TokenizerConfig(bpe_dropout=run.tokenizer.bpe_dropout)
        # The flags of the preparation are accepted too, which determined these values.
        given = with_tags(run, self.mixture).tokenizer
        tags = dict.fromkeys((*given.tags, *(tag for tag in TAGS if tag in tokenizer.tags)))  # of a glossary
        given = replace(given, vocab_size=given.vocab_size or tokenizer.vocab_size, tags=tuple(tags))
        if tokenizer != given and run.tokenizer != default:
            changes = "; ".join(differences(given, tokenizer, "tokenizer."))
            raise ConfigError(f"{changes}: the store's pairs are encoded with its own tokenizer; omit the setting")
        if run.cleaning not in (self.cleaning, CleaningConfig()):
            changes = "; ".join(differences(run.cleaning, self.cleaning, "cleaning."))
            raise ConfigError(f"{changes}: the store's pairs were cleaned when it was prepared; omit the setting")
        if run.both_directions and not self.both_directions:
            raise ConfigError("both_directions=True: the store has one direction; prepare it again with both")
        return replace(run, tokenizer=tokenizer, cleaning=self.cleaning, both_directions=self.both_directions)


def with_tags(run: RunConfig, mixture: Mixture) -> RunConfig:
    """The run with the tags of a mixture and of its glossaries in a tokenizer that is trained."""
    if run.tokenizer.load or run.init_from is not None:
        return run
    of_terms = TAGS if any(member.corpus.glossary is not None for member in mixture.corpora) else ()
    tags = tuple(dict.fromkeys((*run.tokenizer.tags, *mixture.tags, *of_terms)))
    return replace(run, tokenizer=replace(run.tokenizer, tags=tags))


def new_folders(folder: Path, number: int) -> list[Path]:
    """The folder for each corpus of a store. Raises: DataError if it is the store of another number of corpora."""
    folders = _folders(folder, number)
    if others := [path for path in _parts(folder) if path.parent not in folders]:
        raise DataError(
            f"{folder}: is the store of another number of corpora (it has {others[0].relative_to(folder)}); choose "
            "another folder, or remove it"
        )
    return folders


def _folders(folder: Path, number: int) -> list[Path]:
    return [folder] if number == 1 else [folder / f"corpus-{i}" for i in range(number)]


def _parts(folder: Path) -> list[Path]:
    """The folders of pairs in a store, complete or not."""
    places = folder, *sorted(folder.glob("corpus-*"))
    return [place / part for place in places for part in (TRAIN, VALID) if (place / part).is_dir()]
