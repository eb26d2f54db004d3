"""Prefixes, length ratios and forbidden sequences, in both frameworks, against transformers and plain settings."""

import math
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

from parity_tests.decoding.small_twins import SMALL, small_twins
from twinax import flax_transformer, torch_reference
from twinax.backend.errors import ConfigError
from twinax.configs.decoding import DecodingConfig, SamplingConfig
from twinax.formulas.decoding import Decoded
from twinax.parity.search.decoding import compare_decoded

LONGEST = 9
CONFIG = SMALL.replace(max_length=LONGEST)
SOURCES = np.array([[3, 4, 5, 0, 0], [7, 3, 9, 11, 4], [6, 0, 0, 0, 0]])


@pytest.fixture(autouse=True)
def wide() -> Any:
    """Runs the tests in float64."""
    with jax.enable_x64(True):
        yield


def twins_of(seed: int, **fields: Any) -> tuple[flax_transformer.Transformer, torch_reference.Transformer]:
    return small_twins(CONFIG.replace(**fields), seed, end=2.0)


def decode_both(models: Any, src: np.ndarray, config: DecodingConfig, prefixes: Any = None) -> Decoded:
    """What both frameworks return alike."""
    expected = torch_reference.generate(models[1], torch.from_numpy(src), config, prefixes=prefixes)
    output = flax_transformer.generate(models[0], src, config, prefixes=prefixes)
    agreement = compare_decoded(output, expected, config, rounding=1e-12)
    assert not agreement.different, str(agreement)
    assert agreement.score_error <= 1e-10, str(agreement)
    return output


def test_a_prefix_of_one_token_is_a_forced_first_token() -> None:
    plain = twins_of(1)
    config = DecodingConfig(beam_size=4, n_best=4)
    output = decode_both(plain, SOURCES, config, [[7], [], [4]])
    for i, fields in enumerate(({"forced_bos_id": 7}, {}, {"forced_bos_id": 4})):
        alone = decode_both(twins_of(1, **fields), SOURCES[i : i + 1], config)
        assert output.sentences()[i] == alone.sentences()[0]
        np.testing.assert_allclose(output.scores[i], alone.scores[0], atol=1e-10)


def test_what_follows_a_prefix_is_the_most_probable() -> None:
    """Greedily, by a loop; samples begin with it too, and after a forced first token."""
    models = twins_of(2, forced_bos_id=5)
    prefixes = [[7, 3, 3], [], [4, 9]]
    output = decode_both(models, SOURCES, DecodingConfig(), prefixes)
    for src, prefix, found in zip(SOURCES, prefixes, output.sentences(), strict=True):
        tokens = [CONFIG.decoder_start_id, 5, *prefix]
        while len(tokens) < LONGEST and tokens[-1] != CONFIG.eos_id:
            with torch.no_grad():
                logits = models[1](torch.from_numpy(src)[None], torch.tensor([tokens]))[0, -1]
            logits[CONFIG.pad_id] = -torch.inf
            tokens.append(int(logits.argmax()))
        assert found[0] == [token for token in tokens[1:] if token != CONFIG.eos_id]
    config = DecodingConfig(beam_size=3, n_best=3, sampling=SamplingConfig(seed=4))
    for prefix, samples in zip(prefixes, decode_both(models, SOURCES, config, prefixes).sentences(), strict=True):
        assert all(sample[: 1 + len(prefix)] == [5, *prefix] for sample in samples)


