"""A text as sentences and back, against sentencex and `str.splitlines`."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from sentencex import segment

from twinax.inference.serving.documents import Document

LANGUAGES = st.sampled_from([None, "de", "deu_Latn", "de_DE", "zh", "zho_Hans", "source", "", "fra", "x" * 50])
PIECES = ("Aa bb.", "B!", "1. 2", "你好。", "«", "…", " ", "  ", "\t", "\n", "\r\n", "\r", "\u2028", "\x0b")
TEXTS = st.lists(st.sampled_from(PIECES) | st.characters(exclude_categories=["Cs"])).map("".join)


@example("  Aa bb.\n\n\t B! Cc dd.  Ee\n", "de")
@given(TEXTS, LANGUAGES)
def test_a_text_that_is_not_changed_survives(text, language):
    document = Document.of(text, language)
    assert len(document.separators) == len(document.sentences) + 1
    assert all(sentence and sentence == sentence.strip() for sentence in document.sentences)
    joined = "".join(s + t for s, t in zip(document.separators, [*document.sentences, ""], strict=True))
    assert joined == text


@given(TEXTS, LANGUAGES)
def test_every_line_stays_a_line(text, language):
    """Blank lines too, with their line breaks."""
    document = Document.of(text, language)
    translated = document.text(["X"] * len(document.sentences))
    assert len(translated.splitlines()) == len(text.splitlines())
    breaks = [re.findall(r"[\n\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]", value) for value in (text, translated)]
    assert breaks[0] == breaks[1]
    for line, translation in zip(text.splitlines(), translated.splitlines(), strict=True):
        assert bool(line.strip()) == bool(translation.strip())


@given(st.lists(st.sampled_from(["Dr. Huber kam am 3. Mai.", "Er ging!", "Warum?", "z.B. so."]), min_size=1))
def test_sentences_are_those_of_the_library(sentences):
    line = " ".join(sentences)
    expected = [sentence.strip() for sentence in segment("de", line)]
    for language in ("de", "de_DE", "deu_Latn"):
        assert Document.of(line, language).sentences == expected
    assert Document.of(line, None).sentences == [line]


@pytest.mark.parametrize(
    ("text", "translations", "expected"),
    [
        ("你好。我很好！", ["Hello.", "Fine!"], "Hello. Fine!"),
        ("Hello.  Fine!", ["你好。", "很好！"], "你好。很好！"),
        ("Hello.  Fine!", ["Hallo.", "Gut!"], "Hallo.  Gut!"),
        ("Hello.\tFine!", ["你好。", "很好！"], "你好。\t很好！"),
        ("Das ist es. Gut so.", ["Das Wort 你好 ist gut.", "B."], "Das Wort 你好 ist gut. B."),
        ("Das ist es. Gut so.", ["", "B."], " B."),
    ],
)
def test_sentences_are_separated_as_their_script_is(text, translations, expected):
    language = "zh" if text[0] == "你" else "en"
    assert Document.of(text, language).text(translations) == expected
