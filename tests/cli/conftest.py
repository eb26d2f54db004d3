"""A model and its port as a user has them in files."""

import sys

import numpy as np
import pytest

REFERENCE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6))
    return model.eval()

def dropout():
    return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))

def broken():
    return size("hidden_size")

def inputs():
    return (torch.ones(2, 6),)

def nothing():
    return None

def leaves():
    raise SystemExit(3)

def size(name):
    raise KeyError(name)
"""
PORT = """
import jax
from helper import names

def port(p, x):
    return jax.nn.gelu(x @ p["in"] + p["in_bias"], approximate=APPROXIMATE) @ p["out"] + p["out_bias"]

def convert(state):
    return {n: a.T for n, a in zip(names, state.values())}

def make(state):
    return port, convert(state)

def untrained():
    import numpy as np
    return port, {n: np.zeros(s, "f") for n, s in zip(names, [(6, 9), (9,), (9, 6), (6,)])}

def counting():
    import numpy as np
    return (lambda p, x: port(p, x) * (p["steps"] > 0)), untrained()[1] | {"steps": np.ones((), int)}

def squashed():
    return (lambda p, x: port(p, jax.nn.tanh(x))), untrained()[1]

class Port:
    def __init__(self, rngs):
        self.kernel = rngs.params()
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The folder with `ref.py`, `port.py`, which is equal, `wrong.py`, and inputs; the current directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ref.py").write_text(REFERENCE)
    (tmp_path / "helper.py").write_text('names = ("in", "in_bias", "out", "out_bias")')
    (tmp_path / "port.py").write_text(PORT.replace("APPROXIMATE", "False"))
    (tmp_path / "wrong.py").write_text(PORT.replace("APPROXIMATE", "True"))
    np.savez(tmp_path / "batch.npz", np.random.default_rng(0).standard_normal((4, 6)))
    yield tmp_path
    sys.modules.pop("helper", None)
