"""Pretrained tokenizers; the oracle is SentencePiece itself."""

import io
import json
import sys
from types import ModuleType

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from twinax.backend.errors import DataError
from twinax.configs import ConfigError
from twinax.configs.data import TokenizerConfig
from twinax.train.text.pretrained import load_tokenizer
from twinax.train.text.tokenization import train_tokenizer

NOUNS, VERBS = ("Haus", "Hund", "Mädchen", "Baum", "See"), ("schläft", "läuft", "steht am Ufer", "ist größer")
TEXTS = [
    f"Ein{'e' * (i % 2)} {a} {b}, {i} mal; das {c} nicht!" for i, a in enumerate(NOUNS) for b in VERBS for c in NOUNS
]
STRANGE = [
    "",
    "  zwei   Leer ",
    "日本語 ﬁn½ Ⅳ",
    "ß Ä é",
    " Haus xx Hundxx",
    "\tTab\u00a0fest",
    "\u3000Hund\t",
    "▁Hund ▁",
]
SETTINGS = {
    "unigram": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "bpe-bytes": {"model_type": "bpe", "byte_fallback": True, "vocab_size": 400},
    "unigram-own": {"model_type": "unigram", "pad_id": 3, "user_defined_symbols": ["xx"]},
    "unigram-spaces-kept": {"model_type": "unigram", "remove_extra_whitespaces": False},
    "bpe-identity": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "bpe-spaces": {"model_type": "bpe", "split_by_whitespace": False},
    "unigram-as-is": {
        "model_type": "unigram",
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
    },
}


@pytest.fixture(scope="module", params=SETTINGS, ids=str)
def tokenizer_pair(request, tmp_path_factory):
    """(SentencePiece, our tokenizer) for one model."""
    path, file = tmp_path_factory.mktemp("sp") / "a.model", io.BytesIO()
    settings = {"vocab_size": 90, "hard_vocab_limit": False, "minloglevel": 2, **SETTINGS[request.param]}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=file, **settings)
    path.write_bytes(file.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(path)), load_tokenizer(str(path), TokenizerConfig())


def test_sentencepiece_ids_are_its_own(tokenizer_pair):
    reference, tokenizer = tokenizer_pair
    assert tokenizer.encode(TEXTS + STRANGE) == reference.encode(TEXTS + STRANGE)
    expected = (reference.bos_id(), reference.eos_id(), reference.unk_id())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id) == expected
    assert tokenizer.pad_id == (reference.pad_id() if reference.pad_id() >= 0 else reference.vocab_size())
    id_lists = [ids for ids in reference.encode(TEXTS) if reference.unk_id() not in ids]
    assert tokenizer.decode(id_lists) == reference.decode(id_lists)


@given(text=st.text(st.sampled_from("aeHunds ßä½,!xx日 \t\u3000▁"), max_size=30))
def test_sentencepiece_ids_of_any_text(tokenizer_pair, text):
    reference, tokenizer = tokenizer_pair
    assert tokenizer.encode([text]) == [reference.encode(text)]


def test_a_sentencepiece_model_goes_into_a_fast_tokenizer(tokenizer_pair, tmp_path):
    tokenizer_pair[1].save(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS] == tokenizer_pair[1].encode(TEXTS)


def test_a_bare_file_gets_its_special_tokens_by_name(tmp_path):
    config = TokenizerConfig(vocab_size=80, pad_token="[PAD]", special_order=("unk", "pad", "bos", "eos"))
    reference = train_tokenizer(config, TEXTS)
    reference.save(tmp_path / "all")
    bare_file = tmp_path / "tokenizer.json"
    content = json.loads((tmp_path / "all" / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    bare_file.write_text(json.dumps(content))
    for path in (tmp_path / "all", bare_file, tmp_path):
        tokenizer = load_tokenizer(str(path), TokenizerConfig(pad_token="[PAD]"))
        assert tokenizer.encode(TEXTS) == reference.encode(TEXTS)  # and is not truncated
        assert (tokenizer.unk_id, tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2, 3)
    with pytest.raises(DataError, match=r"no token '<pad>' for pad; set pad_token .*'\[PAD\]'"):
        load_tokenizer(str(bare_file), TokenizerConfig())


def test_what_is_no_tokenizer(tmp_path):
    (tmp_path / "a.model").write_bytes(b"no such thing")
    (tmp_path / "a.json").write_text("{}")
    words = io.BytesIO()
    settings = {"model_type": "word", "vocab_size": 20, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=words, **settings)
    (tmp_path / "w.model").write_bytes(words.getvalue())
    buffer = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 60, "user_defined_symbols": ["xx"], "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXTS), model_writer=buffer, **settings)
    (tmp_path / "own.model").write_bytes(buffer.getvalue())
    refusals = {
        "own.model": r"bpe models with user-defined symbols \(xx\)",
        "a.model": "is not a SentencePiece model",
        "a.json": "is not a tokenizer",
        "w.model": "only unigram and bpe models",
        "b.model": "there is no such file",
        ".": "has no tokenizer.json, and no files of a tokenizer class that twinax knows",
    }
    for name, text in refusals.items():
        with pytest.raises(DataError, match=text):
            load_tokenizer(str(tmp_path / name), TokenizerConfig())
    with pytest.raises(ConfigError, match="must be one tokenizer, or the source's and the target's"):
        TokenizerConfig(load=("a", "b", "c"))


def test_a_protobuf_too_old_for_sentencepiece_is_named(tmp_path, monkeypatch):
    """As sentencepiece 0.2.3 with protobuf 6."""
    old = ModuleType("sentencepiece")
    old.__path__ = [str(tmp_path)]
    error = "from google.protobuf.runtime_version import VersionError\nraise VersionError()\n"
    (tmp_path / "sentencepiece_model_pb2.py").write_text(error)
    (tmp_path / "a.model").write_bytes(b"a")
    monkeypatch.setitem(sys.modules, "sentencepiece", old)
    monkeypatch.delitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", raising=False)
    with pytest.raises(DataError, match=r"^sentencepiece \S+ does not work with protobuf \S+; pip install"):
        load_tokenizer(str(tmp_path / "a.model"), TokenizerConfig())
