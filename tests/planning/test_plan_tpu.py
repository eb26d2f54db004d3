"""Plans compiled for TPUs by libtpu: minutes. `make test-slow` installs it."""

import pytest

from twinax import TransformerConfig
from twinax.configs.data import CorpusConfig
from twinax.configs.execution import ExecutionConfig
from twinax.configs.run import RunConfig
from twinax.configs.sharding import ShardingConfig
from twinax.configs.training import TrainingConfig
from twinax.planning.compilation import compile_apart
from twinax.planning.estimate import estimate
from twinax.planning.flops import model_flops
from twinax.planning.topology import parse_topology
from twinax.planning.workload import Workload

pytestmark = pytest.mark.slow


def workload(preset, rows, **parts):
    model = TransformerConfig.preset(preset, compute_dtype="bfloat16")
    return Workload(RunConfig(corpus=CorpusConfig(src="-", tgt="-"), model=model, **parts), rows, 64, 64)


def test_example(command):
    """The example of the help: all programs of `base` on sixteen chips."""
    status, out, err = command("plan", "base", "--topology", "v5e:4x4")
    assert status == 0, err
    assert "base on 16 × TPU v5e (v5e:4x4), data=16 · fsdp=1 · tensor=1" in out
    assert "compiled for this slice and not run" in out


@pytest.mark.parametrize(
    ("topology", "sharding", "parts"),
    [
        ("v6e:2x2", ShardingConfig(data=4), {}),
        (
            *("v5e:2x4", ShardingConfig(data=2, fsdp=2, tensor=2)),
            {"training": TrainingConfig(accumulation=2), "execution": ExecutionConfig(scan_layers=True)},
        ),
        ("v4:2x2x1", ShardingConfig(data=1, fsdp=4), {}),  # libtpu lists one device per chip, as JAX on a TPU v4 does
    ],
)
def test_compiled_step_and_estimate(topology, sharding, parts):
    """FLOPs within 2% of the formula, loops of micro-batches and layers included; state and batch up to padding."""
    work = workload("small", 256, **parts)
    program = next(iter(compile_apart(work, parse_topology(topology), sharding, only_step=True)))
    expected, memory = estimate(work, sharding)
    chips = parse_topology(topology).chips
    assert program.cost.flops == pytest.approx(model_flops(work.run.model, 256, 64, 64) / chips, rel=0.02)
    assert program.cost.flops == pytest.approx(expected.flops, rel=0.02)
    assert 0 <= program.memory.arguments / memory.arguments - 1 < 0.02  # a TPU pads small arrays
    # XLA adds gradients by all-reduce where a reduce-scatter would send half, and gathers embeddings in float32.
    assert 1 / 1.2 < program.cost.sent / expected.sent < 2.2


def test_too_large_for_a_chip():
    """XLA refuses the program; the estimate of what it needs is within 10%."""
    work, sharding = workload("big", 512), ShardingConfig(data=1)
    program = next(iter(compile_apart(work, parse_topology("v5e:1x1"), sharding, only_step=True)))
    assert program.cost is None
    assert program.memory.total == pytest.approx(estimate(work, sharding)[1].total, rel=0.1)
