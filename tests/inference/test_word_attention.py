"""Attention between words from attention between tokens."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twinax.inference.serving.alignment import word_attention
from twinax.inference.translator import Attention


def words_of(text, tokens):
    attention = Attention(np.full((len(tokens), 1), 1.0), tokens, ["▁x"])
    spans = word_attention("x", text, attention)["translation"]
    return [text[begin:end] for begin, end in spans]


def test_weights_are_summed_over_a_source_word_and_averaged_over_a_target_word():
    weights = np.array([[0.1, 0.2, 0.3, 0.4], [0.3, 0.4, 0.1, 0.2], [0.5, 0.1, 0.1, 0.3], [1, 0, 0, 0]])
    tokens = ["▁red", "▁bi", "ke", "</s>"], ["▁rotes", "▁Fahr", "rad", "</s>"]
    result = word_attention("rotes Fahrrad", "red bike", Attention(weights, *tokens))
    assert result["source"] == [(0, 5), (6, 13)]
    assert result["translation"] == [(0, 3), (4, 8)]
    np.testing.assert_allclose(result["weights"], [[0.1, 0.5], [0.4, 0.35]])


@given(st.lists(st.text(st.sampled_from("abÄß,."), min_size=1, max_size=6), min_size=1, max_size=8), st.data())
def test_words_are_those_between_spaces(words, data):
    tokens = []
    for word in words:
        cut = data.draw(st.integers(0, len(word)))
        tokens += [*filter(None, [f"▁{word[:cut]}", word[cut:]])]
    assert words_of(" ".join(words), [*tokens, "</s>"]) == words


def test_scripts_without_spaces_have_a_word_per_token():
    assert words_of("你好世界。", ["▁", "你好", "世界", "。"]) == ["你好", "世界", "。"]


def test_tokens_that_are_not_in_the_text_belong_to_no_word():
    assert words_of("the Ångström unit", ["▁the", "▁<unk>", "strom", "▁unit"]) == ["the", "unit"]
    assert words_of("x", ["</s>"]) == []
    assert words_of("", ["</s>"]) == []
