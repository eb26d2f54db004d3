"""Cross entropy with label smoothing in plain PyTorch; `train.step.losses` is the same with a custom gradient.

Letters: B batch, T target length, V vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..configs.training import TrainingConfig
from ..formulas.label_smoothing import SMOOTHINGS
from .module import at_least_float32


def cross_entropy(
    logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"], pad_id: int, config: TrainingConfig
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """(sum of -sum_v q(v) log p(v) - entropy in nats, number of tokens), both without padding.

    p = softmax(logits); q is the smoothed label, and `Target.entropy` states which entropy is subtracted.

    Raises:
        ValueError: the labels are not integers of the logits' batch size and length, or not in the vocabulary.
    Source: Szegedy et al. 2016, section 7; `formulas.label_smoothing`.
    """
    if labels.shape != logits.shape[:-1] or labels.is_floating_point():
        raise ValueError(
            f"labels: must be integers of shape {list(logits.shape[:-1])}, not {labels.dtype}{list(labels.shape)}"
        )
    if outside := labels[(labels < 0) | (labels >= logits.shape[-1])].tolist():
        raise ValueError(
            f"labels: {len(outside)} are outside the vocabulary, 0 to {logits.shape[-1] - 1}, the first is {outside[0]}"
        )
    target = SMOOTHINGS[config.smoothing](config.label_smoothing, logits.shape[-1])
    keep = labels != pad_id
    q = torch.full_like(logits, target.other, dtype=at_least_float32(logits).dtype)
    q[..., pad_id] = target.padding
    q.scatter_(-1, labels[..., None].long(), target.label)
    # Terms of weight 0 are skipped, because a logit may be -inf.
    # Not log_softmax: in float32 its sequential sum over V loses the small terms if one token is likely.
    z = at_least_float32(logits)
    z = z - z.amax(-1, keepdim=True).detach()
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    losses = -torch.where(q == 0, 0, q * log_p).sum(-1) - target.entropy
    return torch.where(keep, losses, 0).sum(), keep.sum()
