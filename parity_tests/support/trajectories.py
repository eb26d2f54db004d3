"""Compares whole trainings update by update: Flax and PyTorch from one state, on the same batches, with dropout."""

import io
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from twinax import convert, flax_transformer
from twinax.configs.schema import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer.unused_parameters import without_gradient
from twinax.parity.coverage import coverage
from twinax.parity.functions import Batch as FunctionBatch
from twinax.parity.functions import random_arrays
from twinax.torch_reference import step as torch_step
from twinax.torch_reference.model import Transformer
from twinax.torch_reference.optimizers import make_optimizer
from twinax.train.step.step import Batch, Metrics, TrainState, init_state, make_train_step

UPDATES, INPUTS, SENTENCES, LENGTH = 200, 20, 6, 8
LOSS_BOUND, PARAMETER_BOUND, RATIO_BOUND = 1e-9, 1e-8, 1.5
# torch's AdamW rounds a float32 parameter twice, after multiplying by (1 - rate · decay) and after subtracting the
# direction, so that its own error is larger by this factor.
TWICE_ROUNDED = 2**0.5


@dataclass(frozen=True)
class TrajectoryCase:
    """A model config and a training config, in float64."""

    model: TransformerConfig
    training: TrainingConfig

    @property
    def name(self) -> str:
        """The settings in which the cases differ."""
        parts = [self.training.optimizer, self.training.schedule, f"{self.model.norm_placement}-norm"]
        parts += [f"{self.training.accumulation} micro-batches"] if self.training.accumulation > 1 else []
        parts += [self.training.consistency] if self.training.consistency != "none" else []
        return ", ".join(parts)

    def narrow(self) -> "TrajectoryCase":
        """The same case in float32."""
        return replace(self, model=self.model.replace(param_dtype="float32", compute_dtype="float32"))


def trajectory_cases() -> Iterator[TrajectoryCase]:
    """Half of the 16 combinations; every combination of any three choices occurs. Then both consistency losses."""
    model = TransformerConfig.preset(
        "tiny", attention_dropout=0.1, ffn_dropout=0.1, param_dtype="float64", compute_dtype="float64"
    )
    training = TrainingConfig(label_smoothing=0.1, clip_norm=1.0, warmup_updates=40, beta2=0.98, seed=7)
    for adam, noam, pre, whole in product((True, False), repeat=4):
        if adam ^ noam ^ pre ^ whole:
            continue
        schedule: dict[str, Any] = {"schedule": "noam", "learning_rate": 0.2}
        if not noam:
            schedule = {"schedule": "cosine", "learning_rate": 3e-3, "total_updates": UPDATES}
        decay = {"optimizer": "adam"} if adam else {"optimizer": "adamw", "weight_decay": 0.01}
        settings = {**vars(training), **schedule, **decay, "accumulation": 1 if whole else 3}
        placement = (
            {"norm_placement": "pre", "final_norm": True} if pre else {"norm_placement": "post", "final_norm": False}
        )
        yield TrajectoryCase(model.replace(**placement), TrainingConfig(**settings))
    noam = replace(training, schedule="noam", learning_rate=0.2)
    for consistency in ("simcut", "r_drop"):
        yield TrajectoryCase(model, replace(noam, consistency=consistency))


def batch(case: TrajectoryCase, update: int) -> Batch:
    """Random sentences of different lengths and their reversals, as numpy arrays."""
    rng, config = np.random.default_rng(update), case.model
    src: Any = rng.integers(3, 60, (SENTENCES, LENGTH))
    lengths = rng.integers(2, LENGTH + 1, SENTENCES)
    is_token = np.arange(LENGTH) < lengths[:, None]
    src = np.where(is_token, src, config.pad_id)
    reversed_src = np.take_along_axis(src, np.maximum(lengths[:, None] - 1 - np.arange(LENGTH), 0), axis=1)
    labels: Any = np.where(is_token, reversed_src, config.pad_id)
    tgt: Any = np.concatenate([np.full((SENTENCES, 1), config.bos_id), labels[:, :-1]], axis=1)
    rows: Any = np.arange(SENTENCES) + SENTENCES * update
    return Batch(src, tgt, labels, rows)


@lru_cache
def _step(case: TrajectoryCase) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    return make_train_step(case.model, case.training)


