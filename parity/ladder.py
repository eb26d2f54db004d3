"""The ladder: masks, attention weights, every sublayer, encoder, decoder, logits, every gradient.

In float64, a tight absolute bound shows that both models compute the same function. In float32 and bfloat16, the bound
is on the ratio of the two models' errors against float64.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import jax
import jax.numpy as jnp
import numpy as np

from .. import convert, flax_transformer, torch_reference
from ..backend.notebook import result_html
from ..backend.self_test import check_compiler
from ..compare.comparison import Comparison, compare
from ..configs.schema import TransformerConfig
from .attention import Attention, attention_in
from .coverage import Coverage, coverage
from .functions import (
    GRADIENTS,
    Batch,
    Outputs,
    flax_function,
    product_ratio,
    random_arrays,
    random_batch,
    step_function,
    sum_ratio,
    torch_function,
)
from .harness import Criterion, Report, compare_arrays, flatten

# The definition of equal in float64.
CRITERIA = (
    Criterion("masks", 0.0, "one", "booleans must be identical"),
    Criterion("attention weights", 1e-12, "array", "a correct port reaches 1e-14; a float32 softmax is off by 7.5e-8"),
    Criterion("sublayers", 1e-12, "array", "a correct port reaches 2e-14 on activations of any size"),
    Criterion("encoder", 1e-12, "array", "the errors of all its layers together stay below the same bound"),
    Criterion("decoder", 1e-12, "array", "the errors of all its layers together stay below the same bound"),
    Criterion("logits", 1e-12, "array", "the errors of the whole model stay below the same bound; includes the loss"),
    Criterion("gradients", 1e-10, "rung", "relative to the largest gradient: some are 0 in exact arithmetic"),
)
RUNGS = tuple(criterion.rung for criterion in CRITERIA)
Model = tuple[TransformerConfig, Mapping[str, np.ndarray]]  # config, arrays by Flax name
FlaxFunction = Callable[..., Callable[[Mapping[str, np.ndarray], Batch], Outputs]]  # of a config

# In float32 and bfloat16, each model's root mean square error against float64 over POOLED inputs may be at most
# RATIO_BOUND times the other's. The float32 bound is widened by the ratio of isolated matmuls (`product_ratio`).
# bfloat16 covers activations only, because correct gradients differ too much there.
# In float32, inputs in which rounding flips a ReLU are skipped; at most MAX_DRAWS inputs are drawn.
RATIO_BOUND = 1.5
MAX_PRODUCT_RATIO = 2.0  # a larger ratio means reduced precision and is not accepted as a reason
POOLED = 24
MIN_ELEMENTS = 4096
MAX_DRAWS = 240
TEXT_SENTENCES = 16  # of a text, compared in float64


@dataclass(frozen=True)
class Rung:
    """One row of the ladder's table."""

    name: str
    error: float  # worst |difference| in float64
    oracle_error: float | None  # the same of either model from the oracle; None without an oracle
    float32_ratio: float | None  # Flax error / PyTorch error, both against float64; None if not compared
    bfloat16_ratio: float | None
    ok: bool


@dataclass(frozen=True)
class Ladder:
    """The results of all rungs."""

    report: Report  # float64
    coverage: Coverage  # of the inputs in float64
    oracle_reports: Mapping[str, Report]  # each model against the oracle
    rungs: tuple[Rung, ...]
    product_ratio: float  # float32 error of XLA's matrix product / PyTorch's, at the model's widest layer
    sum_ratio: float | None  # the same of sums over the rows of a batch; None without `shape`
    inputs: int  # over which the ratios are measured
    ratios_decide: bool  # whether a rung's verdict depends on float32 and bfloat16 too
    sentences_needed: int | None = None  # for float32 and bfloat16, if the text has fewer
    comparison: Comparison | None = None  # where the twins part, if they are not equal in float64
    attention: Attention | None = None  # of one sentence, in float64

    @property
    def ok(self) -> bool:
        """Whether every rung and every array holds."""
        return all(report.ok for report in self.reports) and all(rung.ok for rung in self.rungs)

    def _repr_html_(self) -> str:
        rows = [(r.name, *numbers(r, ""), "equal" if r.ok else "DIFFERENT") for r in self.rungs]
        columns = ("rung", "float64", "float32 ratio", "bf16 ratio", "verdict")
        return result_html("equal" if self.ok else "DIFFERENT", self.ok, columns, rows)

    @property
    def reports(self) -> tuple[Report, ...]:
        """All comparisons in float64."""
        return (self.report, *self.oracle_reports.values())


