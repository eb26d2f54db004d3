"""The page of an audit: every answer, findings first, and nothing from elsewhere."""

import re
from dataclasses import replace

import pytest

from parity_tests.compare.test_comparison_page import Reader
from parity_tests.support.defects import DEFECTS, examine
from twinax.audit.audit_report import Answer, Mistake
from twinax.audit.page import page

MISTAKE = Mistake("mask_value=-1e-9", "mask_value='exact'", "masked scores become -1e-9 <here>")


@pytest.fixture(scope="module")
def healthy():
    return examine(None)


@pytest.fixture(scope="module")
def broken():
    (defect,) = (defect for defect in DEFECTS if defect.name == "no causal mask")
    return replace(examine(defect), mistakes=(MISTAKE,))


def rows_of(text):
    """(question, answer, measured) of the table, without tags."""
    rows = re.findall(r"<tr[^>]*><th scope=\"row\">(.*?)</th><td[^>]*>(.*?)</td><td>(.*?)</td></tr>", text)
    return [tuple(re.sub("<[^>]+>", " ", cell) for cell in row) for row in rows]


def test_every_question_is_answered(healthy, broken):
    for audit in (healthy, broken):
        rows, document = rows_of(page(audit)), audit.document()
        assert len(rows) == len(document["answers"]) == 19
        for (question, answer, measured), expected in zip(rows, document["answers"], strict=True):
            assert question == expected["question"]
            assert answer == {True: "yes", False: "NO", None: "–"}[expected["ok"]]
            assert measured.split() == f"{expected['measured']} {expected['where']}".split()


def test_findings_come_first_with_their_consequences(broken):
    text = page(broken, "twinax audit x --seed 0", notes=("weights: random",))
    reader = Reader(text)
    assert list(reader.texts) == ["findings", "mistakes", "questions", "environment", "repeat"]
    assert f"✗</span> failed checks: {len(broken.findings)}, known mistakes: 1" in text
    assert any(answer.where for answer in broken.findings)
    for answer in broken.findings:
        where = f" first in {answer.where}" if answer.where else ""
        expected = f"{answer.question} No {answer.measured}{where} {answer.breaks}"
        assert expected in reader.texts["findings"]
    assert (
        "mask_value=-1e-9 masked scores become -1e-9 <here> Repaired by mask_value='exact'" in reader.texts["mistakes"]
    )
    assert "twinax audit x --seed 0" in reader.texts["repeat"]
    assert "<p>weights: random</p>" in text


def test_a_healthy_model_has_neither_findings_nor_mistakes(healthy):
    text = page(healthy)
    assert list(Reader(text).texts) == ["questions", "environment"]
    assert "✓</span> no defects" in text
    assert "float64" in text


def test_what_was_not_measured_in_float64(healthy):
    unknown = Answer(None, "no dropout", question="Does it?")
    text = page(replace(healthy, dtype="float32", dtype_reason="it overflows", answers=(unknown,)))
    assert "It is not float64 because it overflows." in text
    assert rows_of(text) == [("Does it?", "–", "no dropout")]


def test_the_page_needs_no_network_and_no_script(broken):
    hostile = "<script>alert(1)</script>"
    text = page(replace(broken, name=hostile), hostile, (hostile,))
    reader = Reader(text)
    assert "script" not in reader.tags
    assert text.count("&lt;script&gt;") == 4
    assert not {"style", "src", "href", "onclick"} & {name for name, _ in reader.attributes}
    (policy,) = (value for _, value in reader.attributes if value and value.startswith("default-src"))
    assert re.fullmatch(r"default-src 'none'; style-src 'sha256-[\w+/=]+'; base-uri 'none'; form-action 'none'", policy)
    assert "://" not in text
