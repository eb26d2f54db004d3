"""Glossaries: which terms are annotated, with what ids, and what a file must look like."""

import unicodedata
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AddedToken, ByT5Tokenizer

from twinax.backend.errors import DataError
from twinax.configs.data import TokenizerConfig
from twinax.train.text.glossary import TAGS, Glossary, annotate, encode_annotated
from twinax.train.text.pretrained import load_tokenizer
from twinax.train.text.tokenization import train_tokenizer
from twinax.train.text.unspaced import UNSPACED

PIECES = [
    "a",
    "B",
    "b",
    "ab",
    "1",
    "_",
    " ",
    "  ",
    "-",
    "'",
    ".",
    "\t",
    "é",
    "e\u0301",
    "ß",
    "狗",
    "小狗",
    "か",
    "ก็",
    "ह",
]
PIECE = st.sampled_from(["a", "b", " ", "狗"]) | st.sampled_from(PIECES)  # few, so that terms overlap and occur
TERM = st.lists(PIECE, min_size=1, max_size=4).map("".join).map(str.strip).filter(bool)
GLOSSARY = st.dictionaries(TERM, st.sampled_from(["x", "y z", "猫"]), min_size=1, max_size=12)


@st.composite
def glossaries_and_texts(draw):
    """Terms, and a text of them and of what may stand between."""
    terms = draw(GLOSSARY)
    parts = st.sampled_from([*terms]) | st.sampled_from([" ", " "]) | PIECE
    return terms, "".join(draw(st.lists(parts, max_size=14)))


def is_mark(character):
    return unicodedata.category(character).startswith("M")


def is_boundary(text, i):
    """Whether a word may begin or end here: by the characters on both sides, without segmenting the text."""
    if i in (0, len(text)):
        return True
    if is_mark(text[i]):
        return False
    base = next((c for c in reversed(text[:i]) if not is_mark(c)), "a")
    return not all((c.isalnum() or c == "_") and not UNSPACED.match(c) for c in (base, text[i]))


def naive_spans(terms, text, lowercase):
    """Try every end from the right at every beginning from the left."""
    key = str.lower if lowercase else str
    known = {key(source): target for source, target in terms.items()}
    begin, spans = 0, []
    while begin < len(text):
        ends = (end for end in range(len(text), begin, -1) if is_boundary(text, begin) and is_boundary(text, end))
        end = next((end for end in ends if key(text[begin:end]) in known), None)
        if end is not None:
            spans.append((begin, end, known[key(text[begin:end])]))
        begin = begin + 1 if end is None else end
    return spans


@settings(max_examples=200)
@given(glossaries_and_texts(), st.booleans())
def test_the_longest_terms_of_whole_words_from_left_to_right(terms_and_text, lowercase):
    """As a search of all substrings finds them; apart from them, and from spaces before them, the text is as before."""
    terms, text = terms_and_text
    if lowercase:
        terms = {source.lower(): target for source, target in terms.items()}
    glossary = Glossary(terms, lowercase=lowercase)
    spans = glossary.spans(text)
    assert spans == naive_spans(terms, text, lowercase)
    outside, targets, pieces = [""], [], iter(annotate(text, spans))
    for piece in pieces:
        if piece == TAGS[0]:
            targets.append(next(pieces).strip())
            assert next(pieces) == TAGS[1]
            outside.append("")
        else:
            outside[-1] += piece
    begins, ends = [*(begin for begin, _, _ in spans), len(text)], [0, *(end for _, end, _ in spans)]
    between = [text[end:begin] for end, begin in zip(ends, begins, strict=True)]
    assert outside == [*(part.rstrip() for part in between[:-1]), between[-1]]
    assert targets == [target for _, _, target in spans]


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Der Hund, der kleine Hund und die Hunde.", ["dog", "puppy"]),
        ("kleine Hunde", ["small"]),
        ("Schäferhund HUND hund", []),
        ("(Hund)/Hund-Hund", ["dog"] * 3),
        ("Hund\u0301 _Hund Hund1", []),
        ("我的小狗和狗", ["puppy", "dog"]),
        ("ein C++-Kurs", ["C++"]),
    ],
)
def test_what_a_whole_word_is(text, terms):
    glossary = Glossary(
        {"Hund": "dog", "kleine": "small", "kleine Hund": "puppy", "狗": "dog", "小狗": "puppy", "C++": "C++"}
    )
    assert [span.target for span in glossary.spans(text)] == terms


