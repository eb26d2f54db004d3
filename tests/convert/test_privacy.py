"""What a checkpoint that leaves the machine says about it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax import convert
from twinax.configs.data import TokenizerConfig
from twinax.convert.privacy import without_paths

STORED = Path(__file__).parents[1] / "checkpoints" / "v1"
SETTINGS = "tokenizer/tokenizer_config.json"
SECRET = "ada-at-acme"  # a person's name, in every path


@pytest.fixture(scope="module")
def private():
    """A checkpoint with paths in everything that may hold one."""
    checkpoint = convert.load(STORED)
    run = checkpoint.training.run
    corpus = replace(run.corpus, src=f"/home/{SECRET}/train.de", tgt=f"C:\\Users\\{SECRET}\\train.en")
    tokenizer = TokenizerConfig(load=(f"/home/{SECRET}/tokenizer.json",))
    run = replace(run, corpus=corpus, tokenizer=tokenizer, init_from=f"/mnt/{SECRET}/runs/first")
    settings = json.loads(checkpoint.files[SETTINGS]) | {"name_or_path": f"/home/{SECRET}/opus", "extra": ["/", "//x"]}
    return replace(
        checkpoint,
        training=replace(checkpoint.training, run=run),
        documents={"config.json": {"_name_or_path": f"~/{SECRET}/opus", "model_type": "marian"}},
        files={**checkpoint.files, SETTINGS: json.dumps(settings).encode()},
    )


def test_paths_lose_all_but_their_last_part(private):
    public = without_paths(private)
    run = public.training.run
    assert (run.corpus.src, run.corpus.tgt, run.init_from) == ("train.de", "train.en", "first")
    assert run.tokenizer.load == ("tokenizer.json",)
    assert public.documents["config.json"]["_name_or_path"] == "opus"
    settings = json.loads(public.files[SETTINGS])
    assert settings["name_or_path"] == "opus"
    assert settings["extra"] == ["/", "//x"]  # tokens
    assert SECRET not in str(public)


@given(st.text())
def test_the_vocabulary_is_never_rewritten(private, token):
    vocabulary = json.dumps({token: 0, "/home/ada/x": 1}).encode()
    files = {**private.files, "tokenizer/vocab.json": vocabulary}
    assert without_paths(replace(private, files=files)).files["tokenizer/vocab.json"] == vocabulary


@pytest.mark.parametrize("name", ["x.pt", "x.safetensors", "x"])
def test_convert_keeps_paths_only_if_told_to(private, name, command, tmp_path):
    convert.save(replace(private, documents={}), tmp_path / "private.pt")
    for flags in ((), ("--with-paths",)):
        target = tmp_path / f"{len(flags)}{name}"
        assert command("convert", tmp_path / "private.pt", target, *flags)[0] == 0
        files = [path for path in target.rglob("*") if path.is_file()] if target.is_dir() else [target]
        assert any(SECRET.encode() in path.read_bytes() for path in files) == bool(flags)
        assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)  # orbax writes its own path
