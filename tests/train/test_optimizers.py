"""Optimizer and schedules against torch.optim over 50 updates, in float64: within 1e-12 of the largest parameter."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from torch.optim import lr_scheduler

from twinax import TransformerConfig
from twinax.configs import ConfigError
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.configs.training import TrainingConfig
from twinax.convert.checkpoint import Checkpoint, Training
from twinax.convert.optimizers.adam import to_torch_optimizer
from twinax.convert.port import flax_specs
from twinax.formulas.schedules import SCHEDULES, learning_rate
from twinax.parity.functions import random_arrays
from twinax.train.step import optimizers

UPDATES = 50
SHAPES = {"a.kernel": (5, 7), "b.embedding": (11, 3), "a.bias": (7,), "norm.scale": (4,), "unreached.kernel": (2, 3)}


def start(seed=0):
    rng = np.random.default_rng(seed)
    params = {name: rng.normal(0, 1, shape) for name, shape in SHAPES.items()}
    gradients = [
        {name: rng.normal(0, 10 ** rng.uniform(-4, 1), s) for name, s in SHAPES.items()} for _ in range(UPDATES)
    ]
    for gradient in gradients:
        gradient["unreached.kernel"][:] = 0
    return params, gradients


def run_twinax(config, rate_of):
    params, gradients = start()
    optimizer = optimizers.make_optimizer(config, without_gradient={"unreached.kernel"})
    state = optimizer.init(params)

    @jax.jit
    def update(params, state, gradient, rate):
        gradient = optimizers.clip(gradient, optax.tree.norm(gradient), config)
        direction, state = optimizer.update(gradient, state, params)
        return {name: p - rate * direction[name] for name, p in params.items()}, state

    for number, gradient in enumerate(gradients):
        params, state = update(params, state, gradient, rate_of(number))
    return {name: np.asarray(p) for name, p in params.items()}


def run_torch(config, make_scheduler, clip=torch.nn.utils.clip_grad_norm_, with_gradient=True):
    params, gradients = start()
    params = {name: torch.nn.Parameter(torch.from_numpy(p)) for name, p in params.items()}
    decay_group = [p for p in params.values() if p.ndim > 1 or config.decayed == "all"]
    plain_group = [p for p in params.values() if not (p.ndim > 1 or config.decayed == "all")]
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    groups = [{"params": decay_group}, *([{"params": plain_group, "weight_decay": 0.0}] if plain_group else [])]
    betas = (config.beta1, config.beta2)
    optimizer = kind(groups, lr=config.learning_rate, betas=betas, eps=config.eps, weight_decay=config.weight_decay)
    scheduler = make_scheduler(optimizer)
    for gradient in gradients:
        for name, p in params.items():
            p.grad = torch.from_numpy(gradient[name]) if name != "unreached.kernel" or not with_gradient else None
        if config.clip_norm:
            clip(params.values(), config.clip_norm)
        optimizer.step()
        scheduler.step()
    return {name: p.detach().numpy() for name, p in params.items()}


def assert_equal(actual, expected):
    scale = max(np.abs(p).max() for p in expected.values())
    for name, p in expected.items():
        assert np.abs(actual[name] - p).max() <= 1e-12 * scale, name


def unscheduled(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decayed", ["matrices", "all"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_optimizer(optimizer, weight_decay, decayed, clip_norm):
    config = TrainingConfig(
        optimizer=optimizer, weight_decay=weight_decay, decayed=decayed, clip_norm=clip_norm, learning_rate=0.03,
        beta1=0.8, beta2=0.95, eps=1e-6, schedule="constant", warmup_updates=0,
    )  # fmt: skip
    assert_equal(run_twinax(config, lambda n: 0.03), run_torch(config, unscheduled))


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("groups", [[None], [0.1], [0.1, 0.0], [0.0, 0.0]])
def test_settings_of_torchs_optimizer(kind, groups):
    """One group with torch's defaults, or groups of matrices and of the rest; its updates are the oracle."""
    params, gradients = start()
    del params["unreached.kernel"]
    own = {name: torch.nn.Parameter(torch.from_numpy(p)) for name, p in params.items()}
    matrices = [[p for p in own.values() if len(groups) == 1 or (p.ndim > 1) is first] for first in (True, False)]
    decays = [{} if decay is None else {"weight_decay": decay} for decay in groups]
    optimizer = kind([{"params": p} | d for p, d in zip(matrices, decays, strict=False)], lr=0.02, betas=(0.8, 0.99))
    config = TrainingConfig.like_torch(optimizer)
    for gradient in gradients:
        for name, p in own.items():
            p.grad = torch.from_numpy(gradient[name])
        optimizer.step()
    actual = run_twinax(config, lambda n: float(learning_rate(n, config, 8, np)))
    assert_equal({name: actual[name] for name in own}, {name: p.detach().numpy() for name, p in own.items()})


