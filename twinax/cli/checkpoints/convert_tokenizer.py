"""The tokenizer that `twinax convert --tokenizer` adds to a checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ...backend.errors import CheckpointError, DataError
from ...configs.data import TokenizerConfig
from ...convert import Checkpoint
from ...convert.formats.file_layouts import system_of
from ...inference.translator import Translator
from ...published.registry import RECIPES
from ...train.data.fitting import check_fits
from ...train.data.tokenizer_pair import Tokenizers
from ...train.text.pretrained import load_for_model
from ...train.text.tokenization import FILE
from ..usage import UsageError


def tokenizer_files(
    checkpoint: Checkpoint, paths: Sequence[str], languages: Sequence[str]
) -> tuple[dict[str, bytes], str]:
    """(tokenizer files as in a checkpoint, for both sides or one each; the pre-tokenization of a vocabulary).

    Raises:
        UsageError: the checkpoint has a usable tokenizer.
        DataError: a tokenizer cannot be read, or does not match the model.
    """
    config = checkpoint.config
    if checkpoint.files and _has_tokenizer(checkpoint):
        raise UsageError(
            f"--tokenizer {paths[0]}: the checkpoint has a tokenizer ({', '.join(checkpoint.files)}); omit the flag"
        )
    if len(paths) > 2:
        raise UsageError(f"--tokenizer {' '.join(paths)}: pass one, or one per side (source, target)")
    system = checkpoint.system or system_of(config)
    if languages and not any(path.endswith(".txt") for path in paths):
        raise UsageError(
            f"--languages {' '.join(languages)}: is for vocabularies (.txt) only; {paths[0]} has its own rules"
        )
    tokenizer_config = RECIPES[system].tokenizer if system else TokenizerConfig()
    if languages:
        tokenizer_config = replace(tokenizer_config, kind="word", languages=tuple(languages), split="whitespace")
    # A shared vocabulary gives two tokenizers if spaCy pre-tokenizes each side with its own rules.
    sides = [paths[0], paths[-1]] if tokenizer_config.languages and paths[0].endswith(".txt") else paths
    tokenizers = Tokenizers.of(
        [load_for_model(path, config, tokenizer_config, side) for side, path in enumerate(sides)]
    )
    for side, tokenizer in zip(("src", "tgt"), tokenizers, strict=True):
        check_fits(config, tokenizer, side)
    pretokenization = ""
    if any(path.endswith(".txt") for path in paths) and (system or languages):
        rule = (
            f"spaCy, {' and '.join(tokenizer_config.languages)}"
            if tokenizer_config.languages
            else tokenizer_config.split
        )
        pretokenization = rule if languages or system is None else f"{rule}, as in {system}"
    with TemporaryDirectory() as folder:
        tokenizers.save(Path(folder))
        files = [path for path in Path(folder).glob("*/*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(files)}, pretokenization


def _has_tokenizer(checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a tokenizer that twinax can read and that matches its model."""
    try:
        return bool(Translator(checkpoint).tokenizers)
    except (CheckpointError, DataError):
        return False


def with_tokenizer(source_files: Mapping[str, bytes], new_files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The files of a checkpoint and of its new tokenizer, which is the only one read from then on."""
    return {name: content for name, content in source_files.items() if Path(name).name != FILE} | dict(new_files)


def describe_changes(
    source_files: Mapping[str, bytes], new_files: Mapping[str, bytes], files: Mapping[str, bytes]
) -> str:
    """One line on the tokenizer files that were added, replaced, kept or left out."""
    groups = {
        "added": [name for name in new_files if name not in source_files],
        "replaced": [name for name in new_files if name in source_files],
        "kept, not read": [name for name in source_files if name in files and name not in new_files],
        "left out": [name for name in source_files if name not in files],
    }
    return "; ".join(f"{label}: {', '.join(names)}" for label, names in groups.items() if names)
