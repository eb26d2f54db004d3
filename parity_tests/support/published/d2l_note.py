"""The training loop of d2l_note, and its dropout sites."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional

from parity_tests.support.published.training import PublishedTraining, Run
from twinax.torch_reference.step import Batch


def _loop(run: Run, batches: Sequence[Batch]) -> Iterator[float]:
    """Train with the book's optimizer and clipping on the mean over tokens; the note does not specify them."""
    optimizer = torch.optim.Adam(run.parameters, lr=5e-3)
    for number, part in enumerate(batches):
        optimizer.zero_grad()
        logits = run.forward(number, part)
        loss = functional.cross_entropy(logits, part.labels.flatten(), ignore_index=run.config.pad_id)
        loss.backward()
        nn.utils.clip_grad_norm_(run.parameters, 1.0)
        optimizer.step()
        yield loss.item()


TRAINING = PublishedTraining(
    loop=_loop,
    dropouts={
        "encoder.positions.dropout": ("src_input",),
        "decoder.positions.dropout": ("tgt_input",),
        "encoder.blocks.block_*.attention.dropout": ("encoder.layers.*.self_attention",),
        "encoder.blocks.block_*.addnorm1.dropout": ("encoder.layers.*.self_attention_residual",),
        "encoder.blocks.block_*.addnorm2.dropout": ("encoder.layers.*.feed_forward_residual",),
        "decoder.blocks.block_*.attention1.dropout": ("decoder.layers.*.self_attention",),
        "decoder.blocks.block_*.attention2.dropout": ("decoder.layers.*.cross_attention",),
        "decoder.blocks.block_*.addnorm1.dropout": ("decoder.layers.*.self_attention_residual",),
        "decoder.blocks.block_*.addnorm2.dropout": ("decoder.layers.*.cross_attention_residual",),
        "decoder.blocks.block_*.addnorm3.dropout": ("decoder.layers.*.feed_forward_residual",),
    },
)