def numbers(rung: Rung, oracle_name: str) -> list[str]:
    """The cells of a rung's row: its errors in float64 and its ratios."""
    errors = [rung.error, rung.oracle_error] if oracle_name else [rung.error]
    texts = ["–" if error is None else f"{error:.1e}" if error else "0" for error in errors]
    return texts + ["–" if ratio is None else f"{ratio:.2f}" for ratio in (rung.float32_ratio, rung.bfloat16_ratio)]


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
    config: TransformerConfig,
    arrays: Mapping[str, np.ndarray],
    batch: Batch,
    flax: Model | None = None,
    function: FlaxFunction = flax_function,
) -> dict[str, Outputs]:
    """The outputs of both models on one batch, by framework; `flax`: a different model for Flax."""
    flax_config, flax_arrays = flax or (config, arrays)
    return {
        "PyTorch": torch_function(config)(arrays, batch),
        "Flax": function(flax_config)(flax_arrays, batch),
    }


def compare_models(
    config: TransformerConfig, arrays: Mapping[str, np.ndarray], batch: Batch, *, reproduce: str = ""
) -> Report:
    """The ladder in float64 on one batch. Needs `jax_enable_x64` and a float64 config."""
    outputs = run_twins(config, arrays, batch)
    return compare_arrays(outputs["PyTorch"], outputs["Flax"], criteria=CRITERIA, rung_of=rung_of, reproduce=reproduce)


def compare_twins(model: Model, batch: Batch, flax: Model | None = None) -> Comparison:
    """The operations in which both models part on one batch, in their outputs or their gradients.

    Needs `jax_enable_x64` and a float64 config.
    """
    (config, arrays), (flax_config, flax_arrays) = model, flax or model
    reference = torch_reference.Transformer.from_state_dict(config, convert.to_state_dict(arrays, config)).eval()
    candidate = flax_transformer.Transformer.from_arrays(
        flax_config, {name: jnp.asarray(array) for name, array in flax_arrays.items()}
    )
    masks = [mask for mask in (batch.src_mask, batch.tgt_mask) if mask is not None]
    inputs = (batch.src_tokens, batch.tgt_tokens, *masks)
    return compare(reference, candidate, inputs, gradients=True, rounding=False)


def compare_with_oracle(
    outputs: Mapping[str, Outputs],
    expected: Outputs,
    batch: Batch,
    pad_id: int,
    *,
    criteria: Sequence[Criterion] = CRITERIA,
    reproduce: str = "",
) -> dict[str, Report]:
    """Compare the outputs of `run_twins` with those of an oracle, in float64; report by framework."""
    expected = comparable(expected, expected, batch, pad_id)
    return {
        framework: compare_arrays(
            expected,
            comparable(twin_outputs, expected, batch, pad_id),
            criteria=criteria,
            rung_of=rung_of,
            reproduce=reproduce,
        )
        for framework, twin_outputs in outputs.items()
    }


