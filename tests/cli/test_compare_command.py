"""`twinax compare` on files of a user: verdicts, exit status, JSON, and one line for whatever cannot be used."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twinax.cli.flags.proofs import Compare
from twinax.cli.proofs import compare_command
from twinax.cli.proofs.compare_command import run
from twinax.cli.usage import UsageError, one_line_errors
from twinax.compare.capture.trace import Trace
from twinax.compare.comparison import Comparison
from twinax.compare.repair.diagnosis import Diagnosis
from twinax.compare.rounding import Rounding
from twinax.compare.training.updates import UpdateDifference

DEEP = """
import torch

def reference(layers=3):
    return torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(layers)))

def port(state, layers=3):
    def run(p, x):
        for i in range(layers):
            x = x @ p[f"{i}.weight"].T + p[f"{i}.bias"]
        return x
    return run, state
"""


def compare(reference="ref.py:make", candidate="port.py:make", inputs="batch.npz", **flags):
    with one_line_errors():
        return run(Compare(reference=reference, candidate=candidate, inputs=inputs, **{"no_rounding": True} | flags))


def test_equal_models(files, capsys):
    before = list(sys.path)
    assert compare(gradients=True, no_rounding=False, json_file="o.json") == 0
    document = json.loads((files / "o.json").read_text())
    assert (document["verdict"], document["equal"], document["gradients"]["verdict"]) == ("equal", True, "equal")
    assert [entry["dtype"] for entry in document["rounding"] if entry["ok"]] == ["float32", "bfloat16"]
    assert document["weights"]["matches"]["in"] == ["state['0.weight'].T"]
    assert sys.path == before
    out = capsys.readouterr().out
    assert out.startswith("equal: port.py:make against ref.py:make")
    assert "4 of 4" in out


def test_different_models(files, capsys):
    assert compare(candidate="wrong.py:make", json_file="o.json", report="o.html") == 1
    (defect,) = json.loads((files / "o.json").read_text())["outputs"]["defects"]
    (line,) = defect["lines"]
    assert line.endswith("/wrong.py:6")
    assert (defect["repair"]["text"], defect["reference"]["lines"]) == ("should be erf gelu", ["1"])
    assert "should be erf gelu" in capsys.readouterr().out
    text = (files / "o.html").read_text()
    assert "<code>wrong.py:make</code> against <code>ref.py:make</code>" in text
    assert "should be erf gelu" in text
    assert "return jax.nn.gelu(x @ p[&#34;in&#34;]" in text  # the file's own line


def test_a_converter_and_no_converter(files, capsys):
    assert compare(candidate="port.py:untrained", convert="port.py:convert") == 0
    capsys.readouterr()
    assert compare(candidate="port.py:untrained", write_rules="rules.toml") == 0
    out, err = capsys.readouterr()
    assert "weights: 4 of 4 parameters inferred, without their names" in out
    assert err == "the candidate has other weights: inferring which parameter is which\n"
    assert compare(candidate="port.py:counting") == 0
    assert "weights: 4 of 4 parameters inferred" in capsys.readouterr().out  # a counter is no parameter
    assert compare("port.py:untrained", "ref.py:make", json_file="o.json") == 2  # its outputs are all zero
    assert "the candidate is the PyTorch model; if the JAX model is the port, exchange" in capsys.readouterr().err
    assert [*json.loads((files / "o.json").read_text())["cost"]["seconds"]] == ["weights", "tracing", "outputs"]
    assert compare(candidate="port.py:untrained", rules="rules.toml") == 0
    assert compare(candidate="port.py:untrained", convert="rules.py:to_candidate") == 0
    assert compare(inputs="ref.py:inputs") == 0
    np.save("batch.npy", np.load("batch.npz")["arr_0"])
    assert compare(inputs="batch.npy") == 0


def test_a_search_for_weights_that_ends_early(files, capsys, monkeypatch):
    for name in ("_SECONDS", "_RUNS"):
        monkeypatch.setattr(f"twinax.compare.weight_map.inference.{name}", 0.0)
    compare(candidate="port.py:untrained")
    line = "weights: the search stopped after 0 s; in models of fewer layers there is less to search for"
    assert line in capsys.readouterr().out.splitlines()


def test_a_wrong_port_without_a_converter(files, capsys):
    """Behind the mistake no value is the reference's, so weights are assumed; the difference is found all the same."""
    assert compare(candidate="port.py:squashed", json_file="o.json", write_rules="rules.toml") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "weights: 2 of 4 parameters inferred, without their names" in out
    assert "weights assumed from shapes, order of use and names (--write-rules lists them): in, out" in out
    document = json.loads((files / "o.json").read_text())
    (defect,) = document["outputs"]["defects"]
    assert defect["lines"][0].endswith(f"/port.py:{(files / 'port.py').read_text().splitlines().index(SQUASHED) + 1}")
    assert (document["outputs"]["verified"], document["not_tested"]) == (True, [])  # which proves the weights
    assert '"out" = { source = "2.weight", layout = "w.T" }' in (files / "rules.toml").read_text()


