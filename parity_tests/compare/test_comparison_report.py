"""What a comparison says of itself, word by word: its lines, the table on the terminal, JSON, and cells of the page."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from parity_tests.compare.test_comparison_page import MODELS, Reader, chain
from twinax.compare.capture.trace import Operation, Trace
from twinax.compare.comparison import Comparison
from twinax.compare.matching.alignment import Pairing
from twinax.compare.matching.weights import match_weights
from twinax.compare.page import page
from twinax.compare.repair.defect import Defect
from twinax.compare.repair.diagnosis import Diagnosis, trace_weights
from twinax.compare.repair.edits import Repair
from twinax.compare.report import as_document, expressions, show
from twinax.compare.rounding import Rounding
from twinax.compare.training.updates import UpdateDifference

RANDOM = np.random.default_rng(0)
SCALE, SHIFT, KERNEL, BIAS = (RANDOM.standard_normal(shape) for shape in ((5,), (5,), (3, 5), (5,)))
REFERENCE = {"scale": SCALE, "shift": SHIFT, "kernel": KERNEL, "bias": BIAS, "zero": np.zeros(3), "naught": np.zeros(3)}
CANDIDATE = {"offset": SCALE - 1, "more": KERNEL + 1, "sum": SHIFT + BIAS, "nil": np.zeros(3), "other": BIAS * 0.1}


def trace(framework, parameters, operations):
    """A trace of operations (name, inputs, module, lines, settings), each with one new value of 2×5 numbers."""
    result = Trace(framework)
    result.parameters = {name: result.add(array) for name, array in parameters.items()}
    result.inputs = {"0": result.add(RANDOM.standard_normal((2, 3)))}
    for name, inputs, module, lines, settings in operations:
        number = result.add(RANDOM.standard_normal((2, 5)))
        result.operations.append(Operation(name, inputs, (number,), module, lines, settings))
    result.outputs = {"output": len(result.values) - 1}
    return result


ONE = trace(
    *("PyTorch", REFERENCE),
    [
        ("aten.t", (2,), "", (), {}),
        ("aten.addmm", (3, 6, 7), "encoder.0", ("lib/ref.py:8",), {}),
        ("aten.gelu", (8,), "encoder.1", (), {"approximate": "none", "inplace": True}),
    ],
)
OTHER = trace(
    *("JAX", CANDIDATE),
    [
        ("dot_general", (1, 5), "Block_0", ("my/port.py:5", "my/port.py:20", "my/port.py:30"), {}),
        ("mul", (6,), "Block_0.act", ("my/port.py:6", "my/port.py:21", "my/port.py:30"), {"1": np.float64(0.5)}),
        ("mul", (7,), "Block_1.act", ("my/port.py:6", "my/port.py:22", "my/port.py:30"), {"1": np.float64(0.5)}),
        ("mul", (8,), "Block_2.act", ("my/port.py:6", "my/port.py:23", "my/port.py:30"), {"1": np.float64(0.5)}),
    ],
)


def halved(operations, error):
    last = operations[-1]
    return Defect((ONE.operations[2],), operations, error, Repair(last.outputs[0], "mul: 0.5 → 1", last, literal=True))


DEFECTS = (
    halved(tuple(OTHER.operations[:2]), 0.25),
    halved((OTHER.operations[2],), 0.5),
    halved((OTHER.operations[3],), 0.125),
    Defect((), (), 1.0, note="the reference drops 0.1, the candidate 0.2"),
    Defect((), (), 1.0, note="the candidate has one dropout more"),
)
ROUNDED = Defect((ONE.operations[1],), (OTHER.operations[0],), 3e-8, Repair(1, "in float32", None, "more", True))
WEIGHTS = trace_weights(ONE, OTHER)
FORWARD = Diagnosis("different", DEFECTS, (ROUNDED,), WEIGHTS, matched=(2, 9), verified=True)
COMPARISON = Comparison(
    FORWARD,
    Diagnosis("undecided", reason="while_loop has no gradient"),
    (UpdateDifference("learning rate", 1e-3, 1e-2),),
    (Rounding("float32", 1e-8, 3e-6, 24, casts=("my/port.py:7 (bfloat16)",)), Rounding("bfloat16", 0, 0, 24, "OOM")),
    ("input 0: is 0 everywhere",),
    (ONE, OTHER),
    {"tracing": 1.256, "outputs": 2.0},
)
REPAIR = {"text": "mul: 0.5 → 1", "parameter": ""}


def shown(comparison, width=150):
    stream = io.StringIO()
    show(comparison, MODELS, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_lines():
    assert str(COMPARISON).splitlines() == [
        "outputs: different",
        "1. my/port.py:5 and my/port.py:6 (dot_general, mul) differs by 0.2 from encoder.1 (aten.gelu); "
        "equal with my/port.py:6: mul: 0.5 → 1",
        "2. my/port.py:6 (mul) differs by 0.5 from encoder.1 (aten.gelu); equal with my/port.py:6: mul: 0.5 → 1",
        "3. my/port.py:6 (mul) differs by 0.1 from encoder.1 (aten.gelu); equal with my/port.py:6: mul: 0.5 → 1",
        "4. the reference drops 0.1, the candidate 0.2",
        "5. the candidate has one dropout more",
        "float32: my/port.py:5 (dot_general) differs by 3e-08 from lib/ref.py:8 (aten.addmm); "
        "because my/port.py:5: more in float32",
        "gradients: undecided: while_loop has no gradient",
        "optimizer: learning rate: 0.001 in the reference, 0.01 in the candidate",
        "float32: errors 1.0e-08 and 3.0e-06, ratio 300.00: more than rounding; because of my/port.py:7 (bfloat16)",
        "bfloat16: not measured: OOM",
        "not tested: input 0: is 0 everywhere",
    ]


def test_the_document():
    document = as_document(COMPARISON)
    first, second, third = document["outputs"]["defects"]
    assert first == {
        "lines": ["my/port.py:6"],
        "called_from": ["my/port.py:21", "my/port.py:22", "my/port.py:23"],
        "occurrences": 3,
        "modules": ["Block_0", "Block_0.act", "Block_1.act", "Block_2.act"],
        "error": 0.5,
        "candidate": {"lines": ["my/port.py:5", "my/port.py:6"], "operations": ["dot_general", "mul"]},
        "reference": {"lines": ["encoder.1"], "operations": ["aten.gelu"]},
        "repair": REPAIR,
        "note": "",
    }
    assert [second["note"], third["note"]] == [defect.note for defect in DEFECTS[3:]]
    (constant,) = document["outputs"]["float32_constants"]
    assert (constant["lines"], constant["repair"]) == (
        ["my/port.py:5"],
        {"text": "more in float32", "parameter": "more"},
    )
    once = as_document(replace(COMPARISON, forward=replace(FORWARD, defects=DEFECTS[1:2])))["outputs"]["defects"]
    assert once[0]["called_from"] == ["my/port.py:22", "my/port.py:30"]
    assert (document["gradients"]["verdict"], document["gradients"]["reason"]) == (
        "undecided",
        "while_loop has no gradient",
    )
    assert document["optimizer"] == [{"what": "learning rate", "reference": 1e-3, "candidate": 1e-2}]
    assert as_document(replace(COMPARISON, update=()))["optimizer"] == []
    float32, bfloat16 = document["rounding"]
    assert (float32["reference_error"], float32["candidate_error"], float32["ratio"]) == (1e-8, 3e-6, 300)
    assert (bfloat16["ratio"], bfloat16["ok"], bfloat16["failure"]) == (None, False, "OOM")
    assert document["cost"] == {"seconds": {"tracing": 1.26, "outputs": 2.0}, "operations": [3, 4]}
    json.dumps(document, allow_nan=False)


def test_the_terminal():
    lines = shown(COMPARISON).splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    numbers, candidate, repair, reference, error = zip(*cells, strict=True)
    assert [number for number in numbers if number] == ["1", "2", "3", "float32"]
    assert candidate[:4] == ("my/port.py:6", "3 times", "called from", "my/port.py:21")
    assert [text for text in repair if text] == [REPAIR["text"], *(d.note for d in DEFECTS[3:]), "more in float32"]
    assert (reference[0], error[0], reference[-1], error[-1]) == ("encoder.1", "0.5", "lib/ref.py:8", "3e-08")
    assert lines[0] == "different: port.py:make against ref.py:make"
    assert "gradients: while_loop has no gradient" in lines
    assert "parameters: 3 of 5 identified" in lines
    assert lines[-1] == "not tested: input 0: is 0 everywhere"
    assert "makes both equal" in shown(COMPARISON)
    assert "makes both equal" not in shown(replace(COMPARISON, forward=replace(FORWARD, verified=False)))
    assert "optimizer: equal updates" in shown(replace(COMPARISON, update=()))
    constants = Diagnosis("equal but for float32 constants", (), (ROUNDED,), matched=(2, 2))
    assert "more in float32" in shown(Comparison(constants, traces=(ONE, OTHER)))


@pytest.mark.parametrize("number", [4, 5, 9])
def test_of_many_lines_the_first_are_shown_and_the_others_counted(number):
    operations = [Operation("add", (), (), "", (f"port.py:{i}",)) for i in range(number)]
    comparison = Comparison(Diagnosis("different", (Defect((), tuple(operations), 0.5),)), traces=(ONE, OTHER))
    text = shown(comparison)
    assert [f"port.py:{i}" in text for i in range(number)] == [i < 4 for i in range(number)]
    assert ("more" in text) == (number > 4)
    assert number <= 4 or f"and {number - 4} more" in text


def test_expressions_are_the_candidate_s_parameters():
    """Python that gives the values; what it cannot say of a sum's arrangement is said in words."""
    assert WEIGHTS.matches.keys() == {"offset", "more", "sum"}
    for name, match in WEIGHTS.matches.items():
        (text,) = expressions(match, ONE)
        value = eval(text.removesuffix(", arranged alike"), {"state": REFERENCE})
        np.testing.assert_allclose(value, CANDIDATE[name], rtol=1e-12, atol=1e-12)


