"""Tokenization of the published systems: ids equal those of each system's own code; oracles are spaCy and the book."""

import functools
import re
from dataclasses import replace

import pytest
import spacy
import torch
from hypothesis import given
from hypothesis import strategies as st

import twinax
from twinax.configs.data import TokenizerConfig
from twinax.parity.oracles.published import SIZE, SYSTEMS, random_model
from twinax.published.registry import RECIPES
from twinax.train.text.pretrained import load_for_model
from twinax.train.text.tokenization import train_tokenizer, train_tokenizers

# Two spaces give a whitespace token, which has its own id in these vocabularies.
WORDS = [
    "Ein",
    "Mann",
    "z.B.",
    "läuft",
    "Don't",
    "re-use",
    "(gut)",
    "3.5",
    "u.s.w",
    "Frauen-Fußball",
    "e.g.",
    "!?",
    " ",
]
SPACE = st.sampled_from([" ", "  ", "   ", "\t", " \u00a0", ", ", ".", "! "])
TEXT = st.lists(st.tuples(st.sampled_from(WORDS), SPACE), max_size=8).map(lambda pairs: "".join(map("".join, pairs)))


@functools.cache
def blank(language):
    return spacy.blank(language)


def of_spacy(text, language):
    return [token.text for token in blank(language)(text)]


def of_leftover(text, language):
    """The `Whitespace` pre-tokenizer of the tokenizers library, by its documented regex."""
    return re.findall(r"\w+|[^\w\s]+", text)


def of_the_book(text, language):
    """`_preprocess` and `_tokenize` of Dive into Deep Learning, section 10.5."""
    text = text.replace("\u202f", " ").replace("\xa0", " ").lower()
    characters = [" " + c if i > 0 and c in ",.!?" and text[i - 1] != " " else c for i, c in enumerate(text)]
    return [token for token in "".join(characters).split(" ") if token]


ORACLES = {"leftover": of_leftover, "d2l_note": of_the_book}


def vocabulary(name):
    """Special tokens in the system's order, then every token of the words and of whitespace."""
    rule, lower = ORACLES.get(name, of_spacy), RECIPES[name].tokenizer.lowercase
    tokens = {token for word in WORDS[:-3] for language in ("de", "en") for token in rule(word, language)}
    tokens = sorted({token.lower() if lower else token for token in tokens} | {" ", "  ", "!", "?"})
    return [*RECIPES[name].tokenizer.special_tokens, *tokens]


@pytest.fixture(scope="module", params=SYSTEMS)
def system_tokenizers(request, tmp_path_factory):
    """(system, its vocabulary, the tokenizers of both sides, read from the vocabulary file)."""
    name = request.param
    words = vocabulary(name)
    path = tmp_path_factory.mktemp(name) / "words.txt"
    path.write_text("\n".join(words) + "\n")
    sizes = {"src_vocab_size": len(words), "tgt_vocab_size": len(words)}
    model = RECIPES[name].model.replace(**sizes)
    return name, words, [load_for_model(str(path), model, RECIPES[name].tokenizer, side) for side in (0, 1)]


@given(text=TEXT)
def test_ids_are_the_published_ones(system_tokenizers, text):
    name, words, tokenizers = system_tokenizers
    text = text.replace("\t", " ") if name == "d2l_note" else text  # whose files separate columns by tabs
    ids = {word: i for i, word in enumerate(words)}
    config = RECIPES[name].tokenizer
    for language, tokenizer in zip(("de", "en"), tokenizers, strict=True):
        tokens = ORACLES.get(name, of_spacy)(text, language) if text.strip() else []
        tokens = [token.lower() if config.lowercase else token for token in tokens]
        expected = [ids.get(token, ids[config.unk_token]) for token in tokens]
        assert tokenizer.encode([text]) == [expected]
        source_ids = [*[ids[config.bos_token]] * config.source_bos, *expected, ids[config.eos_token]]
        assert tokenizer.encode_sources([text]) == [source_ids]


