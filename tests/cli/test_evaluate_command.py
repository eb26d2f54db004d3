"""`twinax evaluate` with intervals, several references and several systems, against sacreBLEU's own command."""

import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sacrebleu import corpus_bleu, corpus_ter
from sacrebleu.metrics import BLEU, CHRF, TER

from twinax.backend.errors import DataError
from twinax.cli.text import evaluate_command
from twinax.cli.usage import UsageError
from twinax.inference.scores import CorpusScores, compare_systems, corpus_scores

MODEL = str(Path(__file__).parents[1] / "checkpoints" / "v1")
WORDS = ["the", "a", "cat", "dog", "sees", "old", "man", "House", "near", "runs", ",", ".", "!"]
METRICS = {"bleu": "BLEU", "chrf": "chrF", "ter": "TER"}


@pytest.fixture(scope="module")
def texts():
    """Two sets of references, and three systems that change the first one more and more."""
    rng = np.random.default_rng(0)
    references = [" ".join(rng.choice(WORDS, rng.integers(4, 12))) for _ in range(40)]

    def changed(share):
        return [
            " ".join(w if rng.random() > share else str(rng.choice(WORDS)) for w in text.split()) for text in references
        ]

    return {name: changed(share) for name, share in (("more", 0.3), ("a", 0.2), ("b", 0.25), ("c", 0.6))} | {
        "tgt": references
    }