SENTENCES = ["Der kleine Hund läuft zum See.", "Ein Hund und ein Kind am See", "The small dog runs to the lake."] * 3
KINDS = [
    TokenizerConfig(kind=kind, split=split, vocab_size=340 if split == "bytes" else 90, tags=TAGS)
    for kind, splits in {
        "word": ("whitespace", "punctuation", "unspaced"),
        "bpe": ("whitespace", "punctuation", "unspaced", "bytes"),
        "unigram": ("whitespace",),
    }.items()
    for split in splits
]
TERMS = {"Hund": "dog", "kleine Hund": "small dog", "See": "lake", "läuft": "湖"}


@pytest.fixture(scope="module", params=KINDS, ids=lambda config: f"{config.kind}-{config.split}")
def tokenizer(request):
    return train_tokenizer(request.param, SENTENCES)


def test_ids_are_those_of_the_library_for_text_with_tags(tokenizer):
    """It splits a text at special tokens before anything else."""
    glossary = Glossary(TERMS).for_tokenizer(tokenizer)
    texts = ["Der kleine Hund läuft zum See.", "Hund", "See, Hund!  Ein", "ein Kind", ""]
    spans = [glossary.spans(text) for text in texts]
    sentences = encode_annotated(tokenizer, texts, spans, 1000)
    assert [*sentences] == [0, 1, 2]
    for i, ids in sentences.items():
        assert ids == tokenizer.encode_sources(["".join(annotate(texts[i], spans[i]))])[0]
        assert [tokenizer.token_of(number) for number in ids if tokenizer.token_of(number) in TAGS] == [*TAGS] * len(
            spans[i]
        )


def test_ids_of_bytes_are_those_of_transformers(tmp_path):
    reference = ByT5Tokenizer(extra_ids=0)
    reference.add_tokens([AddedToken(tag) for tag in TAGS], special_tokens=True)
    reference.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path), TokenizerConfig())
    text = "Der kleine Hund läuft zum See."
    spans = Glossary(TERMS).for_tokenizer(tokenizer).spans(text)
    (ids,) = encode_annotated(tokenizer, [text], [spans], 1000).values()
    shown = "Der<term> small dog</term><term>湖</term> zum<term> lake</term>."  # a space is before its word
    assert ids == reference(shown).input_ids


def test_a_tag_in_the_text_is_text(tokenizer):
    """Beside terms, and alone; without a glossary, it is the token, as other special tokens are."""
    text = "<term> Hund</term></term><term>See <</term>Hund"
    tag_ids = {tokenizer.id_of(tag) for tag in TAGS}
    spans = Glossary(TERMS).spans(text)
    (ids,) = encode_annotated(tokenizer, [text], [spans], 1000).values()
    assert sum(number in tag_ids for number in ids) == 2 * len(spans) == 6
    (ids,) = encode_annotated(tokenizer, ["a </term> b"], [[]], 1000).values()
    assert not tag_ids & {*ids}
    assert tokenizer.id_of(TAGS[1]) in tokenizer.encode(["a </term> b"])[0]


def test_annotations_that_do_not_fit_are_left_out(tokenizer):
    texts = ["Der Hund"]
    spans = [Glossary(TERMS).spans(texts[0])]
    (ids,) = encode_annotated(tokenizer, texts, spans, 1000).values()
    assert encode_annotated(tokenizer, texts, spans, len(ids)) == {0: ids}
    assert encode_annotated(tokenizer, texts, spans, len(ids) - 1) == {}