SQUASHED = "    return (lambda p, x: port(p, jax.nn.tanh(x))), untrained()[1]"
EQUAL = Comparison(Diagnosis("equal"), traces=(Trace("PyTorch"), Trace("JAX")))


def test_fewer_layers_on_both_sides(files, capsys):
    (files / "deep.py").write_text(DEEP)
    assert compare("deep.py:reference", "deep.py:port", layers=2) == 0
    assert "4 of 4" in capsys.readouterr().out
    assert compare("deep.py:reference", "deep.py:port") == 0
    assert "6 of 6" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("status", "changes"),
    [
        (0, {}),
        (0, {"forward": Diagnosis("equal but for float32 constants")}),
        (0, {"rounding": (Rounding("float32", 0.0, 0.0, 24, "out of memory"),)}),
        (1, {"forward": Diagnosis("different")}),
        (2, {"forward": Diagnosis("undecided", reason="the outputs are empty")}),
        (1, {"backward": Diagnosis("different")}),
        (2, {"backward": Diagnosis("undecided")}),
        (1, {"update": (UpdateDifference("learning rate", 1.0, 2.0),)}),
        (1, {"rounding": (Rounding("float32", 1e-8, 1e-6, 24),)}),
    ],
)
def test_exit_status(status, changes, files, monkeypatch, capsys):
    comparison = replace(EQUAL, **changes)
    monkeypatch.setattr(compare_command, "compare", lambda *arguments, **options: comparison)
    assert compare(report="o.html", json_file="o.json") == status
    assert comparison.ok == (status == 0)
    assert capsys.readouterr().out.startswith(f"{comparison.verdict}: ")
    assert json.loads((files / "o.json").read_text())["equal"] == (status == 0)
    assert f">{'✓✗?'[status]}</span> {comparison.verdict}" in (files / "o.html").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reference": "ref.py"}, "ref.py: must name a function in a Python file, as in port.py:make"),
        ({"reference": "none.py:make"}, "none.py: there is no such file"),
        (
            {"candidate": "port.py:mak"},
            "port.py:mak: port.py has no function mak; it has port, convert, make, untrained, counting",
        ),
        ({"reference": "ref.py:broken"}, "ref.py:broken: failed: KeyError: 'hidden_size' (line 26)"),
        ({"reference": "ref.py:dropout"}, "1: is in training mode; call eval() on the module"),
        ({"inputs": "none.npz"}, "none.npz: there is no such file"),
        ({"inputs": "ref:batch"}, "ref:batch: there is no such file; a function is named as in ref.py:inputs"),
        ({"inputs": "helper.py"}, "helper.py: name its function too, as in helper.py:inputs"),
        ({"inputs": "text.npz"}, "text.npz: is not an .npz or .npy file of arrays"),
        ({"inputs": "empty.npz"}, "empty.npz: has no arrays"),
        ({"inputs": "wide.npz"}, "Sequential: the forward pass in float64 failed: RuntimeError: "),
        ({"candidate": "syntax.py:make"}, "syntax.py: cannot be imported: SyntaxError: "),
        ({"candidate": "port.py:untrained", "convert": "ref.py:broken"}, "broken: TypeError: "),
        ({"rules": "helper.py"}, "helper.py: cannot be read as TOML: "),
        ({"rules": "none.toml"}, "none.toml: there is no such file; --write-rules writes one"),
        ({"rules": "x", "convert": "y"}, "--rules x: cannot be combined with --convert"),
        ({"write_rules": "."}, "--write-rules .: must end in .toml"),
        ({"write_rules": "rules.json"}, "--write-rules rules.json: must end in .toml"),
        ({"write_rules": "port.toml"}, "--write-rules port.py: exists; pass another name"),
        ({"json_file": "none/o.json"}, "none/o.json: there is no directory none"),
        ({"report": "none/o.html"}, "none/o.html: there is no directory none"),
        ({"report": "o.json"}, "--report o.json: must end in .html"),
        ({"report": "o.html", "json_file": "o.html"}, "o.html: is another output of this command"),
        ({"reference": "ref.py:nothing"}, "ref.py:nothing: returned None; return a model"),
        (
            {"candidate": "port.py:Port"},
            "port.py:Port: failed: AttributeError: 'dict' object has no attribute 'params' (line 27); it is a class, "
            "and got the parameters: name a function that returns the model",
        ),
        ({"reference": "ref.py:leaves"}, "ref.py:leaves: failed: SystemExit: 3"),
        ({"layers": 2}, "ref.py:make: has no parameter layers; add layers=None to it, for --layers 2"),
    ],
)
def test_what_cannot_be_used_is_one_line(changes, message, files):
    np.savez(files / "empty.npz")
    (files / "text.npz").write_text("no arrays")
    np.savez(files / "wide.npz", np.ones((2, 7)))
    (files / "syntax.py").write_text("def make(:\n")
    with pytest.raises(UsageError) as error:
        compare(**{"json_file": "o.json", "report": "o.html"} | changes)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert not (files / "o.json").exists()
    assert not (files / "o.html").exists()


