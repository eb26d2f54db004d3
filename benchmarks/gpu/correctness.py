"""What a device computes: the ladder, updates, a comparison, attention, products, and a resumed training."""

import hashlib
import math
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.scale import Scale
from benchmarks.gpu.training import ANY_ORDER

UPDATES = 20
MISTAKES: tuple[dict[str, Any], ...] = (
    {},
    {"norm_eps": 1e-3},
    {"activation": "gelu"},
    {"score_scaling": "none"},
)
REPEATS = 10  # of a timed product


def ladder(scale: Scale) -> list[list[str]]:
    """One row per rung, Flax on the device and PyTorch on the CPU."""
    import jax

    from twinax import TransformerConfig
    from twinax.parity.ladder import run_ladder

    result = run_ladder(TransformerConfig.preset(scale.ladder), backend=jax.default_backend())
    rows = []
    for rung in result.rungs:
        ratios = ("" if ratio is None else f"{ratio:.2f}" for ratio in (rung.float32_ratio, rung.bfloat16_ratio))
        rows.append([rung.name, f"{rung.error:.1e}", *ratios, "yes" if rung.ok else "NO"])
    return rows


def updates(scale: Scale) -> list[list[str]]:
    """Trainings with dropout in both frameworks, update by update; float32 products in full precision."""
    import jax

    from parity_tests.support.trajectories import measure, trajectory_cases

    rows = []
    cases = list(trajectory_cases())
    with jax.default_matmul_precision("highest"):
        for case in cases[:: -(-len(cases) // scale.cases)]:
            outcome = measure(case, UPDATES)
            errors = f"{outcome.loss:.1e}", f"{outcome.parameters:.1e}", f"{outcome.handover:.1e}"
            resumed = "yes" if outcome.resumed else "NO"
            rows.append([case.name, *errors, f"{outcome.ratio:.2f}", resumed, "yes" if outcome.ok else "NO"])
    return rows


def comparison(scale: Scale) -> list[list[str]]:
    """Verdicts of `twinax.parity.compare` on twins, with the Flax twin on the device and wrong in one setting."""
    import jax
    import jax.numpy as jnp

    from twinax import TransformerConfig
    from twinax.parity.functions import random_arrays, random_batch
    from twinax.parity.ladder import compare_twins

    rows = []
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        config = TransformerConfig.preset("tiny", param_dtype="float64", compute_dtype="float64")
        arrays = random_arrays(config, 0)
        batch = random_batch(config, np.random.default_rng(0), 4, 7, 6)
        for mistake in MISTAKES[: 1 + scale.mistakes]:
            flax = {name: jnp.asarray(array) for name, array in arrays.items()}
            found = compare_twins((config, arrays), batch, (config.replace(**mistake), flax))
            first = next(iter(found.forward.defects), None)
            planted = ", ".join(f"{name} = {value}" for name, value in mistake.items()) or "none"
            rows.append([planted, found.verdict, "" if first is None else str(first).splitlines()[0]])
    return rows


def attention(scale: Scale) -> list[list[str]]:
    """Errors of logits and gradients in bfloat16 with both attentions, against PyTorch in float64."""
    # Before JAX starts the backend: cuDNN's attention needs it.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ANY_ORDER}".strip()
    import jax
    import jax.numpy as jnp

    from twinax import TransformerConfig
    from twinax.configs.execution import AttentionImplementation, ExecutionConfig
    from twinax.convert.port import flax_specs
    from twinax.flax_transformer.fused_attention import uses_cudnn
    from twinax.flax_transformer.model import Transformer
    from twinax.parity.functions import GRADIENTS, LOSS, Batch, random_arrays, random_batch, torch_function
    from twinax.train.step.losses import cross_entropy

    implementations: tuple[AttentionImplementation, ...] = ("exact", "fused")
    preset = "small" if scale.inputs > 2 else "tiny"
    config = TransformerConfig.preset(preset, attention_dropout=0.0, compute_dtype="bfloat16", max_length=16)
    if preset == "tiny":
        config = config.replace(v_head_dim=13)  # fused attention has one width
    arrays = random_arrays(config, 0)
    wide = config.replace(param_dtype="float64", compute_dtype="float64")
    reference = torch_function(wide)
    wide_arrays = {name: array.astype("float64") for name, array in arrays.items()}

    def outputs(params: Mapping[str, Any], batch: Batch, implementation: AttentionImplementation) -> Any:
        def loss(params: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
            execution = ExecutionConfig(attention=implementation)
            model = Transformer.from_arrays(config, {**arrays, **params}, execution)
            logits = model(batch.src_tokens, batch.tgt_tokens)
            total, tokens = cross_entropy(logits, batch.labels, config.pad_id, LOSS)
            return total / jnp.maximum(tokens, 1), logits

        (_, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        return {"logits": logits, **{GRADIENTS + name: gradient for name, gradient in gradients.items()}}

    compiled = jax.jit(outputs, static_argnums=2)
    params = {name: jnp.asarray(arrays[name]) for name in flax_specs(config, trained_only=True)}
    squares: Counter[tuple[str, str]] = Counter()
    for number in range(scale.inputs):
        batch = random_batch(config, np.random.default_rng(number), 8, 16, 12)  # even lengths, as cuDNN needs
        exact = {path: np.asarray(value) for path, value in reference(wide_arrays, batch).items()}
        for implementation in implementations:
            for path, value in compiled(params, batch, implementation).items():
                kind = "gradients" if path.startswith(GRADIENTS) else path
                squares[kind, implementation] += float(np.square(np.asarray(value, np.float64) - exact[path]).sum())
                squares[kind, "reference"] += float(np.square(exact[path]).sum()) / len(implementations)
    rows = []
    for kind in ("logits", "gradients"):
        errors = [math.sqrt(squares[kind, name] / squares[kind, "reference"]) for name in implementations]
        rows.append([kind, *(f"{error:.1e}" for error in errors), f"{errors[1] / errors[0]:.2f}"])
    width = config.query_key_width(config.num_heads)
    q, k = (jnp.zeros((8, length, config.num_heads, width), jnp.bfloat16) for length in (12, 16))
    return [*rows, ["computed by", "the formula", "cuDNN" if uses_cudnn(q, k) else "XLA", ""]]


def products(scale: Scale) -> list[list[str]]:
    """Speed and error of one float32 product in each precision of both frameworks."""
    import jax
    import jax.numpy as jnp
    import torch

    side = scale.product
    x, y = (np.random.default_rng(seed).standard_normal((side, side), np.float32) for seed in (0, 1))
    columns = slice(0, 16)
    exact = x.astype(np.float64) @ y[:, columns].astype(np.float64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = [torch.from_numpy(array).to(device) for array in (x, y)]

    def with_jax(precision: str | None, dtype: str) -> Callable[[], np.ndarray]:
        operands = [jnp.asarray(array, dtype) for array in (x, y)]
        product = jax.jit(lambda x, y: jnp.matmul(x, y, precision=precision))
        return lambda: np.asarray(keep(lambda: product(*operands).block_until_ready())[:, columns], np.float64)

    def with_torch(precision: str) -> Callable[[], np.ndarray]:
        def run() -> np.ndarray:
            torch.set_float32_matmul_precision(precision)

            def product() -> torch.Tensor:
                result = tensors[0] @ tensors[1]
                if device == "cuda":
                    torch.cuda.synchronize()
                return result

            return keep(product)[:, columns].double().cpu().numpy()

        return run

    times: list[float] = []

    def keep(product: Callable[[], Any]) -> Any:
        product()
        for _ in range(REPEATS):
            begin = time.perf_counter()
            result = product()
            times.append(time.perf_counter() - begin)
        return result

    rows = []
    for name, run in {
        "JAX, as it is": with_jax(None, "float32"),
        "JAX, `highest`": with_jax("highest", "float32"),
        "PyTorch, as it is": with_torch("highest"),
        "PyTorch, `high`": with_torch("high"),
        "JAX, bfloat16": with_jax(None, "bfloat16"),
    }.items():
        times.clear()
        error = np.sqrt(np.square(run() - exact).sum() / np.square(exact).sum())
        rows.append([name, f"{2 * side**3 / min(times) / 1e12:,.1f}", f"{error:.1e}"])
    return rows


def resume(scale: Scale) -> list[list[str]]:
    """Whether a training that was stopped halfway and resumed in another process has the same bits at its end."""
    context = multiprocessing.get_context("spawn")
    rows = []
    for name, flags in (("yes", ""), ("no", ANY_ORDER))[: scale.cases]:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        with tempfile.TemporaryDirectory() as folder:
            ends = []
            for resumed in (False, True):  # each in a process of its own
                with context.Pool(1) as pool:
                    ends.append(pool.apply(train_and_hash, (scale.resumed, folder, resumed)))
        different = "NO" if name == "yes" else "no"  # equal bits are promised of deterministic operations alone
        rows.append([name, str(UPDATES), ends[0][:12], ends[1][:12], "yes" if ends[0] == ends[1] else different])
    return rows


def train_and_hash(preset: str, folder: str, resumed: bool) -> str:
    """SHA-256 of a training's state after all updates, from the start or from the checkpoint of half of them."""
    from twinax.backend.xla_flags import set_xla_flags

    set_xla_flags()
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from twinax import TransformerConfig
    from twinax.configs.data import CorpusConfig
    from twinax.configs.run import RunConfig
    from twinax.configs.training import TrainingConfig
    from twinax.flax_transformer.model import Transformer
    from twinax.train.checkpointing.checkpoints import Checkpoints
    from twinax.train.step.step import Batch, init_state, make_train_step

    config = TransformerConfig.preset(preset, compute_dtype="bfloat16")
    training = TrainingConfig(schedule="constant", learning_rate=1e-3, warmup_updates=0)
    run = RunConfig(corpus=CorpusConfig(src="-", tgt="-"), model=config, training=training)
    state = init_state(Transformer(config, rngs=nnx.Rngs(0)), training)
    checkpoints = Checkpoints(Path(folder, "checkpoints"))
    if resumed:
        state = checkpoints.restore(state, UPDATES // 2)
    step = make_train_step(config, training)
    for number in range(int(state.update), UPDATES):
        rng = np.random.default_rng(number)
        tokens = [jnp.asarray(rng.integers(4, config.src_vocab_size, (32, 16)), jnp.int32) for _ in range(3)]
        state, _ = step(state, Batch(*tokens, 32 * number + jnp.arange(32, dtype=jnp.int32)))
        if number + 1 == UPDATES // 2 and not resumed:
            checkpoints.save(state, run, NoTokenizers())
            checkpoints.wait()
    hashes = hashlib.sha256()
    for leaf in jax.tree.leaves(state):
        hashes.update(np.asarray(leaf).tobytes())
    return hashes.hexdigest()


class NoTokenizers:
    """Tokenizers of a training on random tokens."""

    def save(self, directory: Path) -> None:
        """Write nothing."""
