"""Each use of a value has a number of its own, where several lines use it."""

import jax
import jax.numpy as jnp
import numpy as np

from twinax.compare.capture.jax_trace import capture_jax
from twinax.compare.matching.uses import USE, with_uses
from twinax.compare.repair.diagnosis import diagnose

X = np.random.default_rng(0).standard_normal((5, 6))
P = {name: np.random.default_rng(i).standard_normal((6, 6)) for i, name in enumerate("qkvo", 1)}


def attention(p, x):
    q, k = x @ p["q"], x @ p["k"]
    return jax.nn.softmax(q @ k.T) @ (x @ p["v"])


def normed(x):
    return (x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True)


def block(p, x, inside=normed, after=lambda x: x):
    x = x @ p["o"]
    x = x + attention(p, inside(x))
    x = after(x)
    return x + jnp.tanh(x @ p["q"])


def line_of(text):
    with open(__file__) as file:
        return next(i for i, line in enumerate(file, 1) if text in line)


def test_numbers_and_values_stay_and_one_attention_is_one_use():
    trace = capture_jax(block, P, (X,))
    apart = with_uses(trace)
    assert len(trace.values) == max(n for o in trace.operations for n in o.outputs) + 1  # the trace is not changed
    assert all(one is other for one, other in zip(trace.values, apart.values, strict=False))
    assert [o.name for o in apart.operations if o.name != USE] == [o.name for o in trace.operations]
    product = next(o for o in trace.operations if o.name == "dot_general").outputs[0]
    uses = [o for o in apart.operations if o.name == USE and product in o.inputs]
    # the norm and the sum; queries, keys and values come after the norm
    assert {use.lines[0].rpartition(":")[0] for use in uses} == {"matching/test_uses.py"}
    assert len(uses) == 2
    replayed = apart.replay({apart.inputs["0"]: X + 1})
    expected = capture_jax(block, P, (X + 1,))
    end = next(iter(apart.outputs.values()))
    np.testing.assert_allclose(replayed[end], expected.values[next(iter(expected.outputs.values()))], rtol=1e-12)


def test_a_norm_that_is_missing_before_one_use_is_missing_there():
    diagnosis = diagnose((block, P), ((lambda p, x: block(p, x, inside=lambda x: x)), P), (X,))
    defect = diagnosis.defects[0]
    assert diagnosis.verdict == "different"
    assert defect.lines[0] == f"matching/test_uses.py:{line_of('x + attention(p, inside(x))')}"


def test_a_norm_that_is_missing_before_all_uses_is_one_difference():
    reference = (lambda p, x: block(p, x, after=normed)), P
    diagnosis = diagnose(reference, (block, P), (X,))
    (defect,) = diagnosis.defects
    assert defect.lines[0] == f"matching/test_uses.py:{line_of('x + attention(p, inside(x))')}"
    assert str(defect.repair).startswith("missing: ")
