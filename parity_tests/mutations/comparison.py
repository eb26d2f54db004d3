"""Mistakes in the comparison of strangers' models: what differs is called equal, or what is equal different."""

from parity_tests.mutations.planting import Mutation

_DIAGNOSIS = ("parity_tests/test_diagnosis.py", "parity_tests/test_diagnosis_bounds.py")
_WEIGHTS = ("parity_tests/test_weights.py",)
_COMPARISON = ("parity_tests/test_comparison.py",)
_GRADIENTS = ("parity_tests/test_gradients.py",)
_MASKS = ("parity_tests/test_dropout_masks.py",)
_JAX = ("parity_tests/test_capture_jax.py",)
_TORCH = ("parity_tests/test_capture_torch.py",)

COMPARISON = (
    Mutation(
        "compare: a shuffle of a value is a match",
        "parity.matching.Side.partners",
        "<= bound and arranged(other, value, bound))",
        "<= bound)",
        _DIAGNOSIS,
    ),
    Mutation(
        "compare: outputs agree to 1e-2",
        "parity.matching",
        "EXACT = 1e-9",
        "EXACT = 1e-2",
        _DIAGNOSIS,
    ),
    Mutation(
        "compare: what differs is not replaced",
        "parity.divergence.State.forced",
        "self.candidate.replay(values)",
        "self.candidate.replay({})",
        _DIAGNOSIS,
    ),
    Mutation(
        "compare: rearranged values end no region",
        "parity.regions.regions",
        "{*suspects[1], *matches.rearranged}",
        "{*suspects[1]}",
        _DIAGNOSIS,
    ),
    Mutation(
        "compare: every small difference is float32's",
        "parity.float32_constants._is_float32",
        "return bool((mantissas != np.trunc(mantissas)).any())",
        "return True",
        _DIAGNOSIS,
    ),
    Mutation(
        "compare: a repair is not tried on the trace",
        "parity.repairs.RepairSearch._judged",
        "if end is None or not same_order(self.target, end, self.bound) or not self._holds(attempt.repair.edits):",
        "if end is None:",
        _DIAGNOSIS,
    ),
    Mutation(
        "compare: views of PyTorch's memory are not copied before it is written",
        "parity.capture.torch_trace._Recorder._keep",
        "self.trace.values[number] = self.trace.values[number].copy()",
        "pass",
        _TORCH,
    ),
    Mutation(
        "compare: PyTorch's hard-coded float32 casts stay",
        "parity.capture.torch_trace._wide_dtype",
        "if isinstance(value, torch.dtype)",
        "if value is None",
        _TORCH,
    ),
    Mutation(
        "compare: the first branch is always taken",
        "parity.capture.jax_trace._Recorder.cond",
        "min(max(int(inputs[0].array), 0), len(branches) - 1)",
        "0",
        _JAX,
    ),
    Mutation(
        "compare: loops run in the other direction",
        "parity.capture.jax_trace._Recorder.scan",
        'range(params["length"])[:: -1 if params["reverse"] else 1]',
        'range(params["length"])',
        _JAX,
    ),
    Mutation(
        "compare: parameters' parts are not compared after they are arranged",
        "parity.weights._split",
        "if layout is not None:",
        "if True:",
        _WEIGHTS,
    ),
    Mutation(
        "compare: numbers that occur twice count as found at the first place",
        "parity.weights._Values.locate",
        "right - left == 1, right > left",
        "right - left >= 1, right > left",
        _WEIGHTS,
    ),
    Mutation(
        "compare: gradients of tied parameters are not added",
        "parity.gradients._as_outputs",
        "same = [name, *weights.ties.get(name, ())]",
        "same = [name]",
        _GRADIENTS,
    ),
    Mutation(
        "compare: a parameter without gradient is not named",
        "parity.gradients._Gradients._untrained",
        "untrained.append(target)",
        "pass",
        _GRADIENTS,
    ),
    Mutation(
        "compare: rounding is allowed ten times the reference's error",
        "parity.rounding",
        "RATIO_BOUND = 3.0",
        "RATIO_BOUND = 30.0",
        _COMPARISON,
    ),
    Mutation(
        "compare: a mask of what is dropped is taken for one of what is kept",
        "parity.dropout._is_inverted",
        "return abs(one.share - other.share) > abs(one.share - (1 - other.share))",
        "return False",
        _MASKS,
    ),
    Mutation(
        "compare: dropout masks keep the reference's order of axes",
        "parity.dropout._arranged",
        "and not same_order(source, target, EXACT):",
        "and False:",
        _MASKS,
    ),
    Mutation(
        "compare: dropout rates are not compared",
        "parity.dropout._other_rates",
        "> _DEVIATIONS * deviation",
        "> 1",
        _MASKS,
    ),
    Mutation(
        "compare: one of several free sources is guessed",
        "parity.inference._Assembly._exclude",
        "len(fitting) == 1 and",
        "fitting and",
        ("parity_tests/test_inference.py::test_of_several_free_sources_none_is_guessed",),
    ),
    Mutation(
        "compare: no line says what was not compared",
        "parity.comparison.compare",
        "requested[part] and not forward.ok",
        "requested[part] and False",
        ("parity_tests/test_comparison.py::test_what_was_asked_for_and_not_compared_is_said",),
    ),
)
