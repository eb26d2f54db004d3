"""Tokenizers of `transformers`' families, built from SentencePiece models or vocabularies as its version 5 builds them.

Each family is a table: the order of ids, the normalization, the pre-tokenization and the special tokens of a source.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from ...backend.errors import DataError
from .added_tokens import add_tokens
from .languages import MBART, MBART50, NLLB
from .sentencepiece_model import CONTROL, USER_DEFINED, read_sentencepiece
from .tokenization import FastTokenizer
from .tokenizer import Languages, TargetRole
from .tokenizer_files import EXTRA, TokenizerFiles

Scores = list[tuple[str, float]]
_FAIRSEQ = ("bos", "pad", "eos", "unk")  # ids 0 to 3 of the families that fairseq trained
_DEFAULTS = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "sep": "</s>", "pad": "<pad>", "cls": "<s>"}
_T5_DEFAULTS = {"eos": "</s>", "unk": "<unk>", "pad": "<pad>"}


@dataclass(frozen=True)
class TokenizerFamily:
    """How a family's files become a tokenizer of the library `tokenizers`."""

    build: Callable[[TokenizerFiles], LibraryTokenizer]
    frame: tuple[str, ...]  # a source: $A is the text, "language" the source language, other entries roles of tokens
    defaults: Mapping[str, AddedToken | str] = field(default_factory=lambda: _DEFAULTS)
    # special tokens without a role if the settings list none
    extra: Callable[[TokenizerFiles], list[AddedToken]] = TokenizerFiles.extra_tokens
    languages: tuple[str, ...] = ()
    source_language: str = ""  # if the files do not set it
    role: TargetRole = "first_output"
    legacy_frame: tuple[str, ...] = ()  # with the setting `legacy_behaviour`

    def frame_of(self, files: TokenizerFiles) -> tuple[str, ...]:
        """The frame of a source: with NLLB's `legacy_behaviour`, that of mBART."""
        return self.legacy_frame if files.settings.get("legacy_behaviour") and self.legacy_frame else self.frame

    def languages_of(self, files: TokenizerFiles, fast: LibraryTokenizer) -> Languages | None:
        """The languages of a multilingual family's tokenizer: those of its tokens, and the tokens that were added.

        Raises:
            DataError: the files set an unknown one.
        """
        if not self.languages:
            return None
        named = {token.content for token in files.named_tokens(self.defaults).values()}
        added = (token.content for token in fast.get_added_tokens_decoder().values())
        codes = dict.fromkeys((*self.languages, *added))
        tokens = {code: code for code in codes if code not in named and fast.token_to_id(code) is not None}
        return Languages.of(tokens, files, self.source_language, self.role)


def family_tokenizer(files: TokenizerFiles, family: TokenizerFamily) -> FastTokenizer:
    """The tokenizer of a family, with all its special tokens. Raises: DataError if a file is missing or damaged."""
    fast = family.build(files)
    named = files.named_tokens(family.defaults)
    add_tokens(fast, files, named, files.extra_tokens() if EXTRA in files.settings else family.extra(files))
    tokens = {role: token.content for role, token in named.items()}
    return FastTokenizer(
        fast, tokens, frame=family.frame_of(files), languages=family.languages_of(files, fast), files=files
    )


def _sentencepiece(files: TokenizerFiles, name: str) -> Any:
    return read_sentencepiece(files.bytes(name), f"{files.name}/{name}")


def _scores(proto: Any) -> Scores:
    return [(piece.piece, piece.score) for piece in proto.pieces]


def _unigram(scores: Scores, unk: int, files: TokenizerFiles, name: str) -> LibraryTokenizer:
    try:
        return LibraryTokenizer(models.Unigram(scores, unk, False))
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"{files.name}/{name}: cannot be used: {error}") from None


def _normalizer(proto: Any, *steps: Any) -> Any:
    charsmap = proto.normalizer_spec.precompiled_charsmap
    return normalizers.Sequence([*([normalizers.Precompiled(charsmap)] if charsmap else []), *steps])


def _collapse_spaces() -> Any:
    return normalizers.Replace(Regex(r" {2,}"), " ")


def _mark_spaces(fast: Any, at_whitespace: bool = False) -> None:
    """Set ▁ before each word; `at_whitespace`: at any whitespace rather than at spaces only."""
    spaces = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    steps = [pre_tokenizers.WhitespaceSplit(), spaces]
    fast.pre_tokenizer = pre_tokenizers.Sequence(steps) if at_whitespace else spaces
    fast.decoder = decoders.Metaspace(prepend_scheme="always", split=True)


