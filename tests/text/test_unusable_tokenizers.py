"""Tokenizers that do not match their model, or that twinax cannot read: one line that names the remedy."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import twinax
from twinax import convert, torch_reference
from twinax.backend.errors import DataError
from twinax.configs.data import CorpusConfig, TokenizerConfig
from twinax.configs.run import RunConfig
from twinax.train.data.prepare import prepare
from twinax.train.data.tokenizer_pair import Tokenizers
from twinax.train.text.pretrained import load_for_model

# The ids of BART's special tokens, and words, up to the 31 tokens of the small random BART.
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{i}" for i in range(27))]


@pytest.fixture
def bart(tmp_path):
    """A directory of a small random BART, without a tokenizer."""
    layers = {f"{side}_{name}": 1 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"d_model": 4, "encoder_ffn_dim": 4, "decoder_ffn_dim": 4, "max_position_embeddings": 9, "vocab_size": 31}
    config = convert.family("bart").config({**layers, **widths}, "float32")
    convert.save(convert.Checkpoint.of(torch_reference.Transformer(config)), tmp_path / "bart", layout="bart")
    return tmp_path / "bart"


@pytest.fixture
def unreadable_bart(bart):
    """A BART directory with tokenizer files that twinax cannot read."""
    (bart / "source.spm").write_bytes(b"\x00\xff")
    (bart / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(WORDS)}))
    (bart / "tokenizer_config.json").write_text("{}")
    (bart / "words.txt").write_text("\n".join(WORDS) + "\n")
    (bart / "text").write_text("w1 w2\n")
    return bart


def with_words(folder, src, tgt, special=()):
    """A checkpoint file of the folder's BART, with these words as source and target vocabularies."""
    checkpoint, tokenizers = convert.load(folder), []
    for side, words in (("src", src), ("tgt", tgt)):
        (folder / f"{side}.txt").write_text("\n".join(words) + "\n")
        tokenizers.append(load_for_model(str(folder / f"{side}.txt"), checkpoint.config, TokenizerConfig()))
        tokenizers[-1].fast.add_special_tokens(list(special))
    Tokenizers.of(tokenizers).save(folder / "saved")
    files = {str(p.relative_to(folder / "saved")): p.read_bytes() for p in sorted((folder / "saved").glob("*/*"))}
    convert.save(replace(checkpoint, files=files), folder / "model.pt")
    return folder / "model.pt"


@pytest.mark.parametrize(("side", "sizes"), [("src", (33, 31)), ("tgt", (31, 33))])
@pytest.mark.parametrize("name", ["translate", "evaluate", "score", "parity"])
def test_a_tokenizer_with_more_tokens_than_the_model(name, side, sizes, command, bart):
    model = with_words(bart, *([*WORDS, "w27", "w28"][:size] for size in sizes))
    (bart / "text").write_text("w1 w2\n")
    text = bart / "text"
    arguments = [text] if name == "translate" else ["--src", text, *(["--tgt", text] if name != "parity" else [])]
    code, out, err = command(name, model, *arguments)
    assert (code, out) == (2, "")
    assert err == (
        f"twinax: {model}: the {side} tokenizer has 2 tokens beyond the model's 31 (the first: 'w27', id 31): it "
        "belongs to another model; `twinax convert` with --tokenizer replaces it\n"
    )


def test_a_special_token_beyond_the_model_is_an_error_where_a_text_has_it(bart):
    """BART's <mask> is the last of its tokenizer's 50,265 tokens; models with 50,264 translate without it."""
    translator = twinax.load(with_words(bart, WORDS, WORDS, special=["<mask>"]))
    assert translator.source_ids(["w1 w2"]) == [[5, 6, 2]]
    with pytest.raises(DataError, match=r"has no token '<mask>' \(id 31, 31 tokens\), as in 'w1 <mask>'"):
        translator.translate(["w1", "w1 <mask>"])
    with pytest.raises(DataError, match=r"has no token '<mask>' \(id 31, 31 tokens\), as in '<mask>'"):
        translator.score(["w1"], ["<mask>"])


def test_such_a_model_can_be_fine_tuned_on_texts_without_the_token(bart):
    path = with_words(bart, WORDS, WORDS, special=["<mask>"])
    tokenizers, config = twinax.load(path).tokenizers, convert.load(path).config
    (bart / "a.txt").write_text("w1 w2\nw3\n")
    (bart / "b.txt").write_text("w1 w2\nw3 <mask>\n")

    def prepare_run(src, tgt):
        corpus = CorpusConfig(src=str(bart / src), tgt=str(bart / tgt), held_out=1)
        return prepare(RunConfig(model=config, corpus=corpus), tokenizers, sizes=config)

    assert prepare_run("a.txt", "a.txt").run.model.src_vocab_size == 31
    for sides in (("a.txt", "b.txt"), ("b.txt", "a.txt")):
        with pytest.raises(DataError, match=r"has the token '<mask>' \(id 31\), but the model has 31 tokens$"):
            prepare_run(*sides)


def test_files_that_cannot_be_read_are_named_and_a_tokenizer_is_added(command, unreadable_bart, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    code, _, err = command("translate", unreadable_bart, unreadable_bart / "text")
    assert (code, err) == (
        2,
        f"twinax: {unreadable_bart}: has no merges.txt, which its BartTokenizer needs; add the file, or replace the "
        "tokenizer by `twinax convert` with --tokenizer\n",
    )
    target = unreadable_bart.parent / "made"
    code, out, _ = command(
        "convert", unreadable_bart, target, "--layout", "bart", "--tokenizer", unreadable_bart / "words.txt"
    )
    assert code == 0
    assert "added: tokenizer/tokenizer.json; replaced: tokenizer/tokenizer_config.json" in out
    assert "; kept, not read: tokenizer/vocab.json, tokenizer/source.spm " in out
    assert (target / "source.spm").read_bytes() == b"\x00\xff"
    assert twinax.load(target).source_ids(["w1 w2"]) == [[5, 6, 2]]
    code, _, err = command(
        "convert", target, unreadable_bart.parent / "x", "--tokenizer", unreadable_bart / "words.txt"
    )
    assert code == 2
    assert "the checkpoint has a tokenizer (tokenizer/tokenizer.json, " in err
    assert "; omit the flag" in err
    assert not Path(unreadable_bart.parent / "x").exists()


def test_a_tokenizer_that_cannot_be_used_is_replaced(command, bart, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    model = with_words(bart, [*WORDS, "w27"], WORDS)
    (bart / "words.txt").write_text("\n".join(WORDS) + "\n")
    code, out, _ = command("convert", model, bart / "mended.pt", "--tokenizer", bart / "words.txt")
    assert code == 0
    assert "added: tokenizer/tokenizer.json, tokenizer/tokenizer_config.json; " in out
    assert "left out: source_tokenizer/tokenizer.json, target_tokenizer/tokenizer.json" in out
    assert twinax.load(bart / "mended.pt").source_ids(["w3"]) == [[7, 2]]
