"""The vocabularies of a checkpoint: a different token for each row of its model."""

from typing import NamedTuple

from ...configs.data import TokenizerConfig
from ...convert.checkpoint import Checkpoint
from ..text.tokenizer import Tokenizer
from .fitting import lacks_language
from .tokenizer_pair import Tokenizers


class Vocabularies(NamedTuple):
    """What another program needs to translate tokens; each side is (tokens by id, token of unknown words)."""

    source: tuple[list[str], str]
    target: tuple[list[str], str]
    starts_with_language: bool  # the first decoder input is the target language's token, and the checkpoint sets none


def of_checkpoint(checkpoint: Checkpoint) -> Vocabularies | None:
    """The vocabularies of a checkpoint; None if there is no tokenizer that twinax reads.

    A row for which a tokenizer has no token, as padding of the vocabulary has none, gets the token `<id 17>`.

    Raises:
        DataError: a tokenizer is damaged.
    """
    tokenizers = Tokenizers.of_checkpoint(checkpoint, TokenizerConfig(), "the checkpoint")
    if tokenizers is None:
        return None
    config = checkpoint.config
    languages = tokenizers.src.languages
    return Vocabularies(
        _tokens(tokenizers.src, config.src_vocab_size),
        _tokens(tokenizers.tgt, config.tgt_vocab_size),
        languages is not None and languages.role == "decoder_start" and lacks_language(config, tokenizers),
    )


def _tokens(tokenizer: Tokenizer, size: int) -> tuple[list[str], str]:
    by_id: dict[int, str] = {}
    for token, number in tokenizer.vocabulary().items():
        by_id.setdefault(number, token)
    return [by_id.get(number, f"<id {number}>") for number in range(size)], by_id[tokenizer.unk_id]