LIKE_TORCH = {
    r"optimizer=RAdam: must be": lambda p, q: torch.optim.RAdam([p, q]),
    r"amsgrad=True: must be False": lambda p, q: torch.optim.Adam([p, q], amsgrad=True),
    r"lr=0.1, 0.2: must be the same": lambda p, q: torch.optim.Adam(
        [{"params": [r]} | {"lr": lr} for r, lr in ((p, 0.1), (q, 0.2))]
    ),
    r"weight_decay=\[0.0, 0.1\]: must be one": lambda p, q: torch.optim.Adam(
        [{"params": [p]}, {"params": [q], "weight_decay": 0.1}]
    ),
}


@pytest.mark.parametrize("message", LIKE_TORCH)
def test_settings_that_twinax_does_not_have(message):
    with pytest.raises(ConfigError, match=message):
        TrainingConfig.like_torch(LIKE_TORCH[message](*(torch.nn.Parameter(torch.ones(2)) for _ in range(2))))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_clipping_and_decay_as_optax_has_them(weight_decay):
    """optax decays a parameter without a gradient, and adds no 1e-6 to the norm."""
    config = TrainingConfig(
        optimizer="adamw", weight_decay=weight_decay, clip_norm=0.5, clip_rule="optax", without_gradient="decay",
        decayed="all", beta2=0.999, eps=1e-8,
    )  # fmt: skip
    params, gradients = start()
    optimizer = optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(0.03, 0.9, 0.999, 1e-8, weight_decay=weight_decay)
    )
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    assert_equal(run_twinax(config, lambda n: 0.03), {name: np.asarray(p) for name, p in params.items()})


def test_the_rules_differ():
    """Each choice moves the result by more than the comparison allows."""
    base = {"optimizer": "adamw", "weight_decay": 0.1, "clip_norm": 0.5}
    expected = run_twinax(TrainingConfig(**base), lambda n: 0.03)
    changes = ({"clip_rule": "optax"}, {"without_gradient": "decay"}, {"decayed": "all"}, {"optimizer": "adam"})
    for change in changes:
        with pytest.raises(AssertionError):
            assert_equal(run_twinax(TrainingConfig(**base | change), lambda n: 0.03), expected)


