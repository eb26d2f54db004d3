"""Tokenizers: splitting, lossless decoding, special ids, and equal ids in `transformers`."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from twinax.backend.errors import DataError
from twinax.configs import ConfigError
from twinax.configs.data import ROLES, TokenizerConfig
from twinax.train.text.pretrained import load_tokenizer
from twinax.train.text.tokenization import FILE, SETTINGS, train_tokenizer, train_tokenizers

TEXTS = [
    "Ein kleines Haus steht am See, und der Hund schläft.",
    "A small house stands by the lake; the dog sleeps (well).",
    "Der Hund sieht ein Haus.",
    "The dog's house is small!",
] * 3
CHINESE = ["今天天气很好", "明天天气不好", "今天很好吗"] * 3
KINDS = [
    TokenizerConfig(kind=kind, split=split, vocab_size=120 if split != "bytes" else 300)
    for kind, splits in {
        "word": ("whitespace", "punctuation", "unspaced"),
        "bpe": ("whitespace", "punctuation", "unspaced", "bytes"),
        "unigram": ("whitespace", "punctuation", "unspaced"),
    }.items()
    for split in splits
]


def name_of(config):
    return f"{config.kind}-{config.split}"


@pytest.fixture(scope="module", params=KINDS, ids=name_of)
def config_and_tokenizer(request):
    return request.param, train_tokenizer(request.param, CHINESE if request.param.split == "unspaced" else TEXTS)


def test_known_text_comes_back(config_and_tokenizer):
    config, tokenizer = config_and_tokenizer
    texts = CHINESE if config.split == "unspaced" else TEXTS
    lossless = config.kind != "word" or config.split != "punctuation"  # which puts spaces around punctuation
    output = tokenizer.decode(tokenizer.encode(texts))
    if lossless:
        assert output == texts
    else:
        assert [text.replace(" ", "") for text in output] == [text.replace(" ", "") for text in texts]
    assert not any(tokenizer.unk_id in ids for ids in tokenizer.encode(texts))


def test_vocabulary_and_special_ids(config_and_tokenizer):
    config, tokenizer = config_and_tokenizer
    assert [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id] == [0, 1, 2, 3]
    assert 4 < tokenizer.vocab_size <= config.vocab_size
    assert tokenizer.encode([""]) == [[]]
    assert tokenizer.decode([[], [0, 1, 2]]) == ["", ""]
    if config.split != "bytes":
        assert tokenizer.unk_id in tokenizer.encode(["Ω"])[0]


def test_what_no_token_crosses():
    for kind in ("word", "bpe", "unigram"):
        tokenizer = train_tokenizer(TokenizerConfig(kind=kind, split="punctuation", vocab_size=200), TEXTS)
        tokens = [tokenizer.fast.id_to_token(i) for i in tokenizer.encode(["See, und (well)."])[0]]
        assert {",", "(", ")", "."} <= {token.strip("▁") for token in tokens}
    words = train_tokenizer(TokenizerConfig(kind="word"), TEXTS)
    assert [words.fast.id_to_token(i) for i in words.encode(["am See, und"])[0]] == ["am", "See,", "und"]
    characters = train_tokenizer(TokenizerConfig(kind="word", split="unspaced"), CHINESE)
    assert [characters.fast.id_to_token(i) for i in characters.encode(["今天 好"])[0]] == ["今", "天", "好"]
    bpe_tokenizer = train_tokenizer(TokenizerConfig(kind="bpe", split="unspaced"), CHINESE)
    assert len(bpe_tokenizer.encode(["今天天气很好"])[0]) < 6


def test_normalization():
    def tokens(**fields):
        tokenizer = train_tokenizer(TokenizerConfig(kind="word", **fields), TEXTS)
        return [tokenizer.fast.id_to_token(i) for i in tokenizer.encode(["Der schla\u0308ft. ﬁ"])[0]]

    assert tokens() == ["Der", "schläft.", "<unk>"]
    assert tokens(normalization="none") == ["Der", "<unk>", "<unk>"]
    assert tokens(lowercase=True)[0] == "der"
    ligature = train_tokenizer(TokenizerConfig(kind="word", normalization="nfkc"), ["fi"])
    assert ligature.unk_id not in ligature.encode(["ﬁ"])[0]


def test_rare_words_are_unknown():
    tokenizer = train_tokenizer(TokenizerConfig(kind="word", min_frequency=2), ["a a b"])
    assert tokenizer.encode(["a b"]) == [[4, tokenizer.unk_id]]


@pytest.mark.parametrize("order", [("unk", "pad", "bos", "eos"), ("bos", "eos", "pad", "unk")])
def test_special_ids_are_free_and_transformers_has_the_same(order, tmp_path):
    config = TokenizerConfig(
        vocab_size=90, special_order=order, bos_token="[SOS]", eos_token="[EOS]", source_bos=True, source_eos=True
    )
    tokenizer = train_tokenizer(config, TEXTS)
    assert [getattr(tokenizer, f"{role}_id") for role in order] == [0, 1, 2, 3]
    tokenizer.save(tmp_path / "both")
    transformers_tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "both")
    assert [getattr(transformers_tokenizer, f"{role}_token_id") for role in order] == [0, 1, 2, 3]
    id_lists = [[tokenizer.bos_id, *ids, tokenizer.eos_id] for ids in tokenizer.encode(TEXTS)]
    assert transformers_tokenizer(TEXTS).input_ids == id_lists
    assert transformers_tokenizer.batch_decode(id_lists, skip_special_tokens=True) == TEXTS
    assert tokenizer.decode(id_lists) == TEXTS
    copy = load_tokenizer(str(tmp_path / "both"), TokenizerConfig())
    assert copy.fast.to_str() == tokenizer.fast.to_str()
    assert copy.special_tokens == tokenizer.special_tokens


def test_one_that_transformers_saved_is_loaded(tmp_path):
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=90), TEXTS)
    names = {f"{role}_token": tokenizer.special_tokens[role] for role in ROLES}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.fast, **names).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path), TokenizerConfig()).encode(TEXTS) == tokenizer.encode(TEXTS)


@pytest.fixture(scope="module")
def byte_tokenizer():
    return train_tokenizer(TokenizerConfig(split="bytes", vocab_size=300, normalization="none"), TEXTS)


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_lose_nothing(byte_tokenizer, text):
    text = "".join(text.split("<"))  # special tokens in a text are encoded as such
    assert byte_tokenizer.decode(byte_tokenizer.encode([text])) == [text]


def test_tokens_of_bytes_are_shown_as_letters(tmp_path):
    texts = ["das mädchen schläft", "ein mädchen"]
    tokenizer = train_tokenizer(TokenizerConfig(split="bytes", vocab_size=300), texts)
    tokenizer.save(tmp_path)
    for one in (tokenizer, load_tokenizer(str(tmp_path), TokenizerConfig())):
        (ids,) = one.encode(["ein mädchen schläft"])
        assert one.show([*ids, one.eos_id]) == ["ein", "▁mädchen", "▁schläft", "</s>"]


def test_what_is_not_a_tokenizer(tmp_path):
    train_tokenizer(TokenizerConfig(vocab_size=90), TEXTS).save(tmp_path / "good")
    with pytest.raises(DataError, match=r"none: there is no such file$"):
        load_tokenizer(str(tmp_path / "none"), TokenizerConfig())
    for name in (FILE, SETTINGS):
        (tmp_path / name).mkdir()
        for file in (FILE, SETTINGS):
            (tmp_path / name / file).write_bytes((tmp_path / "good" / file).read_bytes())
        (tmp_path / name / name).write_text("{")
        with pytest.raises(DataError, match=rf"{name}: is not (a tokenizer|JSON): "):
            load_tokenizer(str(tmp_path / name), TokenizerConfig())
    settings = json.loads((tmp_path / "good" / SETTINGS).read_text())
    del settings["bos_token"]
    settings["pad_token"] = "<nowhere>"
    (tmp_path / "good" / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(DataError, match=r"good: the tokenizer has no special token for pad$"):
        load_tokenizer(str(tmp_path / "good"), TokenizerConfig())


WRONG = {
    r"special_order=\('pad',\): must be an order of pad, bos, eos, unk": {"special_order": ("pad",)},
    "special tokens '<s>', '<s>', '</s>', '<unk>': must differ, and none may be empty": {"pad_token": "<s>"},
    "vocab_size=4: must be above 4, the special tokens": {"vocab_size": 4},
    "min_frequency=0: must be at least 1": {"min_frequency": 0},
    "split='bytes': needs kind='bpe', not 'unigram'": {"split": "bytes", "kind": "unigram"},
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_settings(line):
    with pytest.raises(ConfigError, match=f"^{line}$"):
        TokenizerConfig(**WRONG[line])


WORDS = TokenizerConfig(kind="word", languages=("de", "en"), vocab_size=60)


@pytest.mark.parametrize("joint", [True, False])
def test_words_of_spacy(joint, tmp_path):
    """Each side uses its language's rules, also after saving and loading."""
    sides = ["Er kommt z.B. nicht.", "Don't go, e.g. home."]
    tokenizers = train_tokenizers(replace(WORDS, joint=joint), [sides[0]] * 2, [sides[1]] * 2)
    assert (tokenizers[0].vocab_size == tokenizers[1].vocab_size) is joint
    expected = [["Er", "kommt", "z.B.", "nicht", "."], ["Do", "n't", "go", ",", "e.g.", "home", "."]]
    for tokenizer, text, words in zip(tokenizers, sides, expected, strict=True):
        tokenizer.save(tmp_path)
        for one in (tokenizer, load_tokenizer(str(tmp_path), WORDS)):
            assert one.show(one.encode([text])[0]) == words
            assert one.encode_sources([text], 3)[0] == [*one.encode([text])[0][:2], one.eos_id]
        with pytest.raises(DataError, match=r"tokenizer.json: tokenizer_config.json sets spaCy for pre-tokenization"):
            load_tokenizer(str(tmp_path / FILE), WORDS)
    settings = json.loads((tmp_path / SETTINGS).read_text())
    (tmp_path / SETTINGS).write_text(json.dumps(settings | {"spacy_language": ["en"]}))
    with pytest.raises(DataError, match=r"spacy_language is \['en'\], not a language's code"):
        load_tokenizer(str(tmp_path), TokenizerConfig())


