"""Checkpoints of older versions still load and give the same results.

tests/checkpoints/vN is written by `twinax train` under schema version N; each version adds a folder and a migration.
"""

import json
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from twinax.configs.run import RUN_SCHEMA_VERSION
from twinax.flax_transformer import Transformer
from twinax.flax_transformer.decoding.search import generate
from twinax.train.checkpointing.checkpoints import read_checkpoint

BITS = {1: "e4574bdbef0d5822"}  # of parameters and of the second moments
FOLDER = Path(__file__).parents[1] / "checkpoints"


def test_every_version_is_here():
    versions = {p.name: json.loads((p / "run" / "config.json").read_text()) for p in FOLDER.iterdir()}
    assert {f"v{n}" for n in range(1, RUN_SCHEMA_VERSION + 1)} == set(versions)
    assert all(config["run_schema_version"] == int(name[1:]) for name, config in versions.items())


@pytest.mark.parametrize("version", range(1, RUN_SCHEMA_VERSION + 1))
def test_it_translates_as_it_did(version):
    """The model learnt to uppercase letters."""
    checkpoint = read_checkpoint(FOLDER / f"v{version}")
    assert int(checkpoint.state.update) == 600
    assert checkpoint.state.position.tolist() == [120, 0]
    model = Transformer.from_arrays(checkpoint.run.model, {**checkpoint.state.buffers, **checkpoint.state.params})
    ids = [[*ids, model.config.eos_id] for ids in checkpoint.tokenizers.src.encode(["a b c", "h e d", "f g a"])]
    (tokens,) = zip(*generate(model, np.array(ids)).sentences(), strict=True)
    assert checkpoint.tokenizers.tgt.decode(tokens) == ["A B C", "H E D", "F G A"]
    digest = sha256()
    for name, array in sorted(
        {**checkpoint.state.params, **{f"nu.{n}": a for n, a in checkpoint.state.optimizer[1].nu.items()}}.items()
    ):
        digest.update(name.encode() + np.asarray(array).tobytes())
    assert digest.hexdigest()[:16] == BITS[version]


TPU = {"sharding_type": "NamedSharding", "shape": [16, 16], "axis_names": ["data", "fsdp"]}
TPU |= {"axis_types": ["AxisType.Auto"] * 2, "partition_spec": ["fsdp"], "device_mesh": {"mesh": []}}
TPU["device_mesh"]["mesh"] = [[{"id": 16 * row + column} for column in range(16)] for row in range(16)]
SHARDINGS = {
    "one device": {"sharding_type": "SingleDeviceSharding", "device_str": "TPU_0(process=3,(1,2,0,1))"},
    "a pod slice": TPU,
}


@pytest.mark.parametrize("name", SHARDINGS)
def test_a_checkpoint_of_tpus_opens_without_them(tmp_path, command, name):
    """orbax writes the devices' names beside the arrays."""
    run = shutil.copytree(FOLDER / "v1", tmp_path / "run")
    path = run / "state" / "_sharding"
    names = json.loads(path.read_text())
    assert len(names) > 20
    path.write_text(json.dumps(dict.fromkeys(names, json.dumps(SHARDINGS[name]))))
    assert command("inspect", run)[0] == 0
    assert command("convert", run, tmp_path / "model.pt")[0] == 0
    (tmp_path / "text").write_text("a b\n")
    assert command("translate", run, tmp_path / "text")[:2] == (0, "A B\n")
