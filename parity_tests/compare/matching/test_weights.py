"""Parameters are recognized by their values: in stored pairs, whose converters are not ours, and in random packings."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parity_tests.support import conversion
from twinax import TransformerConfig, convert
from twinax.compare.matching.weights import match_weights
from twinax.convert.port import flax_specs, port_rules
from twinax.parity.functions import random_arrays


def rebuilt(match, reference, candidate):
    """The candidate's parameter from the reference's, as the match says."""
    result = np.full(candidate.shape, np.nan if match.padding is None else match.padding)
    for part in match.parts:
        source = reference[part.source] + (reference[match.added_to] if match.added_to else 0) + match.shift
        result[part.region] = part.layout.apply(source)
    return result


def assert_rebuilt(weights, reference, candidate):
    for name, match in weights.matches.items():
        np.testing.assert_allclose(rebuilt(match, reference, candidate[name]), candidate[name], rtol=1e-6, atol=1e-6)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


def test_our_own_twins():
    """Every parameter is matched with the one that the port's rules name, arranged as they say."""
    config = TransformerConfig.preset("tiny", head_dim=5, v_head_dim=3, positions="learned")
    candidate = random_arrays(config, 0)
    reference = {name: t.numpy() for name, t in convert.to_state_dict(candidate, config).items()}
    weights = match_weights(reference, candidate)
    assert weights.ok
    assert weights.unused == ()
    sources = {rule.source[0]: rule.target[0] for rule in port_rules(flax_specs(config))}
    assert {name: match.sources for name, match in weights.matches.items()} == {n: (s,) for n, s in sources.items()}
    assert_rebuilt(weights, reference, candidate)


@pytest.mark.parametrize("name", ["BART", "M2M100"])
def test_families_of_transformers(name, tmp_path):
    """The oracle is the reading of the directory, which has names and layouts of its own."""
    model = conversion.random_model(name)
    model.save_pretrained(tmp_path)
    checkpoint = convert.load(tmp_path)
    reference = {n: t.detach().numpy() for n, t in model.state_dict().items() if t.is_floating_point()}
    trained = {name: checkpoint.arrays[name] for name in flax_specs(checkpoint.config, trained_only=True)}
    weights = match_weights(reference, trained)
    assert weights.ok
    assert_rebuilt(weights, reference, trained)


def test_packed_projections_both_ways():
    attention = nn.MultiheadAttention(8, 2)
    packed = {n: p.detach().numpy() for n, p in attention.named_parameters()}
    packed |= {n: numbers(i, *a.shape) for i, (n, a) in enumerate(packed.items())}
    single = {
        f"{n}.{kind}": packed[f"in_proj_{kind}"][8 * i : 8 * i + 8].T
        for i, n in enumerate("qkv")
        for kind in ("weight", "bias")
    }
    apart = match_weights(packed, single)
    assert apart.ok
    assert {m.sources for m in apart.matches.values()} == {("in_proj_weight",), ("in_proj_bias",)}
    assert_rebuilt(apart, packed, single)
    together = match_weights(single, packed)
    assert together.unmatched == ("out_proj.weight", "out_proj.bias")
    assert together.matches["in_proj_weight"].sources == ("q.weight", "k.weight", "v.weight")
    assert_rebuilt(together, single, packed)


def test_blocks_of_two_parameters_in_turn():
    reference = {"a": numbers(0, 4, 6), "b": numbers(1, 4, 6)}
    candidate = {"ab": np.concatenate([reference[n][i : i + 2] for i in (0, 2) for n in "ab"])}
    weights = match_weights(reference, candidate)
    assert weights.ok
    assert [part.source for part in weights.matches["ab"].parts] == ["a", "b", "a", "b"]
    assert_rebuilt(weights, reference, candidate)


