"""Mistakes in source files: each changes one expression and moves no line."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.external_pairs.source.measure import _built, _same_outputs, sample
from benchmarks.external_pairs.source.mistakes import mistakes
from benchmarks.external_pairs.source.ports.port import Port
from twinax.compare.capture.trace import Trace

CODE = '''
class Attention:
    def __init__(self, width, epsilon=1e-5):
        self.scale = width**-0.5

    def __call__(self, x, mask: "B T" = None):
        """Adds 1 - 2 to nothing."""
        q, k, v = jnp.split(self.qkv(x), 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", q, k) * self.scale
        if mask is not None and x.shape[0] > 1:
            scores = jnp.where(
                mask,
                scores,
                -1e9,
            )
        weights = jax.nn.softmax(scores, axis=-1)
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        rotated = jnp.concatenate([-x2, x1], axis=-1)
        return x + self.norm(weights @ v) + rotated.reshape(b, t, h).T


def unused():
    return 1.5 + 2.5
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "modeling.py"
    path.write_text(CODE)
    return path


def test_each_is_another_valid_program_with_the_same_lines(file, tmp_path):
    found, programs = list(mistakes(file, ("Attention",))), set()
    for mistake in found:
        mistake.apply(tmp_path / "wrong.py")
        text = (tmp_path / "wrong.py").read_text()
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(CODE)), mistake
        before, after = CODE.splitlines(), text.splitlines()
        changed = [i for i, (one, other) in enumerate(zip(before, after, strict=True), 1) if one != other]
        assert {*changed} <= {*mistake.lines}, mistake
        programs.add(text)
    assert len(programs) == len(found)


def test_what_no_forward_pass_evaluates_stays(file):
    lines = {number for mistake in mistakes(file, ("Attention",)) for number in mistake.lines}
    code = CODE.splitlines()
    for part in ("epsilon", "width**-0.5", "Adds", "B T", "2.5"):
        assert not any(part in code[number - 1] for number in lines)
    kinds = {mistake.kind for mistake in mistakes(file, ("Attention",))}
    assert {"the cases are exchanged", "unpacked in another order", "the other part", "norm is left out"} <= kinds


def test_a_sample_has_every_kind_before_it_repeats_one(file):
    port = Port(lambda folder: None, "", file.name, ("Attention",))
    kinds = [mistake.kind for mistake in sample(port, file.parent, 3)]
    assert len({*kinds[: len({*kinds})]}) == len({*kinds})
    assert kinds != [mistake.kind for mistake in sample(port, file.parent, 4)]


def test_a_pair_is_the_same_each_time():
    port = Port(lambda folder: torch.rand(3), "", "", ())
    assert torch.equal(_built(port, Path()), _built(port, Path()))


@pytest.mark.parametrize(
    ("other", "is_same"), [(np.ones(3), True), (np.arange(3.0), False), (np.ones(4), True), (np.full(3, np.nan), True)]
)
def test_what_all_see_at_once_is_no_sample(other, is_same):
    values = [np.ones(3), np.ones(2)], [other, np.ones(2) + (not is_same)]
    one, two = (Trace("JAX", values=each, outputs={"a": 0, "b": 1}) for each in values)
    assert _same_outputs(one, two) is is_same