class InFlax:
    """A training in Flax."""

    def __init__(self, case: TrajectoryCase, state: TrainState | None = None):
        self.case, self.run = case, _step(case)
        self.state = self.initial_state() if state is None else state

    def initial_state(self) -> TrainState:
        """The initial state, the same for both frameworks."""
        arrays = {name: jnp.asarray(a) for name, a in random_arrays(self.case.model, 0).items()}
        model = flax_transformer.Transformer.from_arrays(self.case.model, arrays)
        return init_state(model, self.case.training)

    def update(self, number: int) -> float:
        """Make one update; return its loss in nats per token."""
        return self.step(number)[0]

    def step(self, number: int) -> tuple[float, ...]:
        """Make one update; return (loss, tokens, gradient norm, learning rate, applied, update)."""
        self.state, metrics = self.run(self.state, batch(self.case, number))
        return tuple(map(float, metrics[:-1]))

    def serialize(self) -> bytes:
        """The state as bytes, as in a checkpoint file."""
        return pickle.dumps(jax.tree.map(np.asarray, self.state))

    def load(self, data: bytes) -> None:
        """Restore what `serialize` returned."""
        self.state = jax.tree.map(jnp.asarray, pickle.loads(data))

    def params(self) -> dict[str, np.ndarray]:
        """Parameters by name."""
        return {name: np.asarray(a) for name, a in self.state.params.items()}


class InPyTorch:
    """A training in PyTorch, from a state in Flax."""

    def __init__(self, case: TrajectoryCase, state: TrainState):
        self.case = case
        self.first_state = jax.tree.map(jnp.copy, state)  # a copy, because a step donates its state
        arrays = {**state.buffers, **state.params}
        self.model = Transformer.from_state_dict(case.model, convert.to_state_dict(arrays, case.model))
        self.optimizer = make_optimizer(self.model, case.training)
        unused = without_gradient(case.model)
        self.optimizer.load_state_dict(convert.to_optimizer_state(state.optimizer, self.model, self.optimizer, unused))

    def update(self, number: int) -> float:
        """Make one update; return its loss in nats per token."""
        return self.step(number)[0]

    def step(self, number: int) -> tuple[float, ...]:
        """Make one update; return (loss, tokens, gradient norm, learning rate, applied, update)."""
        tensors = torch_step.Batch(*(torch.from_numpy(np.asarray(a)) for a in batch(self.case, number)))
        metrics = torch_step.train_step(self.model, self.optimizer, self.case.training, number, tensors)
        return tuple(map(float, metrics[:-1]))

    def serialize(self) -> bytes:
        """Model and optimizer as bytes, as in a checkpoint file."""
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.optimizer.state_dict()], file)
        return file.getvalue()

    def load(self, data: bytes) -> None:
        """Restore what `serialize` returned."""
        model, optimizer = torch.load(io.BytesIO(data), weights_only=True)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def params(self) -> dict[str, np.ndarray]:
        """Parameters by Flax name."""
        params = convert.to_params(self.model.state_dict(), self.case.model)
        return {name: a for name, a in params.items() if not name.endswith(".positions.table")}

    def to_flax(self, number: int) -> TrainState:
        """The state in Flax before update `number`."""
        unused = without_gradient(self.case.model)
        moments = convert.to_optax_state(self.optimizer, self.model, self.first_state.optimizer, unused)
        params = {name: jnp.asarray(a) for name, a in self.params().items()}
        update = jnp.asarray(number, jnp.int32)
        return self.first_state._replace(params=params, optimizer=moments, update=update)


@dataclass(frozen=True)
class Outcome:
    """The results of a case; losses are (update, framework), in nats per token."""

    name: str
    losses: np.ndarray
    narrow_losses: np.ndarray  # of full runs in float32; reported only
    parameters: float  # largest difference at the end, relative to the largest parameter
    resumed: bool  # whether a save and load halfway is bit-identical in both frameworks
    handover: float  # worst loss difference of a handover: a third each in Flax, PyTorch and Flax
    ratio: float  # Flax error / PyTorch error of the parameters after single float32 updates
    moment_ratio: float  # the same for Adam's first moment
    torch_rounding: float  # factor by which PyTorch's own parameter error is larger, see TWICE_ROUNDED

    @property
    def loss(self) -> float:
        """Largest loss difference of any update."""
        return float(np.abs(np.subtract(*self.losses.T)).max())

    @property
    def ok(self) -> bool:
        """Whether every bound holds."""
        lowest = 1 / RATIO_BOUND
        ratios = all(lowest <= ratio <= RATIO_BOUND for ratio in (self.ratio * self.torch_rounding, self.moment_ratio))
        losses_hold = all(difference <= LOSS_BOUND for difference in (self.loss, self.handover))
        return losses_hold and self.parameters <= PARAMETER_BOUND and ratios and self.resumed


