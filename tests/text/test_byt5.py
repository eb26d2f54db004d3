"""ByT5's tokenizer against `transformers.ByT5Tokenizer`: ids of any text, text of any ids; and a directory of it."""

import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken, AutoTokenizer, ByT5Tokenizer

import twinax
from twinax.backend.errors import DataError
from twinax.configs.data import TokenizerConfig
from twinax.train.text.pretrained import load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")  # `transformers` warns about a text that ends with EOS
PARTS = ("</s>", "<pad>", "<unk>", "<extra_id_0>", "<extra_id_2>", "<extra_id_12>", "<extra", " ", "\n", "new", "kept")
TEXTS = st.lists(st.one_of(st.sampled_from(PARTS), st.text(st.characters(exclude_categories=["Cs"]))), max_size=6).map(
    "".join
)


def variants():
    yield "defaults", ByT5Tokenizer()
    few = ByT5Tokenizer(extra_ids=3)
    few.add_tokens(["new", AddedToken("kept", lstrip=True)])
    yield "few", few
    yield "own", ByT5Tokenizer(eos_token="<end>", extra_ids=0, additional_special_tokens=["kept"])


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """(of transformers, of twinax) from the same folders, and from the files of the first version."""
    pairs = []
    for name, tokenizer in variants():
        folder = tmp_path_factory.mktemp(name)
        tokenizer.save_pretrained(folder)
        pairs.append(folder)
    old = tmp_path_factory.mktemp("old")
    token = {"content": "</s>", "lstrip": False, "rstrip": False, "normalized": True, "single_word": False}
    token["__type"] = "AddedToken"
    content = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 4, "eos_token": token, "unk_token": "<unk>"}
    content["additional_special_tokens"] = [f"<extra_id_{i}>" for i in range(4)]
    (old / "tokenizer_config.json").write_text(json.dumps(content))
    return [(AutoTokenizer.from_pretrained(d), load_tokenizer(str(d), TokenizerConfig())) for d in (*pairs, old)]


@settings(max_examples=150)
@given(TEXTS, st.integers(0, 3), st.sampled_from([None, 1, 3, 8]))
def test_ids_of_any_text(tokenizers, text, number, longest):
    reference, tokenizer = tokenizers[number]
    options = {} if longest is None else {"max_length": longest, "truncation": True}
    assert tokenizer.encode_sources([text], longest) == [reference(text, **options).input_ids]
    assert tokenizer.encode([text]) == [reference(text, add_special_tokens=False).input_ids]


@settings(max_examples=150)
@given(st.lists(st.integers(0, 262), max_size=12), st.integers(0, 3))
def test_text_of_any_ids(tokenizers, ids, number):
    reference, tokenizer = tokenizers[number]
    ids = [i for i in ids if i < len(reference)]
    assert tokenizer.decode([ids]) == [reference.decode(ids, skip_special_tokens=True)]
    assert tokenizer.show(ids) == reference.convert_ids_to_tokens(ids)


def test_vocabularies(tokenizers, tmp_path):
    for number, (reference, tokenizer) in enumerate(tokenizers):
        folder = tmp_path / str(number)
        assert tokenizer.vocabulary() == reference.get_vocab()
        assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.bos_id) == (0, 1, 2, None)
        tokenizer.save(folder)
        assert AutoTokenizer.from_pretrained(folder).get_vocab() == reference.get_vocab()
        assert load_tokenizer(str(folder), TokenizerConfig()).vocabulary() == tokenizer.vocabulary()
    with pytest.raises(DataError, match="cannot encode the text"):
        tokenizer.encode(["\udc80"])


@pytest.mark.parametrize("has_files", [True, False])
def test_a_directory_translates(has_files, tmp_path, command):
    """Without a file, config.json names the tokenizer."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": 384}
    config = transformers.T5Config(
        **sizes, decoder_start_token_id=0, tokenizer_class="ByT5Tokenizer", feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(tmp_path / "byt5")
    if has_files:
        ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    texts, tokenizer = ["Grüße, 日本!", "a"], AutoTokenizer.from_pretrained(tmp_path / "byt5")
    outputs = model.eval().generate(
        **tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=6, num_beams=2
    )
    expected = tokenizer.batch_decode(outputs, skip_special_tokens=True)
    loaded = twinax.load(tmp_path / "byt5")
    assert loaded.translate(texts, beam_size=2, max_length=6, framework="torch") == expected
    assert any(expected)
    assert command("convert", tmp_path / "byt5", tmp_path / "a.pt")[0] == 0
    assert twinax.load(tmp_path / "a.pt").tokenizers.src.encode_sources(texts) == tokenizer(texts).input_ids