def test_rows_of_padding_are_mentioned():
    table = RANDOM.standard_normal((5, 3))
    weights = match_weights({"table": table}, {"padded": np.vstack([table, np.zeros((3, 3))])})
    assert expressions(weights.matches["padded"], trace("PyTorch", {"table": table}, ())) == [
        "state['table'], elsewhere 0"
    ]


def test_the_page_of_all_parts():
    text = page(COMPARISON, MODELS)
    texts = Reader(text).texts
    assert "3 times · error 0.5 relative" in texts["difference-1"]
    assert "Called from my/port.py:21 , my/port.py:22 , my/port.py:23" in texts["difference-1"]
    candidate, reference = texts["difference-1"].split("candidate", 1)[1].split("reference")
    assert "my/port.py:6" in candidate
    assert "operations dot_general , mul (0.5)" in candidate
    assert "modules Block_0 , Block_0.act , Block_1.act , Block_2.act parameters more" in candidate
    assert reference.split() == ["operations", "aten.gelu", "modules", "encoder.1"]
    assert "parameters bias , kernel" in texts["difference-4"].split("reference")[1]  # transposed before
    assert [texts[f"difference-{i}"].split(" · ")[-1] for i in (2, 3)] == ["error 1 relative to the largest number"] * 2
    compared = texts["compared"]
    assert "gradients · undecided" in compared
    assert "optimizer ≠ different learning rate: 0.001 in the reference, 0.01 in the candidate" in compared
    assert "float32 ≠ more than rounding errors 1.0e-08 and 3.0e-06 over 24 inputs, ratio 300.00" in compared
    assert "bfloat16 · not measured OOM" in compared
    assert "2 of the reference's 9 values" in compared
    assert "<strong>gradients:</strong> while_loop has no gradient" in text
    parameters = texts["parameters"]
    assert "nil 3 ambiguous: zero naught" in parameters
    assert "other 5 unmatched: the reference has no such values" in parameters
    assert "more 3×5 state['kernel'] + 1" in parameters
    assert "Nothing that is known" not in texts["coverage"]
    assert "tracing 1.26 s, outputs 2.00 s; 3 operations of the reference and 4 of the candidate" in texts["cost"]


