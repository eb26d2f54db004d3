"""`twinax capture`: a comparison of recordings finds what one of the models themselves finds, here and elsewhere."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_compare_command import compare
from twinax.cli.flags.proofs import Capture
from twinax.cli.proofs.capture_command import run
from twinax.cli.usage import UsageError, one_line_errors
from twinax.compare.capture.recording_file import read_recording

TRAINED = """
import torch

def make():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Dropout(0.25), torch.nn.Linear(4, 2)).train()
"""
TRAINED_PORT = """
import jax, jax.numpy as jnp

def make(state):
    return model, {n: a.T for n, a in state.items()}

def model(p, x):
    hidden = x @ p["0.weight"] + p["0.bias"]
    keep = jax.random.bernoulli(jax.random.key(1), 0.75, hidden.shape)
    return jnp.where(keep, hidden / RATE, 0) @ p["2.weight"] + p["2.bias"]
"""


def capture(model="ref.py:make", inputs="batch.npz", out="ref.trace", **flags):
    with one_line_errors():
        return run(Capture(model=model, inputs=inputs, out=out, **flags))


def found(**flags):
    """(exit status, what the JSON says but for times, and for the rounding that recordings do not have)."""
    status = compare(json_file="o.json", **flags)
    document = json.loads(Path("o.json").read_text())
    os.remove("o.json")
    document["not_tested"] = [line for line in document["not_tested"] if not line.startswith("rounding")]
    return status, {name: value for name, value in document.items() if name != "cost"}


@pytest.mark.parametrize(
    ("candidate", "flags", "status"),
    [
        ("port.py:make", {"gradients": True, "optimizer": ("sgd",)}, 0),
        ("wrong.py:make", {}, 1),
        ("port.py:untrained", {}, 0),
        ("port.py:squashed", {}, 1),
    ],
)
def test_recordings_are_compared_as_their_models(candidate, flags, status, files, capsys):
    live = found(candidate=candidate, **flags)
    assert live[0] == status
    capture(gradients=True)
    assert "ref.trace: 5 operations of PyTorch and gradients" in capsys.readouterr().out
    assert found(reference="ref.trace", candidate=candidate, inputs=None, **flags) == live
    assert capsys.readouterr().out.startswith("ref.trace: ref.py:make, recorded with python ")
    if not candidate.endswith(":make"):  # such a port takes the reference's parameters
        capture(candidate, out="port.trace", gradients=True)
        assert found(reference="ref.trace", candidate="port.trace", inputs=None, **flags) == live
        assert found(candidate="port.trace", **flags) == live


def test_a_report_shows_the_lines_of_a_model_that_is_not_here(files):
    (files / "far").mkdir()
    (files / "far" / "away.py").write_text(
        "import torch\n\ndef make():\n    return scaled, {}\n\n\ndef scaled(p, x):\n"
        "    return torch.tanh(x) * 2  # far away\n".replace("{}", '{"unused": torch.ones(1)}')
    )
    capture("far/away.py:make")
    script = "from tests.cli.test_compare_command import compare\n"
    script += "compare('ref.trace', 'port.py:squash', None, report='o.html')"
    (files / "port.py").write_text("import jax\n\ndef squash():\n    return (lambda p, x: jax.nn.tanh(x) * 3), {}\n")
    (files / "far" / "away.py").unlink()
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(root)}, check=True)
    text = (files / "o.html").read_text()
    assert "return torch.tanh(x) * 2  # far away" in text


@pytest.mark.parametrize(("rate", "status"), [("0.75", 0), ("0.8", 1)])
def test_dropout_of_a_recording(rate, status, files):
    (files / "train.py").write_text(TRAINED)
    (files / "trained.py").write_text(TRAINED_PORT.replace("RATE", rate))
    flags = {"candidate": "trained.py:make", "dropout": True, "gradients": True}
    live = found(reference="train.py:make", **flags)
    assert live[0] == status
    capture("train.py:make", dropout=True, gradients=True)
    assert found(reference="ref.trace", inputs=None, **flags) == live
    with pytest.raises(UsageError, match=r"draws random numbers; compare the dropout too, or record the model in"):
        compare("ref.trace", "trained.py:make", None)


def test_inputs_by_name_and_nested(files):
    (files / "named.py").write_text(
        "import numpy as np, torch\nfrom torch import nn\n\n"
        "class Model(nn.Module):\n    def forward(self, state, scale=1.0):\n"
        "        return state['a'] * scale + state['b'][1]\n\n"
        "def make():\n    return Model().eval()\n\n"
        "def port():\n    return (lambda p, state, scale: scale * state['a'] + state['b'][1]), {}\n\n"
        "def inputs():\n    x = np.random.default_rng(0).standard_normal((3, 4, 5))\n"
        "    return {'state': {'a': torch.from_numpy(x[0]), 'b': [x[1], x[2]]}, 'scale': 0.5}\n"
    )
    assert compare("named.py:make", "named.py:port", "named.py:inputs") == 0
    capture("named.py:make", "named.py:inputs")
    assert compare("ref.trace", "named.py:port", None) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": None}, "MODEL.PY:FUNCTION: is missing; see twinax capture --help"),
        ({"inputs": None}, "--inputs: is missing"),
        ({"out": "ref.pt"}, "ref.pt: must end in .trace"),
        ({"out": "none/ref.trace"}, "none/ref.trace: there is no directory none"),
        ({"out": "ref.py"}, "ref.py: is an input of this command"),
        ({"model": "ref.py:broken"}, "ref.py:broken: failed: KeyError"),
        ({"model": "ref.py:dropout"}, "1: is in training mode; call eval() on the module"),
        ({"program": "r.pyz"}, "--program r.pyz: writes the recorder and records nothing; omit ref.py:make"),
        ({"program": "r.py", "model": None}, "--program r.py: must end in .pyz"),
        ({"model": "port.py:make"}, "port.py:make: takes arguments; record a function without any"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(flags, message, files):
    with pytest.raises(UsageError) as error:
        capture(**flags)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)
    assert not [*files.glob("*.trace"), *files.glob("*.part"), *files.glob("*.pyz")]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"inputs": "batch.npz"}, "--inputs batch.npz: ref.trace has its own inputs; omit the flag"),
        ({"reference": "none.trace"}, "none.trace: there is no such file"),
        ({"reference": "broken.trace"}, "broken.trace: is not a recorded model, or is damaged ("),
        ({"reference": "ref.py:make"}, "--inputs: is missing; pass an .npz or .npy file, or file.py:function"),
        ({"gradients": True}, "ref.trace: has no gradients; record it with --gradients"),
        (
            {"candidate": "ref.trace", "candidate_inputs": "batch.npz"},
            "--candidate-inputs batch.npz: ref.trace has its",
        ),
    ],
)
def test_recordings_that_cannot_be_compared(flags, message, files):
    (files / "broken.trace").write_bytes(b"PK\3\4" + bytes(60))
    capture()
    with pytest.raises(UsageError) as error:
        compare(**{"reference": "ref.trace", "inputs": None} | flags)
    assert str(error.value).startswith(message)


def test_the_recorder_is_one_file_that_needs_no_twinax(files, capsys):
    """In isolated mode nothing of this environment's `twinax` is imported; the file is the same."""
    assert capture(None, None, None, program="recorder.pyz") == 0
    assert "python recorder.pyz MODEL.PY:FUNCTION" in capsys.readouterr().out
    capture()
    code = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    words = ["recorder.pyz", "ref.py:make", "--inputs", "batch.npz", "--out", "alone.trace"]
    alone = f"{code}; assert 'twinax' not in sys.modules, 'twinax'"
    subprocess.run([sys.executable, "-c", alone, *words], check=True, capture_output=True)
    one, other = (read_recording(files / f"{name}.trace").forward for name in ("ref", "alone"))
    assert [o.lines for o in one.operations] == [o.lines for o in other.operations]
    assert [value.tobytes() for value in one.values] == [value.tobytes() for value in other.values]
    failed = subprocess.run([sys.executable, *words[:1], "ref.py:mak", *words[2:]], capture_output=True, text=True)
    assert failed.returncode == 1
    assert failed.stderr.startswith("recorder.pyz: ref.py:mak: ref.py has no function mak")


