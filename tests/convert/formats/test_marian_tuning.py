"""Marian models after a training: what an `.npz` can store, and what a file leaves in doubt."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parity_tests.support.marian_files import SIZE, marian_arrays, marian_model, marian_options, save_marian, save_npz
from twinax import convert
from twinax.backend.errors import CheckpointError
from twinax.configs.data import CorpusConfig
from twinax.configs.run import RunConfig
from twinax.configs.training import TrainingConfig
from twinax.convert import Checkpoint, ConversionError
from twinax.convert.checkpoint import CONFIG, MARIAN_OPTIONS
from twinax.convert.load_warnings import load_warning
from twinax.torch_reference.losses import cross_entropy
from twinax.torch_reference.optimizers import make_optimizer
from twinax.train.loop.warm_start import read_initial_weights

FIXTURE = Path(__file__).parents[3] / "parity_tests" / "support" / "marian"
pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about changes in later versions

SETTINGS = {  # training settings -> message of the refusal; None: the trained model can be written
    "none": ({}, None),
    "smoothing": ({"label_smoothing": 0.1}, "label_smoothing=0.1 would train padding"),
    "smoothing without padding": ({"label_smoothing": 0.1, "smoothing": "others_but_padding"}, None),
    "decay": ({"weight_decay": 0.1, "optimizer": "adamw"}, None),
    "decayed biases": ({"weight_decay": 0.1, "decayed": "all"}, "weight_decay=0.1 would train padding"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch, command):
    """A stored Marian model with its vocabulary, as the file a.pt of the current folder."""
    shutil.copytree(FIXTURE, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert command("convert", "model.npz", "a.pt", "--tokenizer", "vocab.yml")[0] == 0
    return tmp_path


@pytest.mark.parametrize("case", SETTINGS)
def test_what_would_train_padding_is_refused_before_the_training(case, folder):
    """Two updates in PyTorch show which settings leave padding as `.npz` files have it."""
    fields, message = SETTINGS[case]
    checkpoint, training = convert.load("a.pt"), TrainingConfig(**fields)
    model = checkpoint.to_torch()
    optimizer = make_optimizer(model, training)
    optimizer.param_groups[0]["lr"] = 0.01
    src, tgt = torch.tensor([[4, 5, 0], [6, 0, SIZE]]), torch.tensor([[SIZE, 4, 5], [SIZE, 6, SIZE]])
    for _ in range(2):
        optimizer.zero_grad()
        loss, _ = cross_entropy(model(src, tgt), torch.tensor([[4, 5, 0], [6, 0, SIZE]]), SIZE, training)
        loss.backward()
        optimizer.step()
    trained = Checkpoint.of(model)
    run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), init_from="a.pt", model=checkpoint.config, training=training)
    if message is None:
        convert.save(trained, "b.npz", layout="marian_npz")
        assert read_initial_weights(run).notes == ()
    else:
        with pytest.raises(ConversionError, match="padding, which Marian does not store"):
            convert.save(trained, "b.npz", layout="marian_npz")
        with pytest.raises(CheckpointError, match=rf"^a\.pt: {re.escape(message)}, .*; set --training\."):
            read_initial_weights(run)


def test_trained_positions_are_announced(folder, command):
    save_marian("Marian .npz, trained positions", Path("x.npz"))
    assert command("convert", "x.npz", "x.pt", "--tokenizer", "vocab.yml")[0] == 0
    corpus, model = CorpusConfig(src="a", tgt="b"), convert.load("x.pt").config
    weights = read_initial_weights(RunConfig(corpus=corpus, init_from="x.pt", model=model, training=TrainingConfig()))
    assert weights is not None
    assert weights.notes == (
        "x.pt: source and target will have their own trained positions, but a Marian .npz has one table (Wpos): the "
        "trained model cannot be written as .npz",
    )


PRE_NORM = "Marian .npz, pre-norm"
VERSIONS = {"v1.11.0 f00d062 2022": False, "v1.10.0": False, "v1.9.36 3a62b1d": True, "": True, None: True}


@pytest.fixture(scope="module")
def pre_norm_arrays():
    return marian_arrays(PRE_NORM, marian_model(PRE_NORM))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_pre_norm_model_of_an_old_version_is_in_doubt(version, pre_norm_arrays, tmp_path, command):
    """Marian 1.10 introduced the correct pre-norm (its CHANGELOG)."""
    options = marian_options(PRE_NORM) | {"version": version}
    save_npz(tmp_path / "x.npz", pre_norm_arrays, {n: v for n, v in options.items() if v is not None})
    code, _, err = command("inspect", tmp_path / "x.npz")
    assert code == 0
    assert err.count("marian-dev did not normalize the keys and values") == VERSIONS[version]
    assert err.startswith(f"twinax: {tmp_path / 'x.npz'}: version=") == VERSIONS[version]


def test_post_norm_and_umt5():
    old = convert.load(FIXTURE / "model.npz")
    assert load_warning(replace(old, documents={MARIAN_OPTIONS: {}})) is None
    umt5 = Checkpoint(old.config, {}, "umt5", {CONFIG: {"tie_word_embeddings": False}})
    assert (load_warning(umt5) or "").startswith("tie_word_embeddings=False: transformers 5.0 to 5.23 scale the logits")
    for other in (replace(umt5, documents={CONFIG: {}}), replace(umt5, layout="mt5")):
        assert load_warning(other) is None
