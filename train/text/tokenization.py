"""Text to ids and back, with fast tokenizers of the library `tokenizers`.

A tokenizer is saved in the form that `transformers.PreTrainedTokenizerFast` loads.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as LibraryTokenizer

from ...backend.errors import DataError
from ...configs.data import ROLES, TokenizerConfig
from .added_tokens import add_tokens
from .spacy_pretokenizer import check_language, split_words
from .tokenizer import Languages, Tokenizer
from .tokenizer_files import CLASS, SETTINGS, TokenizerFiles

FILE = "tokenizer.json"
LANGUAGE = "spacy_language"  # in SETTINGS

# Word tokenizers: split -> (pre-tokenizer, decoder); the decoder joins words with spaces, or without.
_WORDS: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    "whitespace": (pre_tokenizers.WhitespaceSplit, None),
    "punctuation": (
        lambda: pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation()]),
        None,
    ),
    "word_characters": (pre_tokenizers.Whitespace, None),
    # a space before each of , . ! and ? begins a token. Source: Zhang et al., Dive into Deep Learning, section 10.5.
    "d2l": (lambda: pre_tokenizers.Split(Regex(r"[,.!?][^\s,.!?]*|[^\s,.!?]+"), "removed", invert=True), None),
    "unspaced": (
        lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex("."), "isolated")]
        ),
        decoders.Fuse,
    ),
}
# Subword tokenizers: split -> (pre-tokenizer, decoder); spaces are marked, so that decoding is lossless.
_PARTS: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {
    "whitespace": (pre_tokenizers.Metaspace, decoders.Metaspace),
    "punctuation": (
        lambda: pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]),
        decoders.Metaspace,
    ),
    "unspaced": (lambda: pre_tokenizers.Metaspace(split=False), decoders.Metaspace),
    "bytes": (lambda: pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel),
}
_NORMALIZERS: dict[str, Callable[[], Any]] = {"nfc": normalizers.NFC, "nfkc": normalizers.NFKC}


class FastTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`; `language`: pre-tokenize with spaCy's rules for it.

    Without a `frame`, the library's own post-processor sets the special tokens around a source.

    Raises:
        DataError: a token for one of the roles pad, eos, unk is missing; or spaCy is needed but not installed.
    """

    def __init__(
        self,
        fast: LibraryTokenizer,
        special_tokens: Mapping[str, str],
        language: str | None = None,
        frame: tuple[str, ...] | None = None,
        languages: Languages | None = None,
        files: TokenizerFiles | None = None,
    ):
        self.fast, self.language = fast, language
        if files is not None:
            fast.encode_special_tokens = files.splits_special_tokens
        if language is not None:
            check_language(language)
        super().__init__(special_tokens, frame, languages, files)

    @property
    def vocab_size(self) -> int:
        return self.fast.get_vocab_size()

    def vocabulary(self) -> Mapping[str, int]:
        return self.fast.get_vocab()

    @property
    def special(self) -> set[str]:
        return {token.content for token in self.fast.get_added_tokens_decoder().values() if token.special}

    def id_of(self, token: str) -> int | None:
        return self.fast.token_to_id(token)

    def token_of(self, number: int) -> str | None:
        return self.fast.id_to_token(number)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._encode(texts, add_special_tokens=False)]

    def encodings(self, texts: Sequence[str]) -> list[Any]:
        """The library's encodings of texts, which state the word of each token, without special tokens around them."""
        return self._encode(texts, add_special_tokens=False)

    def encode_sources(self, texts: Sequence[str], longest: int | None = None) -> list[list[int]]:
        if self.frame is not None:
            return super().encode_sources(texts, longest)
        if longest is not None:
            self.fast.enable_truncation(longest)
        try:
            return [encoding.ids for encoding in self._encode(texts, add_special_tokens=True)]
        finally:
            self.fast.no_truncation()

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[Any]:
        words: Any = list(texts) if self.language is None else list(split_words(texts, self.language))
        try:
            return self.fast.encode_batch_fast(
                words, is_pretokenized=self.language is not None, add_special_tokens=add_special_tokens
            )
        except (MemoryError, TypeError):
            raise
        except Exception as error:  # the library raises a bare Exception
            raise DataError(f"the tokenizer cannot encode the text: {error}") from None

    @property
    def added(self) -> int:
        return self.fast.num_special_tokens_to_add(False) if self.frame is None else super().added

    @property
    def around(self) -> tuple[list[int], list[int]]:
        if self.frame is not None:
            return super().around
        (framed,), (inner,) = self.encode_sources(["a"]), self.encode(["a"])
        before = next(i for i in range(len(framed)) if framed[i : i + len(inner)] == inner)
        return framed[:before], framed[before + len(inner) :]

    @property
    def lowercases(self) -> bool:
        return self.fast.normalizer is not None and self.fast.normalizer.normalize_str("A") == "a"

    def frame_sources(self, config: TokenizerConfig) -> "FastTokenizer":
        """Set the special tokens around sources from `config`; return self."""
        roles = [role for role in ("bos", "eos") if getattr(config, f"source_{role}")]
        if "bos" in roles and self.bos_id is None:
            raise DataError("source_bos=True: the tokenizer has no token for bos")
        tokens = {role: (self.special_tokens[role], getattr(self, f"{role}_id")) for role in roles}
        template = [tokens[role][0] if role in tokens else "" for role in ("bos", "eos")]
        single = " ".join(filter(None, (template[0], "$A", template[1])))
        try:
            processor = processors.TemplateProcessing(single=single, special_tokens=[*tokens.values()])
        except ValueError as error:  # a colon or a space has a meaning in the library's templates
            names = ", ".join(repr(token) for token, _ in tokens.values())
            raise DataError(f"{names}: cannot be put around a source: {error}") from None
        self.fast.post_processor = processor  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        texts = self.fast.decode_batch([list(ids) for ids in sentences], skip_special_tokens=True)
        return texts if isinstance(self.fast.model, models.BPE) else [self.clean_up(text) for text in texts]

    def show(self, ids: Sequence[int]) -> list[str]:
        """Each token in readable form: bytes are decoded if they form whole characters, ▁ marks a preceding space."""
        tokens = super().show(ids)
        if not isinstance(self.fast.decoder, decoders.ByteLevel):
            return tokens
        texts = self.fast.decode_batch([[i] for i in ids], skip_special_tokens=False)
        readable = [f"▁{text[1:]}" if text.startswith(" ") else text for text in texts]
        return [token if not text or "\ufffd" in text else text for token, text in zip(tokens, readable, strict=True)]

    def save(self, directory: str | PathLike[str]) -> None:
        """Write the files that were read, or the two that `PreTrainedTokenizerFast.from_pretrained` reads.

        With spaCy pre-tokenization, that class needs the words as input, with `is_split_into_words=True`.
        """
        if self.files is not None:
            return super().save(directory)
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.fast.save(str(Path(directory) / FILE))
        kind = "PreTrainedTokenizerFast" if self.languages is None else self.languages.family
        settings: dict[str, Any] = {CLASS: kind, "clean_up_tokenization_spaces": False}
        settings |= {f"{role}_token": token for role, token in self.special_tokens.items()}
        settings |= {LANGUAGE: self.language} if self.language is not None else {}
        self._write_settings(directory, settings)

    @classmethod
    def of(cls, files: TokenizerFiles) -> "FastTokenizer":
        """A tokenizer from files with tokenizer.json that `save` or `transformers` wrote.

        Raises:
            DataError: a file is missing or damaged, or a special token is missing.
        """
        fast = read_fast(files.bytes(FILE), f"{files.name}/{FILE}")
        language = files.settings.get(LANGUAGE)
        if not isinstance(language, str | None):
            raise DataError(f"{files.name}/{SETTINGS}: {LANGUAGE} is {language!r}, not a language's code")
        named = {name: token for name, token in files.named_tokens({}).items() if name not in ROLES}
        add_tokens(fast, files, named, files.extra_tokens())
        texts = {role: token for role in ROLES if (token := files.token(role)) is not None}
        try:
            return cls(fast, texts, language, files=files)
        except DataError as error:
            raise DataError(f"{files.name}: {error}") from None


