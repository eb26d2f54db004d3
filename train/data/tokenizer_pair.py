"""The tokenizers of a run: loaded, or trained on its sentences and kept for the next start."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import tokenizers as library

from ...backend.cache_directory import cache_directory
from ...backend.errors import ConversionError, DataError
from ...configs.data import TokenizerConfig
from ...convert.checkpoint import CONFIG, Checkpoint
from ...convert.io.atomic_io import new_directory
from ...convert.io.checksums import checksum_of_json, checksums_of_files
from ..text.pretrained import load_tokenizer, tokenizer_of_files
from ..text.tokenization import train_tokenizers
from ..text.tokenizer import Tokenizer
from .parts import Part

# Tokenizer folders of a run directory or checkpoint: one for both sides, or one per side.
_JOINT, _SEPARATE = ("tokenizer",), ("source_tokenizer", "target_tokenizer")
Say = Callable[[str], None]


class Tokenizers(NamedTuple):
    """The source and the target tokenizer; the same object if they are joint."""

    src: Tokenizer
    tgt: Tokenizer

    def save(self, directory: Path) -> None:
        """Write them as `transformers` loads them: into tokenizer, or source_tokenizer and target_tokenizer.

        Folders left by an interrupted start are removed first.
        """
        for name in (*_JOINT, *_SEPARATE):
            shutil.rmtree(directory / name, ignore_errors=True)
        for name, tokenizer in zip(_JOINT if self.src.target is self.tgt else _SEPARATE, self, strict=False):
            tokenizer.save(directory / name)

    def with_languages(self, source: str | None, target: str | None) -> "Tokenizers":
        """The same tokenizers for other languages, by code. Raises: DataError if a tokenizer has no such language."""
        src = self.src.with_languages(source, target)
        joint = self.src.target is self.tgt
        return Tokenizers(src, src.target if joint else self.tgt.with_languages(source, target))

    @property
    def target_language(self) -> tuple[str, int] | None:
        """(config field of the target language's token, its id); None if the language is not set, or in the source.

        Raises:
            DataError: the tokenizer of targets lacks the language's token.
        """
        languages = self.tgt.languages if self.src.languages is None else self.src.languages
        if languages is None or languages.target is None or languages.role == "source_prefix":
            return None
        field = "decoder_start_id" if languages.role == "decoder_start" else "forced_bos_id"
        token = languages.tokens[languages.target]
        if (number := self.tgt.id_of(token)) is None:
            raise DataError(f"tgt_lang={languages.target!r}: the target tokenizer has no token {token!r}")
        return field, number

    @classmethod
    def load(cls, directory: Path) -> "Tokenizers | None":
        """The tokenizers that `save` wrote into a directory, or None. Raises: DataError if one is damaged."""
        names = next((names for names in (_JOINT, _SEPARATE) if (directory / names[0]).is_dir()), None)
        return names and cls.of([load_tokenizer(str(directory / name), TokenizerConfig()) for name in names])

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, config: TokenizerConfig, name: str) -> "Tokenizers | None":
        """The tokenizers of a checkpoint, or None; `config` sets special tokens that the files do not define.

        Raises:
            DataError: one is damaged; the message begins with `name`.
        """
        content: dict[str, dict[str, bytes]] = {}
        for path, data in checkpoint.files.items():
            folder, _, file = path.rpartition("/")
            content.setdefault(folder, {})[file] = data
        folders = next((folders for folders in (_JOINT, _SEPARATE) if folders[0] in content), ())
        model = checkpoint.documents.get(CONFIG, {})
        tokenizers: list[Tokenizer] = []
        for folder in folders:
            # in a directory of `transformers`, the tokenizer's files are not in a folder of their own
            place = name if checkpoint.layout is not None else f"{name}/{folder}"
            tokenizer = tokenizer_of_files(content.get(folder, {}), place, config, model)
            if tokenizer is None:
                return None
            tokenizers.append(tokenizer)
        return cls.of(tokenizers) if tokenizers else None

    @classmethod
    def of(cls, tokenizers: Sequence[Tokenizer]) -> "Tokenizers":
        """From one tokenizer for both sides, or from two."""
        return cls(tokenizers[0], tokenizers[-1].target)

    def digest(self) -> str:
        """A hash of the files that `save` writes."""
        with TemporaryDirectory() as folder:
            self.save(Path(folder))
            return checksum_of_json(checksums_of_files(Path(folder)))


def make_tokenizers(config: TokenizerConfig, parts: Sequence[Part], say: Say) -> Tokenizers:
    """Those that the config loads, else those trained on a sample of the parts, or kept from an earlier training.

    Raises:
        DataError: a tokenizer cannot be loaded or trained.
    """
    if config.load:
        return Tokenizers.of([load_tokenizer(path, config) for path in config.load])
    settings = {**asdict(config), "load": None, "bpe_dropout": None, "src_lang": None, "tgt_lang": None}
    key = {"parts": [part.key() for part in parts], "settings": settings, "version": library.__version__}
    folder = cache_directory("tokenizers") / checksum_of_json(key)
    if folder.is_dir():
        with suppress(DataError):
            if (known := Tokenizers.load(folder)) is not None:
                return known
    total = sum(part.originals for part in parts)
    size = min(config.sample, total)
    noun = "the tokenizer" if config.joint else "the tokenizers"
    pairs = f" on {size:,} of {total:,} pairs" if size < total else ""
    say(f"training {noun}{pairs}: {config.kind}, at most {config.vocab_size:,} tokens")
    trained = Tokenizers.of(train_tokenizers(config, *(_sample(parts, side, size) for side in (0, 1))))
    with suppress(ConversionError), new_directory(folder) as temporary:  # another process may be faster
        trained.save(temporary)
    return Tokenizers.load(folder) or trained


def _sample(parts: Sequence[Part], side: int, size: int) -> Iterator[str]:
    """The sentences of `size` pairs, evenly spaced in the parts one after another."""
    total = sum(part.originals for part in parts)
    for number, pair in enumerate(chain.from_iterable(part.texts() for part in parts)):
        if (number + 1) * size // total > number * size // total:
            yield pair[side]
