"""The page of a comparison: what it shows, that it needs nothing else, and that it stays usable for long traces."""

import base64
import hashlib
import re
import sys
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from types import ModuleType
from typing import get_args
from unittest.mock import ANY

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from twinax.compare.capture.source_lines import snippets
from twinax.compare.capture.trace import Operation, Trace
from twinax.compare.comparison import Comparison
from twinax.compare.matching.alignment import Difference, Pairing, side_by_side
from twinax.compare.page import page
from twinax.compare.repair.defect import Defect
from twinax.compare.repair.diagnosis import Diagnosis, diagnose_traces
from twinax.compare.rounding import Rounding
from twinax.compare.training.updates import UpdateDifference
from twinax.parity import compare

X = np.random.default_rng(0).standard_normal((4, 6))
NAMES = ("in", "in_bias", "out", "out_bias", "scale", "shift")
MODELS = ("ref.py:make", "port.py:make")
VOID = {"meta", "br"}


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.LayerNorm(6)).eval()
    nn.init.normal_(module[3].weight)
    return module


def port(approximate, epsilon):
    def function(p, x):
        x = jax.nn.gelu(x @ p["in"] + p["in_bias"], approximate=approximate)  # <activation>
        x = x @ p["out"] + p["out_bias"]
        x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt(x.var(-1, keepdims=True) + epsilon)
        return x * p["scale"] + p["shift"]

    return function


def weights(module):
    return {name: jnp.asarray(p.detach().numpy().T) for name, p in zip(NAMES, module.parameters(), strict=True)}


@pytest.fixture(scope="module")
def different(reference):
    return compare(reference, (port(True, 1e-6), weights(reference)), (X,))


@pytest.fixture(scope="module")
def equal(reference):
    return compare(reference, (port(False, 1e-5), weights(reference)), (X,), gradients=True)