def test_the_worked_example_prints_what_the_page_shows(command, tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "compare.md").read_text()
    folder = tmp_path / "example"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    for code in re.findall(r"```python\n(# \w+\.py\n.*?)```", page, flags=re.DOTALL):
        Path(code.splitlines()[0].removeprefix("# ")).write_text(code)
    shown = re.search(r"```bash\n(twinax compare .*?)\n```.*?prints\n\n```\n(.*?)```", page, re.DOTALL)
    line, output = shown.groups()
    status, out, _ = command(*shlex.split(line)[1:])
    assert status == 1
    assert [text.rstrip() for text in out.splitlines()] == output.splitlines()
    assert (folder / "report.html").exists()


def test_dropout_of_models_in_training_mode(files, capsys):
    (files / "train.py").write_text("import torch\n\ndef make():\n    return torch.nn.Dropout(0.25).train()\n")
    text = "import jax, jax.numpy as jnp\n\ndef make():\n    return (lambda p, x: drop(x, p)), {}\n\ndef drop(x, p):\n"
    text += (
        "    keep = jax.random.bernoulli(jax.random.key(1), 0.75, x.shape)\n    return jnp.where(keep, x / 0.8, 0)\n"
    )
    (files / "port.py").write_text(text)
    assert compare(reference="train.py:make", candidate="port.py:make", dropout=True) == 1
    assert "div: 0.8 → 0.75" in capsys.readouterr().out
    (files / "right.py").write_text(text.replace("0.8", "0.75"))
    assert compare(reference="train.py:make", candidate="right.py:make", dropout=True) == 0
