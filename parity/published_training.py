"""The published trainings, each as its own code has it, with `torch.optim`: what the twins' updates are compared with.

Dropout is on. The modules' own draws are replaced by the masks that the twins share, which is all that is changed.
"""

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from ..configs.label_smoothing import SMOOTHINGS
from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig
from ..convert.arrays import from_torch
from ..convert.file_layouts import from_named
from ..convert.port import to_params
from ..torch_reference.dropout import DropoutKey, keep_mask
from ..torch_reference.optimizers import make_optimizer
from ..torch_reference.step import Batch, train_step
from ..train.step import Batch as JaxBatch
from ..train.step import init_state, make_train_step
from .published import SIZE, call, checkpoint_of, random_model
from .trajectories import LOSS_BOUND, PARAMETER_BOUND

UPDATES, SENTENCES, LENGTH, EPOCH, DROPOUT = 50, 4, 7, 20, 0.2
# The dropouts of a system's modules -> ours, in the order in which a forward pass comes there. Layers are *.
_SITES = {
    "lucky_glass": {
        "pos_embed.dropout": ("src_input", "tgt_input"),
        "encoder.layers.*.attention.dropout": ("encoder.layers.*.self_attention_residual",),
        "encoder.layers.*.feed_forward.dropout": ("encoder.layers.*.feed_forward_residual",),
        "decoder.layers.*.masked_attention.dropout": ("decoder.layers.*.self_attention_residual",),
        "decoder.layers.*.attention.dropout": ("decoder.layers.*.cross_attention_residual",),
        "decoder.layers.*.feed_forward.dropout": ("decoder.layers.*.feed_forward_residual",),
    },
    "jadore801120": {
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
    "leftover": {
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
    "d2l_note": {
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
    "annotated_transformer": {
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
}


class SharedDropout(nn.Module):
    """Dropout at a module's rate whose masks are those of our sites, one a call in turn."""

    key: DropoutKey | None = None  # of the forward pass that runs, for all of them

    def __init__(self, rate: float, sites: Sequence[str]):
        super().__init__()
        self.rate, self.calls = rate, 0
        self.sites = [zlib.crc32(f"{site}.dropout".encode()) for site in sites]

    def forward(self, x: Tensor) -> Tensor:
        """x with some elements zeroed, the others scaled."""
        site, self.calls = self.sites[self.calls % len(self.sites)], self.calls + 1
        assert SharedDropout.key is not None
        return torch.where(keep_mask(SharedDropout.key, site, self.rate, tuple(x.shape)), x / (1 - self.rate), 0)


def share_dropout(name: str, model: nn.Module) -> None:
    """Replaces every dropout of a system's module. Raises: AssertionError where one has no site of ours."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout):
            found = []
            for pattern, sites in _SITES[name].items():
                if match := re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), path):
                    found = [site.replace("*", "".join(match.groups())) for site in sites]
            assert found, path
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, SharedDropout(module.p, found))


def with_dropout(config: TransformerConfig, as_published: bool, name: str) -> TransformerConfig:
    """The config with the rates of a module whose setting is DROPOUT, where there is a dropout at all."""
    sites = ("embedding_dropout", "attention_dropout", "ffn_dropout", "residual_dropout")
    rates = {site: DROPOUT if getattr(config, site) else 0.0 for site in sites}
    if as_published and name in ("jadore801120", "annotated_transformer"):
        rates["attention_dropout"] = 0.1  # whatever the setting
    return config.replace(**rates)


def training_config(name: str, as_published: bool) -> TrainingConfig:
    """The published one; a step, a warm-up and an end within so few updates, and rates that move something."""
    changes: dict[str, Any] = {
        "lucky_glass": {"step_updates": EPOCH} if as_published else {},
        "jadore801120": {"warmup_updates": 30},
        "leftover": {"total_updates": UPDATES, "learning_rate": 1e-3, "final_learning_rate": 1e-4},
        "d2l_note": {},
        "annotated_transformer": {"warmup_updates": 200 if as_published else 20},
    }[name]
    return TrainingConfig.published(name, as_published=as_published, seed=5, **changes)


def batch(number: int, parts: int, as_published: bool, pad: int, size: int) -> Batch:
    """Random sentences and their reversals, ragged. Part k is every so-manieth sentence from k on.

    As published, the first update of several parts comes after one of them: the others are padding alone.
    """
    rng = np.random.default_rng(number)
    src = rng.integers(4, size, (SENTENCES * parts, LENGTH))
    keep = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, len(src))[:, None]
    if as_published and parts > 1 and number == 0:
        keep &= (np.arange(len(src)) % parts == 0)[:, None]
    src = np.where(keep, src, pad)
    labels = np.where(keep, src[:, ::-1] % size, pad)
    labels = np.where(keep & (labels == pad), 3, labels)
    tgt = np.concatenate([np.where(keep[:, :1], 2, pad), labels[:, :-1]], axis=1)
    rows = np.arange(len(src)) + len(src) * number
    return Batch(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (src, tgt, labels, rows)))


@dataclass
class Theirs:
    """A published training: the module, and what its rule needs."""

    name: str
    model: nn.Module
    config: TransformerConfig
    training: TrainingConfig
    as_published: bool

    def run(self, batches: Sequence[Batch]) -> Iterator[float]:
        """Loss of every update, in nats a token."""
        share_dropout(self.name, self.model.train())
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        yield from _RULES[self.name](self, parameters, batches)

    def forward(self, update: int, part: Batch) -> Tensor:
        """What the module gives, with the masks of this update."""
        SharedDropout.key = DropoutKey(self.training.seed, update, part.rows)
        return call(self.model, part.src_tokens, part.tgt_tokens, self.config.pad_id).flatten(0, 1)


def _lucky_glass(theirs: Theirs, parameters: list[nn.Parameter], batches: Sequence[Batch]) -> Iterator[float]:
    """Mean cross entropy; the rate is divided by 10 after each epoch, unless that is repaired."""
    optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    schedule = StepLR(optimizer, 1, gamma=0.1)
    for number, part in enumerate(batches):
        optimizer.zero_grad()
        logits = theirs.forward(number, part)
        loss = functional.cross_entropy(logits, part.labels.flatten(), ignore_index=theirs.config.pad_id)
        loss.backward()
        optimizer.step()
        if theirs.as_published and (number + 1) % EPOCH == 0:
            schedule.step()
        yield loss.item()


def _jadore801120(theirs: Theirs, parameters: list[nn.Parameter], batches: Sequence[Batch]) -> Iterator[float]:
    """Smoothed cross entropy, summed; the rate counts updates from 1."""
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.98), eps=1e-9)
    warmup, d_model = theirs.training.warmup_updates, theirs.config.d_model
    for number, part in enumerate(batches):
        n, gold = number + 1, part.labels.flatten()
        for group in optimizer.param_groups:
            group["lr"] = 2.0 * d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)
        optimizer.zero_grad()
        logits = theirs.forward(number, part)
        classes = logits.shape[-1]
        one_hot = torch.zeros_like(logits).scatter(1, gold[:, None], 1)
        smoothed = one_hot * (1 - 0.1) + (1 - one_hot) * 0.1 / (classes - 1)
        keep = gold != theirs.config.pad_id
        loss = -(smoothed * functional.log_softmax(logits, dim=1)).sum(dim=1).masked_select(keep).sum()
        loss.backward()
        optimizer.step()
        # ours is a KL divergence, less by the entropy of the smoothed label
        yield loss.item() / int(keep.sum()) - SMOOTHINGS["others"](0.1, classes).entropy


def _leftover(theirs: Theirs, parameters: list[nn.Parameter], batches: Sequence[Batch]) -> Iterator[float]:
    """Cross entropy of what the module gives, as published a softmax; clipped; a cosine over all updates."""
    optimizer = torch.optim.Adam(parameters, lr=1e-3, eps=1e-9)
    schedule = CosineAnnealingLR(optimizer, T_max=len(batches), eta_min=1e-4)
    for number, part in enumerate(batches):
        optimizer.zero_grad()
        output = theirs.forward(number, part)
        loss = functional.cross_entropy(
            output, part.labels.flatten(), ignore_index=theirs.config.pad_id, label_smoothing=0.05
        )
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        yield loss.item()


def _d2l_note(theirs: Theirs, parameters: list[nn.Parameter], batches: Sequence[Batch]) -> Iterator[float]:
    """Open there; the book's optimiser and clipping, on the mean over tokens."""
    optimizer = torch.optim.Adam(parameters, lr=5e-3)
    for number, part in enumerate(batches):
        optimizer.zero_grad()
        logits = theirs.forward(number, part)
        loss = functional.cross_entropy(logits, part.labels.flatten(), ignore_index=theirs.config.pad_id)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        yield loss.item()


def _annotated_transformer(theirs: Theirs, parameters: list[nn.Parameter], batches: Sequence[Batch]) -> Iterator[float]:
    """KL divergence over tokens.

    As published: an update after micro-batches 1, 11, 21, of summed gradients, at a rate that counts micro-batches.
    Repaired: after every tenth, of the mean over all tokens, at a rate that counts updates.
    """
    training, config, pad = theirs.training, theirs.config, theirs.config.pad_id
    warmup, parts = training.warmup_updates, training.accumulation
    optimizer = torch.optim.Adam(parameters, lr=1.0, betas=(0.9, 0.98), eps=1e-9)
    first = 0 if theirs.as_published else 1

    def rate(step: int) -> float:
        n = max(step + first, 1)
        return config.d_model**-0.5 * min(n**-0.5, n * warmup**-1.5)

    schedule = LambdaLR(optimizer, rate)
    criterion = nn.KLDivLoss(reduction="sum")
    seen = 0
    for number, whole in enumerate(batches):
        total, tokens = 0.0, int((whole.labels != pad).sum())
        micro_batches = [Batch(*(tensor[k::parts] for tensor in whole)) for k in range(parts)]
        for part in micro_batches[: 1 if theirs.as_published and number == 0 else parts]:
            log_probs, gold = theirs.forward(number, part), part.labels.flatten()
            target = torch.full_like(log_probs, 0.1 / (log_probs.shape[-1] - 2))
            target.scatter_(1, gold[:, None], 0.9)
            target[:, pad] = 0
            target[gold == pad] = 0
            loss = criterion(log_probs, target)
            total += loss.item()
            (loss / (int((gold != pad).sum()) if theirs.as_published else tokens)).backward()
            if theirs.as_published:
                if seen % parts == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                seen += 1
                schedule.step()
        if not theirs.as_published:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        yield total / tokens


_RULES: dict[str, Callable[..., Iterator[float]]] = {
    "lucky_glass": _lucky_glass,
    "jadore801120": _jadore801120,
    "leftover": _leftover,
    "d2l_note": _d2l_note,
    "annotated_transformer": _annotated_transformer,
}


@dataclass(frozen=True)
class Trained:
    """What a training showed."""

    losses: np.ndarray  # (update; published, Flax, PyTorch), in nats a token
    parameters: float  # largest difference of a twin's at the end, of the largest parameter
    unmoved: int  # tensors of the published model that no update changed

    @property
    def loss(self) -> float:
        """Worst difference of a twin's loss in any update."""
        return float(np.abs(self.losses[:, 1:] - self.losses[:, :1]).max())

    @property
    def ok(self) -> bool:
        """Both bounds hold."""
        return self.loss <= LOSS_BOUND and self.parameters <= PARAMETER_BOUND


def train(name: str, as_published: bool, updates: int = UPDATES) -> Trained:
    """Trains the module and both twins from one start on the same batches. Needs `jax_enable_x64`."""
    model = random_model(name, as_published, dropout=DROPOUT, layers=1)
    checkpoint = checkpoint_of(name, model, as_published)
    config, training = with_dropout(checkpoint.config, as_published, name), training_config(name, as_published)
    batches = [batch(n, training.accumulation, as_published, config.pad_id, SIZE) for n in range(updates)]
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    expected = list(Theirs(name, model, config, training, as_published).run(batches))
    losses = [expected, *([] for _ in range(2))]

    twin = replace(checkpoint, config=config).to_flax()
    state, step = init_state(twin, training), make_train_step(config, training)
    for part in batches:
        state, metrics = step(state, JaxBatch(*(jnp.asarray(tensor.numpy()) for tensor in part)))
        losses[1].append(float(metrics.loss))
    reference = replace(checkpoint, config=config).to_torch()
    optimizer = make_optimizer(reference, training)
    for number, part in enumerate(batches):
        losses[2].append(train_step(reference, optimizer, training, number, part).loss)

    named = {key: from_torch(tensor) for key, tensor in model.state_dict().items()}
    theirs, _ = from_named(named, config, name)
    largest = max(np.abs(theirs[key]).max() for key in state.params)
    ends = {key: np.asarray(a) for key, a in state.params.items()}, to_params(reference.state_dict(), config)
    difference = max(np.abs(end[key] - theirs[key]).max() for end in ends for key in state.params) / largest
    unmoved = sum(torch.equal(p, start[key]) for key, p in model.named_parameters() if p.requires_grad)
    return Trained(np.array(losses).T, float(difference), unmoved)
