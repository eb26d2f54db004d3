"""Samples are the same in both frameworks, follow transformers' filters, and have the model's distribution."""

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare
from transformers.generation import logits_process

from parity_tests.decoding.small_twins import SMALL, small_twins
from twinax import flax_transformer, torch_reference
from twinax.backend.errors import ConfigError
from twinax.configs.decoding import DecodingConfig, SamplingConfig
from twinax.flax_transformer.decoding import sampling as flax_sampling
from twinax.formulas.sampling import uniform_numbers
from twinax.parity.search.decoding import compare_decoded
from twinax.torch_reference.decoding import sampling as torch_sampling

SOURCES = np.array([[3, 4, 5, 0, 0], [7, 3, 9, 11, 4], [6, 0, 0, 0, 0]])


@pytest.fixture(autouse=True)
def wide() -> Any:
    """Runs the tests in float64."""
    with jax.enable_x64(True):
        yield


def twins_of(seed: int, **fields: Any) -> tuple[flax_transformer.Transformer, torch_reference.Transformer]:
    return small_twins(SMALL.replace(**fields), seed)


# each filter alone and after others, weak and strong
FILTERS = (
    SamplingConfig(),
    SamplingConfig(temperature=0.3, top_k=4),
    SamplingConfig(top_p=0.6),
    SamplingConfig(temperature=2.5, min_p=0.5),
    SamplingConfig(typical_p=0.4),
    SamplingConfig(top_k=50, top_p=0.9, min_p=0.02, typical_p=0.8),
)


@pytest.mark.parametrize(("cache", "filters"), [(True, FILTERS), (False, FILTERS[-1:])])
def test_both_frameworks_draw_the_same_tokens(cache: bool, filters: tuple[SamplingConfig, ...]) -> None:
    models = [twins_of(seed) for seed in range(3)]

    @settings(max_examples=20, deadline=None)
    @given(
        sampling=st.sampled_from(filters),
        draw_seed=st.integers(0, 2**32 - 1),
        seed=st.integers(0, 2),
        first=st.sampled_from([0, 2**40]),
    )
    def check(sampling: SamplingConfig, draw_seed: int, seed: int, first: int) -> None:
        longest = 8 if cache else 3
        sampling = replace(sampling, seed=draw_seed)
        config = DecodingConfig(beam_size=3, n_best=3, sampling=sampling, cache=cache, min_length=2, max_length=longest)
        numbers = np.array([first + 5, first, 0])
        expected = torch_reference.generate(models[seed][1], torch.from_numpy(SOURCES), config, sentences=numbers)
        output = flax_transformer.generate(models[seed][0], SOURCES, config, sentences=numbers)
        agreement = compare_decoded(output, expected, config, rounding=1e-12)
        assert not agreement.different, str(agreement)
        assert agreement.score_error <= 1e-10, str(agreement)

    check()


