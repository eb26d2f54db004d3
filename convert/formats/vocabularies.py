"""Tokenizer files of vocabularies whose text is already segmented: tokens between spaces."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

# Markers of subwords: a token that the next one continues, and a space before a token
_CONTINUATION, _SPACE = "@@", "▁"


def word_tokenizer(tokens: Mapping[str, int], roles: Mapping[str, str]) -> dict[str, bytes]:
    """The files of a tokenizer, by name: it splits text at spaces, looks up tokens and ends sources with EOS.

    `roles`: the special tokens by role (pad, bos, eos, unk). Decoding joins subwords marked by `@@` at their end, as
    subword-nmt does, or by `▁` for spaces, as SentencePiece does, if the vocabulary has any.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel(dict(tokens), roles["unk"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = _decoder(tokens)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(roles.values())])
    eos = roles["eos"]
    tokenizer.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single=f"$A {eos}", special_tokens=[(eos, tokens[eos])]
    )
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": text for role, text in roles.items()}
    return {
        "tokenizer.json": tokenizer.to_str(pretty=False).encode(),
        "tokenizer_config.json": (json.dumps(settings, indent=2) + "\n").encode(),
    }


def tokens_by_id(tokenizer_json: bytes) -> dict[int, str]:
    """The tokens of a tokenizer.json. Raises: ValueError if it is none."""
    from tokenizers import Tokenizer

    try:
        vocabulary = Tokenizer.from_buffer(tokenizer_json).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises a bare Exception
        raise ValueError(f"is not a tokenizer: {' '.join(str(error).split())[:200]}") from None
    return {number: token for token, number in vocabulary.items()}


def _decoder(tokens: Sequence[str] | Mapping[str, int]) -> Any:
    from tokenizers import Regex, decoders

    join_with_spaces = decoders.WordPiece(prefix="\0", cleanup=False)  # no token starts with this prefix
    steps: list[Any] = [join_with_spaces, decoders.Fuse()]
    if any(token.endswith(_CONTINUATION) for token in tokens):
        steps.append(decoders.Replace(Regex(f"{_CONTINUATION}( |$)"), ""))
    elif any(token.startswith(_SPACE) for token in tokens):
        steps += [decoders.Replace(" ", ""), decoders.Replace(_SPACE, " "), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)
