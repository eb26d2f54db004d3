"""The vocabularies of a checkpoint: a different token for each row of its model."""

from ...configs.data import TokenizerConfig
from ...convert.checkpoint import Checkpoint
from .prepare import Tokenizers
from .tokenizer import Tokenizer


def of_checkpoint(checkpoint: Checkpoint) -> tuple[tuple[list[str], str], ...] | None:
    """(tokens by id, token of unknown words) of source and target; None if there is no tokenizer that twinax reads.

    A row for which a tokenizer has no token, as padding of the vocabulary has none, gets the token `<id 17>`.

    Raises:
        DataError: a tokenizer is damaged.
    """
    tokenizers = Tokenizers.of_checkpoint(checkpoint, TokenizerConfig(), "the checkpoint")
    if tokenizers is None:
        return None
    config = checkpoint.config
    sizes = (config.src_vocab_size, config.tgt_vocab_size)
    return tuple(_tokens(tokenizer, size) for tokenizer, size in zip(tokenizers, sizes, strict=True))


def _tokens(tokenizer: Tokenizer, size: int) -> tuple[list[str], str]:
    by_id: dict[int, str] = {}
    for token, number in tokenizer.vocabulary().items():
        by_id.setdefault(number, token)
    return [by_id.get(number, f"<id {number}>") for number in range(size)], by_id[tokenizer.unk_id]


VOCABULARIES = {"of_checkpoint": of_checkpoint}
