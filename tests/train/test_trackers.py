"""The trackers that the documentation shows log to the packages that they are for, without a network."""

import re
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "trackers.md").read_text(), flags=re.DOTALL)
PACKAGES = ("wandb", "mlflow-skinny", "sqlalchemy<3", "alembic", "aim")

LOGGED = """
def log(tracker):
    tracker.log(1, {"training/loss": 6.9, "training/learning_rate": 1e-4})
    tracker.log(2, {"training/loss": 6.5})
    tracker.log(2, {"validation/loss": 6.6})
    tracker.flush()
    return tracker

tracker = log(WeightsAndBiases(project="translation", name="de_en", mode="offline"))
tracker.close()

mlflow.set_tracking_uri("sqlite:///mlflow.db")
tracker = log(MLflow(run_name="de_en"))
tracker.close()
history = mlflow.MlflowClient().get_metric_history(tracker.run.info.run_id, "training/loss")
assert [(metric.step, metric.value) for metric in history] == [(1, 6.9), (2, 6.5)]
assert mlflow.active_run() is None

tracker = log(Aim(repo=".", experiment="de_en"))
values = {metric.name: [*metric.values.sparse_list()[1]] for metric in tracker.run.metrics()}
tracker.close()
assert values["training/loss"] == [6.9, 6.5] and values["validation/loss"] == [6.6], values
"""


@pytest.mark.slow
def test_the_trackers_of_the_page_log(tmp_path):
    """In an environment of their own, because their dependencies are many. It needs the network."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
    (tmp_path / "trackers.py").write_text("\n".join([*BLOCKS, LOGGED]))
    environment = {
        "HOME": str(tmp_path),
        "PATH": str(python.parent),
        "WANDB_SILENT": "true",
        "GIT_PYTHON_REFRESH": "quiet",
    }
    subprocess.run([python, "trackers.py"], check=True, cwd=tmp_path, env=environment)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    for logged in (rb"training/loss\W+6\.9", rb"training/loss\W+6\.5", rb"validation/loss\W+6\.6"):
        assert re.search(logged, path.read_bytes()), logged
