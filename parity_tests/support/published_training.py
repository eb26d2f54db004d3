"""Compares the twins' updates with the published trainings, each in its own code with `torch.optim`.

Dropout is on. Only the modules' dropout is replaced, by the masks that the twins share.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor, nn

from parity_tests.support.published.training import PublishedTraining, Run
from parity_tests.support.trajectories import LOSS_BOUND, PARAMETER_BOUND
from twinax.configs.schema import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.convert.arrays.frameworks import from_torch
from twinax.convert.formats.file_layouts import from_named
from twinax.convert.port import to_params
from twinax.parity.oracles.published import SIZE, checkpoint_of, random_model
from twinax.published.registry import ORACLES, SYSTEMS
from twinax.torch_reference.dropout import DropoutKey, dropout_mask
from twinax.torch_reference.optimizers import make_optimizer
from twinax.torch_reference.step import Batch, train_step
from twinax.train.step.step import Batch as JaxBatch
from twinax.train.step.step import init_state, make_train_step

TRAININGS: dict[str, PublishedTraining] = {
    name: import_module(f"parity_tests.support.published.{name}").TRAINING for name in SYSTEMS
}
UPDATES, SENTENCES, LENGTH, EPOCH, DROPOUT = 50, 4, 7, 20, 0.2


class SharedDropout(nn.Module):
    """Dropout at a module's rate with the masks of the twins' sites, one per call in turn."""

    key: DropoutKey | None = None  # of the current forward pass, shared by all instances

    def __init__(self, rate: float, sites: Sequence[str]):
        super().__init__()
        self.rate, self.calls = rate, 0
        self.sites = [zlib.crc32(f"{site}.dropout".encode()) for site in sites]

    def forward(self, x: Tensor) -> Tensor:
        """x with dropped elements zeroed and the others scaled."""
        site = self.sites[self.calls % len(self.sites)]
        self.calls += 1
        assert SharedDropout.key is not None
        return torch.where(dropout_mask(SharedDropout.key, site, self.rate, tuple(x.shape)), x / (1 - self.rate), 0)


def share_dropout(name: str, model: nn.Module) -> None:
    """Replace every dropout of a system's module. Raises: AssertionError if one matches no site of the twins."""
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Dropout):
            module_sites = []
            for pattern, sites in TRAININGS[name].dropouts.items():
                if match := re.fullmatch(re.escape(pattern).replace(r"\*", r"(\d+)"), path):
                    module_sites = [site.replace("*", "".join(match.groups())) for site in sites]
            assert module_sites, path
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, SharedDropout(module.p, module_sites))


def with_dropout(config: TransformerConfig, as_published: bool, name: str) -> TransformerConfig:
    """The config with rate DROPOUT at every site whose rate is not 0."""
    sites = ("embedding_dropout", "attention_dropout", "ffn_dropout", "residual_dropout")
    rates = {site: DROPOUT if getattr(config, site) else 0.0 for site in sites}
    return config.replace(**{**rates, **(TRAININGS[name].fixed_rates if as_published else {})})


def training_config(name: str, as_published: bool, updates: int = UPDATES) -> TrainingConfig:
    """The published config, shortened so that its schedule's phases fit into the updates with effective rates."""
    changes = TRAININGS[name].shorten(as_published, updates, EPOCH)
    return TrainingConfig.published(name, as_published=as_published, seed=5, **changes)


def batch(number: int, parts: int, as_published: bool, pad: int, size: int) -> Batch:
    """Random sentences of different lengths and their reversals. Part k is every n-th sentence from k on.

    As published, the first update is made after a single part, so the other parts of batch 0 are padding.
    """
    rng = np.random.default_rng(number)
    src = rng.integers(4, size, (SENTENCES * parts, LENGTH))
    is_token = np.arange(LENGTH) < rng.integers(2, LENGTH + 1, len(src))[:, None]
    if as_published and parts > 1 and number == 0:
        is_token &= (np.arange(len(src)) % parts == 0)[:, None]
    src = np.where(is_token, src, pad)
    labels = np.where(is_token, src[:, ::-1] % size, pad)
    labels = np.where(is_token & (labels == pad), 3, labels)
    tgt = np.concatenate([np.where(is_token[:, :1], 2, pad), labels[:, :-1]], axis=1)
    rows = np.arange(len(src)) + len(src) * number
    return Batch(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (src, tgt, labels, rows)))


def published_losses(
    name: str, model: nn.Module, config: TransformerConfig, training: TrainingConfig, as_published: bool, batches: Any
) -> list[float]:
    """The loss of every update of the published loop, in nats per token."""
    share_dropout(name, model.train())

    def forward(update: int, part: Batch) -> Tensor:
        SharedDropout.key = DropoutKey(training.seed, update, part.rows)
        return ORACLES[name].call(model, part.src_tokens, part.tgt_tokens, config.pad_id).flatten(0, 1)

    parameters = [p for p in model.parameters() if p.requires_grad]
    run = Run(parameters, forward, config, training, as_published, EPOCH)
    return list(TRAININGS[name].loop(run, batches))


@dataclass(frozen=True)
class TrainingComparison:
    """Results of the published training and of both twins."""

    losses: np.ndarray  # (update; published, Flax, PyTorch), in nats per token
    parameters: float  # largest difference of a twin at the end, relative to the largest parameter
    unchanged: int  # tensors of the published model that no update changed

    @property
    def loss(self) -> float:
        """Largest loss difference of a twin in any update."""
        return float(np.abs(self.losses[:, 1:] - self.losses[:, :1]).max())

    @property
    def ok(self) -> bool:
        """Whether both bounds hold."""
        return self.loss <= LOSS_BOUND and self.parameters <= PARAMETER_BOUND


def train(name: str, as_published: bool, updates: int = UPDATES) -> TrainingComparison:
    """Train the module and both twins from the same weights on the same batches. Needs `jax_enable_x64`."""
    model = random_model(name, as_published, dropout=DROPOUT, layers=1)
    checkpoint = checkpoint_of(name, model, as_published)
    config, training = with_dropout(checkpoint.config, as_published, name), training_config(name, as_published, updates)
    batches = [batch(n, training.accumulation, as_published, config.pad_id, SIZE) for n in range(updates)]
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    expected = published_losses(name, model, config, training, as_published, batches)
    losses = [expected, *([] for _ in range(2))]

    twin = replace(checkpoint, config=config).to_flax()
    state, step = init_state(twin, training), make_train_step(config, training)
    for part in batches:
        state, metrics = step(state, JaxBatch(*(jnp.asarray(tensor.numpy()) for tensor in part)))
        losses[1].append(float(metrics.loss))
    pytorch = replace(checkpoint, config=config).to_torch()
    optimizer = make_optimizer(pytorch, training)
    for number, part in enumerate(batches):
        losses[2].append(train_step(pytorch, optimizer, training, number, part).loss)

    state_arrays = {key: from_torch(tensor) for key, tensor in model.state_dict().items()}
    published_params, _ = from_named(state_arrays, config, name)
    largest = max(np.abs(published_params[key]).max() for key in state.params)
    ends = {key: np.asarray(a) for key, a in state.params.items()}, to_params(pytorch.state_dict(), config)
    difference = max(np.abs(end[key] - published_params[key]).max() for end in ends for key in state.params) / largest
    unchanged = sum(torch.equal(p, start[key]) for key, p in model.named_parameters() if p.requires_grad)
    return TrainingComparison(np.array(losses).T, float(difference), unchanged)
