"""Compares the time of a train step without dropout, with the shared counter, and with JAX's threefry.

`python -m benchmarks.training.dropout [PRESET]` runs each once per round and prints the median ratio to the step
without dropout in the same round. On a machine that is not idle, only these ratios are meaningful.
"""

import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from twinax import TransformerConfig, flax_transformer
from twinax.configs.training import TrainingConfig
from twinax.train.step.step import Batch, init_state, make_train_step

ROUNDS, SENTENCES, LENGTH = 31, 32, 32
RATES = ("embedding_dropout", "attention_dropout", "ffn_dropout", "residual_dropout")


def main(preset: str) -> None:
    """Print one line per generator."""
    base = TransformerConfig.preset(preset)
    rng = np.random.default_rng(0)
    src, tgt, labels = (jnp.asarray(rng.integers(4, 100, (SENTENCES, LENGTH))) for _ in range(3))
    batch = Batch(src, tgt, labels, jnp.arange(SENTENCES))
    runs = {}
    for name in ("none", "counter", "threefry"):
        rates = dict.fromkeys(RATES, 0.0 if name == "none" else 0.1)
        config = base.replace(**rates, dropout_generator="counter" if name == "none" else name)
        training = TrainingConfig()
        state = init_state(flax_transformer.Transformer(config, rngs=nnx.Rngs(0)), training)
        step = make_train_step(config, training)
        state, _ = step(state, batch)  # compiles
        runs[name] = (step, state)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, (step, state) in runs.items():
            begin = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
            seconds[name].append(time.perf_counter() - begin)
            runs[name] = (step, state)
    print(
        f"{preset}, {SENTENCES} sentences of {LENGTH} tokens per side, {jax.devices()[0].device_kind}, {ROUNDS} rounds"
    )
    for name, times in seconds.items():
        ratios = [t / base for t, base in zip(times, seconds["none"], strict=True)]
        print(f"{name:9} {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "small")
