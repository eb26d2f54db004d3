"""Cached = uncached = PyTorch = `transformers`, token for token."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.configs.decoding import LENGTH_PENALTIES, DecodingConfig
from twinax.flax_transformer import decode
from twinax.parity_tests.decoding import compare_decoded, transformers_generate
from twinax.parity_tests.functions import random_arrays
from twinax.torch_reference import beam

SMALL = TransformerConfig.preset(
    "tiny",
    d_model=16,
    d_ff=24,
    num_heads=2,
    decoder_num_heads=4,
    num_encoder_layers=1,
    num_decoder_layers=2,
    max_length=7,
    src_vocab_size=13,
    tgt_vocab_size=17,
    param_dtype="float64",
    compute_dtype="float64",
)


@cache
def arrays_of(config: TransformerConfig, seed: int, twins: bool = False) -> dict[str, Any]:
    """Random weights; ends are likely. Where there are `twins`, each second token is the one before it again."""
    arrays = random_arrays(config, seed)
    kernel, bias = arrays["output.proj.kernel"], arrays["output.bias"]
    kernel *= 2
    bias[config.eos_id] += 1.5
    if twins:
        for array in (kernel.T, bias, arrays["tgt_embedding.embedding"]):
            array[4::2] = array[3:-1:2]
    return arrays


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> Any:
    """float64, and a cache that has to grow in so short sentences."""
    monkeypatch.setattr(decode, "SHORTEST", 2)
    with jax.enable_x64(True):
        yield


def twins_of(
    config: TransformerConfig, arrays: Any
) -> tuple[flax_transformer.Transformer, torch_reference.Transformer]:
    """The Flax and the PyTorch model of these arrays."""
    model = flax_transformer.Transformer.from_arrays(config, {name: jnp.asarray(a) for name, a in arrays.items()})
    return model, convert.to_torch(model)


@st.composite
def sources(draw: st.DrawFn, batch: int = 3) -> np.ndarray:
    """Sentences of different lengths, with holes."""
    tokens = st.integers(3, SMALL.src_vocab_size - 1) | st.just(SMALL.pad_id)
    row = st.lists(tokens, min_size=7, max_size=7).filter(any)
    return np.array(draw(st.lists(row, min_size=batch, max_size=batch)))


@pytest.mark.parametrize(("beam_size", "cache"), [(1, True), (2, True), (3, True), (3, False), (4, True), (5, True)])
def test_flax_and_pytorch_find_the_same(beam_size: int, cache: bool) -> None:
    config = DecodingConfig(beam_size=beam_size, n_best=beam_size, max_length=4, cache=cache)
    tied = []

    @settings(max_examples=15, deadline=None)
    @given(src=sources(), seed=st.integers(0, 3), equal_scores=st.booleans())
    def check(src: np.ndarray, seed: int, equal_scores: bool) -> None:
        model, other = twins_of(SMALL, arrays_of(SMALL, seed, equal_scores))
        expected = torch_reference.generate(other, torch.from_numpy(src), config)  # it has no cache
        agreement = compare_decoded(flax_transformer.generate(model, src, config), expected, rounding=1e-12)
        assert not agreement.different, str(agreement)
        assert agreement.score_error <= 1e-10, str(agreement)
        assert equal_scores or not agreement.ties, str(agreement)
        assert expected.margins is not None
        tied.append(bool(expected.margins.min() < 1e-12))

    check()
    assert set(tied) == {True, False}


# name -> (settings of the model, of decoding): every setting in one case at least
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gnmt, forced, start is padding": (
        {"forced_bos_id": 9, "forced_eos_id": 2, "decoder_start_id": 0, "position_counting": "non_padding"},
        {"length_penalty": "gnmt", "length_exponent": 0.6},
    ),
    "negative exponent, lengths, mask value": (
        {"mask_value": -1e9},
        {"length_exponent": -0.5, "min_length": 3, "max_length": 4},
    ),
    "plain sums, forbidden, start is the end": (
        {"decoder_start_id": 2, "position_offset": 2},
        {"length_exponent": 0.0, "forbidden_ids": (3, 4, 5, 6, 7)},
    ),
    "few tokens, start is zero, odd heads": (
        {"decoder_start": "zero_embedding", "positions": "learned", "head_dim": 3, "v_head_dim": 5},
        {"forbidden_ids": tuple(range(4, 17))},
    ),
    "one token": ({"norm_placement": "post"}, {"max_length": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_settings_mean_the_same_in_both(name: str) -> None:
    changed, chosen = CASES[name]
    model_config = SMALL.replace(**changed)
    model, other = twins_of(model_config, arrays_of(model_config, 0))
    config = DecodingConfig(**{"beam_size": 3, "n_best": 3, **chosen})
    src = np.random.default_rng(0).integers(3, 13, (11, 6))
    src[np.arange(6) >= np.arange(11)[:, None] % 6 + 1] = model_config.pad_id
    expected = torch_reference.generate(other, torch.from_numpy(src), config)
    agreement = compare_decoded(flax_transformer.generate(model, src, config), expected, rounding=1e-12)
    assert agreement.equal == len(src), str(agreement)
    assert agreement.score_error <= 1e-10, str(agreement)
    # Neither the other sentences nor padding change anything.
    alone = torch_reference.generate(other, torch.from_numpy(src[3:4, :4]), config)
    assert (alone.lengths == expected.lengths[3]).all()
    assert (alone.tokens[0] == expected.tokens[3, :, : alone.tokens.shape[-1]]).all()


# family -> settings. Tokens are far apart with weights so large, and where the end is likelier, by END in its logit,
# sentences have many lengths: where all run to the longest, hardly any rule can be told from another.
MARIAN = {"pad_token_id": 100, "decoder_start_token_id": 100, "eos_token_id": 0, "forced_eos_token_id": 0}
FAMILIES = {
    "MarianMTModel": MARIAN | {"init_std": 0.8},
    "BartForConditionalGeneration": {"forced_bos_token_id": 7, "init_std": 0.6},
}
END = 5.0


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, convert.Checkpoint]:
    """A random model of `transformers`, and what it is here."""
    sizes = {"vocab_size": 101, "d_model": 32, "max_position_embeddings": 24}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    torch.manual_seed(0)
    architecture = getattr(transformers, request.param)
    model = architecture(architecture.config_class(**sizes, **FAMILIES[request.param])).eval()
    model.final_logits_bias[0, model.config.eos_token_id] = END
    folder = tmp_path_factory.mktemp("decoding") / "model"
    model.save_pretrained(folder)
    return model, convert.load(folder)


def family_sources(pad_id: int) -> np.ndarray:
    """200 sentences of 2 to 16 tokens."""
    rng = np.random.default_rng(0)
    src = rng.integers(3, 99, (200, 16))
    return np.where(np.arange(16) < rng.integers(2, 17, (200, 1)), src, pad_id)


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_transformers_finds_the_same(family: tuple[Any, convert.Checkpoint], dtype: str, beam_size: int) -> None:
    theirs, checkpoint = family
    theirs = theirs.to(getattr(torch, dtype))
    model_config = checkpoint.config.replace(param_dtype=dtype, compute_dtype=dtype)
    model, other = twins_of(model_config, {name: a.astype(dtype) for name, a in checkpoint.arrays.items()})
    src = family_sources(model_config.pad_id)
    config = DecodingConfig(beam_size=beam_size, n_best=beam_size, max_length=24)
    oracle = transformers_generate(theirs, model_config, src, config)
    expected = torch_reference.generate(other, torch.from_numpy(src), config)
    lengths = expected.lengths[:, 0]
    assert len(set(lengths.tolist())) >= 8  # or the test is blind
    assert (lengths < 24).mean() > 0.2
    assert set(expected.tokens[:, :, 0].flat) == {7} or model_config.forced_bos_id is None
    for found in (flax_transformer.generate(model, src, config), oracle):
        # transformers casts the logits to float32, so that it rounds in either case
        wide = dtype == "float64" and found is not oracle
        agreement = compare_decoded(found, expected, rounding=1e-12 if wide else 1e-5)
        assert not agreement.different, str(agreement)
        assert len(agreement.ties) <= (0 if wide else 1), str(agreement)
        assert not wide or agreement.score_error <= 1e-10, str(agreement)


@pytest.mark.parametrize(("length_exponent", "min_length"), [(0.5, 1), (2.0, 5), (0.0, 1), (-1.0, 1)])
def test_transformers_penalises_and_bounds_lengths_alike(
    family: tuple[Any, convert.Checkpoint], length_exponent: float, min_length: int
) -> None:
    theirs, checkpoint = family
    src = family_sources(checkpoint.config.pad_id)
    config = DecodingConfig(
        beam_size=4, n_best=4, length_exponent=length_exponent, min_length=min_length, max_length=20, forbidden_ids=(8,)
    )
    oracle = transformers_generate(theirs.float(), checkpoint.config, src, config)
    expected = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), config)
    agreement = compare_decoded(oracle, expected, rounding=1e-5)
    assert not agreement.different, str(agreement)
    assert len(agreement.ties) <= 1, str(agreement)
    assert (expected.lengths >= min_length).all()
    assert not (expected.tokens == 8).any()


# name -> (how to break the rule, sentences of 200 that have to differ)
WRONG_RULES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], int]] = {
    "an end of any rank finishes": (lambda m: m.setattr(beam, "may_finish", lambda rank, beam_size: rank >= 0), 2),
    "done with K finished": (lambda m: m.setattr(beam, "settled", lambda worst, best: worst > -torch.inf), 40),
    "never done": (lambda m: m.setattr(beam, "settled", lambda worst, best: worst > torch.inf), 20),
    "the start counts": (lambda m: m.setitem(LENGTH_PENALTIES, "power", lambda n, a: (n + 1) ** a), 40),
    "the end does not count": (
        lambda m: m.setitem(LENGTH_PENALTIES, "power", lambda n, a: np.maximum(n - 1, 1) ** a),
        20,
    ),
}


@pytest.mark.parametrize("rule", WRONG_RULES)
@pytest.mark.parametrize("family", ["BartForConditionalGeneration"], indirect=True)
def test_another_rule_is_seen(
    family: tuple[Any, convert.Checkpoint], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, checkpoint = family
    src = family_sources(checkpoint.config.pad_id)
    config = DecodingConfig(beam_size=4, n_best=4, max_length=24)
    oracle = transformers_generate(theirs.float(), checkpoint.config, src, config)
    break_rule, fewest = WRONG_RULES[rule]
    break_rule(monkeypatch)
    found = torch_reference.generate(checkpoint.to_torch(), torch.from_numpy(src), config)
    assert len(compare_decoded(oracle, found, rounding=1e-5).different) >= fewest
