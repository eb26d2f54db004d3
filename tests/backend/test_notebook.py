"""What results show in a notebook has their verdict and numbers, and escapes names."""

from dataclasses import replace

import numpy as np

from twinax.audit.audit_report import Answer, Audit, Mistake
from twinax.parity.coverage import Coverage
from twinax.parity.harness import compare_arrays
from twinax.parity.ladder import CRITERIA, Ladder, Rung, rung_of

HOSTILE = "<script>alert(1)</script>"


def test_of_a_ladder():
    rungs = (Rung("masks", 0.0, None, None, None, True), Rung("logits", 5.3e-15, None, 0.96, 1.01, True))
    report = compare_arrays({"logits": np.ones(2)}, {"logits": np.ones(2)}, criteria=CRITERIA, rung_of=rung_of)
    ladder = Ladder(report, Coverage(*[4] * 10), {}, rungs, 1.0, None, 24, True)
    html = ladder._repr_html_()
    assert "✓ equal" in html
    assert all(f">{cell}</td>" in html for cell in ("masks", "–", "logits", "5.3e-15", "0.96", "1.01"))
    html = replace(ladder, rungs=(replace(rungs[1], name=HOSTILE, ok=False),))._repr_html_()
    assert "✗ DIFFERENT" in html
    assert "&lt;script&gt;" in html
    assert HOSTILE not in html


def test_of_an_audit():
    answers = (Answer(True, "fine", question="Is it finite?"), Answer(False, "by 0.49", HOSTILE, "a & b", "Causal?"))
    html = Audit(HOSTILE, answers, (Mistake("mask_value=1", "mask_value='exact'", "shifts"),))._repr_html_()
    assert "failed checks: 1, known mistakes: 1" in html
    assert all(text in html for text in ("Causal?", "by 0.49", "a &amp; b", "mask_value=1", "shifts"))
    assert "Is it finite?" not in html
    assert html.count("&lt;script&gt;") == 2
    assert HOSTILE not in html
    assert "✓ model: no defects" in Audit("model", answers[:1])._repr_html_()