RATE, WARM, TOTAL = 0.03, 7, 40
CASES = {
    # name -> (our settings, torch's scheduler); first_update=0 is torch's convention
    "constant": (
        {"schedule": "constant", "warmup_updates": 7},
        lambda o: lr_scheduler.LinearLR(o, 1e-300, 1.0, WARM),
    ),
    "cosine": (
        {"schedule": "cosine", "warmup_updates": 0, "total_updates": 40, "final_learning_rate": 0.002},
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.CosineAnnealingLR(o, TOTAL, 0.002), lr_scheduler.ConstantLR(o, 0.002 / RATE, 99)], [TOTAL]
        ),
    ),
    "step": (
        {"schedule": "step", "warmup_updates": 0, "step_updates": 9, "step_factor": 0.5},
        lambda o: lr_scheduler.StepLR(o, 9, 0.5),
    ),
    "cosine with warm-up": (
        {"schedule": "cosine", "warmup_updates": 7, "total_updates": 60},  # torch's rate rises again after the end
        lambda o: transformers.get_cosine_schedule_with_warmup(o, WARM, 60),
    ),
    "linear": (
        {"schedule": "linear", "warmup_updates": 7, "total_updates": 40},
        lambda o: transformers.get_linear_schedule_with_warmup(o, WARM, TOTAL),
    ),
    "linear to a final rate": (
        {"schedule": "linear", "warmup_updates": 0, "total_updates": 40, "final_learning_rate": 0.003},
        lambda o: lr_scheduler.LinearLR(o, 1.0, 0.1, TOTAL),
    ),
    "inverse square root": (
        {"schedule": "inverse_sqrt", "warmup_updates": 7},
        lambda o: transformers.get_inverse_sqrt_schedule(o, WARM, timescale=WARM),
    ),
    "noam": (
        {"schedule": "noam", "warmup_updates": 7, "first_update": 1},
        lambda o: lr_scheduler.LambdaLR(o, lambda n: 16**-0.5 * min((n + 1) ** -0.5, (n + 1) * WARM**-1.5)),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # torch's schedulers call each other in a deprecated way
@pytest.mark.parametrize("name", CASES)
def test_schedule(name):
    settings, make_scheduler = CASES[name]
    config = TrainingConfig(**{"learning_rate": RATE, "first_update": 0, "optimizer": "adamw", **settings})
    expected = run_torch(config, make_scheduler)
    numbers = {"numpy": np, "traced": jnp}
    for library in numbers.values():
        rate_of = jax.jit(lambda n, library=library: learning_rate(n, config, 16, library)) if library is jnp else (
            lambda n: learning_rate(n, config, 16, np)
        )  # fmt: skip
        assert_equal(run_twinax(config, rate_of), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cosine with warm-up", "inverse square root", "noam"])
@pytest.mark.parametrize("updates", [0, 1, 5, 9])
def test_the_rate_in_a_file_is_where_torch_s_scheduler_stands(name, updates):
    """The rate after one scheduler step per update is that of the next update."""
    settings, make_scheduler = CASES[name]
    training = TrainingConfig(**{"learning_rate": RATE, "first_update": 0, **settings})
    scheduled = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=RATE if name != "noam" else 0.03)
    scheduler = make_scheduler(scheduled)
    for _ in range(updates):
        scheduled.step()
        scheduler.step()
    config = TransformerConfig.preset("tiny", d_model=16, num_encoder_layers=1, num_decoder_layers=1)
    arrays = random_arrays(config, 0)
    run = RunConfig(corpus=CorpusConfig(dataset="x"), model=config, training=training)
    moments = {name: arrays[name] for name in flax_specs(config, trained_only=True)}
    state = Training(run, updates, 0, (0, 0), updates, moments, moments)
    state_dict = to_torch_optimizer(state, Checkpoint(config, arrays).to_torch())
    assert [group["lr"] for group in state_dict["param_groups"]] == pytest.approx(
        [scheduled.param_groups[0]["lr"]] * len(state_dict["param_groups"]), rel=1e-12
    )


@pytest.mark.parametrize("schedule", sorted({*SCHEDULES} - {"noam_per_part"}))
@pytest.mark.parametrize("first_update", [0, 1])
def test_warm_up_rises_evenly_and_n_counts_from_the_first_update(schedule, first_update):
    config = TrainingConfig(
        schedule=schedule, warmup_updates=10, total_updates=30, step_updates=5, learning_rate=2.0,
        first_update=first_update,
    )  # fmt: skip
    top = 2.0 * (4**-0.5 * 10**-0.5 if schedule == "noam" else 1)
    rates = [float(learning_rate(update, config, 4, np)) for update in range(40)]
    assert rates[:10] == pytest.approx([top * (update + first_update) / 10 for update in range(10)])
    assert max(rates) == pytest.approx(top)
    assert all(math.isfinite(rate) and rate >= 0 for rate in rates)


def test_noam_per_part_counts_micro_batches_and_reads_0_as_1():
    shared = {"warmup_updates": 30, "first_update": 0}
    parts = TrainingConfig(schedule="noam_per_part", accumulation=10, **shared)
    plain_config = TrainingConfig(schedule="noam", **shared)
    rates = [float(learning_rate(update, parts, 4, np)) for update in range(6)]
    assert rates == [float(learning_rate(n, plain_config, 4, np)) for n in (1, 10, 20, 30, 40, 50)]
    assert np.argmax(rates) == 3  # warm-up ends after a tenth of its updates


WRONG = {
    "label_smoothing=1.0: must be at least 0 and below 1": {"label_smoothing": 1.0},
    "clip_norm=0.0: must be a finite number above 0": {"clip_norm": 0},
    "schedule='noam': needs warmup_updates of at least 1": {"warmup_updates": 0},
    "warmup_updates=10: must be below total_updates=10": {"warmup_updates": 10, "total_updates": 10},
    "accumulation=0: must be at least 1": {"accumulation": 0},
    "optimizer='sgd': must be one of 'adam', 'adamw'": {"optimizer": "sgd"},
    "seed=4294967296: must be below": {"seed": 2**32},
    "weight_decay=-1.0: must be a finite number of at least 0": {"weight_decay": -1},
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_settings(line):
    with pytest.raises(ConfigError, match=f"^{line}"):
        TrainingConfig(**WRONG[line])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_schedules_with_an_end_need_one(schedule):
    with pytest.raises(ConfigError, match=rf"^schedule='{schedule}': needs total_updates, which only `train` fills in"):
        learning_rate(0, TrainingConfig(schedule=schedule), 8, np)


def test_step_needs_its_updates():
    with pytest.raises(ConfigError, match=r"^schedule='step': needs step_updates, which only `train` fills in"):
        learning_rate(0, TrainingConfig(schedule="step"), 8, np)
