"""The published trainings, each as its own code has it, with `torch.optim`: what the twins' updates are compared with.

Dropout is on. The modules' own draws are replaced by the masks that the twins share, which is all that is changed.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig
from ..convert.arrays import from_torch
from ..convert.file_layouts import from_named
from ..convert.port import to_params
from ..published.registry import ORACLES, TRAININGS
from ..published.training import Run
from ..torch_reference.dropout import DropoutKey, keep_mask
from ..torch_reference.optimizers import make_optimizer
from ..torch_reference.step import Batch, train_step
from ..train.step import Batch as JaxBatch
from ..train.step import init_state, make_train_step
from .published import SIZE, checkpoint_of, random_model
from .trajectories import LOSS_BOUND, PARAMETER_BOUND

UPDATES, SENTENCES, LENGTH, EPOCH, DROPOUT = 50, 4, 7, 20, 0.2


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
            for pattern, sites in TRAININGS[name].dropouts.items():
                if match := re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), path):
                    found = [site.replace("*", "".join(match.groups())) for site in sites]
            assert found, path
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, SharedDropout(module.p, found))


def with_dropout(config: TransformerConfig, as_published: bool, name: str) -> TransformerConfig:
    """The config with the rates of a module whose setting is DROPOUT, where there is a dropout at all."""
    sites = ("embedding_dropout", "attention_dropout", "ffn_dropout", "residual_dropout")
    rates = {site: DROPOUT if getattr(config, site) else 0.0 for site in sites}
    return config.replace(**{**rates, **(TRAININGS[name].fixed_rates if as_published else {})})


def training_config(name: str, as_published: bool) -> TrainingConfig:
    """The published one; a step, a warm-up and an end within so few updates, and rates that move something."""
    changes = TRAININGS[name].shorten(as_published, UPDATES, EPOCH)
    return TrainingConfig.published(name, as_published=as_published, seed=5, **changes)


def batch(number: int, parts: int, as_published: bool, pad: int, size: int) -> Batch:
    """Random sentences and their reversals, ragged. Part k is every n-th sentence from k on.

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


def published_losses(
    name: str, model: nn.Module, config: TransformerConfig, training: TrainingConfig, as_published: bool, batches: Any
) -> list[float]:
    """Loss of every update of the published loop, in nats per token."""
    share_dropout(name, model.train())

    def forward(update: int, part: Batch) -> Tensor:
        SharedDropout.key = DropoutKey(training.seed, update, part.rows)
        return ORACLES[name].call(model, part.src_tokens, part.tgt_tokens, config.pad_id).flatten(0, 1)

    parameters = [p for p in model.parameters() if p.requires_grad]
    run = Run(parameters, forward, config, training, as_published, EPOCH)
    return list(TRAININGS[name].loop(run, batches))


@dataclass(frozen=True)
class Trained:
    """What a training showed."""

    losses: np.ndarray  # (update; published, Flax, PyTorch), in nats per token
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
    expected = published_losses(name, model, config, training, as_published, batches)
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
