"""Measures what rematerialization and scanned layers cost on this CPU: `make benchmark-execution`.

`python -m benchmarks.training.execution PAGE` measures each setting in its own process, prints the tables and writes
them into the page. On a machine that is not idle, only the ratios and the bytes are meaningful.
"""

import json
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.progress import track

from benchmarks.pages import marks, write_table
from twinax import TransformerConfig
from twinax.configs.execution import ExecutionConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer.model import Transformer
from twinax.train.step.step import Batch, init_state, make_train_step

STEPS, SENTENCES, LENGTH, VOCABULARY = 10, 16, 32, 1000
SIZES = {"d_model": 128, "d_ff": 512, "src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY}
DEPTHS, DEPTH_OF_REMAT = (2, 6, 12), 6
REMATS = ("none", "layers", "dots")
Setting = tuple[int, str, bool]  # layers per stack, remat, scan_layers
SETTINGS: list[Setting] = [
    *((depth, "none", scan) for depth, scan in product(DEPTHS, (False, True))),
    *((DEPTH_OF_REMAT, remat, scan) for remat, scan in product(REMATS[1:], (False, True))),
]
Figures = dict[str, float]


def measure(layers: int, remat: Any, scan_layers: bool) -> Figures:
    """Seconds of compilation, median seconds of a step, and bytes of temporary memory, in this process."""
    config = TransformerConfig.preset("small", **SIZES, num_encoder_layers=layers, num_decoder_layers=layers)
    execution = ExecutionConfig(remat=remat, scan_layers=scan_layers)
    rng = np.random.default_rng(0)
    src, tgt, labels = (jnp.asarray(rng.integers(4, VOCABULARY, (SENTENCES, LENGTH))) for _ in range(3))
    batch = Batch(src, tgt, labels, jnp.arange(SENTENCES))
    state = init_state(Transformer(config, rngs=nnx.Rngs(0)), TrainingConfig())
    step = make_train_step(config, TrainingConfig(), execution=execution)
    begin = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    figures = {"compile": time.perf_counter() - begin}
    figures["bytes"] = compiled.memory_analysis().temp_size_in_bytes
    seconds = []
    for _ in range(STEPS + 1):
        begin = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
    return {**figures, "step": statistics.median(seconds[1:])}


def measure_apart(setting: Setting) -> Figures:
    """The same in a process of its own."""
    process = subprocess.run(
        [sys.executable, "-m", __spec__.name, json.dumps(setting)], capture_output=True, text=True, check=True
    )
    return json.loads(process.stdout)


def main(page: Path) -> None:
    """Measure all settings, print the tables, write them into the page."""
    for name in ("scanned layers", "rematerialization"):
        marks(page, name)
    figures = {setting: measure_apart(setting) for setting in track(SETTINGS, "processes")}
    rows = []
    for depth in DEPTHS:
        pair = figures[depth, "none", False], figures[depth, "none", True]
        compile_seconds = (f"{run['compile']:.1f}" for run in pair)
        megabytes = (f"{run['bytes'] / 1e6:,.0f}" for run in pair)
        rows.append((f"{depth} + {depth}", *compile_seconds, f"{pair[1]['step'] / pair[0]['step']:.2f}", *megabytes))
    header = ("layers", "compile seconds", "scanned", "step time, scanned / not", "MB", "MB, scanned")
    write_table(page, "scanned layers", header, rows)
    rows, plain = [], figures[DEPTH_OF_REMAT, "none", False]
    for remat, scan in product(REMATS, (False, True)):
        run = figures[DEPTH_OF_REMAT, remat, scan]
        numbers = (f"{run['bytes'] / 1e6:,.0f}", f"{run['step'] / plain['step']:.2f}", f"{run['compile']:.1f}")
        rows.append((f"`{remat}`", "yes" if scan else "no", *numbers))
    header = ("remat", "scanned", "MB", "step time / none, not scanned", "compile seconds")
    write_table(page, "rematerialization", header, rows)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.training.execution PAGE")
    if sys.argv[1].startswith("["):
        print(json.dumps(measure(*json.loads(sys.argv[1]))))
    else:
        main(Path(sys.argv[1]))
