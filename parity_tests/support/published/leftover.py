"""The training loop of leftover, and its dropout sites."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from parity_tests.support.published.training import PublishedTraining, Run
from twinax.torch_reference.step import Batch


def _loop(run: Run, batches: Sequence[Batch]) -> Iterator[float]:
    """Train on the cross entropy of the module's output, as published a softmax; clipping; cosine over all updates."""
    optimizer = torch.optim.Adam(run.parameters, lr=1e-3, eps=1e-9)
    schedule = CosineAnnealingLR(optimizer, T_max=len(batches), eta_min=1e-4)
    for number, part in enumerate(batches):
        optimizer.zero_grad()
        output = run.forward(number, part)
        loss = functional.cross_entropy(
            output, part.labels.flatten(), ignore_index=run.config.pad_id, label_smoothing=0.05
        )
        loss.backward()
        nn.utils.clip_grad_norm_(run.parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


TRAINING = PublishedTraining(
    loop=_loop,
    dropouts={
        "encoder.pos_embedding.dropout": ("src_input",),
        "decoder.pos_embedding.dropout": ("tgt_input",),
        "encoder.encoder_blocks.*.multi_head_attention.dropout": ("encoder.layers.*.self_attention",),
        "encoder.encoder_blocks.*.ffn.dropout": ("encoder.layers.*.feed_forward",),
        "encoder.encoder_blocks.*.dropout": (
            "encoder.layers.*.self_attention_residual",
            "encoder.layers.*.feed_forward_residual",
        ),
        "decoder.decoder_layers.*.multi_head_attention1.dropout": ("decoder.layers.*.self_attention",),
        "decoder.decoder_layers.*.cross_attention.dropout": ("decoder.layers.*.cross_attention",),
        "decoder.decoder_layers.*.ffn.dropout": ("decoder.layers.*.feed_forward",),
        "decoder.decoder_layers.*.dropout": (
            "decoder.layers.*.self_attention_residual",
            "decoder.layers.*.cross_attention_residual",
            "decoder.layers.*.feed_forward_residual",
        ),
    },
    shorten=lambda as_published, updates, epoch: {
        "total_updates": updates,
        "learning_rate": 1e-3,
        "final_learning_rate": 1e-4,
    },
)
