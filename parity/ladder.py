"""The ladder: masks, attention weights, every sublayer, encoder, decoder, logits, every gradient.

Meaning is proven in float64 with a tight absolute bound; then float32 and bfloat16 are bounded by the ratio of the two
models' own errors against float64.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..configs.schema import TransformerConfig
from .coverage import Coverage, coverage
from .functions import GRADIENTS, Batch, Outputs, flax_function, random_arrays, random_batch, torch_function
from .harness import Criterion, Report, compare_arrays, flatten

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
Model = tuple[TransformerConfig, Mapping[str, np.ndarray]]  # and its arrays by Flax name

# In float32 and bfloat16 each model's error against float64 may be at most this many times the other's, as root mean
# square over POOLED inputs, beyond what the frameworks' bare matrix products differ by (`product_ratio`).
# bfloat16 decides on activations only: there, correct gradients are far apart.
# Inputs in which rounding carries a ReLU across 0 are passed over for float32; MOST_DRAWS ends the search for others.
RATIO_BOUND = 1.5
LARGEST_PRODUCT_RATIO = 2.0  # more is no property of a library but a reduced precision, and proves nothing
POOLED = 24
FEWEST_ELEMENTS = 4096
MOST_DRAWS = 240
TEXT_SENTENCES = 16  # of a text that are compared in float64


@dataclass(frozen=True)
class Rung:
    """One row of the ladder's table."""

    name: str
    error: float  # worst |difference| in float64
    oracle_error: float | None  # the same between either model and a third one, the oracle; None where there is none
    float32_ratio: float | None  # Flax's error / PyTorch's, both against float64; None where it does not apply
    bfloat16_ratio: float | None
    ok: bool


@dataclass(frozen=True)
class Ladder:
    """What climbing found."""

    report: Report  # float64
    covered: Coverage  # what the inputs in float64 contain
    oracle_reports: Mapping[str, Report]  # each model's against the oracle
    rungs: tuple[Rung, ...]
    product_ratio: float  # float32 error of XLA's matrix product over PyTorch's, at the model's widest layer
    ratios_decide: bool  # whether a rung's verdict looks at float32 and bfloat16 too

    @property
    def ok(self) -> bool:
        """Every rung holds, and every array within it."""
        return all(report.ok for report in self.reports) and all(rung.ok for rung in self.rungs)

    @property
    def reports(self) -> tuple[Report, ...]:
        """All comparisons in float64."""
        return (self.report, *self.oracle_reports.values())


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


def run_twins(
    config: TransformerConfig, arrays: Mapping[str, np.ndarray], batch: Batch, flax: Model | None = None
) -> dict[str, Outputs]:
    """What each of the two models finds on one batch, by its framework; Flax has another model where one is given."""
    flax_config, flax_arrays = flax or (config, arrays)
    return {
        "PyTorch": torch_function(config)(arrays, batch),
        "Flax": flax_function(flax_config)(flax_arrays, batch),
    }


def compare_models(
    config: TransformerConfig, arrays: Mapping[str, np.ndarray], batch: Batch, *, reproduce: str = ""
) -> Report:
    """The ladder in float64 on one batch. Needs `jax_enable_x64` and a float64 config."""
    found = run_twins(config, arrays, batch)
    return compare_arrays(found["PyTorch"], found["Flax"], criteria=CRITERIA, rung_of=rung_of, reproduce=reproduce)


def compare_with_oracle(
    found: Mapping[str, Outputs],
    expected: Outputs,
    batch: Batch,
    pad_id: int,
    *,
    criteria: Sequence[Criterion] = CRITERIA,
    reproduce: str = "",
) -> dict[str, Report]:
    """What `run_twins` found against what a third function did, in float64, by framework."""
    expected = comparable(expected, expected, batch, pad_id)
    return {
        framework: compare_arrays(
            expected,
            comparable(outputs, expected, batch, pad_id),
            criteria=criteria,
            rung_of=rung_of,
            reproduce=reproduce,
        )
        for framework, outputs in found.items()
    }


def comparable(outputs: Outputs, expected: Outputs, batch: Batch, pad_id: int) -> Outputs:
    """Of `outputs` what the oracle has, less the attention maps of sentences without a source token.

    `transformers` gives maps by its eager attention alone, which there spreads over the padding; its default gives 0,
    as the twins do.
    """
    keep = batch.src_tokens != pad_id if batch.src_mask is None else batch.src_mask
    rows = np.flatnonzero(keep.any(1))
    return {path: outputs[path][rows] if path.endswith(".weights") else outputs[path] for path in expected}


