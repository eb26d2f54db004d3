"""The ladder: masks, attention weights, every sublayer, encoder, decoder, logits, every gradient.

Meaning is proven in float64 with a tight absolute bound; then float32 and bfloat16 are bounded by the ratio of the two
models' own errors against float64.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..configs.schema import TransformerConfig
from .functions import GRADIENTS, Batch, Outputs, flax_function, random_arrays, random_batch, torch_function
from .harness import Criterion, Report, compare, flatten

# What equal means in float64.
CRITERIA = (
    Criterion("masks", 0.0, "one", "booleans are equal or not"),
    Criterion("attention weights", 1e-12, "array", "a correct port reaches 1e-14; the next mistake is at 1e-5"),
    Criterion("sublayers", 1e-12, "array", "a correct port reaches 2e-14 on activations of any size"),
    Criterion("encoder", 1e-12, "array", "errors of all its layers together stay under the same bound"),
    Criterion("decoder", 1e-12, "array", "errors of all its layers together stay under the same bound"),
    Criterion("logits", 1e-12, "array", "errors of the whole model stay under the same bound; the loss is here too"),
    Criterion(
        "gradients", 1e-10, "rung", "of the largest gradient: some are 0 in exact arithmetic and have no relative error"
    ),
)
RUNGS = tuple(criterion.rung for criterion in CRITERIA)

# In float32 and bfloat16 each model's error against float64 may be at most this many times the other's, as root mean
# square over POOLED inputs, beyond what the frameworks' bare matrix products differ by (`product_ratio`).
# bfloat16 decides on activations only: there, correct gradients are far apart.
# Inputs in which rounding carries a ReLU across 0 are passed over for float32; MOST_DRAWS ends the search for others.
RATIO_BOUND = 1.5
LARGEST_PRODUCT_RATIO = 2.0  # more is no property of a library but a reduced precision, and proves nothing
POOLED = 24
FEWEST_ELEMENTS = 4096
MOST_DRAWS = 240


@dataclass(frozen=True)
class Rung:
    """One row of the ladder's table."""

    name: str
    error: float  # worst |difference| in float64
    float32_ratio: float | None  # Flax's error / PyTorch's, both against float64; None where it does not apply
    bfloat16_ratio: float | None
    ok: bool


@dataclass(frozen=True)
class Ladder:
    """What climbing found."""

    report: Report  # float64
    rungs: tuple[Rung, ...]
    product_ratio: float  # float32 error of XLA's matrix product over PyTorch's, at the model's widest layer

    @property
    def ok(self) -> bool:
        """Every rung holds, and every array within it."""
        return self.report.ok and all(rung.ok for rung in self.rungs)


def rung_of(path: str) -> str:
    """The rung of an output path."""
    if path.startswith(GRADIENTS):
        return "gradients"
    if path in ("encoder.output", "decoder.output"):
        return path.removesuffix(".output")
    if path in ("logits", "loss"):
        return "logits"
    if path.endswith("_mask"):
        return "masks"
    return "attention weights" if path.endswith(".weights") else "sublayers"


def compare_models(
    config: TransformerConfig, arrays: Mapping[str, np.ndarray], batch: Batch, *, reproduce: str = ""
) -> Report:
    """The ladder in float64 on one batch. Needs `jax_enable_x64` and a float64 config."""
    functions = torch_function(config), flax_function(config)
    return compare(*functions, arrays, batch, criteria=CRITERIA, rung_of=rung_of, reproduce=reproduce)


def climb(
    config: TransformerConfig,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    reproduce: str = "",
) -> Ladder:
    """The whole ladder for a random model of this config, on the CPU.

    `progress` is told (what is being done, steps done, steps in all).
    """
    total = 1 + 2 * POOLED
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        with jax.enable_x64(False):
            arrays = random_arrays(config.replace(param_dtype="float32", compute_dtype="float32"), seed)
        progress("float64", 0, total)
        wide = config.replace(param_dtype="float64", compute_dtype="float64")
        wide_arrays = {name: a.astype(np.float64) for name, a in arrays.items()}
        with jax.enable_x64(True):
            report = compare_models(wide, wide_arrays, _draw(config, seed, 0, 4), reproduce=reproduce)
        ratios = {}
        for i, (dtype, gradients) in enumerate((("float32", True), ("bfloat16", False))):
            errors = _Errors()
            for draw in range(MOST_DRAWS):
                if errors.inputs == POOLED:
                    break
                progress(f"{dtype} against float64", 1 + i * POOLED + errors.inputs, total)
                batch = _draw(config, seed, 1 + draw, 2)
                oracle = flatten(torch_function(wide, gradients=gradients)(wide_arrays, batch))
                narrow = run_both(config, dtype, arrays, batch, gradients)
                if not (gradients and any(rounding_crosses_relu(config, oracle, side) for side in narrow)):
                    errors.add(oracle, *narrow)
            ratios[dtype] = errors.ratios()
        progress("done", total, total)
        product = product_ratio(config)
    return Ladder(report, tuple(_rows(report, ratios, product)), product)


