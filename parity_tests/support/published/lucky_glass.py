"""The training loop of lucky_glass, and its dropout sites."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

from parity_tests.support.published.training import PublishedTraining, Run
from twinax.torch_reference.step import Batch


def _loop(run: Run, batches: Sequence[Batch]) -> Iterator[float]:
    """Train on the mean cross entropy; as published, the rate is divided by 10 after each epoch."""
    optimizer = torch.optim.Adam(run.parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    schedule = StepLR(optimizer, 1, gamma=0.1)
    for number, part in enumerate(batches):
        optimizer.zero_grad()
        logits = run.forward(number, part)
        loss = functional.cross_entropy(logits, part.labels.flatten(), ignore_index=run.config.pad_id)
        loss.backward()
        optimizer.step()
        if run.as_published and (number + 1) % run.epoch == 0:
            schedule.step()
        yield loss.item()


TRAINING = PublishedTraining(
    loop=_loop,
    dropouts={
        "pos_embed.dropout": ("src_input", "tgt_input"),
        "encoder.layers.*.attention.dropout": ("encoder.layers.*.self_attention_residual",),
        "encoder.layers.*.feed_forward.dropout": ("encoder.layers.*.feed_forward_residual",),
        "decoder.layers.*.masked_attention.dropout": ("decoder.layers.*.self_attention_residual",),
        "decoder.layers.*.attention.dropout": ("decoder.layers.*.cross_attention_residual",),
        "decoder.layers.*.feed_forward.dropout": ("decoder.layers.*.feed_forward_residual",),
    },
    shorten=lambda as_published, updates, epoch: {"step_updates": epoch} if as_published else {},
)
