"""Checkpoints that older versions wrote load for ever, and still mean what they meant.

tests/checkpoints/vN is what `twinax train` wrote under version N of the schema; a new version adds one and a migration.
"""

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from twinax.configs.run import RUN_SCHEMA_VERSION
from twinax.flax_transformer import Transformer
from twinax.flax_transformer.decode import generate
from twinax.train.checkpointing.checkpoints import read_checkpoint

BITS = {1: "e4574bdbef0d5822"}  # of parameters and of the second moments
FOLDER = Path(__file__).parent / "checkpoints"


def test_every_version_is_here():
    versions = {p.name: json.loads((p / "run" / "config.json").read_text()) for p in FOLDER.iterdir()}
    assert {f"v{n}" for n in range(1, RUN_SCHEMA_VERSION + 1)} == set(versions)
    assert all(config["run_schema_version"] == int(name[1:]) for name, config in versions.items())


@pytest.mark.parametrize("version", range(1, RUN_SCHEMA_VERSION + 1))
def test_it_translates_as_it_did(version):
    """It learnt to write small letters large."""
    saved = read_checkpoint(FOLDER / f"v{version}")
    assert int(saved.state.update) == 600
    assert saved.state.position.tolist() == [120, 0]
    model = Transformer.from_arrays(saved.run.model, {**saved.state.buffers, **saved.state.params})
    ids = [[*ids, model.config.eos_id] for ids in saved.tokenizers.src.encode(["a b c", "h e d", "f g a"])]
    (best,) = zip(*generate(model, np.array(ids)).sentences(), strict=True)
    assert saved.tokenizers.tgt.decode(best) == ["A B C", "H E D", "F G A"]
    digest = sha256()
    for name, array in sorted(
        {**saved.state.params, **{f"nu.{n}": a for n, a in saved.state.optimizer[1].nu.items()}}.items()
    ):
        digest.update(name.encode() + np.asarray(array).tobytes())
    assert digest.hexdigest()[:16] == BITS[version]