@pytest.fixture
def folder(texts, tmp_path, monkeypatch):
    for name, lines in texts.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines))
    (tmp_path / "src").write_text("a b\n" * len(texts["tgt"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    return tmp_path


def by_sacrebleu(*arguments):
    """What the command of sacreBLEU prints, with six digits."""
    command = [sys.executable, "-m", "sacrebleu", *arguments, "-w", "6", "-m", *METRICS]
    environment = {**os.environ, "SACREBLEU_SEED": "12345"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def test_intervals_are_those_of_sacrebleu(folder, command):
    code, out, _ = command("evaluate", "a.txt", "--src", "src", "--tgt", "tgt.txt", "--bootstrap", "--json", "e.json")
    assert code == 0
    scores = {score["name"]: score for score in json.loads(Path("e.json").read_text())["scores"]}
    for expected in json.loads(by_sacrebleu("tgt.txt", "-i", "a.txt", "--confidence", "--format", "json")):
        name = expected["name"] if expected["name"] != "chrF2" else "chrF"
        score = scores[name]
        assert score["value"] == pytest.approx(expected["score"], abs=1e-5)
        assert score["mean"] == pytest.approx(expected["confidence_mean"], abs=1e-5)
        assert score["interval"] == pytest.approx(expected["confidence_var"], abs=1e-5)
        assert "bs:1000|seed:12345" in score["signature"]
    assert f"({scores['BLEU']['mean']:.2f} ± {scores['BLEU']['interval']:.2f})" in out
    assert "interval" not in scores["exact match"]


def test_comparison_is_that_of_sacrebleu(folder, command):
    arguments = ("--src", "src", "--tgt", "tgt.txt", "--references", "more.txt", "--paired", "--json", "e.json")
    code, out, _ = command("evaluate", "a.txt", "b.txt", "c.txt", *arguments)
    assert code == 0
    systems = json.loads(Path("e.json").read_text())["systems"]
    assert [system["checkpoint"] for system in systems] == ["a.txt", "b.txt", "c.txt"]
    arguments = ("tgt.txt", "more.txt", "-i", "a.txt", "b.txt", "c.txt", "--paired-bs", "--format", "text")
    rows = [row for row in by_sacrebleu(*arguments).splitlines() if "(" in row and row.startswith("│")][1:]
    numbers = [[float(number) for number in re.findall(r"\d+\.\d+", row)] for row in rows]
    values, p_values = [numbers[0], numbers[1], numbers[3]], [[None] * 3, numbers[2], numbers[4]]
    for system, row, p_row in zip(systems, values, p_values, strict=True):
        scores = {score["name"]: score for score in system["scores"]}
        own = [(scores[name]["value"], scores[name]["mean"], scores[name]["interval"]) for name in METRICS.values()]
        assert [number for metric in own for number in metric] == pytest.approx(row, abs=1e-6)
        assert [scores[name].get("p_value") for name in METRICS.values()] == pytest.approx(p_row, abs=1e-4)
        assert all("nrefs:2|bs:1000|seed:12345" in scores[name]["signature"] for name in METRICS.values())
    worse = next(score for score in systems[2]["scores"] if score["name"] == "BLEU")
    assert worse["p_value"] < 0.01
    assert f", p = {worse['p_value']:.4f}" in out


def test_a_model_and_a_file_are_compared(folder, command):
    translations = ("--src", "src", "--tgt", "tgt.txt", "--paired", "--output", "out", "--beam-size", "1")
    code, out, _ = command("evaluate", MODEL, "b.txt", *translations)
    assert code == 0
    assert Path("out.2").read_text() == Path("b.txt").read_text()
    assert Path("out.1").read_text() == "A B\n" * 40
    assert out.count("b.txt") == 5


def test_text_files_need_no_sources(folder, command):
    printed = [command("evaluate", "a.txt", *sources, "--tgt", "tgt.txt") for sources in ((), ("--src", "src"))]
    assert printed[0] == printed[1]
    assert printed[0][0] == 0


def test_an_earlier_system_is_kept_when_a_later_one_fails(folder, command, monkeypatch):
    lines = evaluate_command._Model.lines

    def failing(self, *arguments):
        if Path("out.1").exists():
            raise UsageError("no memory")
        return lines(self, *arguments)

    monkeypatch.setattr(evaluate_command._Model, "lines", failing)
    Path("second").symlink_to(MODEL)
    translations = ("--src", "src", "--tgt", "tgt.txt", "--paired", "--output", "out", "--beam-size", "1")
    assert command("evaluate", MODEL, "second", *translations)[0] == 2
    assert Path("out.1").read_text() == "A B\n" * 40
    assert not Path("out.2").exists()


def test_an_interrupted_evaluation_goes_on(folder, command, monkeypatch):
    """What was translated is read back and scored with the rest; too long sources are counted all the same."""
    monkeypatch.setattr(evaluate_command, "LARGEST_WINDOW", 7)
    Path("src").write_text("".join(f"{'a ' * (i % 50)}b\n" for i in range(40)))
    words = ("evaluate", MODEL, "--src", "src", "--tgt", "tgt.txt", "--beam-size", "1", "--json", "scores.json")
    code, table, cut = command(*words)
    expected = json.loads(Path("scores.json").read_text())
    assert (code, expected["cut"] > 0) == (0, True)
    lines, calls = evaluate_command._Model.lines, []

    def interrupted(self, sources, written):
        calls.append(written)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return lines(self, sources, written)

    Path("earlier").write_text("earlier\n")
    Path("out").symlink_to("earlier")
    with monkeypatch.context() as context:
        context.setattr(evaluate_command._Model, "lines", interrupted)
        assert command(*words, "--output", "out")[0] == 130
        assert Path("out").read_text() == "earlier\n"
        calls[:] = [None] * 10
        assert command(*words, "--output", "out") == (0, table, cut)
    assert [written is None for written in calls[10:]] == [False, False, False, True, True, True]
    assert json.loads(Path("scores.json").read_text()) == expected
    assert (Path("out").is_symlink(), len(Path("earlier").read_text().splitlines())) == (True, 40)
    assert sorted(path.name for path in Path().glob("earlier*")) == ["earlier"]


@pytest.mark.parametrize("bootstrap", [False, True])
@pytest.mark.parametrize("further", [False, "all", "some"])
def test_scores_of_parts_are_those_of_the_whole(texts, further, bootstrap):
    """The oracle is sacreBLEU, which is given all sentences at once."""
    rng = random.Random(0)
    some = [*[None] * 9, *texts["b"][9:]]  # the last part has all
    references = [texts["tgt"], *({"all": [texts["b"]], "some": [some]}[further] if further else [])]
    whole, number = CorpusScores("intl", bootstrap), len(texts["a"])
    borders = [0, *sorted(rng.sample(range(1, number), 4)), number]
    for begin, end in itertools.pairwise(borders):
        whole.add(texts["a"][begin:end], [column[begin:end] for column in references])
    metrics = {"BLEU": BLEU(tokenize="intl"), "BLEU, lower case": BLEU(True, tokenize="intl")}
    metrics |= {"chrF": CHRF(), "TER": TER()}
    scores = {score.name: score for score in whole.scores()}
    for name, metric in metrics.items():
        result = metric.corpus_score(texts["a"], references, n_bootstrap=1000 if bootstrap else 1)
        assert scores[name].value == pytest.approx(result.score, rel=1e-12)
        assert scores[name].signature == str(metric.get_signature())
        if bootstrap:
            assert (scores[name].mean, scores[name].interval) == pytest.approx((result._mean, result._ci), rel=1e-12)
    assert scores["exact match"].value == corpus_scores(texts["a"], references)[-1].value


def test_a_model_card_states_no_comparison(folder, command):
    assert command("evaluate", "a.txt", "b.txt", "--tgt", "tgt.txt", "--paired", "--json", "e.json")[0] == 0
    code, _, err = command("convert", MODEL, "out", "--layout", "pegasus", "--scores", "e.json")
    assert (code, err) == (
        2, "twinax: --scores e.json: compares systems; pass the scores of one, without --paired\n"
    )  # fmt: skip


def test_systems_that_never_differ_are_not_different(texts):
    """p is the share of resamples with a difference that is at least as large."""
    same, cased = list(texts["a"]), [text.title() for text in texts["a"]]
    scores = compare_systems({"a": texts["a"], "same": same, "cased": cased}, [texts["tgt"]])
    assert [score.p_value for score in scores["same"]] == [1, 1, 1, 1, None]
    p_values = {score.name: score.p_value for score in scores["cased"]}
    assert p_values["BLEU"] < 0.01
    assert (p_values["BLEU, lower case"], p_values["TER"]) == (1, 1)


def test_a_blank_line_is_no_further_reference(folder, command):
    second = Path("more.txt").read_text().splitlines()
    second[3], second[5] = "", "  "
    Path("some.txt").write_text("".join(f"{line}\n" for line in second))
    lines = Path("a.txt").read_text().splitlines()
    Path("a.txt").write_text("".join(f"{line}\n" for line in [*lines[:3], "", *lines[4:]]))
    command("evaluate", "a.txt", "--tgt", "tgt.txt", "--references", "some.txt", "--json", "e.json")
    scores = {score["name"]: score for score in json.loads(Path("e.json").read_text())["scores"]}
    translations, references = (Path(name).read_text().splitlines() for name in ("a.txt", "tgt.txt"))
    some = [None if i in (3, 5) else line for i, line in enumerate(second)]
    for name, corpus_score in (("BLEU", corpus_bleu), ("TER", corpus_ter)):
        expected = corpus_score(translations, [references, some]).score
        assert scores[name]["value"] == pytest.approx(expected, abs=1e-9)
        assert expected != corpus_score(translations, [references, second]).score
        assert scores[name]["signature"].startswith("nrefs:var|")
    equal = sum(line in pair for line, *pair in zip(translations, references, some, strict=True))
    assert scores["exact match"]["value"] == pytest.approx(100 * equal / 40)
    assert scores["exact match"]["signature"].startswith("nrefs:var|")


def test_a_blank_reference_counts_the_same_in_any_file(folder, command):
    first, second = (Path(f"{name}.txt").read_text().splitlines() for name in ("tgt", "more"))
    first[0], second[3], first[7], second[7] = "", "  ", "", ""
    for name, lines in (("one", first), ("two", second)):
        Path(name).write_text("".join(f"{line}\n" for line in lines))
    scores = []
    for pair in (("one", "two"), ("two", "one")):
        command("evaluate", "a.txt", "--tgt", pair[0], "--references", pair[1], "--json", "e.json")
        scores.append(json.loads(Path("e.json").read_text())["scores"])
    assert scores[0] == scores[1]
    translations = Path("a.txt").read_text().splitlines()
    sets = [[None if i == 0 else t for i, t in enumerate(first)], [None if i == 3 else t for i, t in enumerate(second)]]
    values = {score["name"]: score["value"] for score in scores[0]}
    assert values["TER"] == pytest.approx(corpus_ter(translations, sets).score, abs=1e-9)
    assert values["BLEU"] == pytest.approx(corpus_bleu(translations, sets).score, abs=1e-9)


def test_a_match_with_any_reference_is_exact(texts):
    first, second = ["a b", "c", "d  e"], ["x", "c", "d e"]
    (*_, score) = corpus_scores(["x", "c", "d e"], [first, second])
    assert (score.value, score.signature) == (100.0, "nrefs:2|n:3|case:mixed|space:no")
    (*_, score) = corpus_scores(["x", "y", "d e"], [first])
    assert round(score.value, 3) == 33.333
    with pytest.raises(DataError, match="2 translations and 3 references"):
        compare_systems({"a": ["x", "y", "z"], "b": ["x", "y"]}, [first])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "evaluate: needs a checkpoint, or a text file with translations"),
        (("a.txt", "b.txt"), "evaluate: 2 systems are compared with --paired; add it, or name one system"),
        (("a.txt", "--paired"), "--paired: needs at least two systems"),
        (("a.txt", "b.txt", "a.txt", "--paired"), "evaluate: a.txt is named twice"),
        (("a.txt", "nowhere", "--paired"), "nowhere: there is no such file or directory"),
        (("short", MODEL, "--paired"), "short: has 1 lines, and there are 40 pairs"),
        (("a.txt", "--beam-size", "2"), "--beam-size: every system is a text file, nothing is translated; omit it"),
        (("a.txt", "--tgt-lang", "de"), "--tgt-lang: every system is a text file"),
        (("a.txt", "empty", "--paired"), "empty: is an empty directory"),
        (("a.txt", "--json", "a.txt"), "a.txt: is an input of this command; name another file to write"),
        (("a.txt", "--json", "./out"), "out: is another output of this command; name another file to write"),
        (("a.txt", "--references", "short"), "short: has 1 lines, and there are 40 pairs"),
        (("a.txt", "--references", "nowhere"), "nowhere: there is no such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line_before_any_translation(folder, command, arguments, message):
    Path("short").write_text("A\n")
    Path("empty").mkdir()
    code, out, err = command("evaluate", *arguments, "--src", "src", "--tgt", "tgt.txt", "--output", "out")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not list(Path().glob("out*"))


def test_an_output_is_closed_when_the_evaluation_fails(folder, command, monkeypatch):
    """So that the next call goes on, although the exception keeps the variables of the first one."""
    words = ("evaluate", MODEL, "--src", "src", "--tgt", "tgt.txt", "--output", "out", "--beam-size", "1")
    error = DataError("the model fails")

    def fail(*arguments):
        raise error

    with monkeypatch.context() as context:
        context.setattr(evaluate_command._Model, "lines", fail)
        assert command(*words)[::2] == (2, "twinax: the model fails\n")
    assert command(*words)[0] == 0


def test_a_full_device_is_one_line(folder, command):
    words = ("evaluate", MODEL, "--src", "src", "--tgt", "tgt.txt", "--output", "/dev/full", "--beam-size", "1")
    status, _, err = command(*words)
    assert (status, err) == (2, "twinax: /dev/full: cannot be written: No space left on device\n")
