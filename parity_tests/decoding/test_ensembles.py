"""Ensembles are the same in both frameworks, and those of loops in NumPy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from scipy.special import logsumexp

from parity_tests.decoding.small_twins import SMALL, small_twins
from twinax import flax_transformer, torch_reference
from twinax.backend.errors import ConfigError
from twinax.configs.decoding import DecodingConfig, SamplingConfig
from twinax.parity.functions import random_arrays
from twinax.parity.search.decoding import compare_decoded

LONGEST = 5
CONFIG = SMALL.replace(tgt_vocab_size=7)
# the same target vocabulary in models of other sizes, source vocabularies and maximum lengths
CONFIGS = (
    CONFIG,
    CONFIG.replace(d_model=12, src_vocab_size=9, max_length=LONGEST),
    CONFIG.replace(num_decoder_layers=2),
)
SOURCES = (
    np.array([[3, 4, 5, 2, 0], [7, 3, 9, 11, 4], [6, 2, 0, 0, 0]]),
    np.array([[5, 5, 2], [3, 8, 4], [7, 2, 0]]),
    np.array([[3, 4, 5, 2], [7, 3, 9, 2], [6, 2, 0, 0]]),
)


@pytest.fixture(autouse=True)
def wide() -> Any:
    """Runs the tests in float64."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def models() -> Any:
    """(models in Flax, models in PyTorch)."""
    with jax.enable_x64(True):
        pairs = [small_twins(config, seed) for seed, config in enumerate(CONFIGS)]
    return [flax_model for flax_model, _ in pairs], [torch_model for _, torch_model in pairs]


def by_loops(torch_models: Any, row: int, size: int, log_linear: bool) -> list[tuple[float, tuple[int, ...]]]:
    """(score, tokens) of the finished hypotheses of a beam search over the mean distribution, best first."""
    eos, pad = CONFIG.eos_id, CONFIG.pad_id

    def log_probs(prefix: tuple[int, ...]) -> np.ndarray:
        rows = []
        for model, sources in zip(torch_models, SOURCES, strict=True):
            with torch.no_grad():
                tokens = torch.tensor([[CONFIG.decoder_start_id, *prefix]])
                rows.append(model(torch.from_numpy(sources[row])[None], tokens)[0, -1].double().log_softmax(-1).numpy())
        if log_linear:
            mean = np.mean(rows, 0)
            return mean - logsumexp(mean)
        return np.log(np.mean(np.exp(rows), 0))

    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for n in range(1, LONGEST + 1):
        candidates = []
        for rank, (total, prefix) in enumerate(live):
            for token, value in enumerate(log_probs(prefix)):
                if token != pad and (n < LONGEST or token == eos):
                    value = 0.0 if n == LONGEST else value
                    candidates.append((total + value, -rank, -token, (*prefix, token)))
        best = [(total, tokens) for total, _, _, tokens in sorted(candidates, reverse=True)[: 2 * size]]
        ending = [(total / n, tokens) for total, tokens in best[:size] if tokens[-1] == eos]
        finished = sorted([*finished, *ending], key=lambda item: -item[0])[:size]
        live = [(total, tokens) for total, tokens in best if tokens[-1] != eos][:size]
        best_live = live[0][0] / n if live else -math.inf
        if len(finished) == size and finished[-1][0] >= best_live:
            break
    return finished


@pytest.mark.parametrize(("log_linear", "cache"), [(False, True), (True, True), (False, False)])
def test_beam_search_over_the_mean_distribution(log_linear: bool, cache: bool, models: Any) -> None:
    config = DecodingConfig(beam_size=3, n_best=3, log_linear=log_linear, cache=cache)
    output = flax_transformer.generate_together(models[0], SOURCES, config)
    expected = torch_reference.generate_together(models[1], [*map(torch.from_numpy, SOURCES)], config)
    agreement = compare_decoded(output, expected, config, rounding=1e-12)
    assert not agreement.different, str(agreement)
    for row in range(3):
        loops = by_loops(models[1], row, 3, log_linear)
        tokens = [
            tuple(tokens[:n]) for tokens, n in zip(output.tokens[row].tolist(), output.lengths[row], strict=True) if n
        ]
        assert tokens == [hypothesis for _, hypothesis in loops]
        np.testing.assert_allclose(output.scores[row][: len(loops)], [score for score, _ in loops], atol=1e-10)


def test_samples_are_drawn_from_the_mean_distribution(models: Any) -> None:
    config = DecodingConfig(beam_size=4, n_best=4, sampling=SamplingConfig(seed=3))
    output = flax_transformer.generate_together(models[0], SOURCES, config)
    expected = torch_reference.generate_together(models[1], [*map(torch.from_numpy, SOURCES)], config)
    assert output.sentences() == expected.sentences()
    alone = flax_transformer.generate(models[0][0], SOURCES[0], config)
    assert output.sentences() != alone.sentences()
    same = flax_transformer.generate_together(models[0][:1] * 2, SOURCES[:1] * 2, config)
    assert same.sentences() == alone.sentences()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tgt_vocab_size": 8}, "an ensemble's models must have one tgt_vocab_size, not 7 and 8"),
        ({"forced_bos_id": 4}, "an ensemble's models must have one forced_bos_id, not None and 4"),
    ],
)
def test_models_that_have_no_common_target(fields: dict[str, Any], message: str, models: Any) -> None:
    other = CONFIG.replace(**fields)
    arrays = {name: jnp.asarray(a) for name, a in random_arrays(other, 0).items()}
    pair = [models[0][0], flax_transformer.Transformer.from_arrays(other, arrays)]
    with pytest.raises(ConfigError, match=message):
        flax_transformer.generate_together(pair, SOURCES[:1] * 2)