def read_fast(content: bytes, name: str) -> LibraryTokenizer:
    """The library's tokenizer in a file. Raises: DataError if it cannot be read."""
    try:
        fast = LibraryTokenizer.from_buffer(content)
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"{name}: is not a tokenizer: {' '.join(str(error).split())[:200]}") from None
    # A file may set truncation, padding and dropout; twinax does them itself.
    fast.no_truncation()
    fast.no_padding()
    if isinstance(fast.model, models.BPE):
        fast.model.dropout = None
    return fast


def train_tokenizers(config: TokenizerConfig, sources: Iterable[str], targets: Iterable[str]) -> list[FastTokenizer]:
    """One tokenizer if it is joint and uses no spaCy rules, else one per side.

    Raises:
        DataError: one cannot be trained, or spaCy is needed but not installed.
    """
    if not config.languages:
        sides = [chain(sources, targets)] if config.joint else [sources, targets]
        return [train_tokenizer(config, texts) for texts in sides]
    for language in config.languages:
        check_language(language)
    sides = [split_words(texts, language) for texts, language in zip((sources, targets), config.languages, strict=True)]
    tokenizers = [train_tokenizer(config, texts) for texts in ([chain(*sides)] if config.joint else sides)]
    return [
        FastTokenizer(tokenizer.fast, tokenizer.special_tokens, language)
        for tokenizer, language in zip(tokenizers * (2 if config.joint else 1), config.languages, strict=True)
    ]


