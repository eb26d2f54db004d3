"""The benchmark on Multi30k: what is trained in which order, and what is recorded."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.multi30k import page, results, runs
from benchmarks.multi30k.runs import describe_minutes, record, train_initial

FOLDER = Path("corpus")


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The names of the trainings that were run; each leaves its directory."""
    names = []

    def train(training, folder):
        assert training.initial is None or training.initial.run.is_dir()
        training.run.mkdir(parents=True, exist_ok=True)
        training.file("done").touch()
        names.append(training.name)
        return 60.0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "train", train)
    return names


def chain(*arguments):
    """Three trainings, each from the weights of the one before; the arguments are those of the first."""
    first = runs.Training("first", ("de", "en"), arguments)
    second = runs.Training("second", ("de", "en"), (), initial=first)
    return first, second, runs.Training("third", ("de", "en"), (), initial=second)


def test_initial_weights_are_trained_first(trained):
    first, second, third = chain()
    assert third.earlier == [second, first]
    train_initial(map, [third, third], FOLDER)
    assert trained == ["first", "second"]
    trained.clear()
    train_initial(map, [third], FOLDER)
    assert trained == []
    first.file("done").unlink()
    train_initial(map, [third], FOLDER)
    assert trained == []  # not needed: what starts from it is finished
    second.file("done").unlink()
    train_initial(map, [third], FOLDER)
    assert trained == ["first", "second"]


def test_both_directions_are_trained_once_per_seed():
    steps = results.trainings_by_step(3, ("--batches.shapes", "4"))
    trainings = {training.name: training for step in steps for training in step}
    seeds = {f"{name}-{seed}": str(seed) for name in ("de_en", "en_de") for seed in range(3)}
    assert {*trainings} == {*seeds, "marian", "fr_en", "fr_en-tuned"}
    for name, seed in seeds.items():
        assert trainings[name].arguments[:3] == (f"multi30k_{name[:5]}", "--training.seed", seed)
    initial = {name: t.initial.name for name, t in trainings.items() if t.initial is not None}
    assert initial == {"fr_en-tuned": "de_en-2"}
    assert {t.name for t in trainings.values() if "--batches.shapes 4" not in t.commands[0]} == {"fr_en", "fr_en-tuned"}
    names = [[training.name for training in step] for step in steps]
    for name, earlier in initial.items():
        assert next(i for i, step in enumerate(names) if earlier in step) < next(
            i for i, step in enumerate(names) if name in step
        )
    assert {page.EXAMPLE, *results.LAYOUTS} <= {*trainings}


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    for module in (runs, page):
        monkeypatch.setattr(module, "RESULTS", tmp_path / "results.json")


def entry(training):
    values = {runs.VALIDATION: 41.0, runs.TEST: 40.0}
    scores = {
        part: [{"name": name, "value": values[part], "signature": name} for name in page.METRICS]
        for part in training.parts
    }
    numbers = {"updates": 9, "minutes": 80.2, "earlier_minutes": [30.6], "target_tokens_per_second": 4000}
    measured = {"validation_perplexity": 4.1, "curve": [[3, 5.0, None], [9, 2.0, None]]}
    return {"commands": training.commands, **numbers, **measured, "scores": scores}


def test_a_record_of_other_arguments_does_not_count(recorded):
    """Nor does one whose initial weights were trained with others."""
    *_, training = chain()
    record("third", **entry(training))
    record("third", layout="pegasus")
    assert training.recorded is not None
    assert describe_minutes(training.recorded) == "80 + 31"
    assert chain("--loop.updates", "9")[-1].recorded is None
    assert replace(training, arguments=("--loop.epochs", "1")).recorded is None


def test_the_page_shows_what_is_recorded(recorded, monkeypatch, tmp_path):
    path = tmp_path / "results.md"
    path.write_text("".join(f"<!-- {name} -->\n<!-- end of {name} -->\n" for name in page.PARTS))
    monkeypatch.setattr(page, "PAGE", path)
    trainings = [training for step in results.trainings_by_step(2) for training in step]
    page.write_page(trainings, FOLDER)
    assert "| en_de" not in path.read_text()
    for training in trainings:
        if training.name in ("fr_en", "en_de-0", "en_de-1"):
            record(training.name, **entry(training))
    page.write_page(trainings, FOLDER)
    rows = [line.split(" | ")[:7] for line in path.read_text().splitlines() if "80 + 31" in line]
    assert rows == [[f"| {name}", *["40.00"] * 4, "41.00", "4.10"] for name in ("en_de-0", "en_de-1", "fr_en")]
    assert "| en_de | 2 | 40.00 ± 0.00 |" in path.read_text()
    assert (tmp_path / page.CURVES).is_file()


def test_the_recorded_proof_is_shown_as_the_command_shows_it():
    """Its fields are those of today, so that the picture can be drawn without the run."""
    text = page.proof_text(page.EXAMPLE, json.loads(page.RESULTS.read_text(encoding="utf-8"))[page.EXAMPLE]["proof"])
    assert "22 of 22 norm scales not 1" in " ".join(text.split())
    assert text.count("1,000 of 1,000") == 4
    assert text.endswith("\nequal")
