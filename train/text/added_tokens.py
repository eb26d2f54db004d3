"""Tokens that are added to a vocabulary: they are found in a text before it is segmented."""

import re
from collections.abc import Iterable, Mapping

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from ...backend.errors import DataError
from .tokenizer_files import TokenizerFiles


def add_tokens(
    fast: LibraryTokenizer, files: TokenizerFiles, named: Mapping[str, AddedToken], extra: Iterable[AddedToken]
) -> None:
    """Add the tokens of the files to a tokenizer of the library, then the special tokens that it lacks.

    Raises:
        DataError: a token would have another id than the files give it.
    """
    ids = {**fast.get_added_tokens_decoder(), **files.added_tokens()}
    contents = {token.content for token in named.values()}
    for token in ids.values():
        token.special = token.special or token.content in contents
    present = {token.content for token in ids.values()}
    # of several tokens with one text, the library takes the flags of the last
    listed = [ids[i] for i in sorted(ids)]
    fast.add_tokens([*listed, *(token for token in (*named.values(), *extra) if token.content not in present)])
    for i, token in ids.items():
        if (actual := fast.token_to_id(token.content)) != i:
            raise DataError(
                f"{files.name}: its files give the added token {token.content!r} the id {i}, but after the vocabulary "
                f"it has the id {actual}: a file is missing or of another tokenizer; save the tokenizer again with "
                "tokenizer.json"
            )


class AddedTokens:
    """The added tokens of a tokenizer that segments with SentencePiece, found as `transformers` finds them there."""

    def __init__(self, tokens: Iterable[AddedToken]):
        self._tokens = {token.content: token for token in tokens}
        longest_first = sorted(filter(None, self._tokens), key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")

    def __contains__(self, text: str) -> bool:
        return text in self._tokens

    def split(self, text: str) -> list[str]:
        """The parts of a text, some of which are added tokens.

        At each place the longest token counts. `lstrip` and `rstrip` remove whitespace beside a token; `single_word`
        needs a space or the end of the text on both sides, else the token belongs to the text beside it.
        """
        parts = [part for part in self._pattern.split(text) if part]
        for i in range(len(parts)):
            if (token := self._tokens.get(parts[i])) is None:
                continue
            left, right = parts[i - 1] if i else "", parts[i + 1] if i + 1 < len(parts) else ""
            if token.rstrip and right:
                parts[i + 1] = right.lstrip()
            if token.lstrip and left:
                parts[i - 1] = left.rstrip()
            if token.single_word and left and not left.endswith(" "):
                parts[i - 1 : i + 1] = parts[i - 1] + parts[i], ""
            elif token.single_word and right and not right.startswith(" "):
                parts[i : i + 2] = "", parts[i] + parts[i + 1]
        return [part for part in parts if part]
