"""ByT5's tokenizer, which has no vocabulary file: a byte is a token, after three special tokens.

Source: Xue et al. 2022, "ByT5"; `transformers.ByT5Tokenizer`, version 5.
"""

from collections.abc import Mapping, Sequence

from tokenizers import AddedToken

from ...backend.errors import DataError
from .added_tokens import AddedTokens
from .tokenizer import Tokenizer
from .tokenizer_files import TokenizerFiles

CLASS_NAME = "ByT5Tokenizer"
_FIRST = ("pad", "eos", "unk")  # ids 0 to 2
_BYTES = 256
_DEFAULTS = {
    role: AddedToken(token, lstrip=True, rstrip=True)
    for role, token in zip(_FIRST, ("<pad>", "</s>", "<unk>"), strict=True)
}


def byt5(files: TokenizerFiles) -> "ByT5Tokenizer":
    """The tokenizer of these settings. Raises: DataError if one is damaged."""
    settings = files.settings
    tokens = {role: settings.get(f"{role}_token") for role in _FIRST}
    stripped = {r: AddedToken(t, lstrip=True, rstrip=True) for r, t in tokens.items() if isinstance(t, str)}
    named = {**files.named_tokens(_DEFAULTS), **stripped}
    number = settings.get("extra_ids", 125)
    if type(number) is not int or not 0 <= number <= 1 << 16:
        raise DataError(f"{files.name}: extra_ids={number!r}: must be a number of tokens")
    sentinels = [AddedToken(f"<extra_id_{i}>", special=True) for i in range(number)]
    extra = files.extra_tokens() or sentinels
    added = {i: named[role] for i, role in enumerate(_FIRST)} | files.added_tokens()
    for token in (*extra, *named.values()):
        if token.content not in {other.content for other in added.values()}:
            added[max([_BYTES + len(_FIRST) - 1, *added]) + 1] = token
    special = {token.content for token in (*extra, *named.values())}
    return ByT5Tokenizer(added, {role: token.content for role, token in named.items()}, special, files)


class ByT5Tokenizer(Tokenizer):
    """Bytes of UTF-8 as tokens; invalid bytes are omitted in decoding."""

    def __init__(
        self, added: Mapping[int, AddedToken], roles: Mapping[str, str], special: set[str], files: TokenizerFiles
    ):
        """`added`: tokens that are not bytes, by id; `special`: those that decoding omits."""
        self._added, self._special = dict(added), special
        self._ids = {chr(i): i + len(_FIRST) for i in range(_BYTES)} | {t.content: i for i, t in added.items()}
        self._tokens = AddedTokens(added.values())
        super().__init__(roles, files=files)

    def vocabulary(self) -> Mapping[str, int]:
        return self._ids

    @property
    def special(self) -> set[str]:
        return self._special

    def token_of(self, number: int) -> str | None:
        if number in self._added:
            return self._added[number].content
        return chr(number - len(_FIRST)) if len(_FIRST) <= number < _BYTES + len(_FIRST) else None

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._encode_text(text) for text in texts]

    def _encode_text(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self._tokens.split(text):
            try:
                ids += [self._ids[part]] if part in self._tokens else [byte + len(_FIRST) for byte in part.encode()]
            except UnicodeEncodeError as error:
                raise DataError(f"the tokenizer cannot encode the text: {error}") from None
        return ids

    def encode_sources(self, texts: Sequence[str], longest: int | None = None) -> list[list[int]]:
        """As of every tokenizer, but a text that ends with EOS gets no other one."""
        room = None if longest is None else max(longest - 1, 0)
        sentences = [ids[:room] for ids in self.encode(texts)]
        return [ids if ids[-1:] == [self.eos_id] else [*ids, self.eos_id] for ids in sentences]

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        return [self.clean_up(self._decode_ids(ids)) for ids in sentences]

    def _decode_ids(self, ids: Sequence[int]) -> str:
        content = b""
        for i in ids:
            if i in self._added:
                token = self._added[i].content
                content += b"" if token in self._special else token.encode()
            elif len(_FIRST) <= i < _BYTES + len(_FIRST):
                content += bytes([i - len(_FIRST)])
        return content.decode(errors="ignore")
