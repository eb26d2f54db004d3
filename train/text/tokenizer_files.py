"""The tokenizer files of a directory of `transformers`, and the settings in them."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

from ...backend.errors import DataError
from ...configs.json_text import parse_json

SETTINGS, SPECIAL, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
DECODER, EXTRA, OLD_EXTRA = "added_tokens_decoder", "extra_special_tokens", "additional_special_tokens"
_NAMED_EXTRA = "model_specific_special_tokens"  # those that have names
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # in the order in which `transformers` adds them
CLASS, SOURCE_LANGUAGE, TARGET_LANGUAGE = "tokenizer_class", "src_lang", "tgt_lang"

# model_type in config.json -> tokenizer class of `transformers`, for files that do not name one
CLASSES = {
    "marian": "MarianTokenizer",
    "mbart": "MBartTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "pegasus": "PegasusTokenizer",
    "bart": "BartTokenizer",
    "blenderbot": "BlenderbotTokenizer",
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
    "umt5": "T5Tokenizer",
}
# tokenizer class -> the files that it needs without tokenizer.json
NEEDED = {
    "MarianTokenizer": "source.spm, target.spm and vocab.json",
    "M2M100Tokenizer": "sentencepiece.bpe.model and vocab.json",
    **dict.fromkeys(("MBartTokenizer", "MBart50Tokenizer", "NllbTokenizer"), "sentencepiece.bpe.model"),
    **dict.fromkeys(("T5Tokenizer", "PegasusTokenizer"), "spiece.model"),
    **dict.fromkeys(("BartTokenizer", "RobertaTokenizer", "BlenderbotTokenizer"), "vocab.json and merges.txt"),
}


def needed_files(model: Mapping[str, Any]) -> str:
    """The tokenizer files that a model with this config.json needs, as text."""
    kind = str(model.get(CLASS) or CLASSES.get(str(model.get("model_type")))).removesuffix("Fast")
    return f"tokenizer.json, or {NEEDED[kind]}" if kind in NEEDED else "tokenizer.json"


@dataclass(frozen=True)
class TokenizerFiles:
    """The files by name, and the settings of tokenizer_config.json with those of special_tokens_map.json."""

    name: str  # of the directory, for messages
    content: Mapping[str, bytes]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, content: Mapping[str, bytes], name: str, model: Mapping[str, Any] | None = None) -> "TokenizerFiles":
        """Files with their settings; `model` is config.json, which may determine the class.

        Raises:
            DataError: a file with settings is damaged.
        """
        files = cls(name, content)
        settings = files.json(SETTINGS) if SETTINGS in content else {}
        if isinstance(settings.get(EXTRA), dict):
            settings[_NAMED_EXTRA] = settings.pop(EXTRA)
        elif not settings.get(EXTRA) and OLD_EXTRA in settings:
            settings[EXTRA] = settings.pop(OLD_EXTRA)
        if DECODER not in settings and SPECIAL in content:
            settings = {**settings, **files.json(SPECIAL)}
        model = model or {}
        kind = settings.get(CLASS) or model.get(CLASS) or CLASSES.get(str(model.get("model_type")))
        return cls(name, content, {**settings, CLASS: str(kind).removesuffix("Fast") if kind else None})

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in a file. Raises: DataError if there is none."""
        content = self.bytes(name)
        try:
            values = parse_json(content)
        except ValueError as error:
            raise DataError(f"{self.name}/{name}: is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise DataError(f"{self.name}/{name}: must be a JSON object, not a {type(values).__name__}")
        return values

    def vocabulary(self, name: str) -> dict[str, int]:
        """The ids of tokens in a file. Raises: DataError if it is damaged, or two tokens have one id."""
        ids = self.json(name)
        bad_token = next((token for token, i in ids.items() if type(i) is not int or i < 0), None)
        if bad_token is not None or not ids:
            reason = "holds no token" if bad_token is None else f"the id of {bad_token!r} is {ids[bad_token]!r}"
            raise DataError(f"{self.name}/{name}: must map tokens to ids from 0, but {reason}")
        if len(set(ids.values())) < len(ids):
            raise DataError(f"{self.name}/{name}: two tokens have the same id")
        return ids

    def bytes(self, name: str) -> bytes:
        """The content of a file. Raises: DataError if it is missing."""
        if name not in self.content:
            raise DataError(
                f"{self.name}: has no {name}, which its {self.settings.get(CLASS)} needs; add the file, or replace the "
                "tokenizer by `twinax convert` with --tokenizer"
            )
        return self.content[name]

    def token(self, role: str, default: str | None = None) -> str | None:
        """The text of the special token for a role."""
        value = self.settings.get(f"{role}_token", default)
        value = value.get("content") if isinstance(value, dict) else value
        if not isinstance(value, str | None):
            raise DataError(f"{self.name}/{SETTINGS}: {role}_token is {value!r}, not a token")
        return value

    @property
    def splits_special_tokens(self) -> bool:
        """Whether special tokens in a text are segmented as other text is."""
        return self.settings.get("split_special_tokens") is True

    def named_tokens(self, defaults: Mapping[str, AddedToken | str]) -> dict[str, AddedToken]:
        """The special tokens by name, roles first; those that the settings lack have the defaults of their class."""
        values: dict[str, Any] = {role: self.settings.get(f"{role}_token", defaults.get(role)) for role in NAMED}
        for role, value in values.items():
            if isinstance(value, str) and isinstance(default := defaults.get(role), AddedToken):
                values[role] = _with_content(default, value)
        # names that this tokenizer alone has, as in transformers 5
        own = {name.removesuffix("_token"): value for name, value in self.settings.items() if name.endswith("_token")}
        values |= {name: value for name, value in own.items() if name not in values and isinstance(value, str)}
        extra = self.settings.get(_NAMED_EXTRA)
        values |= extra if isinstance(extra, dict) else {}
        place = f"{self.name}/{SETTINGS}"
        return {n: _added(value, f"{place}: {n}_token") for n, value in values.items() if value is not None}

    def added_tokens(self) -> dict[int, AddedToken]:
        """The tokens that the files add to the vocabulary by id, in the order of the ids."""
        entries = self.settings.get(DECODER)
        if isinstance(entries, dict):
            place = f"{self.name}/{SETTINGS}: {DECODER}"
            if bad_id := next((i for i in entries if not re.fullmatch(r"\d{1,9}", i)), None):
                raise DataError(f"{place} has the id {bad_id!r}; ids are numbers from 0")
            return {int(i): _added(entries[i], place, special=False) for i in sorted(entries, key=int)}
        if ADDED not in self.content or not self.json(ADDED):
            return {}
        ids = self.vocabulary(ADDED)
        special = {self.token(role) for role in NAMED} | {token.content for token in self._listed(EXTRA)}
        tokens = sorted(ids, key=ids.__getitem__)
        return {ids[t]: AddedToken(t, normalized=t not in special, special=t in special) for t in tokens}

    def extra_tokens(self) -> list[AddedToken]:
        """The special tokens without a name that the settings list."""
        return self._listed(EXTRA if EXTRA in self.settings else OLD_EXTRA)

    def _listed(self, setting: str) -> list[AddedToken]:
        values = self.settings.get(setting) or []
        if not isinstance(values, list):
            raise DataError(f"{self.name}/{SETTINGS}: {setting} is not a list")
        return [_added(value, f"{self.name}/{SETTINGS}: {setting}") for value in values]


def _added(value: Any, place: str, special: bool = True) -> AddedToken:
    """A token from a text, or from a dict as `transformers` writes it; `special`: whether it is if it does not say."""
    if isinstance(value, AddedToken):
        return value
    if isinstance(value, str):
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise DataError(f"{place} is {value!r}, not a token"[:300])
    flags = {name: bool(value[name]) for name in ("lstrip", "rstrip", "single_word", "normalized") if name in value}
    return AddedToken(value["content"], **flags, special=bool(value.get("special", special)))


def _with_content(token: AddedToken, content: str) -> AddedToken:
    """A special token with another text and the same flags."""
    flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(content, **flags, special=True)