def product_ratio(config: TransformerConfig) -> float:
    """Error of XLA's float32 product x W over PyTorch's, both against float64, W being the widest layer's.

    PyTorch's is closer on some machines, and no port can change that.
    """
    rng, squares = np.random.default_rng(0), np.zeros(2)
    widest = max(config.d_ff, config.decoder_d_ff or 0)
    with jax.enable_x64(False):
        for _ in range(POOLED):
            x, w = (rng.standard_normal(shape, np.float32) for shape in ((14, widest), (widest, config.d_model)))
            exact = x.astype(np.float64) @ w.astype(np.float64)
            flax, other = jnp.dot(x, w), torch.from_numpy(x) @ torch.from_numpy(w)
            squares += [np.square(np.asarray(side, np.float64) - exact).sum() for side in (flax, other)]
    return float(np.sqrt(squares[0] / squares[1]))


def rounding_crosses_relu(config: TransformerConfig, oracle: Outputs, narrow: Outputs) -> bool:
    """Whether a ReLU is open in one and closed in the other by no more than rounding: the gradient is another's then.

    Where the two are farther apart it is no rounding, and the input counts.
    """
    crossed = False
    for path in oracle if config.activation == "relu" else ():
        if path.endswith(".inner"):
            wide, other = oracle[path], narrow[path]
            apart = np.maximum(wide, other)[(wide > 0) != (other > 0)]
            crossed |= bool(apart.size)
            if apart.max(initial=0) > 1e-4 * wide.max():
                return False
    return crossed


def _draw(config: TransformerConfig, seed: int, number: int, batch: int) -> Batch:
    src_length, tgt_length = min(11, config.max_length), min(7, config.max_length)
    return random_batch(config, np.random.default_rng([seed, number]), batch, src_length, tgt_length)


def run_both(
    config: TransformerConfig, dtype: str, arrays: Mapping[str, np.ndarray], batch: Batch, gradients: bool
) -> tuple[Outputs, Outputs]:
    """(Flax outputs, PyTorch outputs) computed in a narrow number type from float32 parameters."""
    narrow = config.replace(param_dtype="float32", compute_dtype=dtype)
    with jax.enable_x64(False):
        flax = flax_function(narrow, gradients=gradients)(arrays, batch)
    return flatten(flax), flatten(torch_function(narrow, gradients=gradients)(arrays, batch))


class _Errors:
    """Squared errors of both models, pooled a rung; activations of different size count alike."""

    def __init__(self) -> None:
        self.inputs = 0
        self.elements: dict[str, int] = {}
        self.sums: dict[str, np.ndarray] = {}

    def add(self, oracle: Outputs, flax: Outputs, other: Outputs) -> None:
        self.inputs += 1
        for path in flax:
            rung = rung_of(path)
            if rung == "masks" or path == "loss":  # nothing to round, and a scalar proves nothing
                continue
            errors = np.array([np.square(side[path] - oracle[path]).sum() for side in (flax, other)])
            scale = 1.0 if rung == "gradients" else np.square(oracle[path]).mean() + 1e-30
            self.elements[rung] = self.elements.get(rung, 0) + oracle[path].size
            self.sums[rung] = self.sums.get(rung, np.zeros(2)) + errors / scale

    def ratios(self) -> dict[str, float]:
        if self.inputs < POOLED:  # fewer prove nothing: no rung holds then
            return dict.fromkeys(RUNGS, float("nan"))
        return {
            rung: float(np.sqrt(flax / other)) if self.elements[rung] >= FEWEST_ELEMENTS else float("nan")
            for rung, (flax, other) in self.sums.items()
        }


def _rows(report: Report, ratios: Mapping[str, Mapping[str, float]], product: float) -> Iterator[Rung]:
    widened = min(max(product, 1 / LARGEST_PRODUCT_RATIO), LARGEST_PRODUCT_RATIO)
    allowed = {"float32": (min(1, widened) / RATIO_BOUND, max(1, widened) * RATIO_BOUND)}
    allowed["bfloat16"] = (1 / RATIO_BOUND, RATIO_BOUND)
    for name in RUNGS:
        worst = report.worst(name)
        found = {dtype: ratios[dtype].get(name) for dtype in allowed}
        near = all(r is None or allowed[dtype][0] <= r <= allowed[dtype][1] for dtype, r in found.items())
        exact = worst is not None and all(f.ok for f in report.findings if f.rung == name)
        error = float(np.max([f.error for f in report.findings if f.rung == name], initial=0.0))
        yield Rung(name, error, *found.values(), ok=exact and near)
