"""All mutations apply to the current source; the slow test plants a sample of them."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from parity_tests.mutations import planting
from parity_tests.mutations.areas import AREAS, MUTATIONS, plant
from parity_tests.mutations.planting import Mutation, MutationError, copy_package, run

SAMPLE = 15


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return copy_package(tmp_path_factory.mktemp("package"))


def test_every_mutation_applies(package):
    """A mutation that no longer applies must be updated, because otherwise its check is never verified."""
    assert len(MUTATIONS) >= 100
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    root = Path(__file__).parents[2]
    for mutation in MUTATIONS:
        path, mutated_source = mutation.apply(package)
        assert mutated_source != path.read_text(encoding="utf-8")
        assert all((root / test.partition("::")[0]).is_file() for test in mutation.checks)
    assert all(len(mutations) >= 10 for mutations in AREAS.values())


@pytest.mark.parametrize(
    ("place", "old", "message"),
    [
        ("flax_transformer.nowhere.f", "x", "there is no such module|there is no nowhere"),
        ("flax_transformer.layers.no_norm", "x", "there is no no_norm"),
        ("flax_transformer.layers.layer_norm", "no such text", "occurs 0 times"),
        ("flax_transformer.layers", "eps", r"occurs \d\d times"),
        ("flax_transformer.layers.layer_norm", "return", "is no longer valid Python"),
    ],
)
def test_a_mutation_that_does_not_apply_is_refused(package, place, old, message):
    with pytest.raises(MutationError, match=message):
        Mutation("x", place, old, "return return", ()).apply(package)


CHECK = """
from twinax.formulas.position_tables import sinusoidal_half

def test_a_table_is_float64():
    assert sinusoidal_half(4, 6).dtype == "float64"
"""


def test_what_its_checks_do_not_see_survives(package, monkeypatch, tmp_path):
    """The source is restored. An ImportError does not count as caught."""
    (tmp_path / "test_tables.py").write_text(CHECK)  # outside the repository, whose set-up imports JAX and PyTorch
    checks = (f"{tmp_path / 'test_tables.py'}::test_a_table_is_float64",)
    place, old = "formulas.position_tables.sinusoidal_half", "np.sin(angles), np.cos("
    path = package / "formulas" / "position_tables.py"
    original = path.read_bytes()
    assert run(Mutation("x", place, old, "np.cos(angles), np.sin(", checks), package).caught_by is None
    float32_mutation = Mutation("x", place, "axis=1)", "axis=1).astype(np.float32)", checks)
    assert run(float32_mutation, package).caught_by.endswith("test_tables.py::test_a_table_is_float64")
    monkeypatch.setattr(planting, "check", lambda *arguments: (2, "ImportError"))
    import_verdict = run(
        Mutation("x", "formulas.position_tables", "import numpy as np", "import numpy_ as np", checks), package
    )
    assert import_verdict.caught_by is None
    assert "its checks do not run" in str(import_verdict)
    assert path.read_bytes() == original


@pytest.mark.slow
def test_a_sample_is_caught():
    indices = np.random.default_rng(0).choice(len(MUTATIONS), SAMPLE, replace=False)
    of_the_tests = next(mutation for mutation in MUTATIONS if mutation.place.startswith("parity_tests.support."))
    verdicts = plant([of_the_tests, *(MUTATIONS[i] for i in indices)], Console(stderr=True))
    assert [verdict.mutation.name for verdict in verdicts if verdict.caught_by is None] == []
