"""The benchmark on Multi30k: what is trained in which order, and what is recorded."""

from pathlib import Path

import pytest

from benchmarks import multi30k, multi30k_page, multi30k_runs
from benchmarks.multi30k_runs import describe_minutes, record, train_starts

FOLDER = Path("corpus")


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The names of the trainings that were run; each leaves its directory."""
    names = []

    def train(training, folder):
        assert training.start is None or training.start.run.is_dir()
        training.run.mkdir(parents=True, exist_ok=True)
        names.append(training.name)
        return 60.0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(multi30k_runs, "train", train)
    return names


def test_initial_weights_are_trained_first(trained):
    """The weights of fr_en-tuned are those of a direction, which starts from both directions."""
    (tuned,) = (t for step in multi30k.trainings_by_step(1, ()) for t in step if t.name == "fr_en-tuned")
    train_starts(map, [tuned, tuned], FOLDER)
    assert trained == ["both-0", "de_en-0"]
    assert [start.name for start in tuned.starts] == ["de_en-0", "both-0"]
    trained.clear()
    train_starts(map, [tuned], FOLDER)
    assert trained == ["de_en-0"]  # continues it, in case that it was stopped


def test_a_step_needs_only_weights_of_earlier_steps():
    earlier = set()
    for step in multi30k.trainings_by_step(3, ("--batches.shapes", "4")):
        assert all(training.start is None or training.start.name in earlier for training in step)
        assert all("--batches.shapes 4" in " ".join(t.all_arguments) for t in step if not t.name.startswith("fr_en"))
        earlier |= {training.name for training in step}
    assert multi30k_page.EXAMPLE in earlier
    assert set(multi30k.LAYOUTS) <= earlier


def test_a_record_of_other_arguments_does_not_count(monkeypatch, tmp_path):
    monkeypatch.setattr(multi30k_runs, "RESULTS", tmp_path / "results.json")
    one, other = (multi30k.seeded_training("de_en", 0, None, *words) for words in ((), ("--loop.epochs", "1")))
    record(one.name, arguments=" ".join(one.all_arguments), minutes=80.2)
    record(one.name, minutes_of_starts=[30.6])
    assert one.recorded is not None
    assert other.recorded is None
    assert describe_minutes(one.recorded) == "80 + 31"
