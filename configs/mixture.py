"""Several corpora in one run: which, how often each occurs in an epoch, and what marks its sources."""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..backend.errors import ConfigError
from .data import CorpusConfig
from .json_text import parse_json
from .validation import check_field_types

_PATHS = ("src", "tgt", "dataset", "glossary", "valid_src", "valid_tgt", "valid_dataset")
_NESTED, _NOT_NESTED = ("store", "mixture"), "a corpus of a mixture must be text or a dataset"


@dataclass(frozen=True, kw_only=True)
class MixtureCorpus:
    """A corpus of a mixture.

    Raises:
        ConfigError: a field has an invalid value.
    """

    name: str  # in messages and metrics
    corpus: CorpusConfig  # with validation pairs of its own
    copies: float | None = None  # of each pair in an epoch; None: 1, or by the temperature
    tag: str | None = None  # token before the text of each source, such as <bt>
    src_lang: str | None = None  # as in the run's tokenizer
    tgt_lang: str | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        if not self.name or "/" in self.name or not self.name.isprintable():
            raise ConfigError(f"name={self.name!r}: must not be empty, and have neither a slash nor a line break")
        if self.copies is not None and not 0 < self.copies < math.inf:
            raise ConfigError(f"copies={self.copies}: must be a number above 0; omit the corpus otherwise")


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Corpora whose pairs are mixed in every epoch.

    With a temperature T, the share of a corpus with n pairs is proportional to n^(1/T), and the largest occurs once.

    Raises:
        ConfigError: there is no corpus, two have the same name, or `temperature` and `copies` are both set.

    Source: Arivazhagan et al. 2019, "Massively Multilingual Neural Machine Translation in the Wild", section 4.2.
    """

    corpora: tuple[MixtureCorpus, ...]
    temperature: float | None = None

    def __post_init__(self) -> None:
        check_field_types(self)
        names = [corpus.name for corpus in self.corpora]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"corpora: there must be one, and their names must differ: {', '.join(names) or 'none'}")
        if self.temperature is None:
            return
        if not self.temperature >= 1:
            raise ConfigError(f"temperature={self.temperature}: must be at least 1")
        if both := [corpus.name for corpus in self.corpora if corpus.copies is not None]:
            raise ConfigError(f"temperature={self.temperature}: determines the copies; omit those of {', '.join(both)}")

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags of the corpora, each once."""
        return tuple(dict.fromkeys(corpus.tag for corpus in self.corpora if corpus.tag is not None))

    def copies(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """How often each pair of a corpus occurs in an epoch, by the corpora's numbers of pairs."""
        if self.temperature is None:
            return {corpus.name: corpus.copies or 1.0 for corpus in self.corpora}
        largest = max(sizes.values())
        return {name: (size / largest) ** (1 / self.temperature - 1) for name, size in sizes.items()}

    @classmethod
    def read(cls, path: str) -> "Mixture":
        """From a .toml or .json file; its paths are relative to its folder.

        Raises:
            ConfigError: the file cannot be read, or a value is wrong.
        """
        try:
            content = Path(path).read_bytes()
            values: Any = parse_json(content) if path.endswith(".json") else tomllib.loads(content.decode())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(f"{path}: cannot be read: {reason}") from None
        if unknown := sorted({*values} - {"temperature", "corpora"} if isinstance(values, dict) else ["not a table"]):
            raise ConfigError(f"{path}: has {', '.join(unknown)}; a mixture has temperature and corpora")
        corpora = values.get("corpora")
        if not isinstance(corpora, list) or not all(isinstance(corpus, dict) for corpus in corpora):
            raise ConfigError(f"{path}: corpora must be tables, as [[corpora]] begins them")
        try:
            members = tuple(_corpus(corpus, Path(path).parent) for corpus in corpora)
            return cls(corpora=members, temperature=values.get("temperature"))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def write(self, path: str) -> None:
        """To a .json file that `read` reads. Raises: ConfigError if a corpus is no text or dataset."""
        corpora = []
        for corpus in self.corpora:
            if any(getattr(corpus.corpus, name) is not None for name in _NESTED):
                raise ConfigError(f"{corpus.name}: {_NOT_NESTED}")
            values = {**asdict(corpus.corpus), **asdict(replace(corpus, corpus=CorpusConfig(src="a", tgt="b")))}
            del values["corpus"]
            paths = {name: str(Path(values[name]).resolve()) for name in _PATHS if _is_path(name, values[name])}
            corpora.append({name: value for name, value in {**values, **paths}.items() if value is not None})
        document = {"corpora": corpora} | ({} if self.temperature is None else {"temperature": self.temperature})
        Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _corpus(values: Mapping[str, Any], folder: Path) -> MixtureCorpus:
    own = {f.name for f in fields(MixtureCorpus)} - {"corpus"}
    names = own | {f.name for f in fields(CorpusConfig)} - {*_NESTED}
    if nested := [name for name in _NESTED if name in values]:
        raise ConfigError(f"{nested[0]}={values[nested[0]]!r}: {_NOT_NESTED}")
    if unknown := sorted({*values} - names):
        raise ConfigError(f"unknown fields {', '.join(unknown)}; a corpus has {', '.join(sorted(names))}")
    location = {name: value for name, value in values.items() if name not in own}
    location |= {name: str(folder / location[name]) for name in _PATHS if _is_path(name, location.get(name), folder)}
    settings = {name: value for name, value in values.items() if name in own}
    corpus = CorpusConfig(**location)
    default = Path(values["src"]).name if "src" in values else str(values.get("dataset")).replace("/", "_")
    return MixtureCorpus(corpus=corpus, **{"name": default, **settings})


def _is_path(name: str, value: Any, folder: Path = Path()) -> bool:
    """Whether a value is a path, not the name of a dataset on the hub."""
    return isinstance(value, str) and ("dataset" not in name or (folder / value).exists())