def _roles(files: TokenizerFiles, roles: tuple[str, ...]) -> list[str]:
    return [str(files.token(role, _DEFAULTS[role])) for role in roles]


BPE_MODEL, T5_MODEL = "sentencepiece.bpe.model", "spiece.model"


def _fairseq_scores(files: TokenizerFiles, proto: Any, languages: tuple[str, ...]) -> Scores:
    """fairseq's order of ids: four special tokens, SentencePiece's pieces but its three, languages, the mask."""
    last = (*languages, str(files.token("mask", "<mask>")))
    return [*((t, 0.0) for t in _roles(files, _FAIRSEQ)), *_scores(proto)[3:], *((token, 0.0) for token in last)]


def _mbart(files: TokenizerFiles) -> LibraryTokenizer:
    proto = _sentencepiece(files, BPE_MODEL)
    fast = _unigram(_fairseq_scores(files, proto, MBART), 3, files, BPE_MODEL)
    _mark_spaces(fast, at_whitespace=True)  # without SentencePiece's normalization, as transformers 5
    return fast


def _mbart50(files: TokenizerFiles) -> LibraryTokenizer:
    proto = _sentencepiece(files, BPE_MODEL)
    fast: Any = _unigram(_fairseq_scores(files, proto, MBART50), 3, files, BPE_MODEL)
    fast.normalizer = _normalizer(proto, _collapse_spaces())
    _mark_spaces(fast)
    return fast


def _nllb(files: TokenizerFiles) -> LibraryTokenizer:
    proto = _sentencepiece(files, BPE_MODEL)
    ids = _nllb_pieces(files)
    merges = _merges(ids)
    for code in _nllb_codes(files):
        ids.setdefault(code, len(ids))
    unk = str(files.token("unk", "<unk>"))
    fast: Any = LibraryTokenizer(models.BPE(ids, merges, unk_token=unk, fuse_unk=True))
    if proto.normalizer_spec.precompiled_charsmap:
        fast.normalizer = _normalizer(proto, _collapse_spaces())
    _mark_spaces(fast)
    return fast


def _nllb_pieces(files: TokenizerFiles) -> dict[str, int]:
    pieces = (piece.piece for piece in _sentencepiece(files, BPE_MODEL).pieces)
    return {token: i for i, token in enumerate(dict.fromkeys([*_roles(files, _FAIRSEQ), *pieces]))}


def _nllb_codes(files: TokenizerFiles) -> tuple[str, ...]:
    """The languages of the published models, in their order, unless the files say which tokens follow the pieces.

    The files of the first versions do not.
    """
    pieces, listed = _nllb_pieces(files), {token.content for token in files.extra_tokens()}
    if new := [i for i, token in files.added_tokens().items() if token.content not in pieces]:
        return () if min(new) == len(pieces) else NLLB
    return NLLB if not listed or listed >= {*NLLB} else ()