def test_heads_stacks_flips_padding_sums_and_shifts():
    lstm = nn.LSTM(3, 4)
    reference = {n: numbers(i, *p.shape) for i, (n, p) in enumerate(lstm.named_parameters())}
    reference |= {f"layers.{i}.w": numbers(20 + i, 6, 4) for i in range(3)}
    reference |= {
        "conv": numbers(30, 5, 4, 3, 3),
        "table": numbers(31, 9, 4),
        "scale": numbers(32, 7),
        "unused": numbers(33, 2),
    }
    gates = reference["weight_ih_l0"].reshape(4, 4, 3)
    candidate = {
        "gates": gates[[1, 0, 2, 3]].reshape(16, 3).T,  # another order of the gates
        "bias": (reference["bias_ih_l0"] + reference["bias_hh_l0"]).astype(np.float32),
        "stack": np.stack([reference[f"layers.{i}.w"].T for i in range(3)]),
        "heads": reference["weight_hh_l0"].reshape(4, 4, 4).transpose(2, 0, 1),
        "kernel": reference["conv"].transpose(2, 3, 1, 0)[::-1, ::-1],
        "padded": np.concatenate([reference["table"], np.zeros((3, 4))]),
        "norm": (reference["scale"] - 1).astype(np.float32),
    }
    weights = match_weights(reference, candidate)
    assert weights.ok
    assert weights.unused == ("unused",)
    assert set(weights.matches["bias"].sources) == {"bias_ih_l0", "bias_hh_l0"}
    assert (weights.matches["norm"].shift, weights.matches["padded"].padding) == (-1, 0.0)
    assert len(weights.matches["gates"].parts) == 3  # f; i; g and o
    assert weights.matches["stack"].sources == ("layers.0.w", "layers.1.w", "layers.2.w")
    assert_rebuilt(weights, reference, candidate)


@given(st.permutations(range(5)), st.integers(0, 2**31), st.sampled_from([np.float32, np.float16]))
@settings(max_examples=20)
def test_equal_values_here_and_there_do_not_mislead(order, seed, dtype):
    """Float16 has few values: most occur in several parameters, and layouts follow from those that occur once."""
    rng = np.random.default_rng(seed)
    reference = {f"r{i}": rng.standard_normal((12, 8)).astype(dtype) for i in range(5)}
    candidate = {f"c{i}": reference[f"r{i}"].T.reshape(2, 4, 12) for i in order}
    weights = match_weights(reference, candidate)
    assert weights.ok
    assert {name: match.sources for name, match in weights.matches.items()} == {f"c{i}": (f"r{i}",) for i in range(5)}
    assert_rebuilt(weights, reference, candidate)


def test_what_values_do_not_decide():
    """Constants: one possible source is taken, several are named. A shuffled parameter is not matched."""
    reference = {
        "a": np.zeros(3),
        "b": np.zeros(3),
        "ones": np.ones((2, 2)),
        "w": numbers(0, 4, 4),
        "tied": numbers(0, 4, 4),
    }
    shuffled = np.random.default_rng(1).permutation(reference["w"].ravel()).reshape(4, 4)
    candidate = {"zero": np.zeros(3), "scale": np.ones((2, 2)), "w": shuffled, "other": numbers(5, 2)}
    weights = match_weights(reference, candidate)
    assert weights.ambiguous == {"zero": ("a", "b"), "w": ("w",)}
    assert weights.matches["scale"].sources == ("ones",)
    assert weights.unmatched == ("other",)
    assert weights.ties == {"w": ("tied",)}
    assert not weights.ok


def test_the_large_is_found_in_seconds():
    reference = {f"w{i}": torch.randn(512, 512).numpy() for i in range(4)}
    assert match_weights(reference, {name: w.T for name, w in reference.items()}).ok


def test_transformers_has_no_name_in_common():
    gpt = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=31, n_positions=13, n_embd=12, n_layer=2, n_head=3)
    )
    reference = {n: numbers(i, *p.shape) for i, (n, p) in enumerate(gpt.named_parameters())}
    candidate = {str(i): a.T for i, a in enumerate(reference.values())}
    weights = match_weights(reference, candidate)
    assert [match.sources for match in weights.matches.values()] == [(name,) for name in reference]


def test_numbers_that_occur_several_times_do_not_hide_an_arrangement():
    """Rounded to two digits, most numbers of these parameters have an equal somewhere."""
    reference = {name: np.round(numbers(seed, 12, 20), 2) for seed, name in enumerate("qkv")}
    packed = np.concatenate([array.T.reshape(20, 3, 4) for array in reference.values()], 1)
    weights = match_weights(reference, {"qkv": packed})
    assert len(np.unique(packed)) < packed.size / 2
    assert [part.source for part in weights.matches["qkv"].parts] == ["q", "k", "v"]
    assert_rebuilt(weights, reference, {"qkv": packed})