class Reader(HTMLParser):
    """The text of each element with an id, all tags and attributes; fails where tags do not nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], {}
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append((tag, dict(attributes).get("id")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, name in self.open:
            if name:
                self.texts[name] = " ".join(f"{self.texts.get(name, '')} {data}".split())


def rows_of(comparison):
    differences = [Difference(i, d.reference, d.candidate) for i, d in enumerate(comparison.forward.defects, 1)]
    return side_by_side(comparison.traces, comparison.forward.pairing, differences)


def test_the_page_shows_both_defects_with_their_code(different):
    reader = Reader(page(different, MODELS))
    first, second = reader.texts["difference-1"], reader.texts["difference-2"]
    assert "should be erf gelu" in first
    assert 'x = jax.nn.gelu(x @ p["in"] + p["in_bias"], approximate=approximate) # <activation>' in first
    assert "aten.gelu" in first
    assert "modules 1" in first
    assert "add: 1e-06 → 1e-05" in second
    assert re.search(r"▶ +\d+ x = x / jnp.sqrt", second)
    assert "parameters 3.weight , 3.bias" in second
    assert "aten.native_layer_norm (6, 1e-05)" in second
    assert "in state['0.weight'].T" not in reader.texts["trace"]
    assert "in 6×9 state['0.weight'].T" in reader.texts["parameters"]
    assert "the reference's parameter 0.bias" in reader.texts["trace"]
    assert "a step inside the reference's operation 2, aten.addmm" in reader.texts["trace"]
    assert "their order was not tested: shift" in reader.texts["coverage"]


def test_the_page_of_equal_models_marks_nothing(equal):
    text = page(equal, MODELS)
    reader = Reader(text)
    assert "differences" not in reader.texts
    assert 'class="different"' not in text
    compared = reader.texts["compared"]
    assert re.search(r"outputs = equal .* gradients = equal optimizer · not compared float32 = rounding only", compared)


def test_the_page_names_the_casts_that_explain_rounding(equal):
    entry = Rounding("float32", 1e-8, 1e-3, 24, casts=("port.py:7 (bfloat16)", "port.py:9 (float16)"))
    compared = Reader(page(replace(equal, rounding=(entry,)), MODELS)).texts["compared"]
    assert re.search(r"because of port.py:7 \(bfloat16\) *because of port.py:9 \(float16\)", compared)


def test_a_difference_of_gradients_is_not_one_of_the_forward_pass():
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).eval()
    names = {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}

    def tanh(p, x):
        return jnp.tanh(jax.lax.stop_gradient(x @ p["0.weight"].T) + p["0.bias"])  # stopped

    comparison = compare(module, (tanh, names), (X,), gradients=True, rounding=False)
    text = page(comparison, MODELS)
    reader = Reader(text)
    assert comparison.verdict == "gradients different"
    assert "without stop_gradient" in reader.texts["difference-1"]
    assert "# stopped" in reader.texts["difference-1"]
    assert "gradients ≠ different" in reader.texts["compared"]
    assert '<td class="different"><div>' not in text


def test_every_verdict_has_a_meaning():
    def verdicts():
        for verdict in get_args(Diagnosis.__annotations__["verdict"]):
            yield Comparison(Diagnosis(verdict), traces=(Trace("JAX"), Trace("JAX")))
        equal = Comparison(Diagnosis("equal"), traces=(Trace("JAX"), Trace("JAX")))
        for verdict in ("different", "undecided"):
            yield replace(equal, backward=Diagnosis(verdict))
        yield replace(equal, update=(UpdateDifference("learning rate", 1e-3, 1e-2),))
        yield replace(equal, rounding=(Rounding("float32", 1e-8, 1e-6, 24),))

    headings = [re.search(r"</span> (.*?)</h1>\n<p>(.+?)</p>", page(c, MODELS)).groups() for c in verdicts()]
    assert len(set(headings)) == len(headings) == 8


def test_the_page_needs_no_other_file_and_no_script(different):
    text = page(different, ("<script>alert(1)</script>", 'a"b'))
    reader = Reader(text)
    names = {name for name, _ in reader.attributes}
    assert "script" not in reader.tags
    assert not names & {"src", "href", "style", "onclick"}
    assert "&lt;script&gt;" in text
    (policy,) = (value for _, value in reader.attributes if value and value.startswith("default-src"))
    style = re.search(r"<style>(.*?)</style>", text, flags=re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'" in policy
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_is_deterministic_but_for_the_seconds(reference, different):
    again = compare(reference, (port(True, 1e-6), weights(reference)), (X,))
    assert page(again, MODELS) != page(different, MODELS)
    assert page(replace(again, seconds=different.seconds), MODELS) == page(different, MODELS)


def test_every_operation_has_one_cell_in_order(different, equal):
    for comparison in (different, equal):
        rows = rows_of(comparison)
        for side, trace in enumerate(comparison.traces):
            cells = [row[side] for row in rows if row[side] is not None]
            assert [cell.operation for cell in cells] == trace.operations
            assert [cell.index for cell in cells] == list(range(1, len(cells) + 1))
            assert all(cell.note for cell in cells if cell.mark == "unmatched")
        pairs = [row for row in rows if None not in row and row[1].operation.name == "add" and row[0].mark == "equal"]
        assert [one.operation.name for one, _ in pairs][:2] == ["aten.addmm", "aten.addmm"]


def test_values_behind_a_difference_say_so(different):
    cells = [cell for row in rows_of(different) for cell in row if cell is not None]
    after = [cell for cell in cells if "after the repair of 1" in cell.note]
    assert after
    assert min(cell.index for cell in after) > min(cell.index for cell in cells if cell.difference == 1)
    assert any("after the repair of 1 and 2" in cell.note for cell in cells)


def chain(count, modules, values=None):
    """A trace of `count` operations, each of the value before."""
    random = np.random.default_rng(0)
    trace = Trace("JAX", values=values or [random.standard_normal((2, 3)) for _ in range(count + 1)])
    trace.inputs, trace.outputs = {"0": 0}, {"output": count}
    for i in range(count):
        trace.operations.append(Operation("mul", (i,), (i + 1,), modules(i), (f"models/port.py:{i}",)))
    return trace


def test_two_thousand_operations_are_folded_by_module():
    one = chain(2000, lambda i: f"model.layers.{i // 100}.{'attention' if i % 100 < 50 else 'mlp'}.{i % 10}")
    comparison = Comparison(diagnose_traces(one, chain(2000, lambda i: "", one.values)), traces=(one, one))
    text = page(comparison, MODELS)
    assert 10 <= text.count("<details>") <= 24
    assert "<details open>" not in text
    assert "model.layers.7 <span>100 equal</span>" in text
    assert len(text) < 3e6


def test_a_difference_is_open_and_what_is_far_from_it_is_not():
    one = chain(200, lambda i: f"layers.{i // 20}")
    other = chain(200, lambda i: "", one.values)
    pairing = Pairing({i: (i,) for i in range(201) if i != 100}, (frozenset(), frozenset()))
    text = page(Comparison(Diagnosis("different", pairing=pairing), traces=(one, other)), MODELS)
    assert "<details open>" not in text  # no defect was placed: one value lies between equal ones
    assert text.count("another way to") == 2
    pairing = Pairing({i: (i,) for i in range(100)}, (frozenset(), frozenset()))
    diagnosis = Diagnosis("different", reason="the outputs differ", pairing=pairing)
    text = page(Comparison(diagnosis, traces=(one, other)), MODELS)
    assert text.count("<details open>") == 1
    assert text.count("leads to an output that differs") == 101
    assert "<strong>outputs:</strong> the outputs differ" in text


def test_models_that_cannot_be_compared_have_no_trace(reference):
    comparison = compare(reference, (port(True, 1e-6), weights(reference)), (X,), (X + 1,))
    reader = Reader(page(comparison, MODELS))
    assert comparison.verdict == "undecided"
    assert "no values are matched" in reader.texts["trace"]
    assert '<span aria-hidden="true">?</span> undecided' in page(comparison, MODELS)


def test_where_lines_are_left_out(tmp_path, monkeypatch):
    """Also a single one."""
    (tmp_path / "models").mkdir()
    module = ModuleType("left_out")
    module.__file__ = str(tmp_path / "models" / "left_out.py")
    (tmp_path / "models" / "left_out.py").write_text("".join(f"line {i}\n" for i in range(1, 12)))
    monkeypatch.setitem(sys.modules, "left_out", module)
    for last, gaps in ((8, 1), (7, 0)):
        lines = tuple(Operation("add", (), (), "", (f"models/left_out.py:{i}",)) for i in (2, last))
        comparison = Comparison(Diagnosis("different", (Defect((), lines, 0.5),)), traces=(Trace("JAX"), Trace("JAX")))
        assert page(comparison, MODELS).count("⋮") == gaps


def test_cells_and_their_notes():
    """Equal values on one row where the order allows it, each operation once; else a note names the other."""
    one, other = chain(6, lambda i: f"ref.{i}"), chain(6, lambda i: "", [np.ones((3, 2))] * 7)
    other.operations[3] = replace(other.operations[3], inputs=(3, 0))

    def notes(equal):
        rows = side_by_side((one, other), Pairing(equal, (frozenset(), frozenset())), [])
        cells = [[row[side] for row in rows if row[side] is not None] for side in range(2)]
        assert [[cell.operation for cell in side] for side in cells] == [one.operations, other.operations]
        return [[cell.note for cell in side] for side in cells]

    reference, candidate = notes({3: (3,), 5: (2,), 6: (0,)})
    assert candidate[2:] == ["value of the reference's operation 3", ANY, "", "the reference's input 0"]
    assert reference[2] == "value of the candidate's operation 3"
    reference, candidate = notes({1: (3,), 2: (3,), 6: (6,)})  # two of one value
    assert "value of the reference's operation 3" in candidate[:2]
    _, candidate = notes({2: (4, 2), 6: (6,)})
    assert candidate[0] == "another way to the reference's operation 2, mul"
    reference, _ = notes({0: (0,), 3: (3,), 4: (4,), 6: (6,)})
    assert reference[0] == "another way to the candidate's operation 3, mul"
    reference, _ = notes({0: (0,), 4: (4,), 6: (6,)})
    assert reference[2] == "another way to the candidate's operation 4, mul"  # of whose inputs one is known
    text = page(
        Comparison(Diagnosis("equal", pairing=Pairing({}, (frozenset(), frozenset()))), traces=(one, other)), MODELS
    )
    assert (text.count("2×3"), text.count("3×2")) == (6, 6)


def test_code_of_a_file_that_is_not_the_only_one_is_not_shown(tmp_path, monkeypatch):
    for folder in ("a", "b"):
        (tmp_path / folder / "models").mkdir(parents=True)
        path = tmp_path / folder / "models" / "port.py"
        path.write_text("".join(f"line {i} of {folder}\n" for i in range(1, 10)))
        module = ModuleType(folder)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, f"snippets_{folder}", module)
        if folder == "a":
            (snippet,) = snippets(["models/port.py:2", "models/port.py:9", "encoder.layers.0", "models/none.py:3"])
    assert [line.number for line in snippet.lines] == [1, 2, 3, 4, 7, 8, 9]
    assert [line.text for line in snippet.lines if line.named] == ["line 2 of a", "line 9 of a"]
    assert snippets(["models/port.py:3"]) == []


def test_a_notebook_shows_the_verdict_and_the_differences(different, equal):
    html = different._repr_html_()
    assert "✗ different" in html
    assert html.count("<tr>") == 1 + len(different.forward.defects)
    for defect in different.forward.defects:
        assert f">{escape(str(defect.repair))}</td>" in html
        assert f">{defect.error:.1g}</td>" in html
    defect = replace(different.forward.defects[0], note="<script>")
    html = replace(different, forward=replace(different.forward, defects=(defect,)))._repr_html_()
    assert "&lt;script&gt;" in html
    assert "<script>" not in html
    assert "<table>" not in equal._repr_html_()
    assert equal.verdict in equal._repr_html_()
