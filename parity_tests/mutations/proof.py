"""Mistakes in the proof itself, after which it would accept unequal models."""

from parity_tests.mutations.planting import Mutation

_PROOF = ("parity_tests/test_proof.py",)
_HARNESS = ("parity_tests/test_harness.py",)
_PRECISION = ("parity_tests/test_precision.py",)
_TRAJECTORY = ("parity_tests/test_trajectories.py::test_a_resume_that_drops_a_moment_is_seen",)
_EPSILON = ("parity_tests/test_ladder.py::test_narrow_types_see_a_wrong_epsilon",)
_DRAWS = ("parity_tests/test_ladder.py::test_too_few_inputs_prove_nothing",)

PROOF = (
    Mutation(
        "the ratio of errors is inverted",
        "parity.ladder._Errors.ratios",
        "np.sqrt(flax / pytorch)",
        "np.sqrt(pytorch / flax)",
        _PROOF,
    ),
    Mutation(
        "errors are Flax' alone",
        "parity.ladder._Errors.add",
        "for side in (flax, pytorch)]",
        "for side in (flax, flax)]",
        _PROOF,
    ),
    Mutation(
        "the narrow run is PyTorch's twice",
        "parity.ladder._run_both",
        "return flatten(flax_outputs), flatten(pytorch_outputs)",
        "return flatten(pytorch_outputs), flatten(pytorch_outputs)",
        _EPSILON,
    ),
    Mutation(
        "too few draws hold",
        "parity.ladder._Errors.ratios",
        'return dict.fromkeys(RUNGS, float("nan"))',
        "return dict.fromkeys(RUNGS, 1.0)",
        _DRAWS,
    ),
    Mutation(
        "what was resumed is compared with itself",
        "parity.trajectories.resumes",
        "np.array_equal(params[name], resumed_params[name])",
        "np.array_equal(resumed_params[name], resumed_params[name])",
        _TRAJECTORY,
    ),
    Mutation(
        "nothing is loaded in a resume",
        "parity.trajectories.resumes",
        "    side.load(saved)\n",
        "",
        _TRAJECTORY,
    ),
    Mutation(
        "random batches have no padding",
        "parity.functions.random_batch",
        "np.where(np.arange(length) < lengths[:, None], tokens, config.pad_id)",
        "tokens",
        _PROOF,
    ),
    Mutation(
        "random batches may have no padding",
        "parity.functions.random_batch",
        "lengths[1] = length - 1",
        "lengths[1] = length",
        _PROOF,
    ),
    Mutation(
        "an oracle is asked about rows without padding",
        "parity.ladder.comparable",
        "np.flatnonzero(keep.any(1))",
        "np.flatnonzero(keep.all(1))",
        _PROOF,
    ),
    Mutation(
        "coverage is not checked",
        "parity.coverage.Coverage.check",
        "if self.gaps:",
        "if not self.gaps and False:",
        _PROOF,
    ),
    Mutation(
        "padding of targets counts as covered",
        "parity.coverage.Coverage.gaps",
        '"no padding in targets": self.tgt_padding == 0,',
        "",
        _PROOF,
    ),
    Mutation(
        "NaN is within every tolerance",
        "parity.harness._finding",
        "np.where(np.isfinite(error), error, np.inf)",
        "np.where(np.isfinite(error), error, 0.0)",
        _HARNESS,
    ),
    Mutation(
        "the first element is the worst",
        "parity.harness._finding",
        "flat = int(np.argmax(error))",
        "flat = 0",
        _HARNESS,
    ),
    Mutation(
        "arrays of one size but two shapes are compared",
        "parity.harness._finding",
        "if reference.shape != candidate.shape:",
        "if reference.size != candidate.size:",
        _HARNESS,
    ),
    Mutation(
        "nothing to compare is a proof",
        "parity.harness.Report.ok",
        "bool(self.findings) and all(",
        "all(",
        _HARNESS,
    ),
    Mutation(
        "a tolerance grows with infinities",
        "parity.harness._largest",
        "np.abs(array[np.isfinite(array)]).max(initial=0.0)",
        "np.abs(array).max(initial=0.0)",
        _HARNESS,
    ),
    Mutation(
        "operations inside jit are not read",
        "parity.precision._walk",
        "yield from _walk(part, vocab_size)",
        "yield from ()",
        _PRECISION,
    ),
    Mutation(
        "the bias of the logits is a residual",
        "parity.precision._walk",
        "_EXACT_IN_JAX.fullmatch(name) and not of_logits",
        "_EXACT_IN_JAX.fullmatch(name)",
        _PRECISION,
    ),
    Mutation(
        "audit: a weight that is NaN counts as zero",
        "audit.checks.hides_masked_keys",
        "nan=1.0",
        "nan=0.0",
        ("parity_tests/test_audit.py::test_a_weight_that_is_nan_is_not_zero",),
    ),
)
