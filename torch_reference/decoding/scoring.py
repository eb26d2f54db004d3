"""Log-probabilities and attention weights of existing translations.

Letters: B sentences, S source length, T target length.
"""

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ...formulas.decoding import AttentionMaps, Scored, check_sources, decoder_inputs, map_names, target_mask
from ..inputs import check_inputs
from ..model import Transformer
from ..module import activations, at_least_float32


@torch.no_grad()
def score(
    model: Transformer,
    src_tokens: Int[Tensor, "B S"],
    tgt_tokens: Int[Tensor, "B T"],
    src_mask: Bool[Tensor, "B S"] | None = None,
) -> Scored:
    """log p(target | source) of target sentences (B, T): without the start token, with EOS, padded at the end.

    Raises:
        ValueError: shapes do not fit, a sentence is empty, or an id is outside the vocabulary.
    """
    logits = model(src_tokens, _inputs(model, src_tokens, tgt_tokens, src_mask), src_mask)
    log_probs = at_least_float32(logits).log_softmax(-1).gather(-1, tgt_tokens[..., None].long())[..., 0]
    tokens = np.where(target_mask(tgt_tokens.numpy(force=True), model.config), log_probs.numpy(force=True), 0)
    return Scored(tokens.sum(1), tokens)


@torch.no_grad()
def attention_maps(
    model: Transformer,
    src_tokens: Int[Tensor, "B S"],
    tgt_tokens: Int[Tensor, "B T"],
    src_mask: Bool[Tensor, "B S"] | None = None,
) -> AttentionMaps:
    """All attention weights of a forward pass with these targets; arguments and exceptions as of `score`."""
    inputs = _inputs(model, src_tokens, tgt_tokens, src_mask)
    _, captures = activations(model, src_tokens, inputs, src_mask)
    stacks = [torch.stack([captures[name] for name in names], dim=1) for names in map_names(model.config)]
    return AttentionMaps(*(stack.numpy(force=True) for stack in stacks))


def _inputs(model: Transformer, src_tokens: Tensor, tgt_tokens: Tensor, src_mask: Tensor | None) -> Tensor:
    """The decoder inputs; checks all arguments."""
    config = model.config
    check_inputs("src", src_tokens, src_mask, config.src_vocab_size, config.max_length, None)
    check_inputs("tgt", tgt_tokens, None, config.tgt_vocab_size, config.max_length, None)
    check_sources(model.source_mask(src_tokens, src_mask).numpy(force=True))
    return torch.from_numpy(decoder_inputs(tgt_tokens.long().numpy(force=True), config)).to(tgt_tokens.device)