def test_the_page_of_what_was_not_compared():
    comparison = Comparison(Diagnosis("equal"), traces=(ONE, OTHER))
    texts = Reader(page(comparison, MODELS)).texts
    for part in ("gradients", "optimizer", "rounding"):
        assert f"{part} · not compared" in texts["compared"]
    assert "Nothing that is known" in texts["coverage"]
    equal = replace(comparison, update=(), rounding=(Rounding("float32", 1e-8, 1e-8, 24),))
    compared = Reader(page(equal, MODELS)).texts["compared"]
    assert "optimizer = equal float32 = rounding only errors" in compared
    assert "rounding · not compared" not in compared


def test_a_repair_that_was_verified_and_one_that_was_not():
    """Each part has its own."""
    backward = Diagnosis("different", DEFECTS[:1], verified=False)
    text = Reader(page(replace(COMPARISON, backward=backward), MODELS)).texts
    assert "outputs · 3 times" in text["difference-1"]
    assert "after all repairs" in text["difference-1"]
    assert "gradients · error" in text["difference-5"]
    assert "were not shown to agree" in text["difference-5"]
    assert "parameters more" not in text["difference-5"]  # the numbers of its values are others


def test_rows_that_are_open_and_counts_of_a_section():
    """Two rows on each side of a difference; the others are folded, with what is in them."""
    one = chain(200, lambda i: f"block{i // 4}.mlp")
    other = chain(200, lambda i: "", one.values)
    pairing = Pairing({i: (i,) for i in range(201) if i != 151}, (frozenset(), frozenset()))
    step = other.operations[150]
    defect = Defect((one.operations[150],), (step,), 0.5, Repair(151, "mul: 1 → 2", step))
    text = page(Comparison(Diagnosis("different", (defect,), pairing=pairing), traces=(one, other)), MODELS)
    sections = text.split("<details")[1:]
    opened = [section for section in sections if section.startswith(" open")]
    numbers = [[i for i in range(1, 201) if f'<span class="number">{i}</span>' in section] for section in opened]
    assert numbers == [[149, 150, 151, 152, 153]]
    assert "<span>4 equal, 1 different</span>" in opened[0]
    assert "the repair is here" in opened[0]
    assert opened[0].count("after the repair of 1") == 2
    assert [section.split("<summary>")[1].split(" <span>")[0] for section in sections if section not in opened] == [
        "block0 … block36",
        "block38 … block49",
    ]
    pairing = Pairing({**pairing.equal, 10: (10, 151)}, pairing.unidentified)  # the reference has this value earlier
    diagnosis = Diagnosis("different", (replace(defect, reference=()),), pairing=pairing)
    text = page(Comparison(diagnosis, traces=(one, other)), MODELS)
    assert "<span>4 equal, 1 different</span>" in text
