"""Tokenizers that segment with SentencePiece and look its pieces up in a vocabulary: Marian's and M2M100's.

Their ids are not those of the SentencePiece model, and a piece may be missing from the vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

from ...backend.errors import DataError
from .added_tokens import AddedTokens
from .languages import M2M100
from .sentencepiece_model import read_sentencepiece
from .tokenizer import Languages, Tokenizer
from .tokenizer_files import TokenizerFiles

_SPACE = "▁"


class SentencePieceTokenizer(Tokenizer):
    """SentencePiece with a vocabulary of its own for each side."""

    def __init__(
        self,
        files: TokenizerFiles,
        encoder: Any,
        decoder: Any,
        ids: Mapping[str, int],
        added: Mapping[int, AddedToken],
        languages: Languages | None,
        defaults: Mapping[str, str],
    ):
        """`encoder`, `decoder`: SentencePiece models of the text and of its tokens; `added`: further tokens, by id."""
        added_ids = {token.content: i for i, token in added.items()}
        self._ids = {**ids, **added_ids}
        self._tokens = {i: token for token, i in (*ids.items(), *added_ids.items())}
        self._added, self._splits_added = AddedTokens(added.values()), files.splits_special_tokens
        roles = {role: token.content for role, token in files.named_tokens(defaults).items()}
        super().__init__(roles, ("language", "$A", "eos"), languages, files)
        self._encoder, self._decoder = encoder, decoder
        # Marian's texts may start with a language, as >>fra<<
        self._has_prefix = languages is None or languages.role == "source_prefix"
        self._omitted = {*roles.values(), *(token.content for token in files.extra_tokens())}
        if languages is not None and not self._has_prefix:  # the files may not list them
            self._omitted |= {*languages.tokens.values()} - {*added_ids}
        self._target: Tokenizer | None = None

    @property
    def target(self) -> Tokenizer:
        """The tokenizer of targets."""
        return self if self._target is None else self._target

    def with_target(self, target: "SentencePieceTokenizer") -> "SentencePieceTokenizer":
        """This tokenizer, for sources, with another one for targets."""
        self._target = target
        return self

    def vocabulary(self) -> Mapping[str, int]:
        return self._ids

    @property
    def special(self) -> set[str]:
        return self._omitted

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [[self._ids.get(token, self.unk_id) for token in self._segment(text)] for text in texts]

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        tokens = ([self._tokens.get(i) for i in ids] for ids in sentences)
        texts = (self._decoder.decode_pieces([t for t in row if t and t not in self._omitted]) for row in tokens)
        # in added tokens, only Marian's class replaces the mark
        texts = (text.replace(_SPACE, " ") if self._has_prefix else text for text in texts)
        return [self.clean_up(text.strip()) for text in texts]

    def token_of(self, number: int) -> str | None:
        return self._tokens.get(number)

    def _segment(self, text: str) -> list[str]:
        if self._splits_added:
            return self._pieces(text)
        parts = self._added.split(text)
        return [token for part in parts for token in ([part] if part in self._added else self._pieces(part))]

    def _pieces(self, text: str) -> list[str]:
        prefix = self.language_prefix(text)
        return [*([prefix] if prefix else []), *self._encoder.encode(text.removeprefix(prefix), out_type=str)]

    def language_prefix(self, text: str) -> str:
        """The token of a language with which one of Marian's sources begins, as >>fra<<; empty if there is none."""
        end = text.find("<<") if self._has_prefix and text.startswith(">>") else -1
        return text[: end + 2] if end >= 0 else ""


_DEFAULTS = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}


def marian(files: TokenizerFiles) -> SentencePieceTokenizer:
    """Marian's tokenizer of sources; its `target` is that of targets.

    Raises:
        DataError: a file is missing or damaged.
    """
    models = [_processor(files, name) for name in ("source.spm", "target.spm")]
    source_ids = files.vocabulary("vocab.json")
    separate = bool(files.settings.get("separate_vocabs"))
    target_ids = files.vocabulary("target_vocab.json") if separate else source_ids
    # transformers decodes with the source's model if the vocabulary is shared; both models give the same text
    decoder = models[1 if separate else 0]
    added = _added_tokens(files, source_ids, _DEFAULTS)  # on both sides, even with two vocabularies
    tokens = [*source_ids, *(token.content for token in added.values())]
    codes = {token[2:-2]: token for token in tokens if token.startswith(">>") and token.endswith("<<")}
    # Marian's own settings source_lang and target_lang name the training data rather than a token
    languages = Languages.of(codes, files, None, "source_prefix") if codes else None
    source = SentencePieceTokenizer(files, models[0], models[0], source_ids, added, languages, _DEFAULTS)
    return source.with_target(
        SentencePieceTokenizer(files, models[1], decoder, target_ids, added, languages, _DEFAULTS)
    )


def m2m100(files: TokenizerFiles) -> SentencePieceTokenizer:
    """M2M100's tokenizer: its languages' ids follow the vocabulary. Raises: DataError, as `marian`."""
    model, ids = _processor(files, "sentencepiece.bpe.model"), files.vocabulary("vocab.json")
    name = str(files.settings.get("language_codes") or "m2m100")
    if name not in M2M100:
        raise DataError(f"{files.name}: language_codes={name!r}: must be one of {', '.join(M2M100)}")
    defaults = _DEFAULTS | {"bos": "<s>", "sep": "</s>"}
    codes = {code: f"__{code}__" for code in M2M100[name]}
    ids |= {token: len(ids) + i for i, token in enumerate(codes.values())}
    added = _added_tokens(files, ids, defaults)
    contents = [token.content for token in added.values()]
    codes |= {
        token[2:-2]: token for token in contents if token.startswith("__") and token.endswith("__") and token[2:-2]
    }
    languages = Languages.of(codes, files, "en", "first_output")
    return SentencePieceTokenizer(files, model, model, ids, added, languages, defaults)


def _added_tokens(
    files: TokenizerFiles, vocabulary: Mapping[str, int], defaults: Mapping[str, str]
) -> dict[int, AddedToken]:
    """The added tokens by id: those that the files add, then the special tokens; new ids follow the vocabulary's.

    Raises:
        DataError: the vocabulary has no unknown token.
    """
    if (unk := files.token("unk", defaults["unk"])) not in vocabulary:
        raise DataError(f"{files.name}: its vocabulary has no unknown token {unk!r}")
    added = files.added_tokens()
    ids = {**vocabulary, **{token.content: i for i, token in added.items()}}
    listed = {token.content for token in added.values()}
    special = (*files.named_tokens(defaults).values(), *files.extra_tokens())
    for content in dict.fromkeys(token.content for token in special):
        if content and content not in listed:
            added[ids.setdefault(content, len(ids))] = AddedToken(content, special=True)
    return added


def _processor(files: TokenizerFiles, name: str) -> Any:
    from sentencepiece import SentencePieceProcessor

    content = files.bytes(name)
    read_sentencepiece(content, f"{files.name}/{name}")  # because the library accepts an empty model
    try:
        return SentencePieceProcessor(model_proto=content)
    except RuntimeError:
        raise DataError(f"{files.name}/{name}: is not a SentencePiece model") from None