def _merges(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, by the token's id, then by the lengths of its parts."""
    cuts = (
        (i, cut, token[:cut], token[cut:])
        for token, i in ids.items()
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    )
    return [(left, right) for _, _, left, right in sorted(cuts)]


def _piece_tokens(files: TokenizerFiles, name: str = BPE_MODEL) -> list[AddedToken]:
    """The control and user-defined pieces of SentencePiece, which are found in a text before other pieces."""
    pieces = [p for p in _sentencepiece(files, name).pieces if p.type in (CONTROL, USER_DEFINED)]
    return [AddedToken(p.piece, normalized=False, special=p.type == CONTROL) for p in pieces]


def _special(tokens: Iterable[str]) -> list[AddedToken]:
    return [AddedToken(token, special=True) for token in tokens]


def _pegasus_extra(files: TokenizerFiles) -> list[AddedToken]:
    sentence_mask = files.settings.get("mask_token_sent", "<mask_1>")
    return _special([*([sentence_mask] if sentence_mask else []), *_pegasus_unused(files)])


def _pegasus_unused(files: TokenizerFiles) -> list[str]:
    return [f"<unk_{i}>" for i in range(2, files.settings.get("offset", 103))]


def _pegasus(files: TokenizerFiles) -> LibraryTokenizer:
    proto = _sentencepiece(files, T5_MODEL)
    # The defaults of the two masks are swapped in transformers 5, where the settings do not state them.
    masks = files.token("mask", "<mask_1>"), files.settings.get("mask_token_sent", "<mask_2>")
    stated = {token.content: i for i, token in files.added_tokens().items()}
    masks = sorted(filter(None, masks), key=lambda mask: stated.get(mask, 0))
    first = [*_roles(files, ("pad", "eos")), *dict.fromkeys(masks)]
    scores = [*((t, 0.0) for t in first), *((t, -100.0) for t in _pegasus_unused(files)), *_scores(proto)[2:]]
    unk = str(files.token("unk", "<unk>"))
    unk_id = next((i for i, score in enumerate(scores) if score == (unk, 0.0)), None)
    if unk_id is None:
        raise DataError(f"{files.name}/{T5_MODEL}: has no unknown token {unk!r}")
    fast: Any = _unigram(scores, unk_id, files, T5_MODEL)
    has_map = bool(proto.normalizer_spec.precompiled_charsmap)
    line_breaks = [] if has_map else [normalizers.Replace(Regex(r"\n"), " ")]
    fast.normalizer = _normalizer(proto, *line_breaks, _collapse_spaces())
    _mark_spaces(fast)
    return fast


def _sentinels(files: TokenizerFiles) -> list[str]:
    return [f"<extra_id_{i}>" for i in range(files.settings.get("extra_ids", 100))]


def _t5_extra(files: TokenizerFiles) -> list[AddedToken]:
    return [*_piece_tokens(files, T5_MODEL), *_special(_sentinels(files))]


def _t5(files: TokenizerFiles) -> LibraryTokenizer:
    proto = _sentencepiece(files, T5_MODEL)
    scores = [*_scores(proto), *((token, 0.0) for token in reversed(_sentinels(files)))]
    fast: Any = _unigram(scores, 2, files, T5_MODEL)
    if proto.normalizer_spec.precompiled_charsmap:
        fast.normalizer = _normalizer(proto)
    _mark_spaces(fast, at_whitespace=True)
    return fast


def _byte_level(add_prefix_space: bool) -> Callable[[TokenizerFiles], LibraryTokenizer]:
    """Byte-level BPE; `add_prefix_space`: whether a text starts with a space if the settings do not state it."""

    def build_bytes(files: TokenizerFiles) -> LibraryTokenizer:
        ids, text = files.vocabulary("vocab.json"), files.bytes("merges.txt")
        try:
            lines = [line for line in text.decode().split("\n") if line and not line.startswith("#version")]
            merges: Any = [tuple(line.split(" ")) for line in lines]
            fast: Any = LibraryTokenizer(models.BPE(ids, merges))
        except Exception as error:  # the library raises a bare Exception
            raise DataError(f"{files.name}/merges.txt: does not fit vocab.json: {error}") from None
        space = bool(files.settings.get("add_prefix_space", add_prefix_space))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
        fast.decoder = decoders.ByteLevel()
        return fast

    return build_bytes


_MASK = {"mask": AddedToken("<mask>", lstrip=True, special=True)}
_NORMALIZED_MASK = {"mask": AddedToken("<mask>", lstrip=True, normalized=True, special=True)}
_BART = TokenizerFamily(_byte_level(False), ("cls", "$A", "sep"), _DEFAULTS | {"mask": "<mask>"})

# tokenizer class of `transformers` -> its family. Blenderbot's sources have no EOS in version 5.
FAMILIES: dict[str, TokenizerFamily] = {
    "MBartTokenizer": TokenizerFamily(
        _mbart,
        ("$A", "eos", "language"),
        _DEFAULTS | _MASK,
        lambda files: [*_special(MBART), *_piece_tokens(files)],
        languages=MBART,
        source_language="en_XX",
        role="decoder_start",
    ),
    "MBart50Tokenizer": TokenizerFamily(
        _mbart50,
        ("language", "$A", "eos"),
        _DEFAULTS | _MASK,
        lambda files: [*_piece_tokens(files), *_special(MBART50)],
        languages=MBART50,
        source_language="en_XX",
    ),
    "NllbTokenizer": TokenizerFamily(
        _nllb,
        ("language", "$A", "eos"),
        _DEFAULTS | _NORMALIZED_MASK,
        lambda files: [*_piece_tokens(files), *_special(_nllb_codes(files))],
        languages=NLLB,
        source_language="eng_Latn",
        legacy_frame=("$A", "eos", "language"),
    ),
    "PegasusTokenizer": TokenizerFamily(_pegasus, ("$A", "eos"), _T5_DEFAULTS | {"mask": "<mask_2>"}, _pegasus_extra),
    "T5Tokenizer": TokenizerFamily(_t5, ("$A", "eos"), _T5_DEFAULTS, _t5_extra),
    "BartTokenizer": _BART,
    "RobertaTokenizer": _BART,
    "BlenderbotTokenizer": TokenizerFamily(_byte_level(True), ("$A",), _DEFAULTS | _MASK),
}