def measure(case: TrajectoryCase, updates: int = UPDATES) -> Outcome:
    """Train a case in both frameworks and make every comparison."""
    with jax.enable_x64(True):
        flax = InFlax(case)
        src_tokens, tgt_tokens, labels = (np.asarray(a) for a in batch(case, 0)[:3])
        inputs = FunctionBatch(src_tokens, tgt_tokens, labels)
        coverage(inputs, flax.params(), case.model.pad_id).check()
        pytorch = InPyTorch(case, flax.state)
        third, half = 3 * updates // 12, updates // 2
        files, losses = {}, []
        errors = _Errors(case)
        for number in range(updates):
            if number in (third, half):
                files[number] = flax.serialize(), pytorch.serialize()
            if number % (updates // INPUTS) == 0:
                errors.add(flax, number)
            losses.append((flax.update(number), pytorch.update(number)))
        ends = flax.params(), pytorch.params()
        largest = max(np.abs(p).max() for p in ends[1].values())
        difference = max(np.abs(ends[0][name] - p).max() for name, p in ends[1].items()) / largest

        resumed = all(resumes(*pair, range(half, updates)) for pair in zip((flax, pytorch), files[half], strict=True))
        handover = _handover(flax, files[third][0], third)
    narrow = _free_run(case.narrow(), updates)
    handover_difference = float(np.abs(handover - np.array(losses)[third : third + len(handover), 0]).max())
    rounding = TWICE_ROUNDED if case.training.optimizer == "adamw" and case.training.weight_decay else 1.0
    return Outcome(
        case.name,
        np.array(losses),
        narrow,
        float(difference),
        resumed,
        handover_difference,
        *errors.ratios(),
        torch_rounding=rounding,
    )


def resumes(side: InFlax | InPyTorch, saved: bytes, updates: Iterable[int]) -> bool:
    """Whether resuming from `saved` over these updates reproduces the current parameters bit-exactly."""
    params = side.params()
    side.load(saved)
    for number in updates:
        side.update(number)
    resumed_params = side.params()
    return all(np.array_equal(params[name], resumed_params[name]) for name in params)


def _handover(flax: InFlax, saved: bytes, updates: int) -> np.ndarray:
    """Losses of the handover: after `updates` updates in Flax (`saved`), as many in PyTorch, then as many in Flax."""
    flax.load(saved)
    pytorch = InPyTorch(flax.case, flax.state)
    losses = [pytorch.update(number) for number in range(updates, 2 * updates)]
    flax.state = pytorch.to_flax(2 * updates)
    return np.array(losses + [flax.update(number) for number in range(2 * updates, 3 * updates)])


def _free_run(case: TrajectoryCase, updates: int) -> np.ndarray:
    with jax.enable_x64(False):
        flax = InFlax(case)
        pytorch = InPyTorch(case, flax.state)
        return np.array([(flax.update(number), pytorch.update(number)) for number in range(updates)])


class _Errors:
    """Squared errors of single float32 updates in both frameworks against float64, from the same states."""

    def __init__(self, case: TrajectoryCase):
        self.narrow = case.narrow()
        self.sums = {"parameters": np.zeros(2), "moments": np.zeros(2)}

    def add(self, flax: InFlax, number: int) -> None:
        state = jax.tree.map(lambda a: _cast(a, np.float64, np.float32), flax.state)
        wide = jax.tree.map(lambda a: jnp.asarray(_cast(a, np.float32, np.float64)), state)
        exact, _ = flax.run(wide, batch(flax.case, number))
        with jax.enable_x64(False):
            state = jax.tree.map(jnp.asarray, state)
            pytorch = InPyTorch(self.narrow, state)
            pytorch.update(number)
            states = _step(self.narrow)(state, batch(self.narrow, number))[0], pytorch.to_flax(number + 1)
        for name in exact.params:
            if not name.endswith("k_proj.bias"):  # its exact gradient is zero
                self._add("parameters", exact.params[name], *(side.params[name] for side in states))
                self._add("moments", _mu(exact)[name], *(_mu(side)[name] for side in states))

    def _add(self, kind: str, exact: Any, *arrays: Any) -> None:
        exact = np.asarray(exact)
        self.sums[kind] += [np.square(np.asarray(array, np.float64) - exact).sum() for array in arrays]

    def ratios(self) -> tuple[float, float]:
        first, second = (float(np.sqrt(flax / pytorch)) for flax, pytorch in self.sums.values())
        return first, second


def _cast(array: Any, from_dtype: Any, to_dtype: Any) -> np.ndarray:
    array = np.array(array)
    return array.astype(to_dtype) if array.dtype == from_dtype else array


def _mu(state: TrainState) -> Any:
    return optax.tree.get(state.optimizer, "mu")
