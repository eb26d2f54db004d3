"""One training step in plain PyTorch, the reference for `train.step`.

Letters: B sentences in the whole batch, S source length, T target length.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from ..configs.training import TrainingConfig
from ..formulas.refused_updates import describe_refusal
from ..formulas.schedules import learning_rate
from .consistency import training_loss
from .dropout import DropoutKey
from .model import Transformer
from .module import at_least_float32
from .optimizers import clip


class Batch(NamedTuple):
    """Sentence pairs. The decoder's inputs are `tgt_tokens`; `labels` are the same tokens shifted by one."""

    src_tokens: Int[Tensor, "B S"]
    tgt_tokens: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]
    rows: Int[Tensor, " B"]  # row of each sentence in the whole batch


class Metrics(NamedTuple):
    """The metrics of a step."""

    loss: float  # nats per token, with the divergence of consistency training
    tokens: int  # labels that are not padding
    gradient_norm: float  # before clipping
    learning_rate: float
    applied: bool  # False: the update was skipped
    update: int  # number of the update, from 0
    nonfinite: tuple[str, ...]  # parameters with a non-finite gradient norm


def train_step(
    model: Transformer, optimizer: torch.optim.Optimizer, config: TrainingConfig, update: int, batch: Batch
) -> Metrics:
    """Apply update number `update`, counted from 0, to model and optimizer in place; return its metrics.

    After a skipped update the next batch gets the same number `update` again.

    Raises:
        ValueError: `accumulation` does not divide the batch, or its arrays do not fit.
    """
    sentences, parts = len(batch.labels), config.accumulation
    for name, tensor in batch._asdict().items():
        if len(tensor) != sentences:
            raise ValueError(f"{name}: must have {sentences} rows, as labels, not {len(tensor)}")
    if sentences % parts:
        raise ValueError(f"accumulation={parts}: does not divide the batch of {sentences} sentences")
    optimizer.zero_grad(set_to_none=True)
    total, tokens = 0.0, 0
    for part in (Batch(*(tensor[i::parts] for tensor in batch)) for i in range(parts)):
        key = DropoutKey(config.seed, update, part.rows)
        loss, count = training_loss(model, part.src_tokens, part.tgt_tokens, part.labels, key, config)
        (loss / max(int(count), 1) if config.reduction == "parts" else loss).backward()  # accumulates gradients
        total += loss.item()
        tokens += int(count)

    parameters = list(model.parameters())
    if config.without_gradient == "decay":
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    gradients = [p.grad for p in parameters if p.grad is not None]
    for gradient in gradients:
        gradient.div_(max(tokens, 1) if config.reduction == "tokens" else 1)
    squares = {n: at_least_float32(p.grad).square().sum() for n, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack(list(squares.values())).sum().sqrt()
    rate = float(learning_rate(update, config, model.config.d_model, np))
    loss = total / max(tokens, 1)
    applied = tokens > 0 and bool(norm.isfinite()) and bool(np.isfinite(loss))
    if applied:
        clip(gradients, norm, config)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    nonfinite = tuple(name for name, square in squares.items() if not square.isfinite())
    return Metrics(loss, tokens, norm.item(), rate, applied, update, nonfinite)


def explain(metrics: Metrics) -> str | None:
    """The reason why a step was skipped, in one line; None if it was applied."""
    if metrics.applied:
        return None
    return describe_refusal(metrics.update, metrics.tokens, metrics.loss, metrics.nonfinite)