def comparable(outputs: Outputs, expected: Outputs, batch: Batch, pad_id: int) -> Outputs:
    """The outputs that the oracle has too, without attention weights of sentences that have no source token.

    `transformers` returns them only from its eager attention, which attends to padding in such sentences; its default
    attention returns 0, as the twins do.
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
    backend: str = "cpu",
    shape: tuple[int, int] | None = None,
) -> Ladder:
    """Run the whole ladder for a model of this config, with Flax on the first device of a JAX backend.

    `progress` receives (label, completed steps, all steps). The weights are `arrays`, or random. `flax`: a different
    model for Flax, with arrays of the same shapes. `oracle`: computes some of the outputs in float64; both models are
    compared with it too. `draw(number, count)`: batch `number`, with `count` sentences, or None at the end; by
    default batches are random. With `draw`, the ratios affect no verdict, because with trained weights the error of one
    batch can be much larger than that of the others. `shape`: sentences and tokens per side of every random batch, at
    which loss and gradients are those of the program that trains.
    """
    check_compiler()
    with jax.default_device(jax.devices(backend)[0]), jax.default_matmul_precision("highest"):
        is_random = arrays is None and draw is None
        decide = draw is None
        with jax.enable_x64(False):
            arrays = arrays or random_arrays(config.replace(param_dtype="float32"), seed)
        function = flax_function if shape is None else step_function
        if shape is not None:
            sentences, draw = shape[0], lambda number, _: _draw(config, seed, number, *shape, shape[1])
        elif draw is None:
            sentences, draw = 4, lambda number, count: _draw(config, seed, number, count, 11, 7)
        else:
            sentences = TEXT_SENTENCES
        wide, wide_arrays = _as_type((config, arrays), "float64")
        model, batch = _as_type((config, arrays), "float32"), draw(0, sentences)
        assert batch is not None  # the caller ensures at least one sentence
        per_input = sentences_per_input(config, batch)
        pooled = POOLED if shape is None else -(-POOLED * per_input // sentences)
        total = 1 + 2 * pooled
        progress("float64", 0, total)
        too_few = draw(pooled, per_input) is None
        if decide and oracle is None:  # some oracles divide by zero on fully masked rows
            batch.src_tokens[-1] = config.pad_id
        input_coverage = coverage(batch, arrays, config.pad_id)
        if is_random and config.max_length > 2:
            input_coverage.check()
        wide_flax = flax and _as_type(flax, "float64")
        with jax.enable_x64(True):
            outputs = run_twins(wide, wide_arrays, batch, wide_flax, function)
        twins = outputs["PyTorch"], outputs["Flax"]
        report = compare_arrays(*twins, criteria=CRITERIA, rung_of=rung_of, reproduce=reproduce)
        oracle_reports = {}
        if oracle is not None:
            progress("float64 against the oracle", 0, total)
            oracle_reports = compare_with_oracle(outputs, oracle(batch), batch, config.pad_id, reproduce=reproduce)
        attention = attention_in(*twins, batch, config.pad_id, report)
        del outputs, twins
        narrow = model, _as_type(flax, "float32") if flax else model
        ratios = {"float32": {}, "bfloat16": {}}
        for i, dtype in enumerate(ratios):
            if too_few or any(finding.problem for finding in report.findings):  # a missing array has no error
                break

            def show(completed: int, dtype: str = dtype, i: int = i) -> None:
                progress(f"{dtype} against float64", 1 + i * pooled + completed, total)

            draws = (draw(1 + number, per_input) for number in range(MAX_DRAWS))
            batches = (batch for batch in takewhile(lambda batch: batch is not None, draws) if batch is not None)
            ratios[dtype] = _ratios(dtype, (wide, wide_arrays), narrow, batches, show, pooled, function)
        comparison = None
        if not report.ok:
            progress("where the models diverge", total, total)
            with jax.enable_x64(True):
                comparison = compare_twins((wide, wide_arrays), batch, wide_flax)
        progress("done", total, total)
        product = product_ratio(config, POOLED)
        sums = None if shape is None else sum_ratio(config, shape[0] * shape[1])
    of_gradients = max(product, 1 / MAX_PRODUCT_RATIO) if sums is None else sums  # small sums are PyTorch's errors
    rungs = tuple(_rows(report, oracle_reports, ratios, product, of_gradients, decide))
    sentences_needed = TEXT_SENTENCES + POOLED * per_input if too_few else None
    return Ladder(
        report,
        input_coverage,
        oracle_reports,
        rungs,
        product,
        sums,
        pooled,
        decide,
        sentences_needed,
        comparison,
        attention,
    )


def sentences_per_input(config: TransformerConfig, batch: Batch) -> int:
    """Sentences in each of the POOLED inputs, enough for MIN_ELEMENTS elements; `batch` has their target length."""
    return max(2, -(-MIN_ELEMENTS // (POOLED * batch.tgt_tokens.shape[1] * config.d_model)))


def _ratios(
    dtype: str,
    wide: Model,
    narrow: tuple[Model, Model],
    batches: Iterator[Batch],
    show: Callable[[int], None],
    pooled: int,
    function: FlaxFunction,
) -> dict[str, float]:
    """Flax error / PyTorch error per rung in a dtype; `narrow` is (PyTorch's model, Flax's model).

    Empty if there are too few batches: repeating sentences would prove no more.
    """
    errors = _Errors(pooled)
    gradients = dtype == "float32"
    config, arrays = wide
    for batch in batches:
        show(errors.inputs)
        errors.draws += 1
        exact = flatten(torch_function(config, gradients=gradients)(arrays, batch))
        outputs = _run_both(*narrow, dtype, batch, gradients, function)
        flips = gradients and any(rounding_crosses_relu(config, exact, side) for side in outputs)
        if flips and function is step_function:  # as in any batch of many sentences
            outputs = tuple({p: a for p, a in side.items() if rung_of(p) != "gradients"} for side in outputs)
        if not flips or function is step_function:
            errors.add(exact, *outputs)
        if errors.inputs == pooled:
            break
    return errors.ratios() if errors.inputs == pooled or errors.draws == MAX_DRAWS else {}


def rounding_crosses_relu(config: TransformerConfig, reference: Outputs, outputs: Outputs) -> bool:
    """Whether rounding flips a ReLU between the two, which changes the gradient.

    False if any such pair differs by more than rounding: then the input counts.
    """
    crossed = False
    for path in reference if config.activation == "relu" else ():
        if path.endswith(".inner"):
            exact, values = np.abs(reference[path]), np.abs(outputs[path])  # a gate makes some of them negative
            flipped = np.maximum(exact, values)[(exact > 0) != (values > 0)]
            crossed |= bool(flipped.size)
            if flipped.max(initial=0) > 1e-4 * exact.max():
                return False
    return crossed


def _draw(config: TransformerConfig, seed: int, number: int, batch: int, src_length: int, tgt_length: int) -> Batch:
    lengths = min(src_length, config.max_length), min(tgt_length, config.max_length)
    return random_batch(config, np.random.default_rng([seed, number]), batch, *lengths)


def _as_type(model: Model, dtype: str) -> Model:
    """The model with its parameters and computation in a dtype."""
    config, arrays = model
    config = config.replace(param_dtype=dtype, compute_dtype=dtype)
    return config, {name: a.astype(dtype) for name, a in arrays.items()}


def _run_both(
    model: Model, flax: Model, dtype: str, batch: Batch, gradients: bool, function: FlaxFunction = flax_function
) -> tuple[Outputs, Outputs]:
    """(Flax outputs, PyTorch outputs) of models with float32 parameters, computed in a narrow dtype."""
    (config, arrays), (flax_config, flax_arrays) = model, flax
    with jax.enable_x64(False):
        flax_outputs = function(flax_config.replace(compute_dtype=dtype), gradients=gradients)(flax_arrays, batch)
    pytorch_outputs = torch_function(config.replace(compute_dtype=dtype), gradients=gradients)(arrays, batch)
    return flatten(flax_outputs), flatten(pytorch_outputs)


class _Errors:
    """Squared errors of both models, pooled per rung; activations are normalized by their size."""

    def __init__(self, needed: int = POOLED) -> None:
        self._needed = needed
        self.inputs = self.draws = 0
        self.elements: dict[str, int] = {}
        self.sums: dict[str, np.ndarray] = {}

    def add(self, exact: Outputs, flax: Outputs, pytorch: Outputs) -> None:
        self.inputs += 1
        for path in flax:
            rung = rung_of(path)
            if rung == "masks" or path == "loss":  # masks are not rounded, and a scalar proves nothing
                continue
            errors = np.array([np.square(side[path] - exact[path]).sum() for side in (flax, pytorch)])
            scale = 1.0 if rung == "gradients" else np.square(exact[path]).mean() + 1e-30
            self.elements[rung] = self.elements.get(rung, 0) + exact[path].size
            self.sums[rung] = self.sums.get(rung, np.zeros(2)) + errors / scale

    def ratios(self) -> dict[str, float]:
        if self.inputs < self._needed:  # too few inputs prove nothing: no rung holds
            return dict.fromkeys(RUNGS, float("nan"))
        return {
            rung: float(np.sqrt(flax / pytorch)) if self.elements[rung] >= MIN_ELEMENTS else float("nan")
            for rung, (flax, pytorch) in self.sums.items()
        }


def _rows(
    report: Report,
    oracle: Mapping[str, Report],
    ratios: Mapping[str, Mapping[str, float]],
    product: float,
    product_of_gradients: float,
    decide: bool,
) -> Iterator[Rung]:
    for name in RUNGS:
        widened = product_of_gradients if name == "gradients" else max(product, 1 / MAX_PRODUCT_RATIO)
        widened = min(widened, MAX_PRODUCT_RATIO)
        allowed = {"float32": (min(1, widened) / RATIO_BOUND, max(1, widened) * RATIO_BOUND)}
        allowed["bfloat16"] = (1 / RATIO_BOUND, RATIO_BOUND)
        rung_ratios = {dtype: ratios[dtype].get(name) for dtype in allowed}
        in_bounds = (r is None or allowed[dtype][0] <= r <= allowed[dtype][1] for dtype, r in rung_ratios.items())
        ratios_hold = not decide or all(in_bounds)
        findings = [f for f in report.findings if f.rung == name]
        oracle_findings = [f for oracle_report in oracle.values() for f in oracle_report.findings if f.rung == name]
        exact = bool(findings) and all(f.ok for f in findings + oracle_findings)
        errors = [float(np.max([f.error for f in group])) if group else None for group in (findings, oracle_findings)]
        yield Rung(name, errors[0] or 0.0, errors[1], *rung_ratios.values(), ok=exact and ratios_hold)
