"""Reads pretrained tokenizers: `transformers` directories, tokenizer.json, SentencePiece models, vocabularies."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers
from tokenizers import Tokenizer as LibraryTokenizer

from ...backend.errors import ConversionError, DataError
from ...configs.data import ROLES, TokenizerConfig
from ...configs.json_text import parse_json
from ...configs.schema import TransformerConfig
from ...convert.checkpoint import CONFIG, TOKENIZER_FILES
from ...convert.formats.marian import read_vocabulary
from ...convert.formats.vocabularies import word_tokenizer
from . import byt5_tokenizer
from .corpus import read_lines
from .family_tokenizers import FAMILIES, family_tokenizer
from .sentencepiece_model import read_sentencepiece
from .sentencepiece_tokenizer import m2m100, marian
from .tokenization import FILE, LANGUAGE, FastTokenizer, prepare_text, read_fast
from .tokenizer import Tokenizer
from .tokenizer_files import CLASS, SETTINGS, TokenizerFiles

_SPACE = "▁"


def load_tokenizer(path: str, config: TokenizerConfig, model: Mapping[str, Any] | None = None) -> Tokenizer:
    """A tokenizer from a directory, a tokenizer.json, or a SentencePiece model (.model, .spm).

    `config` sets the special tokens if the files do not define them. Special tokens that a SentencePiece model lacks
    (mostly padding) are appended after its pieces, so that its ids do not change. A directory's settings define the
    special tokens around sources; for a single file, `config` does. `model`: config.json, by default the directory's.

    Raises:
        DataError: there is no tokenizer, it is damaged or of an unknown kind, or a special token is missing.
    """
    location = Path(path)
    if location.is_dir():
        content = {name: (location / name).read_bytes() for name in TOKENIZER_FILES if (location / name).is_file()}
        if model is None and (location / CONFIG).is_file():
            model = TokenizerFiles(path, {CONFIG: (location / CONFIG).read_bytes()}).json(CONFIG)
        tokenizer = tokenizer_of_files(content, path, config, model)
        if tokenizer is None:
            raise DataError(f"{location}: has no {FILE}, and no files of a tokenizer class that twinax knows")
        return tokenizer
    if not location.is_file():
        raise DataError(f"{location}: there is no such file")
    if location.suffix in (".model", ".spm"):
        return _from_sentencepiece(location, config)
    _check_alone(location)
    return _from_file(location.read_bytes(), path, config)


def _from_file(content: bytes, name: str, config: TokenizerConfig) -> Tokenizer:
    fast, tokens = read_fast(content, name), {role: getattr(config, f"{role}_token") for role in ROLES}
    for role, token in tokens.items():
        if fast.token_to_id(token) is None:
            special = [repr(t.content) for t in fast.get_added_tokens_decoder().values() if t.special]
            raise DataError(
                f"{name}: has no token {token!r} for {role}; set {role}_token in the tokenizer's settings "
                f"(its special tokens: {', '.join(special) or 'none'})"
            )
    return FastTokenizer(fast, tokens).frame_sources(config)


def tokenizer_of_files(
    content: Mapping[str, bytes], name: str, config: TokenizerConfig, model: Mapping[str, Any] | None
) -> Tokenizer | None:
    """The tokenizer of a directory that `transformers` reads; None if it has none that twinax can read.

    `name`: the directory's, for messages.

    Raises:
        DataError: as `load_tokenizer`.
    """
    if FILE in content and SETTINGS not in content:
        return _from_file(content[FILE], f"{name}/{FILE}", config)
    files = TokenizerFiles.of(content, name, model)
    kind = str(files.settings[CLASS])
    if FILE in content:
        tokenizer = FastTokenizer.of(files)
        languages = FAMILIES[kind].languages_of(files, tokenizer.fast) if kind in FAMILIES else None
        if languages is not None:
            tokenizer.frame, tokenizer.languages = FAMILIES[kind].frame_of(files), languages
        return tokenizer
    if kind in FAMILIES:
        return family_tokenizer(files, FAMILIES[kind])
    if kind == byt5_tokenizer.CLASS_NAME:  # it needs no file
        return byt5_tokenizer.byt5(files)
    build = {"MarianTokenizer": marian, "M2M100Tokenizer": m2m100}.get(kind)
    return build(files) if build is not None and content else None


def load_for_model(path: str, model: TransformerConfig, config: TokenizerConfig, side: int = 0) -> Tokenizer:
    """A tokenizer for existing weights; the path may also be a vocabulary (.txt): one token per line, in order of ids.

    In a file, the special tokens are those at the model's ids. `config` sets the special tokens around a source. For a
    vocabulary it also sets the unknown token, the normalization and the pre-tokenization. `side`: 0 source, 1 target.

    Raises:
        DataError: there is no tokenizer, it is damaged or of an unknown kind, or it does not match the model.
    """
    location = Path(path)
    if location.suffix in (".model", ".spm") and location.is_file() and model.bos_id is None:
        return _from_sentencepiece(location, config, has_bos=False)
    if location.is_dir() or location.suffix in (".model", ".spm"):
        return load_tokenizer(path, config)
    if not location.is_file():
        raise DataError(f"{location}: there is no such file")
    if location.suffix in (".yml", ".yaml") or _is_mapping(location):
        return _from_marian_vocabulary(location, model)
    _check_alone(location)
    fast = _from_vocabulary(location, config) if location.suffix == ".txt" else read_fast(location.read_bytes(), path)
    language = config.languages[side] if config.languages and location.suffix == ".txt" else None
    tokens = {"unk": getattr(fast.model, "unk_token", None) or config.unk_token}
    for role, i in (("pad", model.pad_id), ("bos", model.bos_id), ("eos", model.eos_id)):
        token = getattr(config, f"{role}_token") if i is None else fast.id_to_token(i)
        if token is None:
            raise DataError(f"{location}: has {fast.get_vocab_size():,} tokens, so none with the model's {role}_id={i}")
        tokens[role] = token
    if location.suffix == ".txt":
        _check_ids(location, fast, model, config)
    fast.add_special_tokens([tokens[role] for role in ROLES])
    return FastTokenizer(fast, tokens, language).frame_sources(config)


def _check_ids(path: Path, fast: LibraryTokenizer, model: TransformerConfig, config: TokenizerConfig) -> None:
    """Raises: DataError if a special token of a vocabulary has a different id than in the model."""
    tokens = {role: getattr(config, f"{role}_token") for role in ("pad", "bos", "eos")}
    ids = {f"{role}_id": fast.token_to_id(token) for role, token in tokens.items()}
    comparable_ids = {name: i for name, i in ids.items() if i is not None and getattr(model, name) is not None}
    name = next((name for name, i in comparable_ids.items() if i != getattr(model, name)), None)
    if name is not None:
        settings = ",".join(f"{key}={i}" for key, i in comparable_ids.items())
        raise DataError(
            f"{path}: {tokens[name[:3]]!r} has id {comparable_ids[name]}, but the model's {name} is "
            f"{getattr(model, name)}; if the file is right, set the model's ids, as in --config NAME:{settings}"
        )


def _check_alone(path: Path) -> None:
    """Raises: DataError if a tokenizer.json is incomplete because its directory pre-tokenizes with spaCy."""
    settings = path.with_name(SETTINGS)
    if path.name == FILE and settings.is_file() and f'"{LANGUAGE}"' in settings.read_text(encoding="utf-8"):
        raise DataError(f"{path}: {SETTINGS} sets spaCy for pre-tokenization; pass the directory {path.parent} instead")


def _from_vocabulary(path: Path, config: TokenizerConfig) -> LibraryTokenizer:
    words = list(read_lines(str(path)))
    if len(set(words)) < len(words):
        duplicate = next(word for word, times in Counter(words).items() if times > 1)
        raise DataError(f"{path}: must have each token once, but {duplicate!r} occurs again")
    if config.unk_token not in words:
        raise DataError(f"{path}: has no unknown token {config.unk_token!r}")
    fast = LibraryTokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, config.unk_token))
    # A vocabulary always lists words, even if a run's tokenizers are of another kind; it defines no normalization.
    word_config = replace(config, kind="word", split="whitespace", normalization="none")
    prepare_text(fast, config if config.kind == "word" else word_config)
    return fast


def _is_mapping(path: Path) -> bool:
    """Whether a file is JSON that maps tokens to ids, unlike a tokenizer.json."""
    if path.suffix != ".json":
        return False
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and all(isinstance(number, int) for number in content.values())


def _from_marian_vocabulary(path: Path, model: TransformerConfig) -> Tokenizer:
    """A vocabulary of Marian, whose text is segmented already; padding is that of the model.

    Source: marian-dev `data/default_vocab.cpp`, where EOS and the unknown token are `</s>` and `<unk>`, or Nematus'
    `eos` at id 0 and `UNK` at id 1.
    """
    try:
        ids = read_vocabulary(path)
    except ConversionError as error:
        raise DataError(str(error)) from None
    names = {"eos": ("eos", 0, "</s>"), "unk": ("UNK", 1, "<unk>")}
    roles = {role: old if ids.get(old) == number else new for role, (old, number, new) in names.items()}
    if missing := [token for token in roles.values() if token not in ids]:
        raise DataError(f"{path}: has no token {missing[0]}, which a vocabulary of Marian must have")
    if (number := ids[roles["eos"]]) != model.eos_id:
        raise DataError(
            f"{path}: EOS, {roles['eos']}, has id {number}, but the model's eos_id is {model.eos_id}: use the model's "
            "own vocabulary"
        )
    if model.pad_id in ids.values():
        raise DataError(
            f"{path}: has {len(ids):,} tokens, one of them at the id of padding, {model.pad_id}: use the model's own "
            "vocabulary"
        )
    roles["pad"] = "<pad>" if "<pad>" not in ids else f"<pad{model.pad_id}>"
    files = word_tokenizer({**ids, roles["pad"]: model.pad_id}, roles)
    return FastTokenizer(LibraryTokenizer.from_str(files[FILE].decode()), roles)


def _from_sentencepiece(path: Path, config: TokenizerConfig, has_bos: bool = True) -> Tokenizer:
    proto = read_sentencepiece(path.read_bytes(), str(path))
    trainer, kinds = proto.trainer_spec, proto.trainer_spec.ModelType
    if trainer.model_type not in (kinds.UNIGRAM, kinds.BPE) or trainer.treat_whitespace_as_suffix:
        raise DataError(f"{path}: only unigram and bpe models that put the space before a word are supported")
    user_symbols = [p.piece for p in proto.pieces if p.type == p.USER_DEFINED]
    if user_symbols and trainer.model_type == kinds.BPE:
        raise DataError(
            f"{path}: bpe models with user-defined symbols ({user_symbols[0]}) are not supported: ids would differ"
        )
    model = (_unigram if trainer.model_type == kinds.UNIGRAM else _bpe)(proto)
    fast = LibraryTokenizer(model)
    collapse_spaces = proto.normalizer_spec.remove_extra_whitespaces
    steps: list[Any] = []
    if proto.normalizer_spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(proto.normalizer_spec.precompiled_charsmap))
    if collapse_spaces:  # U+0020 only, unlike `normalizers.Strip`
        steps += [normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    steps.append(normalizers.Replace(" ", _SPACE))
    if collapse_spaces:  # as in SentencePiece, this includes the symbol itself
        steps.append(normalizers.Replace(Regex(rf"{_SPACE}+\z"), ""))
    # Not `pre_tokenizers.Metaspace`, which adds no space before a text that begins with one.
    steps += [normalizers.Prepend(_SPACE)] if proto.normalizer_spec.add_dummy_prefix else []
    # Not split at spaces: SentencePiece segments the whole sentence, and pieces may contain a space.
    fast.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    decode: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    decode += [decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []
    fast.decoder = decoders.Sequence(decode)  # pyright: ignore[reportAttributeAccessIssue]
    ids = {"pad": trainer.pad_id, "bos": trainer.bos_id, "eos": trainer.eos_id, "unk": trainer.unk_id}
    tokens = {role: proto.pieces[n].piece if n >= 0 else getattr(config, f"{role}_token") for role, n in ids.items()}
    if not has_bos:  # a model without BOS has no id for one
        del tokens["bos"]
    fast.add_special_tokens(list(tokens.values()))
    return FastTokenizer(fast, tokens).frame_sources(config)


def _unigram(proto: Any) -> Any:
    scores = [p.score for p in proto.pieces if p.type == p.NORMAL]
    unused_score = min(scores) - 100
    best_score = max(scores)

    def score(p: Any) -> float:
        if p.type == p.USER_DEFINED:  # as in SentencePiece: always better than its parts
            return len(p.piece.encode()) * best_score - 0.1
        return unused_score if p.type == p.UNUSED else p.score

    vocab = [(p.piece, score(p)) for p in proto.pieces]
    return models.Unigram(vocab, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)


def _bpe(proto: Any) -> Any:
    """SentencePiece merges the neighbors that form the best-scored piece, so every split of a piece is a merge."""
    ids = {p.piece: i for i, p in enumerate(proto.pieces)}
    scores = {p.piece: p.score for p in proto.pieces if p.type == p.NORMAL}
    merges = []
    for piece in sorted(scores, key=lambda piece: -scores[piece]):
        cuts = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        merges += sorted((cut for cut in cuts if set(cut) <= set(scores)), key=lambda cut: (ids[cut[0]], ids[cut[1]]))
    unk = proto.pieces[proto.trainer_spec.unk_id].piece
    return models.BPE(ids, merges, unk_token=unk, fuse_unk=True, byte_fallback=proto.trainer_spec.byte_fallback)
