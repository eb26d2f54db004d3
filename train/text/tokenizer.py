"""Text to ids and back: what every tokenizer can do, whichever library it uses."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Literal

from ...backend.errors import DataError
from ...configs.data import ROLES
from .tokenizer_files import CLASS, SETTINGS, SOURCE_LANGUAGE, TARGET_LANGUAGE, TokenizerFiles

# what the token of the target's language is: the decoder's first output, its start, or the first token of the source
TargetRole = Literal["first_output", "decoder_start", "source_prefix"]

# in the order in which `transformers` replaces them
_CLEANED = (
    *((f" {mark}", mark) for mark in ".?!,"),
    (" ' ", "'"),
    *((f" {end}", end) for end in ("n't", "'m", "'s", "'ve", "'re")),
)
_LISTED, _MATCHES = 5, 3  # languages in a message, and those that a wrong one may mean


@dataclass(frozen=True)
class Languages:
    """The languages of a multilingual tokenizer."""

    tokens: Mapping[str, str]  # language code -> its token
    source: str | None  # code of the language of sources; None: no token stands for it
    target: str | None  # code of the language of targets, if it is set
    family: str  # tokenizer class of `transformers`
    role: TargetRole

    @classmethod
    def of(cls, tokens: Mapping[str, str], files: TokenizerFiles, source: str | None, role: TargetRole) -> "Languages":
        """Languages with those that the files set; `source` is the default. Raises: DataError if one is unknown."""
        settings = files.settings
        languages = cls(tokens, source if source in tokens else None, None, str(settings[CLASS]), role)
        return languages.changed(settings.get(SOURCE_LANGUAGE), settings.get(TARGET_LANGUAGE))

    def changed(self, source: str | None, target: str | None) -> "Languages":
        """The languages with another source or target; None changes nothing. Raises: DataError if one is unknown."""
        if source is not None and self.role == "source_prefix":
            raise DataError(f"{SOURCE_LANGUAGE}={source!r}: no token stands for the source's language; omit it")
        for name, code in ((SOURCE_LANGUAGE, source), (TARGET_LANGUAGE, target)):
            if code is not None and code not in self.tokens:
                raise DataError(f"{name}={code!r}: the tokenizer has no such language; {self._similar(str(code))}")
        return replace(self, source=source or self.source, target=target or self.target)

    def _similar(self, code: str) -> str:
        """The languages that a code may mean, else some of those that there are, as a hint."""
        related = [c for c in self.tokens if c.startswith(code) or code.startswith(c) or code == self.tokens[c]]
        matches = [*dict.fromkeys((*related, *get_close_matches(code, self.tokens)))][:_MATCHES]
        return f"did you mean {' or '.join(map(repr, matches))}?" if matches else f"it has {self._some}"

    @property
    def _some(self) -> str:
        return ", ".join([*self.tokens][:_LISTED]) + ", …" * (len(self.tokens) > _LISTED)

    @property
    def frame(self) -> str | None:
        """The token around a source: of its own language, or of the target's; None if a source has none.

        Raises:
            DataError: a source needs one, and the default language is not among the tokenizer's.
        """
        if self.role == "source_prefix":
            return None if self.target is None else self.tokens[self.target]
        if self.source is None:
            raise DataError(f"{SOURCE_LANGUAGE}=None: set the language of sources; the tokenizer has {self._some}")
        return self.tokens[self.source]


class Tokenizer(ABC):
    """A tokenizer with the ids of its special tokens.

    Raises:
        DataError: a token for one of the roles pad, eos, unk is missing.
    """

    def __init__(
        self,
        special_tokens: Mapping[str, str],
        frame: tuple[str, ...] | None = None,
        languages: Languages | None = None,
        files: TokenizerFiles | None = None,
    ):
        """`frame`: a source, as roles of special tokens, "language", and $A for the text; `files`: what to save."""
        self.special_tokens, self.frame, self.languages, self.files = dict(special_tokens), frame, languages, files
        self.cleans_up = False  # whether decoding removes spaces before punctuation; ignored by byte-level BPE
        if files is not None:
            self.cleans_up = files.settings.get("clean_up_tokenization_spaces") is True
        ids = {role: self.id_of(special_tokens[role]) for role in ROLES if role in special_tokens}
        missing = [role for role in ROLES if ids.get(role) is None and role != "bos"]
        if missing:
            raise DataError(f"the tokenizer has no special token for {', '.join(missing)}")
        self.pad_id, self.eos_id, self.unk_id = (ids[role] or 0 for role in ("pad", "eos", "unk"))
        self.bos_id = ids.get("bos")  # None: the family has no such token

    @abstractmethod
    def vocabulary(self) -> Mapping[str, int]:
        """The id of each token."""

    @property
    @abstractmethod
    def special(self) -> set[str]:
        """The special tokens, which decoding omits."""

    @abstractmethod
    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without special tokens around it."""

    @abstractmethod
    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """Text of each sentence, without special tokens."""

    @abstractmethod
    def token_of(self, number: int) -> str | None:
        """The token of an id; None if there is none."""

    @property
    def lowercases(self) -> bool:
        """Whether text is lowercased before it is segmented."""
        return False

    def clean_up(self, text: str) -> str:
        """Text as `transformers` decodes it if the files set `clean_up_tokenization_spaces`."""
        for wrong, right in _CLEANED if self.cleans_up else ():
            text = text.replace(wrong, right)
        return text

    def id_of(self, token: str) -> int | None:
        """The id of a token; None if there is none."""
        return self.vocabulary().get(token)

    def show(self, ids: Sequence[int]) -> list[str]:
        """Each token in readable form; ▁ marks a preceding space."""
        return [self.token_of(i) or "?" for i in ids]

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self.vocabulary())

    def tokens_beyond(self, size: int) -> list[tuple[int, str]]:
        """(id, token) of the tokens that a model with `size` ids lacks, in the order of ids.

        Special tokens may lie beyond it, as <mask> does in some BART models, because text rarely contains them.
        """
        special = self.special
        return sorted((i, token) for token, i in self.vocabulary().items() if i >= size and token not in special)

    @property
    def target(self) -> "Tokenizer":
        """The tokenizer of targets, if this one is that of sources."""
        return self

    def encode_sources(self, texts: Sequence[str], longest: int | None = None) -> list[list[int]]:
        """Ids of each text with the special tokens of a source, truncated to `longest` ids in total."""
        before, after = self.around
        room = None if longest is None else max(longest - self.added, 0)
        return [[*before, *ids[:room], *after] for ids in self.encode(texts)]

    @property
    def added(self) -> int:
        """Number of special tokens around a source."""
        return sum(map(len, self.around))

    @property
    def around(self) -> tuple[list[int], list[int]]:
        """Ids before and after the text of a source."""
        tokens: dict[str, str | None] = {**self.special_tokens}
        if self.languages is not None:
            tokens["language"] = self.languages.frame
        frame = self.frame or ("$A", "eos")
        ids = [self.id_of(tokens.get(role) or "") if role != "$A" else None for role in frame]
        middle = frame.index("$A")
        return [i for i in ids[:middle] if i is not None], [i for i in ids[middle + 1 :] if i is not None]

    def with_languages(self, source: str | None, target: str | None) -> "Tokenizer":
        """The same tokenizer for other languages, by code; None changes nothing.

        Raises:
            DataError: the tokenizer has no such language, or is not multilingual.
        """
        if self.languages is None:
            name = SOURCE_LANGUAGE if source is not None else TARGET_LANGUAGE
            raise DataError(f"{name}={source or target!r}: the tokenizer is not multilingual; omit it")
        tokenizer = copy(self)
        tokenizer.languages = self.languages.changed(source, target)
        return tokenizer

    def save(self, directory: str | PathLike[str]) -> None:
        """Write the files that `transformers` reads."""
        assert self.files is not None  # other tokenizers have a method of their own
        Path(directory).mkdir(parents=True, exist_ok=True)
        for name, content in self.files.content.items():
            (Path(directory) / name).write_bytes(content)
        settings = self.files.json(SETTINGS) if SETTINGS in self.files.content else {}
        kind = settings.get(CLASS) or self.files.settings[CLASS] or "PreTrainedTokenizerFast"
        self._write_settings(directory, {**settings, CLASS: kind})

    def _write_settings(self, directory: str | PathLike[str], settings: dict[str, object]) -> None:
        if self.languages is not None:
            settings[SOURCE_LANGUAGE], settings[TARGET_LANGUAGE] = self.languages.source, self.languages.target
        text = json.dumps(settings, indent=2) + "\n"
        (Path(directory) / SETTINGS).write_text(text, encoding="utf-8")
