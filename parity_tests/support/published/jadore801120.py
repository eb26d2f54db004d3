"""The training loop of jadore801120, and its dropout sites."""

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from parity_tests.support.published.training import PublishedTraining, Run
from twinax.formulas.label_smoothing import SMOOTHINGS
from twinax.torch_reference.step import Batch


def _loop(run: Run, batches: Sequence[Batch]) -> Iterator[float]:
    """Train on the sum of the smoothed cross entropy; the schedule counts updates from 1."""
    optimizer = torch.optim.Adam(run.parameters, betas=(0.9, 0.98), eps=1e-9)
    warmup, d_model = run.training.warmup_updates, run.config.d_model
    for number, part in enumerate(batches):
        n, gold = number + 1, part.labels.flatten()
        for group in optimizer.param_groups:
            group["lr"] = 2.0 * d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
        optimizer.zero_grad()
        logits = run.forward(number, part)
        classes = logits.shape[-1]
        one_hot = torch.zeros_like(logits).scatter(1, gold[:, None], 1)
        smoothed = one_hot * (1 - 0.1) + (1 - one_hot) * 0.1 / (classes - 1)
        keep = gold != run.config.pad_id
        loss = -(smoothed * functional.log_softmax(logits, dim=1)).sum(dim=1).masked_select(keep).sum()
        loss.backward()
        optimizer.step()
        # twinax computes a KL divergence, which is smaller by the entropy of the smoothed label
        yield loss.item() / int(keep.sum()) - SMOOTHINGS["others"](0.1, classes).entropy


TRAINING = PublishedTraining(
    loop=_loop,
    dropouts={
        "encoder.dropout": ("src_input",),
        "decoder.dropout": ("tgt_input",),
        "encoder.layer_stack.*.slf_attn.attention_dropout": ("encoder.layers.*.self_attention",),
        "encoder.layer_stack.*.slf_attn.dropout": ("encoder.layers.*.self_attention_residual",),
        "encoder.layer_stack.*.pos_ffn.dropout": ("encoder.layers.*.feed_forward_residual",),
        "decoder.layer_stack.*.slf_attn.attention_dropout": ("decoder.layers.*.self_attention",),
        "decoder.layer_stack.*.slf_attn.dropout": ("decoder.layers.*.self_attention_residual",),
        "decoder.layer_stack.*.enc_attn.attention_dropout": ("decoder.layers.*.cross_attention",),
        "decoder.layer_stack.*.enc_attn.dropout": ("decoder.layers.*.cross_attention_residual",),
        "decoder.layer_stack.*.pos_ffn.dropout": ("decoder.layers.*.feed_forward_residual",),
    },
    shorten=lambda as_published, updates, epoch: {"warmup_updates": 30},
    fixed_rates={"attention_dropout": 0.1},
)
