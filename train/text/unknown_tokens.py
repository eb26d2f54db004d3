"""A warning for text of which a tokenizer does not know much, because it is segmented otherwise."""

from tokenizers import models

from .tokenization import FastTokenizer
from .tokenizer import Tokenizer

_SHARE = 0.1  # of the source tokens; text in the language and segmentation of the training has a few percent at most
_SPACE, _CONTINUED = "▁", "@@"  # marks of SentencePiece's pieces, and of those of subword-nmt


def unknown_warning(tokenizer: Tokenizer, unknown: int, tokens: int) -> str | None:
    """One line if more than a tenth of the source tokens are unknown; None otherwise."""
    if unknown <= _SHARE * tokens:
        return None
    share = f"{unknown / tokens:.0%} of the source tokens are unknown ({tokenizer.special_tokens['unk']})"
    return f"{share}; {_advice(tokenizer)}"


def _advice(tokenizer: Tokenizer) -> str:
    if not isinstance(tokenizer, FastTokenizer) or not isinstance(tokenizer.fast.model, models.WordLevel):
        return "is the text in the language of the model?"
    vocabulary = tokenizer.vocabulary()
    looks_up = "the tokenizer looks up tokens between spaces; segment the text first as the training data was"
    if any(token.endswith(_CONTINUED) for token in vocabulary):
        return f"{looks_up}, with its BPE codes: subword-nmt apply-bpe -c bpecodes"
    if any(token.startswith(_SPACE) for token in vocabulary):
        return f"{looks_up}, with its SentencePiece model: spm_encode --model MODEL"
    return looks_up