def train_tokenizer(config: TokenizerConfig, sentences: Iterable[str | list[str]]) -> FastTokenizer:
    """A tokenizer trained on sentences, or on lists of words if `config` sets languages.

    If `config` sets no vocabulary size, it follows from the number of sentences.

    Source: Sennrich et al. 2016 (bpe); Kudo 2018 (unigram).
    """
    if config.vocab_size is None:
        sentence_list = list(sentences)
        config, sentences = config.sized(len(sentence_list)), iter(sentence_list)
    special, unk = [*config.special_tokens, *config.tags], config.unk_token
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "special_tokens": special,
        "show_progress": False,
    }
    model: Any
    trainer: Any
    if config.kind == "word":
        model = models.WordLevel(unk_token=unk)
        trainer = trainers.WordLevelTrainer(min_frequency=config.min_frequency, **common)
    elif config.kind == "bpe":
        model = models.BPE(unk_token=unk)
        alphabet = pre_tokenizers.ByteLevel.alphabet() if config.split == "bytes" else []
        max_characters = max(common["vocab_size"] - len(special), 1)  # rarer characters become unknown
        trainer = trainers.BpeTrainer(
            min_frequency=config.min_frequency, initial_alphabet=alphabet, limit_alphabet=max_characters, **common
        )
    else:
        model = models.Unigram()
        trainer = trainers.UnigramTrainer(unk_token=unk, **common)
    fast = LibraryTokenizer(model)
    prepare_text(fast, config)
    try:
        fast.train_from_iterator(sentences, trainer)
    except DataError:  # of the sentences
        raise
    except Exception as error:  # the library raises a bare Exception
        raise DataError(f"a {config.kind} tokenizer of {config.vocab_size} tokens cannot be trained: {error}") from None
    return FastTokenizer(fast, {role: getattr(config, f"{role}_token") for role in ROLES}).frame_sources(config)


def prepare_text(fast: LibraryTokenizer, config: TokenizerConfig) -> None:
    """Set the normalizer, pre-tokenizer and decoder of a tokenizer from a config.

    With spaCy there is no further pre-tokenizer: each spaCy token, whitespace included, is one word.
    """
    steps = [_NORMALIZERS[config.normalization]()] if config.normalization != "none" else []
    steps += [normalizers.Lowercase()] if config.lowercase else []
    fast.normalizer = normalizers.Sequence(steps)  # pyright: ignore[reportAttributeAccessIssue]
    make_split, make_decoder = (_WORDS if config.kind == "word" else _PARTS)[config.split]
    if not config.languages:
        fast.pre_tokenizer = make_split()  # pyright: ignore[reportAttributeAccessIssue]
    if make_decoder is not None:
        fast.decoder = make_decoder()  # pyright: ignore[reportAttributeAccessIssue]
