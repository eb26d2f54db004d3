"""Compares the speed of a train step on a CPU with and without keeping freed memory.

`python -m benchmarks.training.malloc [RUN]` alternates both, each in its own process, and prints the ratio of target
tokens per second over rounds: median, smallest and largest. On a machine that is not idle, only these ratios are
meaningful.
"""

import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from twinax.backend.malloc import keep_freed_memory
from twinax.flax_transformer.model import Transformer
from twinax.presets.runs import run_preset
from twinax.train.step.step import Batch, init_state, make_train_step

ROUNDS, STEPS, TOKENS, VOCABULARY, LENGTH = 7, 20, 4096, 3000, 20


def measure(run: str, keeps_memory: bool) -> float:
    """Target tokens per second, in this process; the first step is not counted."""
    if keeps_memory and not keep_freed_memory():
        sys.exit("the C library of this system is not glibc: nothing to measure")
    preset = run_preset(run)
    config = preset.model.replace(src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY)
    sentences = TOKENS // LENGTH
    rng = np.random.default_rng(0)
    src, tgt, labels = (jnp.asarray(rng.integers(4, VOCABULARY, (sentences, LENGTH))) for _ in range(3))
    batch = Batch(src, tgt, labels, jnp.arange(sentences))
    state, step = (
        init_state(Transformer(config, rngs=nnx.Rngs(0)), preset.training),
        make_train_step(config, preset.training),
    )
    state, metrics = step(state, batch)
    metrics.loss.block_until_ready()
    begin = time.perf_counter()
    for _ in range(STEPS):
        state, metrics = step(state, batch)
        metrics.loss.block_until_ready()
    return STEPS * sentences * LENGTH / (time.perf_counter() - begin)


def main(run: str) -> None:
    """Print the speeds and their ratio."""
    speeds_by_name: dict[str, list[float]] = {"freed": [], "kept": []}
    for _ in range(ROUNDS):
        for name, speeds in speeds_by_name.items():
            process = subprocess.run(
                [sys.executable, "-m", __spec__.name, run, name], capture_output=True, text=True, check=True
            )
            speeds.append(float(process.stdout))
    ratios = [kept_speed / freed_speed for freed_speed, kept_speed in zip(*speeds_by_name.values(), strict=True)]
    medians = " and ".join(f"{statistics.median(speeds):,.0f} {name}" for name, speeds in speeds_by_name.items())
    print(f"{run}, {jax.devices()[0].device_kind}, {ROUNDS} rounds of {STEPS} steps; tokens per second: {medians}")
    print(f"kept / freed: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    if sys.argv[2:]:
        print(measure(sys.argv[1], sys.argv[2] == "kept"))
    else:
        main(sys.argv[1] if len(sys.argv) > 1 else "multi30k_de_en")
