"""The loss of an update in plain PyTorch; `train.step.consistency` is the same with both passes in one.

Letters: B sentences, S source length, T target length, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..configs.training import TrainingConfig
from .dropout import SECOND_PASS, DropoutKey
from .losses import cross_entropy
from .model import Transformer
from .module import at_least_float32


def training_loss(
    model: Transformer,
    src_tokens: Int[Tensor, "B S"],
    tgt_tokens: Int[Tensor, "B T"],
    labels: Int[Tensor, "B T"],
    key: DropoutKey,
    config: TrainingConfig,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """(sum of the losses in nats, number of tokens), without padding.

    CE(p, y) + α KL(p || c) in simcut; CE(p, y) + CE(q, y) + α/2 (KL(p || q) + KL(q || p)) in r_drop; else CE(p, y).
    p and q are the predictions of two passes with different dropout masks, c is q with cutoff, and α the config's
    `divergence_weight`. Gradients pass through both predictions.

    Source: Gao et al. 2022, "Bi-SimCut", section 3.2; Liang et al. 2021, "R-Drop", section 2.1.
    """
    pad_id = model.config.pad_id
    first = model(src_tokens, tgt_tokens, dropout_key=key)
    total, tokens = cross_entropy(first, labels, pad_id, config)
    if config.consistency == "none":
        return total, tokens
    cutoff = config.cutoff if config.consistency == "simcut" else None
    second_key = key._replace(rows=key.rows + SECOND_PASS, cutoff=cutoff)
    second = model(src_tokens, tgt_tokens, dropout_key=second_key)
    if config.consistency == "simcut":
        divergence = divergences(first, second)
    else:
        total = total + cross_entropy(second, labels, pad_id, config)[0]
        divergence = (divergences(first, second) + divergences(second, first)) / 2
    return total + config.divergence_weight * torch.where(labels != pad_id, divergence, 0).sum(), tokens


def divergences(first: Float[Tensor, "B T V"], second: Float[Tensor, "B T V"]) -> Float[Tensor, "B T"]:
    """KL(p || q) = sum_v p_v (log p_v - log q_v) in nats, of p = softmax(first) and q = softmax(second)."""
    log_p, log_q = (at_least_float32(logits).log_softmax(-1) for logits in (first, second))
    p = log_p.exp()
    # Tokens without probability are excluded before the product, or -inf minus -inf has a gradient of NaN.
    return (p * torch.where(p > 0, log_p - log_q, 0)).sum(-1)
