"""Tokenizers that others trained: directories of `transformers`, tokenizer.json, SentencePiece models, word lists."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from ...configs.data import ROLES, TokenizerConfig
from ...configs.errors import DataError
from ...configs.schema import TransformerConfig
from .corpus import read_lines
from .tokenization import FILE, LANGUAGE, SETTINGS, Tokenizer, prepare_text, read_fast

_SPACE = "▁"


def load_tokenizer(path: str, config: TokenizerConfig) -> Tokenizer:
    """A tokenizer from a directory, a tokenizer.json, or a SentencePiece model (.model, .spm).

    Where the files do not say which tokens are special, `config` names them. A SentencePiece model gets those that it
    lacks (mostly padding) behind its own pieces, so that its ids stay. What stands around sources, a directory says
    itself; of a file, `config` does.

    Raises:
        DataError: there is no tokenizer, it is damaged or of an unknown kind, or a special token is missing.
    """
    place = Path(path)
    if place.is_dir() and (place / FILE).is_file() and (place / SETTINGS).is_file():
        return Tokenizer.load(place)
    if place.is_dir():
        place = place / FILE
    if not place.is_file():
        raise DataError(f"{place}: there is no such file")
    if place.suffix in (".model", ".spm"):
        return _from_sentencepiece(place, config)
    _check_alone(place)
    fast, tokens = read_fast(place), {role: getattr(config, f"{role}_token") for role in ROLES}
    for role, token in tokens.items():
        if fast.token_to_id(token) is None:
            special = [repr(t.content) for t in fast.get_added_tokens_decoder().values() if t.special]
            raise DataError(
                f"{place}: has no token {token!r} for {role}; name it by {role}_token of the tokenizer's settings "
                f"(its special tokens: {', '.join(special) or 'none'})"
            )
    return Tokenizer(fast, tokens).frame_sources(config)


def load_for_model(path: str, model: TransformerConfig, config: TokenizerConfig, side: int = 0) -> Tokenizer:
    """A tokenizer for weights that exist, also a vocabulary (.txt): a token per line, in the order of ids.

    Of a file, special tokens are those at the model's ids. `config` names the special tokens around a source and, for a
    vocabulary, the unknown token, the normalization and the pre-tokenization; `side` is 0 for source, 1 for target.

    Raises:
        DataError: there is no tokenizer, it is damaged or of an unknown kind, or not of this model.
    """
    place = Path(path)
    if place.is_dir() or place.suffix in (".model", ".spm"):
        return load_tokenizer(path, config)
    if not place.is_file():
        raise DataError(f"{place}: there is no such file")
    _check_alone(place)
    fast = _from_vocabulary(place, config) if place.suffix == ".txt" else read_fast(place)
    language = config.languages[side] if config.languages and place.suffix == ".txt" else None
    tokens = {"unk": getattr(fast.model, "unk_token", None) or config.unk_token}
    for role, i in (("pad", model.pad_id), ("bos", model.bos_id), ("eos", model.eos_id)):
        token = getattr(config, f"{role}_token") if i is None else fast.id_to_token(i)
        if token is None:
            raise DataError(f"{place}: has {fast.get_vocab_size():,} tokens, and none for the model's {role}_id={i}")
        tokens[role] = token
    if place.suffix == ".txt":
        _check_ids(place, fast, model, config)
    fast.add_special_tokens([tokens[role] for role in ROLES])
    return Tokenizer(fast, tokens, language).frame_sources(config)


def _check_ids(path: Path, fast: FastTokenizer, model: TransformerConfig, config: TokenizerConfig) -> None:
    """Raises: DataError where a special token of a vocabulary has another id than the model's."""
    tokens = {role: getattr(config, f"{role}_token") for role in ("pad", "bos", "eos")}
    ids = {f"{role}_id": fast.token_to_id(token) for role, token in tokens.items()}
    known = {name: i for name, i in ids.items() if i is not None and getattr(model, name) is not None}
    if wrong := [name for name, i in known.items() if i != getattr(model, name)]:
        settings = ",".join(f"{name}={i}" for name, i in known.items())
        raise DataError(
            f"{path}: {tokens[wrong[0][:3]]!r} has id {known[wrong[0]]} and the model's {wrong[0]} is "
            f"{getattr(model, wrong[0])}; where the file is right, set the model's ids, as in --config NAME:{settings}"
        )


