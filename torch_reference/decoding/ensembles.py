"""The distribution of several models: the mean of theirs. Letters: B sentences, K hypotheses, V vocabulary."""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def combine(log_probs: Sequence[Float[Tensor, "B K V"]], log_linear: bool) -> Float[Tensor, "B K V"]:
    """log of the mean probability over the models; `log_linear`: the mean log-probability, normalized."""
    if len(log_probs) == 1:
        return log_probs[0]
    stacked = torch.stack([*log_probs])
    return stacked.mean(0).log_softmax(-1) if log_linear else stacked.logsumexp(0) - math.log(len(log_probs))