def run_ladder(
    config: TransformerConfig,
    seed: int = 0,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    reproduce: str = "",
    arrays: Mapping[str, np.ndarray] | None = None,
    oracle: Callable[[Batch], Outputs] | None = None,
    flax: Model | None = None,
    draw: Callable[[int, int], Batch | None] | None = None,
) -> Ladder:
    """The whole ladder for a model of this config, on the CPU.

    `progress` is told (what is being done, steps done, steps in all). The model is that of `arrays`, or a random one;
    `flax` is what Flax computes where that is to be another model, of arrays of the same shapes. Where there is an
    `oracle` that computes some of the outputs in float64, both models are compared with it too. `draw` gives the batch
    of a number and of so many sentences, or None where there are no more; without it they are random. Then float64
    alone decides: of trained weights one batch can have a much larger error than the others.
    """
    total = 1 + 2 * POOLED
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        is_random = arrays is None
        with jax.enable_x64(False):
            arrays = arrays or random_arrays(config.replace(param_dtype="float32"), seed)
        progress("float64", 0, total)
        is_random, decide = is_random and draw is None, draw is None
        first = 4 if draw is None else TEXT_SENTENCES
        draw = draw or (lambda number, sentences: _draw(config, seed, number, sentences))
        wide, wide_arrays = _as_type((config, arrays), "float64")
        model, batch = _as_type((config, arrays), "float32"), draw(0, first)
        assert batch is not None  # there is something to compare
        if decide and oracle is None:  # some oracles divide by zero on fully masked rows
            batch.src_tokens[-1] = config.pad_id
        covered = coverage(batch, arrays, config.pad_id)
        if is_random and config.max_length > 2:
            covered.check()
        with jax.enable_x64(True):
            found = run_twins(wide, wide_arrays, batch, flax and _as_type(flax, "float64"))
        twins = found["PyTorch"], found["Flax"]
        report = compare_arrays(*twins, criteria=CRITERIA, rung_of=rung_of, reproduce=reproduce)
        oracle_reports = {}
        if oracle is not None:
            progress("float64 against the oracle", 0, total)
            oracle_reports = compare_with_oracle(found, oracle(batch), batch, config.pad_id, reproduce=reproduce)
        del found, twins
        sentences = max(2, -(-FEWEST_ELEMENTS // (POOLED * batch.tgt_tokens.shape[1] * config.d_model)))
        narrow, ratios = (model, _as_type(flax, "float32") if flax else model), {"float32": {}, "bfloat16": {}}
        for i, dtype in enumerate(ratios):
            if any(finding.problem for finding in report.findings):  # an array that is missing has no error
                break

            def tell(done: int, dtype: str = dtype, i: int = i) -> None:
                progress(f"{dtype} against float64", 1 + i * POOLED + done, total)

            drawn = (draw(1 + number, sentences) for number in range(MOST_DRAWS))
            batches = (batch for batch in takewhile(lambda batch: batch is not None, drawn) if batch is not None)
            ratios[dtype] = _ratios(dtype, (wide, wide_arrays), narrow, batches, tell)
        progress("done", total, total)
        product = product_ratio(config)
    rungs = tuple(_rows(report, oracle_reports, ratios, product, decide))
    return Ladder(report, covered, oracle_reports, rungs, product, decide)


def _ratios(
    dtype: str, wide: Model, narrow: tuple[Model, Model], batches: Iterator[Batch], tell: Callable[[int], None]
) -> dict[str, float]:
    """Flax's error over PyTorch's in a dtype, a rung; `narrow` is PyTorch's model and Flax'.

    None where there are fewer batches: the same sentences again would prove no more.
    """
    errors, gradients = _Errors(), dtype == "float32"
    config, arrays = wide
    for batch in batches:
        tell(errors.inputs)
        errors.drawn += 1
        exact = flatten(torch_function(config, gradients=gradients)(arrays, batch))
        found = _run_both(*narrow, dtype, batch, gradients)
        if not (gradients and any(rounding_crosses_relu(config, exact, side) for side in found)):
            errors.add(exact, *found)
        if errors.inputs == POOLED:
            break
    return errors.ratios() if errors.inputs == POOLED or errors.drawn == MOST_DRAWS else {}


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


def _as_type(model: Model, dtype: str) -> Model:
    """The same model with parameters of a dtype, computing in it."""
    config, arrays = model
    config = config.replace(param_dtype=dtype, compute_dtype=dtype)
    return config, {name: a.astype(dtype) for name, a in arrays.items()}


def _run_both(model: Model, flax: Model, dtype: str, batch: Batch, gradients: bool) -> tuple[Outputs, Outputs]:
    """(Flax outputs, PyTorch outputs) of models with float32 parameters, computed in a narrow dtype."""
    (config, arrays), (flax_config, flax_arrays) = model, flax
    with jax.enable_x64(False):
        narrow = flax_function(flax_config.replace(compute_dtype=dtype), gradients=gradients)(flax_arrays, batch)
    other = torch_function(config.replace(compute_dtype=dtype), gradients=gradients)(arrays, batch)
    return flatten(narrow), flatten(other)


class _Errors:
    """Squared errors of both models, pooled a rung; activations of different size count alike."""

    def __init__(self) -> None:
        self.inputs = self.drawn = 0
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


def _rows(
    report: Report,
    oracle: Mapping[str, Report],
    ratios: Mapping[str, Mapping[str, float]],
    product: float,
    decide: bool,
) -> Iterator[Rung]:
    widened = min(max(product, 1 / LARGEST_PRODUCT_RATIO), LARGEST_PRODUCT_RATIO)
    allowed = {"float32": (min(1, widened) / RATIO_BOUND, max(1, widened) * RATIO_BOUND)}
    allowed["bfloat16"] = (1 / RATIO_BOUND, RATIO_BOUND)
    for name in RUNGS:
        found = {dtype: ratios[dtype].get(name) for dtype in allowed}
        near = not decide or all(r is None or allowed[dtype][0] <= r <= allowed[dtype][1] for dtype, r in found.items())
        findings = [f for f in report.findings if f.rung == name]
        more = [f for each in oracle.values() for f in each.findings if f.rung == name]
        exact = bool(findings) and all(f.ok for f in findings + more)
        errors = [float(np.max([f.error for f in some])) if some else None for some in (findings, more)]
        yield Rung(name, errors[0] or 0.0, errors[1], *found.values(), ok=exact and near)
