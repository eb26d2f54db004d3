"""Numbers for SwanLab. The package conflicts with the tested dependencies; a stand-in has the functions we call."""

import json
import re
import types

import pytest

from twinax.backend.errors import DataError
from twinax.configs.data import CorpusConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.train.tracking.metrics import MetricsLog
from twinax.train.tracking.swanlab_tracker import SwanLabTracker

SETTINGS = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), loop=LoopConfig(swanlab="project")).to_dict()


class StandIn(types.ModuleType):
    """The functions of `swanlab` 0.10 that we call."""

    def __init__(self):
        super().__init__("swanlab")
        self.begun, self.logged, self.finished = [], [], 0

    def init(self, *, project, experiment_name, config, logdir, id, resume):
        if project == "refused":
            raise ValueError("api key\n not configured")
        json.dumps(config)
        assert re.fullmatch("[0-9a-f]{8}", id)
        self.begun.append((project, experiment_name, logdir, id, resume))

    def log(self, data, step):
        self.logged.append((step, data))

    def finish(self):
        self.finished += 1


@pytest.fixture
def swanlab(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr("twinax.train.tracking.swanlab_tracker.import_module", {"swanlab": stand_in}.__getitem__)
    return stand_in


def test_it_gets_what_tensorboard_gets(swanlab, tmp_path):
    log = MetricsLog(tmp_path, 0, print)
    log.add(SwanLabTracker("project", tmp_path, SETTINGS))
    log.write({"update": 1, "epoch": 0, "loss": 2.5})
    log.write({"update": 1, "validation": {"loss": 2.25, "samples": [["a", "b", "c"]]}})
    log.write({"update": 1, "averaged": [1], "validation": {"loss": 2.0}})
    log.close()
    assert swanlab.logged == [(1, {"training/epoch": 0, "training/loss": 2.5}), (1, {"validation/loss": 2.25})]
    assert swanlab.finished == 1
    SwanLabTracker("project", tmp_path, SETTINGS)
    first_call, second_call = swanlab.begun
    assert first_call == second_call
    assert (first_call[:3], first_call[4]) == (("project", tmp_path.name, str(tmp_path / "swanlab")), "allow")
    (tmp_path / "other").mkdir()
    SwanLabTracker("project", tmp_path / "other", SETTINGS)
    assert swanlab.begun[2][3] != first_call[3]


def test_what_is_wrong_is_said(swanlab, tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"swanlab='refused': SwanLab cannot start: api key not configured; log in, or"):
        SwanLabTracker("refused", tmp_path, SETTINGS)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "swanlab", None)
    with pytest.raises(DataError, match=r"SwanLab is not installed: pip install 'twinax\[swanlab\]'"):
        SwanLabTracker("project", tmp_path, SETTINGS)
