"""Decoding settings and their errors, scores, attention maps and their plots."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from flax import nnx

from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.backend.errors import NotFiniteError
from twinax.configs import ConfigError
from twinax.configs.decoding import DecodingConfig, LengthPenalty
from twinax.flax_transformer.module import named_arrays
from twinax.formulas.decoding import LENGTH_PENALTIES, plan, without_cache
from twinax.inference.attention_plot import attention_blocks, attention_plot
from twinax.parity.functions import random_arrays

CONFIG = TransformerConfig.preset(
    "tiny", num_encoder_layers=1, num_decoder_layers=2, decoder_num_heads=2, max_length=9, src_vocab_size=13,
    tgt_vocab_size=17, param_dtype="float64", compute_dtype="float64",
)  # fmt: skip


@pytest.fixture(scope="module")
def twins():
    arrays = random_arrays(CONFIG, 0)
    arrays["output.bias"][CONFIG.eos_id] += 1.5
    model = flax_transformer.Transformer.from_arrays(CONFIG, {name: jnp.asarray(a) for name, a in arrays.items()})
    return model, convert.to_torch(model)


def sources(batch=5, length=6):
    src = np.random.default_rng(0).integers(3, 13, (batch, length))
    return np.where(np.arange(length) < 2 + np.arange(batch)[:, None] % (length - 1), src, CONFIG.pad_id)


def call_both(twins, function, *arrays):
    """Results of the function of this name in both frameworks."""
    model, torch_model = twins
    tensors = [torch.from_numpy(a) for a in arrays]
    flax_result = getattr(flax_transformer, function)(model, *arrays)
    return flax_result, getattr(torch_reference, function)(torch_model, *tensors)


WRONG: dict[str, dict[str, Any]] = {
    "beam_size=0: must be at least 1": {"beam_size": 0},
    "max_length=0: must be at least 1": {"max_length": 0},
    "n_best=3: must not be above beam_size=2": {"n_best": 3, "beam_size": 2},
    "min_length=5: must not be above max_length=4": {"min_length": 5, "max_length": 4},
    "length_exponent=inf: must be a finite number": {"length_exponent": float("inf")},
    r"length_exponent=-60.0: penalties of up to 9 tokens are outside 1e-30 to 1e30": {"length_exponent": -60.0},
    "length_exponent=1000.0: penalties of up to 9 tokens are outside 1e-30 to 1e30": {"length_exponent": 1000},
    "forbidden_ids=5: must be whole numbers": {"forbidden_ids": 5},
    "length_penalty='t2t': must be one of 'power', 'power_with_start', 'gnmt'": {"length_penalty": "t2t"},
    r"forbidden_ids=\('3',\): must be whole numbers": {"forbidden_ids": ("3",)},
    "beam_size=18: must not be above the target vocabulary of 17 tokens": {"beam_size": 18},
    "max_length=10: the model's positions end at 9": {"max_length": 10},
    "min_length=10: the model's positions end at 9": {"min_length": 10},
    "forbidden_ids: 17 is outside the target vocabulary, 0 to 16": {"forbidden_ids": (17,)},
    "forbidden_ids: 2 is eos_id, without which decoding cannot finish; see min_length": {"forbidden_ids": [2]},
    "min_length=2: forbidden_ids allow no token but EOS": {"min_length": 2, "forbidden_ids": (1, *range(3, 17))},
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_settings(line):
    with pytest.raises(ConfigError, match=f"^{line}"):
        plan(CONFIG, DecodingConfig(**WRONG[line]))


def test_ids_of_numpy_are_ids():
    assert DecodingConfig(forbidden_ids=np.array([3, 4])).forbidden_ids == (3, 4)  # pyright: ignore


def test_a_vocabulary_of_one():
    config = CONFIG.replace(tgt_vocab_size=1, bos_id=None, eos_id=0, decoder_start_id=0)
    with pytest.raises(ConfigError, match=r"^tgt_vocab_size=1: decoding needs at least 2 tokens"):
        plan(config, DecodingConfig())


def test_decoding_is_not_for_jit(twins):
    with pytest.raises(ValueError, match=r"^src_tokens: is traced; decoding compiles its own programs"):
        jax.jit(lambda src: flax_transformer.generate(twins[0], src).scores)(sources())


def test_an_end_that_is_padding_too_counts_once():
    config = CONFIG.replace(pad_id=2, eos_id=2, num_decoder_layers=1)
    arrays = random_arrays(config, 0)
    model = flax_transformer.Transformer.from_arrays(config, {n: jnp.asarray(a) for n, a in arrays.items()})
    pair = model, convert.to_torch(model)
    src, tgt = np.array([[5, 6], [7, 2]], np.uint8), np.array([[4, 2, 2], [2, 2, 2]], np.uint8)
    flax_scores, torch_scores = call_both(pair, "score", src.astype(int), tgt.astype(int))
    assert np.abs(flax_scores.tokens - torch_scores.tokens).max() < 1e-12
    assert ((flax_scores.tokens < 0) == [[True, True, False], [True, False, False]]).all()
    assert np.array_equal(flax_transformer.score(model, src, tgt).tokens, flax_scores.tokens)


def test_a_model_without_a_start():
    with pytest.raises(ConfigError, match=r"^decoder_start_id=None: the model has no decoder start token"):
        plan(CONFIG.replace(decoder_start_id=None), DecodingConfig())


BAD_SOURCES = {
    r"src_tokens\[2\]: the sentence is empty, or all its tokens are padding or masked; omit it": np.array(
        [[4, 5], [6, 0], [0, 0]]
    ),
    "src_tokens: there is no sentence in the batch": np.zeros((0, 3), int),
    "src_tokens: length 10 is not between 1 and the config's max_length=9": np.full((1, 10), 4),
    "src_tokens: length 0 is not between 1": np.zeros((2, 0), int),
    r"src_tokens\[0, 1\] is 13: 1 ids are outside the vocabulary, 0 to 12": np.array([[4, 13]]),
}


@pytest.mark.parametrize("line", BAD_SOURCES)
def test_bad_sources(twins, line):
    src = BAD_SOURCES[line]
    tgt = np.full((len(src), 2), 2)
    for function, arrays in (("generate", (src,)), ("score", (src, tgt)), ("attention_maps", (src, tgt))):
        for package, model, convert_array in zip(
            (flax_transformer, torch_reference), twins, (np.asarray, torch.from_numpy), strict=True
        ):
            with pytest.raises(ValueError, match=f"^{line}"):
                getattr(package, function)(model, *map(convert_array, arrays))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_logits_in_float32(sign, twins):
    """Of all but the tokens that may not be generated, and with either sign, as 0/0 has one on x86."""
    arrays = flax_transformer.named_arrays(twins[0])
    arrays = {name: jnp.asarray(a, jnp.float32) for name, a in arrays.items()}
    arrays["output.bias"] = jnp.full_like(arrays["output.bias"], np.copysign(np.nan, sign))
    config = CONFIG.replace(param_dtype="float32", compute_dtype="float32")
    model = flax_transformer.Transformer.from_arrays(config, arrays)
    for beam_size in (1, 3):
        with pytest.raises(NotFiniteError, match="the model's logits are NaN; its weights are too large or not finite"):
            flax_transformer.generate(model, sources(2), DecodingConfig(beam_size=beam_size, max_length=3))


def test_weights_that_are_not_finite(twins):
    model, _ = twins
    arrays = flax_transformer.named_arrays(model)
    nan_arrays = {**arrays, "output.bias": arrays["output.bias"].at[4].set(jnp.nan)}
    model = flax_transformer.Transformer.from_arrays(CONFIG, nan_arrays)
    with pytest.raises(NotFiniteError, match=r"^src_tokens\[0\]: the model's logits are NaN"):
        flax_transformer.generate(model, sources(2), DecodingConfig(max_length=3))
    with pytest.raises(NotFiniteError, match=r"^src_tokens\[0\]: the model's logits are NaN"):
        torch_reference.generate(convert.to_torch(model), torch.from_numpy(sources(2)), DecodingConfig(max_length=3))


def test_greedy_search_is_the_likeliest_next_token(twins):
    """The oracle is a plain loop over the logits, without the search code."""
    model, src = twins[0], sources()
    output = flax_transformer.generate(model, src)
    all_logits = nnx.jit(lambda model, src, prefix: model(src, prefix)[0])
    for row, tokens in zip(src, output.sentences(), strict=True):
        prefix = [CONFIG.decoder_start_id]
        while len(prefix) <= len(tokens[0]) + 1:
            padded = np.resize(prefix, (1, CONFIG.max_length))  # of one length, so that one program is compiled
            logits = np.array(all_logits(model, jnp.asarray(row[None]), jnp.asarray(padded))[len(prefix) - 1])
            logits[CONFIG.pad_id] = -np.inf
            prefix.append(CONFIG.eos_id if len(prefix) == CONFIG.max_length else int(logits.argmax()))
        assert prefix[1:] == [*tokens[0], CONFIG.eos_id]


@pytest.mark.parametrize("cache", [True, False])
def test_a_given_source_mask_counts_in_every_attention(cache, twins):
    """Translating under a mask, of which some hidden tokens stand in the middle, is scoring under it."""
    src, config = sources(), DecodingConfig(beam_size=2, cache=cache)
    mask = (src != CONFIG.pad_id) & (np.arange(src.shape[1]) != 1)
    output = flax_transformer.generate(twins[0], src, config, src_mask=mask)
    torch_output = torch_reference.generate(
        twins[1], torch.from_numpy(src), DecodingConfig(beam_size=2), torch.from_numpy(mask)
    )
    assert np.abs(output.scores - flax_transformer.generate(twins[0], src, config).scores).max() > 1e-3
    tensors = [torch.from_numpy(a) for a in (src, output.tokens[:, 0], mask)]
    for result in (output, torch_output):
        assert np.array_equal(result.tokens, output.tokens)
        shorter = output.lengths[:, 0] < CONFIG.max_length
        assert shorter.any()
        for scores in (
            flax_transformer.score(twins[0], src, output.tokens[:, 0], mask),
            torch_reference.score(twins[1], *tensors),
        ):
            means = scores.totals / output.lengths[:, 0] ** config.length_exponent
            assert np.abs(means - result.scores[:, 0])[shorter].max() < 1e-12


@pytest.mark.parametrize("penalty", get_args(LengthPenalty))
def test_scores_are_those_of_the_sentences(twins, penalty):
    """The result of `score`, divided by the length penalty, equals the score from beam search."""
    config = DecodingConfig(beam_size=3, n_best=3, length_penalty=penalty, length_exponent=0.7)
    output = flax_transformer.generate(twins[0], sources(), config)
    for rank in range(3):
        shorter = output.lengths[:, rank] < CONFIG.max_length  # at max_length EOS is forced and costs nothing
        for scores in call_both(twins, "score", sources(), output.tokens[:, rank]):
            penalties = LENGTH_PENALTIES[penalty](output.lengths[:, rank].astype(float), 0.7)
            assert np.abs(scores.totals / penalties - output.scores[:, rank])[shorter].max() < 1e-12
            assert shorter.sum() >= 3


def test_scores_are_the_cross_entropy_of_torch(twins):
    src, tgt = sources(), np.random.default_rng(1).integers(3, 17, (5, 7))
    tgt = np.where(np.arange(7) < 1 + np.arange(5)[:, None], tgt, CONFIG.pad_id)
    inputs = np.concatenate([np.full((5, 1), CONFIG.decoder_start_id), tgt[:, :-1]], axis=1)
    logits = twins[1](torch.from_numpy(src), torch.from_numpy(inputs)).detach()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(tgt).flatten(), ignore_index=CONFIG.pad_id, reduction="none"
    ).unflatten(0, tgt.shape)
    for scores in call_both(twins, "score", src, tgt):
        assert scores.tokens.shape == tgt.shape
        assert np.abs(scores.tokens + losses.numpy()).max() < 1e-12
        assert np.abs(scores.totals + losses.numpy().sum(1)).max() < 1e-12


def test_attention_maps(twins):
    src = sources()
    tgt = flax_transformer.generate(twins[0], src).tokens[:, 0]
    flax_maps, torch_maps = call_both(twins, "attention_maps", src, tgt)
    length = tgt.shape[1]
    assert flax_maps.encoder.shape == (5, 1, CONFIG.num_heads, 6, 6)
    assert flax_maps.decoder.shape == (5, 2, 2, length, length)
    assert flax_maps.cross.shape == (5, 2, 2, length, 6)
    for actual, reference in zip(flax_maps, torch_maps, strict=True):
        assert np.abs(actual - reference).max() < 1e-12
    assert np.abs(flax_maps.cross.sum(-1) - 1).max() < 1e-12
    assert not np.triu(flax_maps.decoder, 1).any()
    assert not np.moveaxis(flax_maps.cross, -1, 1)[src == CONFIG.pad_id].any()


@pytest.mark.parametrize("function", ["score", "attention_maps"])
def test_bad_targets(twins, function, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    src = sources(2)
    for line, tgt in {
        r"tgt_tokens\[1\]: the sentence has no token, not even eos_id=2": np.array([[5, 2], [0, 0]]),
        "tgt_tokens: length 10 is not between 1 and the config's max_length=9": np.full((2, 10), 4),
        "src_tokens and tgt_tokens: must have the same batch size": np.full((3, 4), 4),
    }.items():
        for package, model, convert_array in zip(
            (flax_transformer, torch_reference), twins, (np.asarray, torch.from_numpy), strict=True
        ):
            with pytest.raises(ValueError, match=f"^{line}"):
                getattr(package, function)(model, convert_array(src), convert_array(tgt))


HINTS = get_type_hints(TransformerConfig)
VALUES = [
    (field.name, value)
    for field in fields(TransformerConfig)
    if get_origin(HINTS[field.name]) is Literal
    and field.name not in ("param_dtype", "compute_dtype", "dropout_generator")
    for value in get_args(HINTS[field.name])
] + [("mask_value", value) for value in (-1e-9, -100.0, -1e4, -1e9)]


@pytest.mark.parametrize(("name", "value"), VALUES)
def test_settings_without_a_cache_are_those_in_which_a_token_sees_later_ones(name, value):
    """The oracle measures whether a later target token changes an earlier logit."""
    config = CONFIG.replace(**{name: value, "num_decoder_layers": 1})
    arrays = random_arrays(config.replace(param_dtype="float32", compute_dtype="float32"), 0)
    model = torch_reference.Transformer.from_state_dict(
        config, convert.to_state_dict({n: a.astype(np.float64) for n, a in arrays.items()}, config)
    )
    src, tgt = torch.tensor([[4, 5, 6, 7]]), torch.tensor([[1, 7, 8, 9], [1, 7, 8, 3]])
    with torch.no_grad():
        logits = model(src.expand(2, -1), tgt)
    sees_later = bool((logits[0, :3] - logits[1, :3]).abs().max() > 1e-12)
    assert sees_later <= (without_cache(config) is not None)


def test_a_model_that_cannot_be_cached_is_decoded_without():
    config = CONFIG.replace(mask_value=-1e-9, max_length=4, num_decoder_layers=1)
    model = flax_transformer.Transformer.from_arrays(
        config, {n: jnp.asarray(a) for n, a in random_arrays(config, 0).items()}
    )
    src = sources(3)[:, :4]
    with pytest.raises(ConfigError, match=r"^cache=True: mask_value=-1e-09 gives masked keys weight.*omit it"):
        flax_transformer.generate(model, src, DecodingConfig(cache=True))
    output = flax_transformer.generate(model, src, DecodingConfig(beam_size=2))
    torch_model = convert.to_torch(model)
    expected = torch_reference.generate(torch_model, torch.from_numpy(src), DecodingConfig(beam_size=2))
    assert np.array_equal(output.tokens, expected.tokens)
    scores = call_both((model, torch_model), "score", src, output.tokens[:, 0])
    assert np.abs(scores[0].tokens - scores[1].tokens).max() < 1e-12


def test_few_compiles(twins):
    """Lengths are rounded up: sources of 2 to 9 tokens and targets of up to 9 compile one program each."""
    config = DecodingConfig(beam_size=2, max_length=9, length_exponent=0.7)  # of no other test
    begin, go_on = flax_transformer.decoding.programs.search_programs((CONFIG,), config)
    for length in (3, 5, 6):
        flax_transformer.generate(twins[0], sources(4, length), config)
    assert (begin._cache_size(), go_on._cache_size()) == (1, 1)


def test_target_languages_share_programs(twins):
    config = DecodingConfig(beam_size=2, max_length=9, length_exponent=0.6)  # of no other test
    for token in (4, 6):
        model = flax_transformer.Transformer.from_arrays(CONFIG.replace(forced_bos_id=token), named_arrays(twins[0]))
        assert (flax_transformer.generate(model, sources(4, 5), config).tokens[:, 0, 0] == token).all()
    for program in flax_transformer.decoding.programs.search_programs((CONFIG,), config):
        assert program._cache_size() == 1


@pytest.mark.parametrize(("sentences", "longest", "first"), [(1, 40, 32), (32, 40, 32), (33, 40, 16), (1, 9, 9)])
def test_the_cache_of_a_few_hypotheses_starts_longer(twins, sentences, longest, first):
    """Of at most 64, at 32 positions: translations of up to 32 tokens then compile one program instead of two."""
    config = DecodingConfig(beam_size=2, max_length=longest)
    begin, _ = flax_transformer.decoding.programs.search_programs((CONFIG.replace(max_length=40),), config)
    src = sources(sentences, 5)
    given = np.zeros((sentences, 2, 0)), np.zeros((sentences, 0), int)
    *_, past = begin([named_arrays(twins[0])], [(src, src != CONFIG.pad_id)], *given)
    assert past.ancestors.shape == (sentences, 2, first)
    assert past.layers[0][0].keys.shape[-1] == past.layers[0][0].values.shape[-2] == 2 * first


def test_pictures(tmp_path):
    targets, sources = ["▁a", "$5", "家"], ["ein", "$5", "ein_sehr_langes_Wort", "</s>"]
    weights = np.array([[0.8, 0.2, 0, 0], [0, 0.4, 0.2, 0.2], [0, 0, 0.1, 0.9]])
    assert attention_blocks(weights, targets, sources).splitlines() == [
        "       e",
        "       i",
        "       n",
        "       _",
        "       s",
        "       e",
        "       h",
        "       r",
        "       _ <",
        "   e   l /",
        "   i $ a s",
        "   n 5 … >",
        "▁a ██░░",
        "$5   ▒▒░░░░",
        "家       ██",
    ]
    targets[2] = "home"  # matplotlib's default font has no Chinese glyphs
    attention_plot(np.stack([weights, weights / 2]), targets, sources, tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")
    figure = attention_plot(weights, targets, sources, titles=["layer 1"])
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == sources
    assert [label.get_text() for label in axes.get_yticklabels()] == targets
    assert axes.get_title() == "layer 1"
    with pytest.raises(ValueError, match=r"^weights: must have .* 3 target and 3 source tokens, not \[3, 4\]"):
        attention_plot(weights, targets, sources[:3])
    with pytest.raises(ValueError, match=r"^weights: must have shape \(target, source\), not \[2, 3, 4\]"):
        attention_blocks(np.stack([weights, weights]), targets, sources)
    with pytest.raises(ValueError, match=r"^titles: must have one title per panel, 2, not 1"):
        attention_plot(np.stack([weights, weights]), targets, sources, titles=["one"])