def test_special_tokens_around_a_source_are_around_an_annotated_one():
    config = TokenizerConfig(vocab_size=90, tags=TAGS, source_bos=True)
    tokenizer = train_tokenizer(config, SENTENCES)
    glossary = Glossary(TERMS).for_tokenizer(tokenizer)
    (ids,) = encode_annotated(tokenizer, ["Hund"], [glossary.spans("Hund")], 1000).values()
    assert (ids[0], ids[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert ids == tokenizer.encode_sources(["<term> dog</term>"])[0]


def test_case_counts_unless_the_tokenizer_lowercases():
    cased, uncased = (
        train_tokenizer(TokenizerConfig(vocab_size=90, tags=TAGS, lowercase=lowercase), SENTENCES)
        for lowercase in (False, True)
    )
    glossary = Glossary(TERMS)
    assert glossary.for_tokenizer(cased).spans("HUND am see") == []
    assert [span.target for span in glossary.for_tokenizer(uncased).spans("HUND am see")] == ["dog", "lake"]
    assert glossary.for_tokenizer(uncased).usage("Hund", "the DOG") == (1, 1)
    both = Glossary({"See": "lake", "see": "look"})
    assert len(both.for_tokenizer(cased).terms) == 2
    with pytest.raises(
        DataError, match=r"^the glossary: 'see' has two targets, 'lake' and 'look'; the model lowercases"
    ):
        both.for_tokenizer(uncased)


def test_a_tokenizer_needs_the_tags():
    tokenizer = train_tokenizer(TokenizerConfig(vocab_size=90, tags=TAGS[:1]), SENTENCES)
    with pytest.raises(DataError, match=r"no token '</term>'; the model has to be trained with --corpus\.glossary"):
        Glossary(TERMS).for_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("source", "translation", "expected"),
    [
        ("Hund", "a dog", (1, 1)),
        ("Hund", "a dogs", (1, 0)),
        ("Hund und Hund", "a dog", (2, 1)),
        ("Hund", "dog dog", (1, 1)),
        ("der kleine Hund am See", "small dog dog by a lake", (2, 2)),
        ("Hut", "dog", (0, 0)),
        ("Eis", "ice - cream", (1, 1)),
        ("Eis", "ice cream", (1, 0)),
    ],
)
def test_terms_in_a_translation(source, translation, expected):
    """As often as in the source, at most; spaces around punctuation make no difference."""
    assert Glossary({**TERMS, "Eis": "ice-cream"}).usage(source, translation) == expected


WRONG = {
    "no tab": ("Hund dog", "line 1: must have a source term, a tab and a target term, not 0 tabs"),
    "two tabs": ("Hund\tdog\tx", "line 1: must have a source term, a tab and a target term, not 2 tabs"),
    "no source": ("a\tb\n\tdog", "line 2: the source term is empty"),
    "no target": ("Hund\t ", "line 1: the target term is empty"),
    "a tab alone": ("\t", "line 1: the source term is empty"),
    "two targets": ("Hund\tdog\n\nHund\thound", "line 3: 'Hund' has the target 'hound', and 'dog' before"),
    "a tag": ("Hund\t<term>", "line 1: the target term '<term>' has <term>, which marks terms"),
    "a tag within": ("a</term>b\tx", "line 1: the source term 'a</term>b' has </term>, which marks terms"),
    "nothing": (" \n\n", "has no term"),
    "Latin-1": ("Tür\tdoor".encode("latin-1"), r"line 1: is not UTF-8 (byte 0xfc at 2)"),
}


@pytest.mark.parametrize(("content", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_file_is_named_with_its_line(content, message, tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as error:
        Glossary.of(path)
    separator = ", " if message.startswith("line") else ": "
    assert str(error.value).startswith(f"{path}{separator}{message}")
    assert "\n" not in str(error.value)


def test_a_file_and_a_mapping_are_the_same_glossary(tmp_path):
    path = tmp_path / "terms.tsv"
    path.write_bytes("\ufeffHund\tdog\r\n\n kleine Hund \t small dog\nHund\tdog\n".encode())
    glossary = Glossary.of(str(path))
    assert glossary.terms == {"Hund": "dog", "kleine Hund": "small dog"}
    assert glossary.digest() == Glossary.of({" kleine Hund": "small dog", "Hund": "dog"}).digest()
    assert glossary.digest() != Glossary.of({"Hund": "dog"}).digest()
    assert Glossary.of(glossary) is glossary
    for name, message in (("terms.gz", "must be plain text; unpack it"), ("nowhere", "there is no such file")):
        with pytest.raises(DataError, match=message):
            Glossary.of(tmp_path / name)
    with pytest.raises(DataError, match=r"^the glossary: the target term is empty"):
        Glossary.of({"Hund": " "})


def test_terms_are_counted_by_pair():
    spans = Glossary(TERMS).spans_of_pair("Der Hund am See, ein Hund", "A dog by the water")
    assert Counter(span.target for span in spans) == {"dog": 2}
