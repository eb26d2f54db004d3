"""fairseq's dictionaries, one `token count` per line, and the tokenizer files made of them."""

from collections.abc import Sequence
from pathlib import Path

from ...backend.errors import ConversionError
from ..checkpoint import FOLDERS, Checkpoint
from ..layouts.fairseq import SPECIAL_TOKENS
from .vocabularies import tokens_by_id, word_tokenizer

FILE = "dict.txt"  # in a folder of tokenizer files
_OVERWRITE = "#fairseq:overwrite"  # a flag after the count: the token's earlier id is no longer looked up
_ROLES: dict[str, str] = dict(zip(("bos", "pad", "eos", "unk"), SPECIAL_TOKENS, strict=True))
_TOKENIZER = "tokenizer.json"


def read_dictionary(path: Path) -> dict[str, int]:
    """The ids of a dictionary by token, special tokens included.

    Raises:
        ConversionError: the file cannot be read, a line is not `token count`, or a token occurs twice.
    """
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConversionError(f"{path}: cannot be read: {error}") from None
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines):
        text, overwrites = line.rstrip(), False
        if text.endswith(f" {_OVERWRITE}"):
            text, overwrites = text.removesuffix(f" {_OVERWRITE}"), True
        token, space, count = text.rpartition(" ")
        if not space or not count.removeprefix("-").isdecimal():
            raise ConversionError(f"{path}: line {number + 1} is {line[:80]!r}, must be a token, a space and a count")
        if token in ids and not overwrites:
            raise ConversionError(f"{path}: line {number + 1}: {token!r} occurs again; fairseq requires {_OVERWRITE}")
        ids[token] = number + len(SPECIAL_TOKENS)
    return ids


def tokenizer_files(paths: Sequence[Path], sizes: Sequence[int]) -> dict[str, bytes]:
    """The tokenizer files of the dictionaries of source and target, by path: one tokenizer if they are equal.

    Empty without dictionaries.

    Raises:
        ConversionError: a dictionary is damaged, or the model has another number of tokens.
    """
    contents = []
    for path, size in zip(paths, sizes, strict=False):
        ids = read_dictionary(path)
        if (count := max(ids.values()) + 1) != size:
            raise ConversionError(f"{path}: has {count:,} tokens, special ones included, but the model has {size:,}")
        contents.append({FILE: path.read_bytes(), **word_tokenizer(ids, _ROLES)})
    is_joint = len(contents) == 2 and contents[0] == contents[1]
    folders = FOLDERS[:1] if is_joint else FOLDERS[1:]
    return {
        f"{folder}/{name}": text
        for folder, files in zip(folders, contents, strict=False)
        for name, text in files.items()
    }


def dictionary_files(checkpoint: Checkpoint) -> list[bytes]:
    """The dictionaries of source and target: those of a fairseq checkpoint, else the tokens of its tokenizers.

    Empty if the checkpoint has no tokenizer.

    Raises:
        ConversionError: a tokenizer is damaged, or has a token that a dictionary cannot hold.
    """
    joint, *separate = FOLDERS
    folders = [joint, joint] if f"{joint}/{_TOKENIZER}" in checkpoint.files else separate
    sizes = (checkpoint.config.src_vocab_size, checkpoint.config.tgt_vocab_size)
    if not all(f"{folder}/{_TOKENIZER}" in checkpoint.files for folder in folders):
        return []
    return [_dictionary(checkpoint, folder, size) for folder, size in zip(folders, sizes, strict=True)]


def _dictionary(checkpoint: Checkpoint, folder: str, size: int) -> bytes:
    if (content := checkpoint.files.get(f"{folder}/{FILE}")) is not None:
        return content
    name = f"{folder}/{_TOKENIZER}"
    try:
        tokens = tokens_by_id(checkpoint.files[name])
    except ValueError as error:
        raise ConversionError(f"{name}: {error}") from None
    lines = []
    for number in range(len(SPECIAL_TOKENS), size):
        token = tokens.get(number, f"madeupword{number:04d}")
        if not token or token.split("\n") != [token] or "\r" in token:
            raise ConversionError(f"{name}: token {number} is {token!r}, which a line of {FILE} cannot hold")
        lines.append(f"{token} 1\n")
    return "".join(lines).encode()