@pytest.mark.slow
def test_a_port_that_ran_in_the_newest_jax_alone(files, monkeypatch):
    """An environment of Python 3.12 with the newest JAX and nothing else records; this one, with PyTorch, judges."""
    root = Path(__file__).parents[2]
    live = [found(candidate=f"{file}.py:recorded") for file in _recorded_ports(files)]
    pyenv = subprocess.run(["pyenv", "latest", "3.12"], capture_output=True, text=True, check=False).stdout.strip()
    environment = os.environ | ({"PYENV_VERSION": pyenv} if pyenv else {})
    subprocess.run(["python3.12", "-m", "venv", "newest"], env=environment, check=True)
    install = ["newest/bin/python", "-m", "pip", "install", "--quiet", "-c", root / "constraints-newest.txt", "jax"]
    subprocess.run(install, check=True)
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # which the newest may not know
    capture(None, None, None, program="recorder.pyz")
    for name, expected in zip(("port", "wrong"), live, strict=True):
        words = ["recorder.pyz", f"{name}.py:recorded", "--inputs", "batch.npz", "--out", f"{name}.trace"]
        subprocess.run(["newest/bin/python", *words], check=True)
        assert found(candidate=f"{name}.trace") == expected
    assert [status for status, _ in live] == [0, 1]


def _recorded_ports(folder):
    """Both ports with the reference's weights, read from a file, as an environment without PyTorch has them."""
    from twinax.compare.capture.factories import called, function_of
    from twinax.compare.capture.parameters import arrays_of

    np.savez(folder / "weights.npz", **arrays_of(called("ref.py:make", function_of("ref.py:make"))))
    more = "\ndef recorded():\n    import numpy as np\n    return port, convert(dict(np.load('weights.npz')))\n"
    for name in ("port", "wrong"):
        with (folder / f"{name}.py").open("a") as file:
            file.write(more)
        yield name