def test_languages_that_cannot_be():
    with pytest.raises(ConfigError, match=r"languages=\('de',\): must be two"):
        TokenizerConfig(kind="word", languages=("de",))
    with pytest.raises(
        ConfigError, match=r"kind='bpe': languages=.* selects spaCy's pre-tokenization, which needs 'word'; omit one"
    ):
        TokenizerConfig(languages=("de", "en"))
    with pytest.raises(ConfigError, match="split='punctuation': languages="):
        TokenizerConfig(kind="word", languages=("de", "en"), split="punctuation")
    with pytest.raises(DataError, match=r"spaCy cannot tokenize 'nope': .*nope"):
        train_tokenizers(replace(WORDS, languages=("nope", "en")), ["a"], ["b"])


def test_word_characters():
    """`\\w+|[^\\w\\s]+`, as in the `Whitespace` pre-tokenizer of the tokenizers library."""
    config = TokenizerConfig(kind="word", split="word_characters", vocab_size=60, normalization="none")
    tokenizer = train_tokenizer(config, ["\u00abAh!... amico_caro, 5\u00b0."])
    text = "\u00abAh!... amico_caro, 5\u00b0."
    assert tokenizer.show(tokenizer.encode([text])[0]) == ["\u00ab", "Ah", "!...", "amico_caro", ",", "5", "\u00b0."]
    with pytest.raises(ConfigError, match="split='word_characters': needs kind='word', not 'bpe'"):
        TokenizerConfig(split="word_characters")
