"""Fits a model to tokenizers: vocabulary sizes, special ids, the target's language."""

from ...backend.errors import DataError
from ...configs.schema import TransformerConfig
from ..text.tokenizer import Tokenizer
from .tokenizer_pair import Tokenizers

# Fields of the model that the tokenizers determine.
FROM_TOKENIZERS = (
    *("src_vocab_size", "tgt_vocab_size", "pad_id", "bos_id", "eos_id"),
    *("decoder_start_id", "forced_bos_id", "forced_eos_id"),
)


def with_tokenizers(model: TransformerConfig, tokenizers: Tokenizers) -> TransformerConfig:
    """The model with the tokenizers' sizes and special ids; an id that equalled a special id follows it."""
    tgt = tokenizers.tgt
    if tokenizers.src.pad_id != tgt.pad_id:
        raise DataError(
            f"the tokenizers have padding {tokenizers.src.pad_id} and {tgt.pad_id}: they must have the same id"
        )
    roles = {model.eos_id: tgt.eos_id, model.pad_id: tgt.pad_id, model.bos_id: tgt.bos_id}
    derived_ids = ("decoder_start_id", "forced_bos_id", "forced_eos_id")
    return model.replace(
        src_vocab_size=tokenizers.src.vocab_size,
        tgt_vocab_size=tgt.vocab_size,
        **{role: getattr(tgt, role) for role in ("pad_id", "bos_id", "eos_id")},
        **{name: roles.get(getattr(model, name), getattr(model, name)) for name in derived_ids},
    )


def with_target_language(model: TransformerConfig, tokenizers: Tokenizers) -> TransformerConfig:
    """The model with the token of the tokenizers' target language. Raises: DataError if the model lacks it."""
    if tokenizers.target_language is None:
        return model
    field, number = tokenizers.target_language
    if number >= model.tgt_vocab_size:
        raise DataError(
            f"tgt_lang: the model lacks {tokenizers.tgt.token_of(number)!r}, the tokenizer's id {number:,}: it has "
            f"{model.tgt_vocab_size:,} tokens; use the model's own tokenizer, or another language"
        )
    return model.replace(**{"forced_bos_id": None, field: number})


def lacks_language(model: TransformerConfig, tokenizers: Tokenizers, multilingual: bool = False) -> bool:
    """Whether a translation must begin with a language's token and the model sets none.

    `multilingual`: whether its family is, for a tokenizer that does not know its languages.
    """
    languages = tokenizers.src.languages
    if model.forced_bos_id is not None:
        return False
    if languages is None:
        return multilingual and model.decoder_start_id == model.eos_id
    if languages.role == "source_prefix":
        return False
    if languages.role == "decoder_start":
        return model.decoder_start_id not in {tokenizers.tgt.id_of(token) for token in languages.tokens.values()}
    return model.decoder_start_id in (None, model.eos_id)


def check_language(model: TransformerConfig, tokenizers: Tokenizers) -> None:
    """Raises: DataError if a multilingual model has no target language."""
    if lacks_language(model, tokenizers):
        assert tokenizers.src.languages is not None
        example = [*tokenizers.src.languages.tokens][:2][-1]
        raise DataError(f"tgt_lang=None: the model is multilingual; set --tokenizer.tgt-lang, as in {example}")


def check_fits(model: TransformerConfig, tokenizer: Tokenizer, side: str) -> None:
    """Raises: DataError if the tokenizer does not match existing weights."""
    size = getattr(model, f"{side}_vocab_size")
    if excess_tokens := tokenizer.tokens_beyond(size):
        number, token = excess_tokens[0]
        raise DataError(
            f"the {side} tokenizer has {len(excess_tokens):,} tokens beyond the model's {size:,} (the first: "
            f"{token!r}, id {number}): use the model's own tokenizer"
        )
    ids = {"pad_id": model.pad_id, "eos_id": model.eos_id}
    for name, expected in ids.items():
        if getattr(tokenizer, name) != expected:
            raise DataError(
                f"the {side} tokenizer has {name}={getattr(tokenizer, name)} but the model has {expected}: use "
                "the model's own tokenizer, or set the special tokens"
            )


def check_both_directions(tokenizers: Tokenizers) -> None:
    """Raises: DataError if a tokenizer is for one language."""
    if tokenizers.src is not tokenizers.tgt or tokenizers.src.languages is not None:
        raise DataError(
            "both_directions=True: each side has sentences of both languages, but these tokenizers have a language per "
            "side; use one tokenizer for both sides, without languages"
        )