@pytest.mark.parametrize("ratios", [(0.0, 0.7), (1.2, 1.5), (3.0, None)])
def test_ratios_are_the_lengths_of_each_sentence(ratios: tuple[float, float | None]) -> None:
    models = twins_of(3)
    config = DecodingConfig(beam_size=3, n_best=3, min_length_ratio=ratios[0], max_length_ratio=ratios[1])
    output = decode_both(models, SOURCES, config)
    for i, tokens in enumerate((CONFIG.pad_id != SOURCES).sum(1).tolist()):
        least = min(max(math.ceil(ratios[0] * tokens), 1), LONGEST)
        most = LONGEST if ratios[1] is None else min(math.ceil(ratios[1] * tokens), LONGEST)
        lengths = DecodingConfig(beam_size=3, n_best=3, min_length=least, max_length=most)
        alone = decode_both(models, SOURCES[i : i + 1], lengths)
        assert output.sentences()[i] == alone.sentences()[0]
        np.testing.assert_allclose(output.scores[i][: len(alone.scores[0])], alone.scores[0], atol=1e-10)


def test_forbidden_sequences_are_those_of_transformers() -> None:
    """Each step of a greedy search, with the logits after `NoBadWordsLogitsProcessor`."""
    models = [twins_of(seed) for seed in range(3)]
    tokens = st.integers(3, CONFIG.tgt_vocab_size - 1)
    differs = []

    @settings(max_examples=10, deadline=None)
    @given(
        words=st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), min_size=3, max_size=12, unique=True),
        seed=st.integers(0, 2),
    )
    def check(words: list[tuple[int, ...]], seed: int) -> None:
        model = models[seed][1]
        config = DecodingConfig(forbidden_sequences=tuple(words), cache=False, max_length=5, force_end=False)
        output = torch_reference.generate(model, torch.from_numpy(SOURCES), config)
        processor = logits_process.NoBadWordsLogitsProcessor([list(word) for word in words], CONFIG.eos_id)
        for src, found in zip(SOURCES, output.sentences(), strict=True):
            ids = [CONFIG.decoder_start_id]
            while len(ids) < 6 and ids[-1] != CONFIG.eos_id:
                with torch.no_grad():
                    logits = model(torch.from_numpy(src)[None], torch.tensor([ids]))[:, -1]
                logits[:, CONFIG.pad_id] = -torch.inf
                ids.append(int(processor(torch.tensor([ids]), logits).argmax()))
            assert found[0] == [token for token in ids[1:] if token != CONFIG.eos_id]
        plain = DecodingConfig(max_length=5, force_end=False)
        differs.append(
            torch_reference.generate(model, torch.from_numpy(SOURCES), plain).sentences() != output.sentences()
        )

    check()
    assert any(differs)
    for pair in models:
        plain = decode_both(pair, SOURCES, DecodingConfig(beam_size=3, n_best=3))
        longest = max((tuple(tokens) for found in plain.sentences() for tokens in found), key=len)
        words = (longest[:2], longest[1:4])
        decode_both(pair, SOURCES, DecodingConfig(beam_size=3, n_best=3, forbidden_sequences=words))


@pytest.mark.parametrize(
    ("prefixes", "message"),
    [
        ([[3]], r"prefixes: 1 for 3 sentences; pass one for each, empty for none"),
        ([[3] * 9, [], []], r"prefixes\[0\]: has 9 tokens, and a translation has at most 9 with EOS"),
        ([[], [2], []], r"prefixes\[1\]: has an id that is EOS, padding or outside 0 to 10"),
        ([[], [], [11]], r"prefixes\[2\]: has an id that is EOS, padding or outside 0 to 10"),
    ],
)
def test_prefixes_that_cannot_be_forced(prefixes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flax_transformer.generate(twins_of(0)[0], SOURCES, prefixes=prefixes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"forbidden_sequences": ((),)}, "forbidden_sequences: one is empty; omit it"),
        ({"forbidden_sequences": ((3, "a"),)}, "must be sequences of whole numbers"),
        ({"min_length_ratio": -0.5}, "min_length_ratio=-0.5: must be at least 0"),
        ({"min_length_ratio": 2.0, "max_length_ratio": 1.0}, "max_length_ratio=1.0: must be above 0, and at least"),
    ],
)
def test_settings_that_cannot_be_used(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodingConfig(**fields)
