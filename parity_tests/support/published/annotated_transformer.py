"""The training loop of annotated_transformer, and its dropout sites."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from parity_tests.support.published.training import PublishedTraining, Run
from twinax.torch_reference.step import Batch


def _loop(run: Run, batches: Sequence[Batch]) -> Iterator[float]:
    """Train on the KL divergence per token.

    As published: an update after micro-batches 1, 11, 21, with summed gradients; the schedule counts micro-batches.
    Repaired: an update after every tenth one, with the mean over all tokens; the schedule counts updates.
    """
    training, config, pad = run.training, run.config, run.config.pad_id
    warmup, parts = training.warmup_updates, training.accumulation
    optimizer = torch.optim.Adam(run.parameters, lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    first = 0 if run.as_published else 1

    def rate(step: int) -> float:
        n = max(step + first, 1)
        return config.d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)

    schedule = LambdaLR(optimizer, rate)
    criterion = nn.KLDivLoss(reduction="sum")
    count = 0  # micro-batches so far
    for number, batch in enumerate(batches):
        total, tokens = 0.0, int((batch.labels != pad).sum())
        micro_batches = [Batch(*(tensor[k::parts] for tensor in batch)) for k in range(parts)]
        for part in micro_batches[: 1 if run.as_published and number == 0 else parts]:
            log_probs, gold = run.forward(number, part), part.labels.flatten()
            target = torch.full_like(log_probs, 0.1 / (log_probs.shape[-1] - 2))
            target.scatter_(1, gold[:, None], 0.9)
            target[:, pad] = 0
            target[gold == pad] = 0
            loss = criterion(log_probs, target)
            total += loss.item()
            (loss / (int((gold != pad).sum()) if run.as_published else tokens)).backward()
            if run.as_published:
                if count % parts == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                count += 1
                schedule.step()
        if not run.as_published:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        yield total / tokens


TRAINING = PublishedTraining(
    loop=_loop,
    dropouts={
        "src_embed.1.dropout": ("src_input",),
        "tgt_embed.1.dropout": ("tgt_input",),
        "encoder.layers.*.self_attn.dropout": ("encoder.layers.*.self_attention",),
        "encoder.layers.*.feed_forward.dropout": ("encoder.layers.*.feed_forward",),
        "encoder.layers.*.sublayer.0.dropout": ("encoder.layers.*.self_attention_residual",),
        "encoder.layers.*.sublayer.1.dropout": ("encoder.layers.*.feed_forward_residual",),
        "decoder.layers.*.self_attn.dropout": ("decoder.layers.*.self_attention",),
        "decoder.layers.*.src_attn.dropout": ("decoder.layers.*.cross_attention",),
        "decoder.layers.*.feed_forward.dropout": ("decoder.layers.*.feed_forward",),
        "decoder.layers.*.sublayer.0.dropout": ("decoder.layers.*.self_attention_residual",),
        "decoder.layers.*.sublayer.1.dropout": ("decoder.layers.*.cross_attention_residual",),
        "decoder.layers.*.sublayer.2.dropout": ("decoder.layers.*.feed_forward_residual",),
    },
    shorten=lambda as_published, updates, epoch: {"warmup_updates": 200 if as_published else 20},
    fixed_rates={"attention_dropout": 0.1},
)