def by_transformers(scores: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """The log-probabilities after the warpers of `generate`, in its order."""
    warpers: list[Any] = [logits_process.TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(logits_process.MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1:
        warpers.append(logits_process.TypicalLogitsWarper(sampling.typical_p))
    for warper in warpers:
        scores = warper(torch.zeros(len(scores), 0), scores)
    return scores.log_softmax(-1)


@pytest.mark.parametrize("vocab_size", [7, 300])
def test_filters_are_those_of_transformers(vocab_size: int) -> None:
    """Element by element, with tokens that are forbidden before; no two tokens are equally probable."""
    kept, in_flax = [], jax.jit(flax_sampling.filtered, static_argnums=1)

    @settings(max_examples=60, deadline=None)
    @given(sampling=st.sampled_from(FILTERS), seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 5.0]))
    def check(sampling: SamplingConfig, seed: int, scale: float) -> None:
        rng = np.random.default_rng(seed)
        scores = scale * rng.standard_normal((2, 3, vocab_size))
        scores[rng.random(scores.shape) < 0.1] = -np.inf
        scores[..., 0] = scale  # one is allowed
        log_probs = torch.from_numpy(scores).log_softmax(-1)
        expected = by_transformers(log_probs.flatten(0, 1), sampling).unflatten(0, (2, 3)).numpy()
        outputs = {
            "Flax": np.asarray(in_flax(log_probs.numpy(), sampling)),
            "PyTorch": torch_sampling.filtered(log_probs, sampling).numpy(),
        }
        for name, output in outputs.items():
            assert np.array_equal(np.isfinite(output), np.isfinite(expected)), name
            np.testing.assert_allclose(np.exp(output), np.exp(expected), rtol=1e-12, atol=1e-14, err_msg=name)
        kept.append(np.isfinite(expected).sum(-1))

    check()
    numbers = np.concatenate([*map(np.ravel, kept)])
    assert (numbers == 1).any()
    assert ((numbers > 1) & (numbers < vocab_size)).any()


@pytest.mark.parametrize("framework", ["Flax", "PyTorch"])
def test_draws_have_the_distribution_they_are_drawn_from(framework: str) -> None:
    """Chi-squared over 100,000 draws: of one step, by the sentence's number."""
    q = np.log(
        np.array([0.0, 0.3, 0.05, 0.001, 0.0, 0.449, 0.2, 0.0]), where=[0, 1, 1, 1, 0, 1, 1, 0], out=np.full(8, -np.inf)
    )
    uniform = uniform_numbers(3, np.arange(100_000), 1, 1)[:, :, 1]
    rows = np.broadcast_to(q, (100_000, 1, 8))
    if framework == "Flax":
        tokens = np.asarray(flax_sampling.draw(jnp.asarray(rows), jnp.asarray(uniform)))
    else:
        tokens = torch_sampling.draw(torch.from_numpy(rows.copy()), torch.from_numpy(uniform)).numpy()
    counts, expected = np.bincount(tokens[:, 0], minlength=8), 100_000 * np.exp(q)
    assert (counts[expected == 0] == 0).all()
    assert chisquare(counts[expected > 0], expected[expected > 0] * counts.sum() / expected.sum()).pvalue > 0.001


def test_samples_have_the_distribution_of_the_model() -> None:
    """Chi-squared over 100,000 translations of one sentence, against the probability of every possible translation."""
    model, torch_model = twins_of(1, tgt_vocab_size=6, max_length=3)
    config = DecodingConfig(beam_size=10, n_best=10, max_length=3, force_end=False, sampling=SamplingConfig(seed=8))
    src = np.repeat(SOURCES[:1, :3], 10_000, 0)
    output = flax_transformer.generate(model, src, config)
    counts: dict[tuple[int, ...], int] = {}
    for tokens, length in zip(output.tokens.reshape(-1, 3), output.lengths.ravel(), strict=True):
        key = tuple(tokens[:length].tolist())
        counts[key] = counts.get(key, 0) + 1
    pad, eos = SMALL.pad_id, SMALL.eos_id
    others = [token for token in range(6) if token not in (pad, eos)]
    ended = [(*prefix, eos) for n in range(3) for prefix in itertools.product(others, repeat=n)]
    translations = [*ended, *itertools.product(others, repeat=3)]
    probabilities = probabilities_of(torch_model, src[0], translations)
    assert probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert counts.keys() <= {*translations}
    observed = np.array([counts.get(translation, 0) for translation in translations])
    expected = 100_000 * probabilities
    frequent = expected >= 5
    observed = np.append(observed[frequent], observed[~frequent].sum())
    expected = np.append(expected[frequent], expected[~frequent].sum())
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    assert chi2.sf(statistic, len(expected) - 1) > 0.001


def probabilities_of(model: torch_reference.Transformer, src: np.ndarray, translations: list[Any]) -> np.ndarray:
    """By the chain rule, one forward pass per prefix; padding is never drawn."""
    start, pad = model.config.decoder_start_id, model.config.pad_id

    def next_probabilities(prefix: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.from_numpy(src)[None], torch.tensor([[start, *prefix]]))[0, -1]
        logits[pad] = -torch.inf
        return logits.softmax(-1)

    prefixes = {translation[:n] for translation in translations for n in range(len(translation))}
    tables = {prefix: next_probabilities(prefix) for prefix in prefixes}
    return np.array([np.prod([float(tables[t[:n]][t[n]]) for n in range(len(t))]) for t in translations])


def test_nothing_but_seed_and_number_changes_the_samples_of_a_sentence() -> None:
    """Neither the batch, nor its padding, nor the number of samples, nor how many tokens are cached."""
    model, _ = twins_of(2)
    config = DecodingConfig(beam_size=4, n_best=4, sampling=SamplingConfig(seed=1))
    whole = flax_transformer.generate(model, SOURCES, config, sentences=[7, 8, 9])
    alone = flax_transformer.generate(model, SOURCES[:1, :3], config, sentences=[7])
    fewer = replace(config, beam_size=2, n_best=2)
    few = flax_transformer.generate(model, np.pad(SOURCES[[2, 0]], ((0, 0), (0, 3))), fewer, sentences=[9, 7])
    assert alone.sentences()[0] == whole.sentences()[0]
    assert [few.sentences()[1], few.sentences()[0]] == [whole.sentences()[0][:2], whole.sentences()[2][:2]]
    assert len({*map(tuple, whole.sentences()[1])}) > 1
    for other in (replace(config, sampling=SamplingConfig(seed=2)), config):
        numbers = [7, 8, 9] if other is not config else [8, 7, 9]
        different = flax_transformer.generate(model, SOURCES, other, sentences=numbers)
        assert different.sentences()[:2] != whole.sentences()[:2]


def test_another_seed_compiles_nothing() -> None:
    model, _ = twins_of(0)
    for seed in (1, 2):
        config = DecodingConfig(sampling=SamplingConfig(seed=seed, temperature=0.77))
        flax_transformer.generate(model, SOURCES, config)
    begin, go_on = flax_transformer.decoding.programs.search_programs((SMALL,), config.without_seed())
    assert (begin._cache_size(), go_on._cache_size()) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"seed": -1}, r"seed=-1: must be 0 to 2\^32 - 1"),
        ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"top_k": -2}, "top_k=-2: must be at least 0"),
        ({"top_p": 0.0}, "top_p=0.0: must be above 0 and at most 1"),
        ({"typical_p": 1.5}, "typical_p=1.5: must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p=1.5: must be 0 to 1"),
    ],
)
def test_settings_that_cannot_be_used(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingConfig(**fields)


def test_samples_do_not_compete() -> None:
    with pytest.raises(ConfigError, match=r"^sampling: needs early_stopping=False and ended='leave'"):
        DecodingConfig(sampling=SamplingConfig(), ended="stay")
    model, _ = twins_of(0)
    with pytest.raises(ValueError, match=r"^sentences: has shape \(2,\), and the batch has 3 sentences"):
        flax_transformer.generate(model, SOURCES, DecodingConfig(sampling=SamplingConfig()), sentences=[1, 2])
