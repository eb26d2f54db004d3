"""Diverse beam search is the same in both frameworks, and that of an implementation in plain loops."""

import math
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from parity_tests.decoding.small_twins import SMALL, small_twins
from twinax import flax_transformer, torch_reference
from twinax.backend.errors import ConfigError
from twinax.configs.decoding import DecodingConfig
from twinax.parity.search.decoding import compare_decoded

LONGEST = 6
CONFIG = SMALL.replace(max_length=LONGEST, tgt_vocab_size=9)


@pytest.fixture(autouse=True)
def wide() -> Any:
    """Runs the tests in float64."""
    with jax.enable_x64(True):
        yield


def twins_of(seed: int) -> tuple[flax_transformer.Transformer, torch_reference.Transformer]:
    return small_twins(CONFIG, seed, end=0.5)


def by_loops(
    model: torch_reference.Transformer, src: np.ndarray, width: int, groups: int, penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens) of the finished hypotheses, best first, after algorithm 1 of Vijayakumar et al. 2018.

    As in `group_beam_search` of transformers 4: each group has its own finished hypotheses, the penalty counts in the
    scores, and all are ranked together. Scores are sums over the length; EOS is forced at the end.
    """
    size, eos, pad = width // groups, CONFIG.eos_id, CONFIG.pad_id
    live: list[list[tuple[float, tuple[int, ...]]]] = [[(0.0, ())] for _ in range(groups)]
    finished: list[list[tuple[float, tuple[int, ...]]]] = [[] for _ in range(groups)]
    done = [False] * groups

    def log_probs(prefix: tuple[int, ...]) -> list[float]:
        with torch.no_grad():
            tokens = torch.tensor([[CONFIG.decoder_start_id, *prefix]])
            return model(torch.from_numpy(src)[None], tokens)[0, -1].log_softmax(-1).tolist()

    for n in range(1, LONGEST + 1):
        taken: list[int] = []
        for g in range(groups):
            candidates = []
            for rank, (total, prefix) in enumerate(live[g]):
                for token, value in enumerate(log_probs(prefix)):
                    if token == pad or (n == LONGEST and token != eos):
                        continue
                    value = 0.0 if n == LONGEST else value
                    value -= penalty * taken.count(token)
                    candidates.append((total + value, -rank, -token, (*prefix, token)))
            best = [(total, tokens) for total, _, _, tokens in sorted(candidates, reverse=True)[: 2 * size]]
            if not done[g]:
                ending = [(total / n, tokens) for total, tokens in best[:size] if tokens[-1] == eos]
                finished[g] = sorted([*finished[g], *ending], key=lambda item: -item[0])[:size]
            live[g] = [(total, tokens) for total, tokens in best if tokens[-1] != eos][:size]
            if not done[g]:
                taken += [tokens[-1] for _, tokens in live[g]]
                best_live = live[g][0][0] / n if live[g] else -math.inf
                done[g] = len(finished[g]) == size and finished[g][-1][0] >= best_live
        if all(done):
            break
    return sorted((item for group in finished for item in group), key=lambda item: -item[0])


def test_both_frameworks_and_plain_loops_agree() -> None:
    models = [twins_of(seed) for seed in range(3)]
    differs = []

    @example(groups=(4, 2), penalty=0.3, seed=1, tokens=[3])  # whose first group finishes first
    @settings(max_examples=8, deadline=None)
    @given(
        groups=st.sampled_from([(4, 2), (6, 3)]),
        penalty=st.sampled_from([0.3, 2.0]),
        seed=st.integers(0, 2),
        tokens=st.lists(st.integers(3, 12), min_size=1, max_size=5),
    )
    def check(groups: tuple[int, int], penalty: float, seed: int, tokens: list[int]) -> None:
        width, number = groups
        config = DecodingConfig(beam_size=width, n_best=width, beam_groups=number, diversity_penalty=penalty)
        src = np.array([tokens])
        reference = torch_reference.generate(models[seed][1], torch.from_numpy(src), config)
        output = flax_transformer.generate(models[seed][0], src, config)
        agreement = compare_decoded(output, reference, config, rounding=1e-12)
        assert not agreement.different, str(agreement)
        assert agreement.score_error <= 1e-10, str(agreement)
        expected = by_loops(models[seed][1], src[0], width, number, penalty)
        scores = reference.scores[0][np.isfinite(reference.scores[0])]
        np.testing.assert_allclose(scores, [score for score, _ in expected], atol=1e-10)
        found = [tuple(row[:n]) for row, n in zip(reference.tokens[0].tolist(), reference.lengths[0], strict=True) if n]
        assert found == [tokens for _, tokens in expected]
        plain = DecodingConfig(beam_size=width, n_best=width)
        differs.append(output.sentences() != flax_transformer.generate(models[seed][0], src, plain).sentences())

    check()
    assert any(differs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_size": 4, "beam_groups": 3, "diversity_penalty": 1.0}, "beam_groups=3: must divide beam_size=4"),
        ({"beam_size": 4, "beam_groups": 2}, r"diversity_penalty=0.0, beam_groups=2: set both, or neither"),
        ({"diversity_penalty": -1.0}, r"diversity_penalty=-1.0: must be at least 0"),
        (
            {"beam_size": 2, "beam_groups": 2, "diversity_penalty": 1.0, "ended": "stay"},
            "beam_groups=2: needs ended='leave', without sampling",
        ),
    ],
)
def test_settings_that_cannot_be_used(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecodingConfig(**fields)