def _check_alone(path: Path) -> None:
    """Raises: DataError where a file is not the whole tokenizer, for spaCy cuts words before it."""
    beside = path.with_name(SETTINGS)
    if path.name == FILE and beside.is_file() and f'"{LANGUAGE}"' in beside.read_text(encoding="utf-8"):
        raise DataError(f"{path}: spaCy cuts words before it, as {SETTINGS} says; give the directory {path.parent}")


def _from_vocabulary(path: Path, config: TokenizerConfig) -> FastTokenizer:
    words = list(read_lines(str(path)))
    if len(set(words)) < len(words):
        twice = next(word for word, times in Counter(words).items() if times > 1)
        raise DataError(f"{path}: must have each token once; {twice!r} is there again")
    if config.unk_token not in words:
        raise DataError(f"{path}: has no token {config.unk_token!r} for what it does not know")
    fast = FastTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, config.unk_token))
    # A vocabulary is of words, whatever a run's tokenizers are; it says nothing of normalization.
    words_of = replace(config, kind="word", split="whitespace", normalization="none")
    prepare_text(fast, config if config.kind == "word" else words_of)
    return fast


def _from_sentencepiece(path: Path, config: TokenizerConfig) -> Tokenizer:
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2 as schema

    proto: Any = schema.ModelProto()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError:
        proto.Clear()
    if not proto.pieces:
        raise DataError(f"{path}: is no SentencePiece model")
    trainer, kinds = proto.trainer_spec, proto.trainer_spec.ModelType
    if trainer.model_type not in (kinds.UNIGRAM, kinds.BPE) or trainer.treat_whitespace_as_suffix:
        raise DataError(f"{path}: only unigram and bpe models with the space before a word can be read")
    own = [p.piece for p in proto.pieces if p.type == p.USER_DEFINED]
    if own and trainer.model_type == kinds.BPE:
        raise DataError(f"{path}: a bpe model with symbols of its own ({own[0]}) cannot be read to the same ids")
    model = (_unigram if trainer.model_type == kinds.UNIGRAM else _bpe)(proto)
    fast = FastTokenizer(model)
    spaces = proto.normalizer_spec.remove_extra_whitespaces
    steps: list[Any] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    if spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    fast.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    prepend: Any = "always" if proto.normalizer_spec.add_dummy_prefix else "never"
    # Not split at spaces: SentencePiece looks at the sentence as a whole, and pieces may hold a space.
    fast.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)  # pyright: ignore
    decode: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    decode += [decoders.Strip(" ", 1, 0)] if prepend == "always" else []
    fast.decoder = decoders.Sequence(decode)  # pyright: ignore[reportAttributeAccessIssue]
    ids = {"pad": trainer.pad_id, "bos": trainer.bos_id, "eos": trainer.eos_id, "unk": trainer.unk_id}
    tokens = {role: proto.pieces[n].piece if n >= 0 else getattr(config, f"{role}_token") for role, n in ids.items()}
    fast.add_special_tokens(list(tokens.values()))
    return Tokenizer(fast, tokens).frame_sources(config)


def _unigram(proto: Any) -> Any:
    scores = [p.score for p in proto.pieces if p.type == p.NORMAL]
    never, most = min(scores) - 100, max(scores)

    def score(p: Any) -> float:
        if p.type == p.USER_DEFINED:  # as SentencePiece does it: always better than its parts
            return len(p.piece.encode()) * most - 0.1
        return never if p.type == p.UNUSED else p.score

    vocab = [(p.piece, score(p)) for p in proto.pieces]
    return models.Unigram(vocab, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)


def _bpe(proto: Any) -> Any:
    """SentencePiece joins whatever neighbours make the piece with the best score: every cut of a piece is a merge."""
    ids = {p.piece: i for i, p in enumerate(proto.pieces)}
    scores = {p.piece: p.score for p in proto.pieces if p.type == p.NORMAL}
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += sorted((cut for cut in cuts if set(cut) <= set(scores)), key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    unk = proto.pieces[proto.trainer_spec.unk_id].piece
    return models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=proto.trainer_spec.byte_fallback)
