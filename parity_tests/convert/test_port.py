"""Conversion: bit-identical round trips, ties are preserved, and a wrong transposition always fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.convert import port
from twinax.convert.rules import IDENTITY, TRANSPOSE
from twinax.parity.functions import Batch, flax_function, random_arrays, random_batch, run_torch, torch_function
from twinax.parity.harness import compare_arrays
from twinax.parity.ladder import CRITERIA, rung_of

FLOAT64 = {"param_dtype": "float64", "compute_dtype": "float64"}
OBLONG = TransformerConfig(
    src_vocab_size=11,
    tgt_vocab_size=13,
    d_model=6,
    num_heads=3,
    head_dim=5,
    v_head_dim=4,
    d_ff=7,
    num_encoder_layers=1,
    num_decoder_layers=1,
    max_length=8,
    norm_placement="pre",
    final_norm=True,
    embedding_norm="before_dropout",
    **FLOAT64,
)
# Every matrix is square, so that a transposed one passes all shape checks.
SQUARE = OBLONG.replace(
    src_vocab_size=6, tgt_vocab_size=6, head_dim=2, v_head_dim=2, d_ff=6, max_length=6, positions="learned"
)
KERNELS = [name for name in port.flax_specs(SQUARE) if name.endswith(".kernel")]


def same_bits(left, right):
    return list(left) == list(right) and all(
        np.asarray(left[k]).dtype == np.asarray(right[k]).dtype
        and np.asarray(left[k]).tobytes() == np.asarray(right[k]).tobytes()
        for k in left
    )


@given(
    dtype=st.sampled_from(["float64", "float32", "bfloat16", "float16"]),
    positions=st.sampled_from(["learned", "stored", "sinusoidal_half", "none"]),
    tied=st.booleans(),
    square=st.booleans(),
    seed=st.integers(0, 99),
)
def test_round_trip_is_bit_identical(dtype, positions, tied, square, seed):
    config = (SQUARE if square else OBLONG).replace(param_dtype=dtype, positions=positions, tied_output=tied)
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    arrays = {  # arbitrary bits, including NaN payloads
        name: rng.integers(0, 256, kind.itemsize * int(np.prod(spec.shape)), np.uint8).view(kind).reshape(spec.shape)
        for name, spec in port.flax_specs(config).items()
    }
    assert same_bits(arrays, convert.to_params(convert.to_state_dict(arrays, config), config))


def test_models_round_trip():
    model = flax_transformer.Transformer(OBLONG, rngs=nnx.Rngs(0))
    torch_model = convert.to_torch(model)
    round_trip_model = convert.to_flax(torch_model)
    assert round_trip_model.config == torch_model.config == model.config
    assert same_bits(flax_transformer.named_arrays(model), flax_transformer.named_arrays(round_trip_model))
    graphs = nnx.split(model)[0], nnx.split(round_trip_model)[0]
    assert graphs[0] == graphs[1]


def test_bare_trees_in_any_form():
    model = flax_transformer.Transformer(OBLONG, rngs=nnx.Rngs(0))
    by_name = flax_transformer.named_arrays(model)
    state = nnx.state(model)
    forms = [by_name, state, nnx.to_pure_dict(state)]
    first, *other_state_dicts = (convert.to_state_dict(form, OBLONG) for form in forms)
    for state_dict in other_state_dicts:
        assert all(torch.equal(first[name], state_dict[name]) for name in first)


def test_gradients_convert_without_the_fixed_tables():
    params = nnx.state(flax_transformer.Transformer(OBLONG, rngs=nnx.Rngs(0)), nnx.Param)
    state_dict = convert.to_state_dict(params, OBLONG, trained_only=True)
    assert set(state_dict) == {name for name, _ in torch_reference.Transformer(OBLONG).named_parameters()}
    assert same_bits(convert.to_params(state_dict, OBLONG, trained_only=True), flax_transformer.named_arrays(params))


def test_memory_is_not_shared():
    model = flax_transformer.Transformer(OBLONG, rngs=nnx.Rngs(0))
    initial_arrays = {k: np.array(v) for k, v in flax_transformer.named_arrays(model).items()}
    torch_model = convert.to_torch(model)
    round_trip_model = convert.to_flax(torch_model)
    with torch.no_grad():
        for tensor in torch_model.state_dict().values():
            tensor.zero_()
    assert same_bits(initial_arrays, flax_transformer.named_arrays(model))
    assert same_bits(initial_arrays, flax_transformer.named_arrays(round_trip_model))


@pytest.mark.parametrize("tied", [True, False])
def test_ties_stay_ties(tied):
    config = SQUARE.replace(tied_output=tied, shared_embeddings=tied)
    torch_model = convert.to_torch(convert.to_flax(torch_reference.Transformer(config)))
    tables = [name for name in torch_model.state_dict() if "embedding" in name or "output.proj" in name]
    assert len(tables) == (1 if tied else 3)
    pointers = [tensor.data_ptr() for tensor in torch_model.state_dict().values()]
    assert len(set(pointers)) == len(pointers)
    with torch.no_grad():
        torch_model.src_embedding.weight.zero_()
    logits = torch_model(torch.ones(1, 2, dtype=torch.long), torch.ones(1, 2, dtype=torch.long))
    assert torch.equal(logits, torch_model.output.bias.expand(1, 2, -1)) == tied


def test_fixed_tables_are_carried_not_recomputed():
    config = OBLONG.replace(positions="sinusoidal_half")
    arrays = random_arrays(config, 0)
    arrays["src_input.positions.table"] = np.full_like(arrays["src_input.positions.table"], 0.25)
    torch_model = torch_reference.Transformer.from_state_dict(config, convert.to_state_dict(arrays, config))
    assert (torch_model.src_input.positions.table == 0.25).all()
    round_trip_arrays = flax_transformer.named_arrays(convert.to_flax(torch_model))
    assert same_bits(dict(sorted(arrays.items())), round_trip_arrays)
    assert "src_input.positions.table" not in dict(torch_model.named_parameters())


def test_errors_are_listed_together():
    arrays = random_arrays(OBLONG, 0)
    del arrays["output.bias"]
    arrays["output.extra"] = np.ones(2)
    arrays["encoder.layers.0.feed_forward.inner_proj.kernel"] = np.ones((7, 6))
    arrays["decoder.final_norm.scale"] = np.ones(6, np.float32)
    with pytest.raises(convert.ConversionError) as error:
        convert.to_state_dict(arrays, OBLONG)
    assert str(error.value).splitlines() == [
        "4 arrays do not fit the model:",
        "  missing: output.bias, float64[13]",
        "  not in the model: output.extra, float64[2]",
        "  wrong: decoder.final_norm.scale is float32[6], must be float64[6]",
        "  wrong: encoder.layers.0.feed_forward.inner_proj.kernel is float64[7, 6], must be float64[6, 7]",
    ]
    with pytest.raises(convert.ConversionError) as error:
        convert.to_params({}, OBLONG)
    number = len(port.flax_specs(OBLONG))
    assert str(error.value).splitlines()[0] == f"{number} arrays do not fit the model:"
    assert len(str(error.value).splitlines()) == 1 + number


def test_float64_is_refused_where_jax_would_cut_it():
    torch_model = torch_reference.Transformer(OBLONG)
    with jax.enable_x64(False):
        with pytest.raises(convert.ConversionError, match="jax_enable_x64"):
            convert.to_flax(torch_model)
        with pytest.raises(ValueError, match="jax_enable_x64"):
            flax_transformer.Transformer(OBLONG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def square():
    """(batch, arrays, the PyTorch outputs) of the square model."""
    batch = random_batch(SQUARE, np.random.default_rng(0), 3, 5, 4)
    arrays = random_arrays(SQUARE, 0)
    return batch, arrays, torch_function(SQUARE)(arrays, batch)


def test_square_model_is_equal_as_it_is(square):
    batch, arrays, reference = square
    compare_arrays(reference, flax_function(SQUARE)(arrays, batch), criteria=CRITERIA, rung_of=rung_of).check()


@pytest.mark.parametrize("name", KERNELS)
def test_each_transposition_is_seen(name, square):
    """A transposed square matrix passes all shape checks, so it must fail on the ladder."""
    batch, arrays, reference = square
    transposed_arrays = {**arrays, name: arrays[name].T}
    report = compare_arrays(
        reference, flax_function(SQUARE)(transposed_arrays, batch), criteria=CRITERIA, rung_of=rung_of
    )
    sublayer = "attention weights" if (".q_proj." in name or ".k_proj." in name) else "sublayers"
    assert any(finding.rung in (sublayer, "logits") for finding in report.failures)
    assert report.failed_rung != "gradients"


@pytest.mark.parametrize("config", [SQUARE, OBLONG])
@pytest.mark.parametrize("leaf", ["kernel", "embedding", "table"])  # the other leaves are vectors
def test_each_rule_flipped_is_seen(leaf, config, monkeypatch):
    """A rule with the wrong transform fails: by shape for oblong matrices, on the ladder for square ones."""
    batch, arrays = random_batch(config, np.random.default_rng(0), 3, 5, 4), random_arrays(config, 0)
    reference = flax_function(config)(arrays, batch)
    name, transform = port.LEAVES[leaf]
    with monkeypatch.context() as patch:
        patch.setitem(port.LEAVES, leaf, (name, IDENTITY if transform is TRANSPOSE else TRANSPOSE))
        port.port_of.cache_clear()  # the rules of a config are cached
        state_dict = convert.to_state_dict(arrays, config)
    port.port_of.cache_clear()
    if config is OBLONG:
        with pytest.raises(RuntimeError, match="size mismatch"):
            torch_reference.Transformer.from_state_dict(config, state_dict)
        return
    outputs = run_torch(torch_reference.Transformer.from_state_dict(config, state_dict), batch, gradients=False)
    reference = {path: value for path, value in reference.items() if not path.startswith("gradients.")}
    assert not compare_arrays(reference, outputs, criteria=CRITERIA, rung_of=rung_of).ok


def test_every_leaf_of_the_model_has_a_rule_and_every_rule_a_leaf():
    leaves = {name.rpartition(".")[2] for name in port.flax_specs(OBLONG)}
    assert leaves == set(port.LEAVES)


def test_outputs_of_ported_models_agree():
    torch_model = torch_reference.Transformer(OBLONG, generator=torch.Generator().manual_seed(0))
    flax_model = convert.to_flax(torch_model)
    batch = random_batch(OBLONG, np.random.default_rng(0), 3, 5, 4)
    tokens = Batch(*map(torch.from_numpy, batch[:3]))
    compare_arrays(
        {"logits": torch_model(tokens.src_tokens, tokens.tgt_tokens)},
        {"logits": nnx.jit(lambda model, *tokens: model(*tokens))(flax_model, *map(jnp.asarray, batch[:2]))},
        criteria=CRITERIA,
        rung_of=rung_of,
    ).check()
