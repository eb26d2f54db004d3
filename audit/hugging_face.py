"""Adapter for encoder-decoders of `transformers`: sizes, forward pass and cached forward pass."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .subject import Forward

_POSITIONS = ("max_position_embeddings", "max_encoder_position_embeddings", "max_decoder_position_embeddings")
_SPECIAL = ("_token_id", "_token_index")  # suffixes of settings that hold ids of special tokens


class Sizes(NamedTuple):
    """The sizes of a model that an audit needs; None for those that its config does not state."""

    vocab_size: tuple[int, int] | None
    pad_id: int | None
    special_ids: tuple[int, ...]
    max_length: int | None


def sizes(module: nn.Module) -> Sizes | None:
    """The sizes in the config of an encoder-decoder of `transformers`; None for any other module."""
    config: Any = getattr(module, "config", None)
    if not getattr(config, "is_encoder_decoder", False) or not hasattr(config, "get_text_config"):
        return None
    encoder, decoder = (getattr(config, side, config).get_text_config() for side in ("encoder", "decoder"))
    source = _first((encoder,), ("src_vocab_size", "vocab_size"))
    target = _first((decoder,), ("tgt_vocab_size", "decoder_vocab_size", "vocab_size"))
    settings = [c.to_dict().items() for c in (config, encoder, decoder)]
    ids = {i for items in settings for name, v in items if name.endswith(_SPECIAL) for i in _integers(v)}
    lengths = [v for c in (encoder, decoder) for name in _POSITIONS if (v := getattr(c, name, None)) is not None]
    return Sizes(
        vocab_size=None if source is None or target is None else (source, target),
        pad_id=_first((config, decoder), ("pad_token_id",)),
        special_ids=tuple(sorted(ids)),
        max_length=min(lengths, default=None),
    )


def _first(configs: Iterable[Any], names: Iterable[str]) -> int | None:
    values = (getattr(config, name, None) for config in configs for name in names)
    return next((value for value in values if value is not None), None)


def _integers(value: Any) -> list[int]:
    """The ids in a setting, which is one id or a list."""
    return [i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int)]


def forward(pad_id: int) -> Forward:
    """A function that returns the logits of a whole target."""

    def run(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        return module(
            input_ids=src, attention_mask=(src != pad_id).long(), decoder_input_ids=tgt, use_cache=False
        ).logits

    return run


def cached(pad_id: int) -> Forward:
    """A function that returns the same logits, computed token by token with the model's cache."""

    def run(module: nn.Module, src: Tensor, tgt: Tensor) -> Tensor:
        model: Any = module
        mask, cache, logits = {"attention_mask": (src != pad_id).long()}, None, []
        memory = model.get_encoder()(input_ids=src, **mask)
        for t in range(tgt.shape[1]):
            step = model(
                encoder_outputs=memory,
                decoder_input_ids=tgt[:, t : t + 1],
                past_key_values=cache,
                use_cache=True,
                **mask,
            )
            cache = step.past_key_values
            logits.append(step.logits)
        return torch.cat(logits, 1)

    return run