def test_a_token_of_whitespace_has_a_place(system_tokenizers):
    """spaCy makes the second space a token; without it, every later id shifts by one place."""
    name, words, (tokenizer, _) = system_tokenizers
    tokens = [words[i] for i in tokenizer.encode(["Mann  Ein"])[0]]
    word_tokens = [token.lower() if RECIPES[name].tokenizer.lowercase else token for token in ("Mann", "Ein")]
    assert tokens == (word_tokens if name in ORACLES else [word_tokens[0], " ", word_tokens[1]])


@pytest.mark.parametrize("name", ["lucky_glass", "leftover"])
def test_the_command_gives_a_vocabulary_its_pretokenization(name, command, tmp_path):
    special = RECIPES[name].tokenizer.special_tokens
    words = {"lucky_glass": ["z.B.", "Hund"], "leftover": ["z", "Hund"]}[name]
    (tmp_path / "words.txt").write_text("\n".join([*special, *words, *"abcdefg"]) + "\n")
    assert len(special) + 9 == SIZE
    torch.save(random_model(name, as_published=False).float().state_dict(), tmp_path / "theirs.pt")
    arguments = ("convert", tmp_path / "theirs.pt", tmp_path / "ours.pt", "--tokenizer", tmp_path / "words.txt")
    status, out, err = command(*arguments, "--config", f"{name}:repaired" + ",num_heads=4" * (name == "leftover"))
    assert status == 0, err
    expected = {"lucky_glass": "spaCy, de and en", "leftover": "word_characters"}[name]
    assert f"pre-tokenization {expected}, as in {name}" in " ".join(out.replace("│", " ").split())
    ids = twinax.load(tmp_path / "ours.pt").tokenizers.src.encode(["z.B. Hund"])[0]
    assert ids == ([4, 5] if name == "lucky_glass" else [4, 0, 0, 0, 5])


def test_other_languages_can_be_said(command, tmp_path):
    (tmp_path / "words.txt").write_text(
        "\n".join([*RECIPES["lucky_glass"].tokenizer.special_tokens, "do", "n't", *"abcdefg"])
    )
    torch.save(random_model("lucky_glass", as_published=False).float().state_dict(), tmp_path / "theirs.pt")
    arguments = ("convert", tmp_path / "theirs.pt", tmp_path / "ours.pt", "--config", "lucky_glass:repaired")
    status, _, err = command(*arguments, "--languages", "en", "de")
    assert (status, "--languages en de: needs --tokenizer" in err) == (2, True)
    arguments = (*arguments, "--tokenizer", tmp_path / "words.txt")
    status, _, err = command(*arguments, "--languages", "en")
    assert (status, "languages=('en',): must be two" in err) == (2, True)
    assert not (tmp_path / "ours.pt").exists()
    assert command(*arguments, "--languages", "en", "de")[0] == 0
    tokenizers = twinax.load(tmp_path / "ours.pt").tokenizers
    assert [side.encode(["don't"])[0] for side in tokenizers] == [[4, 5], [0]]


def test_training_counts_tokens_of_whitespace():
    config = TokenizerConfig(kind="word", languages=("de", "en"), vocab_size=60, normalization="none")
    for tokenizer, language in zip(train_tokenizers(config, ["a  b"] * 2, ["c   d"] * 2), ("de", "en"), strict=True):
        text = {"de": "a  b", "en": "c   d"}[language]
        assert tokenizer.show(tokenizer.encode([text])[0]) == of_spacy(text, language)
        assert tokenizer.encode(["", "  "]) == [[], []]


def test_punctuation_of_the_book():
    config = replace(RECIPES["d2l_note"].tokenizer, vocab_size=60, min_frequency=1)
    tokenizer = train_tokenizer(config, ["Salut, ça va?! (3.5)"])
    tokens = tokenizer.show(tokenizer.encode(["Salut, ça va?! (3.5)"])[0])
    assert tokens == ["salut", ",", "ça", "va", "?", "!", "(3", ".5)"]
