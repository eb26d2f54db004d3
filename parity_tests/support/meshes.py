"""The same training on different meshes of devices: losses in float64, and the error of gradients in float32."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from twinax.configs.schema import TransformerConfig
from twinax.configs.sharding import ShardingConfig
from twinax.configs.training import TrainingConfig
from twinax.convert.optimizers.adam import find_adam
from twinax.flax_transformer.model import Transformer
from twinax.flax_transformer.module import named_arrays
from twinax.parity.functions import random_batch
from twinax.train.step.partitioning import Placement
from twinax.train.step.step import Batch, init_state, make_train_step

# Every dimension that an axis divides is a multiple of 8, and no two are equal.
MODEL = TransformerConfig(
    **{"src_vocab_size": 104, "tgt_vocab_size": 112, "d_model": 32, "num_heads": 8, "d_ff": 48, "max_length": 16},
    **{"num_encoder_layers": 2, "num_decoder_layers": 2, "norm_placement": "pre", "final_norm": True},
    **{f"{site}_dropout": 0.1 for site in ("embedding", "residual", "attention", "ffn")},
)
TRAINING = TrainingConfig(
    label_smoothing=0.1, accumulation=2, clip_norm=1.0, schedule="inverse_sqrt", learning_rate=1e-2, warmup_updates=10
)
LOSS_BOUND = 1e-10  # of a difference in nats, in float64; parameters without a gradient differ by rounding / eps
RATIO_BOUND = 1.5  # of root mean square errors in float32, as in the ladder
_ROWS = (16, 13)  # of batches in turn; 13 is divided by no mesh


@dataclass(frozen=True)
class MeshAgreement:
    """A training on a mesh, compared with the training on one device."""

    sharding: ShardingConfig
    loss: float  # largest difference in nats, in float64
    params: float  # largest difference of a parameter at the end, in float64
    ratio: float  # float32 error of the gradients on the mesh / on one device, both against float64

    @property
    def ok(self) -> bool:
        """Whether it is the same training up to rounding."""
        return self.loss <= LOSS_BOUND and self.ratio <= RATIO_BOUND


def factorizations(devices: int) -> Iterator[ShardingConfig]:
    """Every mesh of this many devices."""
    for data in (n for n in range(1, devices + 1) if devices % n == 0):
        for fsdp in (n for n in range(1, devices // data + 1) if devices // data % n == 0):
            yield ShardingConfig(data=data, fsdp=fsdp, tensor=devices // data // fsdp)


def compare_meshes(
    shardings: Sequence[ShardingConfig], model: TransformerConfig, training: TrainingConfig, updates: int
) -> Iterator[MeshAgreement]:
    """Train in float64 on every mesh with the same batches, and compute gradients in float32.

    Needs float64 in JAX, and as many devices as the meshes have.
    """
    wide = model.replace(param_dtype="float64", compute_dtype="float64")
    narrow = model.replace(param_dtype="float32", compute_dtype="float32")
    one = ShardingConfig(data=1)
    losses, params = _train(one, wide, training, updates)
    exact = _gradients(one, wide, training)
    error = _error(_gradients(one, narrow, training), exact)
    for sharding in shardings:
        mesh_losses, mesh_params = _train(sharding, wide, training, updates)
        ratio = _error(_gradients(sharding, narrow, training), exact) / error
        yield MeshAgreement(sharding, _difference(mesh_losses, losses), _difference(mesh_params, params), ratio)


class MeshTraining:
    """The state of a training on a mesh; its weights are those of float64, rounded."""

    def __init__(self, sharding: ShardingConfig, model: TransformerConfig, training: TrainingConfig):
        self.model, self.training = model, training
        count = int(np.prod(list(vars(sharding).values())))
        self.placement = Placement.of(sharding, model, jax.devices()[:count])
        wide = Transformer(model.replace(param_dtype="float64", compute_dtype="float64"), rngs=nnx.Rngs(0))
        arrays = {name: array.astype(model.param_dtype) for name, array in named_arrays(wide).items()}
        self.state = self.placement.place(init_state(Transformer.from_arrays(model, arrays), training))
        self.step = make_train_step(model, training, self.placement)

    def batch(self, number: int) -> Batch:
        """The batch of an update, the same on every mesh."""
        rng = np.random.default_rng(number)
        batch = random_batch(self.model, rng, _ROWS[number % len(_ROWS)], 7, 9)
        arrays = (batch.src_tokens, batch.tgt_tokens, batch.labels)
        return Batch(*self.placement.split(arrays, self.model.pad_id, self.training.accumulation))

    def update(self, number: int) -> float:
        """Make an update; its loss in nats per token."""
        self.state, metrics = self.step(self.state, self.batch(number))
        return float(metrics.loss)


def _train(
    sharding: ShardingConfig, model: TransformerConfig, training: TrainingConfig, updates: int
) -> tuple[np.ndarray, np.ndarray]:
    """(losses in nats, parameters at the end)."""
    run = MeshTraining(sharding, model, training)
    losses = [run.update(number) for number in range(updates)]
    return np.array(losses), _flat(run.state.params)


def _gradients(sharding: ShardingConfig, model: TransformerConfig, training: TrainingConfig) -> np.ndarray:
    """The gradients of one update, unclipped and times 1 - beta1: Adam's first moments."""
    run = MeshTraining(sharding, model, replace(training, clip_norm=None))
    run.update(0)
    return _flat(find_adam(run.state.optimizer).mu)


def _flat(arrays: Any) -> np.ndarray:
    return np.concatenate([np.asarray(arrays[name], np.float64).ravel() for name in sorted(arrays)])


def _error(array: np.ndarray, exact: np.ndarray) -> float:
    return float(np.sqrt(np.square(array - exact).mean()))


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())
