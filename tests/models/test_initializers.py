"""Initial values: both frameworks draw from the named distribution."""

import math

import numpy as np
import pytest
import torch
from flax import nnx
from scipy import stats
from transformers import T5Config, T5ForConditionalGeneration

from twinax import TransformerConfig, convert, flax_transformer, torch_reference

D, F, V = 40, 200, 300
CONFIG = TransformerConfig(
    src_vocab_size=V, tgt_vocab_size=V, d_model=D, num_heads=2, d_ff=F, num_encoder_layers=1, num_decoder_layers=1
)
INNER, OUTER, TABLE = (
    "encoder.layers.0.feed_forward.inner_proj.kernel",  # (D, F)
    "encoder.layers.0.feed_forward.outer_proj.kernel",  # (F, D)
    "src_embedding.embedding",  # (V, D)
)


def flax_arrays(config):
    return flax_transformer.named_arrays(flax_transformer.Transformer(config, rngs=nnx.Rngs(7)))


def torch_arrays(config):
    model = torch_reference.Transformer(config, generator=torch.Generator().manual_seed(7))
    return convert.to_params(model.state_dict(), config)


def uniform(bound):
    return stats.uniform(-bound, 2 * bound)


def truncated(std):
    return stats.truncnorm(-2, 2, scale=std / stats.truncnorm(-2, 2).std())


LINEAR = {
    "xavier_uniform": lambda inputs, outputs: uniform(math.sqrt(6 / (inputs + outputs))),
    "xavier_uniform_torch_bias": lambda inputs, outputs: uniform(math.sqrt(6 / (inputs + outputs))),
    "xavier_uniform_per_head": lambda inputs, outputs: uniform(math.sqrt(6 / (inputs + outputs))),
    "lecun_normal": lambda inputs, outputs: truncated(inputs**-0.5),
    "normal_rsqrt_d_model": lambda inputs, outputs: stats.norm(0, D**-0.5),
    "mesh_tensorflow": lambda inputs, outputs: stats.norm(0, inputs**-0.5),
    "torch_default": lambda inputs, outputs: uniform(inputs**-0.5),
}
EMBEDDING = {
    "normal_rsqrt_d_model": stats.norm(0, D**-0.5),
    "xavier_uniform": uniform(math.sqrt(6 / (V + D))),
    "torch_default": stats.norm(0, 1),
}


def follows(values, distribution):
    """Kolmogorov-Smirnov test over at least 8,000 values: a standard deviation off by 5% has p < 1e-3."""
    return stats.kstest(np.asarray(values).ravel(), distribution.cdf).pvalue > 1e-3


@pytest.mark.parametrize("draw", [flax_arrays, torch_arrays])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, draw):
    arrays = draw(CONFIG.replace(linear_init=name))
    assert follows(arrays[INNER], LINEAR[name](D, F))
    assert follows(arrays[OUTER], LINEAR[name](F, D))
    wrong_way_round = LINEAR[name](F, D)
    if name in ("lecun_normal", "mesh_tensorflow", "torch_default"):
        assert not follows(arrays[INNER], wrong_way_round)
    biases = np.concatenate([np.ravel(a) for n, a in arrays.items() if n.endswith("inner_proj.bias")])
    if name in ("torch_default", "xavier_uniform_torch_bias", "xavier_uniform_per_head"):
        assert follows(biases, uniform(D**-0.5))
    else:
        assert (biases == 0).all()


@pytest.mark.parametrize("draw", [flax_arrays, torch_arrays])
def test_each_head_has_a_bound_of_its_own(draw):
    arrays = draw(CONFIG.replace(d_model=128, num_heads=4, linear_init="xavier_uniform_per_head"))
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        kernel = arrays[f"encoder.layers.0.self_attention.{name}.kernel"]
        outputs = 128 if name == "out_proj" else 32
        assert follows(kernel, uniform(math.sqrt(6 / (128 + outputs)))), name


@pytest.mark.parametrize("draw", [flax_arrays, torch_arrays])
@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(70, None), (90, 50), (12, 100)])
def test_the_bound_of_a_head_of_another_width_is_that_of_its_own_matrix(head_dim, v_head_dim, draw):
    """The oracle is PyTorch's initializer on a matrix of one head, (head width, d_model)."""
    widths = {"head_dim": head_dim, "v_head_dim": v_head_dim}
    arrays = draw(CONFIG.replace(d_model=64, num_heads=4, linear_init="xavier_uniform_per_head", **widths))
    value = v_head_dim or head_dim
    shapes = {"q_proj": (head_dim, 64), "k_proj": (head_dim, 64), "v_proj": (value, 64), "out_proj": (64, 4 * value)}
    for name, shape in shapes.items():
        kernel = arrays[f"encoder.layers.0.self_attention.{name}.kernel"]
        bound = float(torch.nn.init.xavier_uniform_(torch.empty(shape)).abs().max())
        assert abs(float(np.abs(kernel).max()) / bound - 1) < 0.02, name


@pytest.mark.parametrize("head_dim", [3, 8, 31])
def test_values_are_as_wide_as_keys_by_default(head_dim):
    """T5's one `d_kv` is the oracle."""
    oracle = (
        T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=D, d_kv=head_dim, num_heads=2, d_ff=4, num_layers=1))
        .encoder.block[0]
        .layer[0]
        .SelfAttention
    )
    for draw in (flax_arrays, torch_arrays):
        arrays = draw(CONFIG.replace(head_dim=head_dim))
        for name, layer in {"q_proj": oracle.q, "k_proj": oracle.k, "v_proj": oracle.v, "out_proj": oracle.o}.items():
            for part in ("encoder.layers.0.self_attention", "decoder.layers.0.cross_attention"):
                assert arrays[f"{part}.{name}.kernel"].shape == tuple(layer.weight.T.shape)


@pytest.mark.parametrize("draw", [flax_arrays, torch_arrays])
@pytest.mark.parametrize("name", EMBEDDING)
def test_embedding(name, draw):
    arrays = draw(CONFIG.replace(embedding_init=name, positions="stored", max_length=V))
    assert follows(arrays[TABLE], EMBEDDING[name])
    assert follows(arrays["tgt_input.positions.table"], EMBEDDING[name])


@pytest.mark.parametrize("draw", [flax_arrays, torch_arrays])
@pytest.mark.parametrize("name", ["torch_padding_idx", "xavier_uniform_padding_idx"])
def test_padding_begins_at_zero(draw, name):
    arrays = draw(CONFIG.replace(embedding_init=name, positions="stored", max_length=V, pad_id=3))
    rows = np.flatnonzero((np.asarray(arrays[TABLE]) == 0).all(1))
    assert rows.tolist() == [3]
    distribution = EMBEDDING[{"torch_padding_idx": "torch_default"}.get(name, "xavier_uniform")]
    assert follows(np.delete(arrays[TABLE], 3, 0), distribution)
    assert follows(arrays["tgt_input.positions.table"], distribution)


@pytest.mark.parametrize("draw", [flax_arrays, torch_arrays])
def test_norms_start_as_the_identity_and_tables_differ(draw):
    arrays = draw(CONFIG)
    assert all((np.asarray(a) == 1).all() for n, a in arrays.items() if n.endswith(".scale"))
    assert not np.array_equal(arrays["src_embedding.embedding"], arrays["tgt_embedding.embedding"])
    kernels = [np.asarray(a) for n, a in arrays.items() if n.endswith("q_proj.kernel")]
    assert not any(np.array_equal(kernels[0], kernel) for kernel in kernels[1:])


@pytest.mark.parametrize("draw", [flax_arrays, torch_arrays])
def test_a_seed_repeats(draw):
    assert all(np.array_equal(a, b) for a, b in zip(draw(CONFIG).values(), draw(CONFIG).values(), strict=True))


def test_torch_default_is_what_torch_itself_draws():
    linear = torch.nn.Linear(D, F)
    assert follows(linear.weight.detach(), LINEAR["torch_default"](D, F))
    assert follows(torch.nn.Embedding(V, D).weight.detach(), EMBEDDING["torch_default"])


# a parameter's name in twinax -> in transformers
T5_NAMES = {
    "src_embedding.embedding": "shared",
    "encoder.relative_positions.embedding": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
    "encoder.layers.0.self_attention.q_proj.kernel": "encoder.block.0.layer.0.SelfAttention.q",
    "decoder.layers.0.cross_attention.q_proj.kernel": "decoder.block.0.layer.1.EncDecAttention.q",
    "decoder.layers.0.cross_attention.k_proj.kernel": "decoder.block.0.layer.1.EncDecAttention.k",
    "decoder.layers.0.self_attention.v_proj.kernel": "decoder.block.0.layer.0.SelfAttention.v",
    "decoder.layers.0.self_attention.out_proj.kernel": "decoder.block.0.layer.0.SelfAttention.o",
    "encoder.layers.0.feed_forward.gate_proj.kernel": "encoder.block.0.layer.1.DenseReluDense.wi_0",
    "encoder.layers.0.feed_forward.inner_proj.kernel": "encoder.block.0.layer.1.DenseReluDense.wi_1",
    "encoder.layers.0.feed_forward.outer_proj.kernel": "encoder.block.0.layer.1.DenseReluDense.wo",
    "output.proj.kernel": "lm_head",
}


@pytest.mark.parametrize("draw", [flax_arrays, torch_arrays])
def test_a_new_t5_is_transformers_s(draw):
    """Two-sample Kolmogorov-Smirnov tests; of 4,096 values, a standard deviation off by 25% has p < 1e-3."""
    sizes = {"d_model": 64, "num_heads": 4, "d_ff": 160}
    settings = T5Config(
        vocab_size=V, d_kv=20, num_layers=1, relative_attention_num_buckets=999, feed_forward_proj="gated-gelu", **sizes
    )
    settings.tie_word_embeddings = False  # its constructor always ties
    torch.manual_seed(0)
    oracle = T5ForConditionalGeneration(settings).state_dict()
    config = CONFIG.replace(
        **sizes,
        head_dim=20,
        shared_embeddings=True,
        ffn_gate=True,
        relative_positions="shared",
        relative_position_buckets=999,
        relative_position_max_distance=2000,
        linear_init="mesh_tensorflow",
        embedding_init="torch_default",
    )
    arrays = draw(config)
    for name, oracle_name in T5_NAMES.items():
        expected = oracle[f"{oracle_name}.weight"].numpy().ravel()
        assert stats.ks_2samp(np.asarray(arrays[name]).ravel(), expected).pvalue > 1e-3, name
    queries, keys = (arrays[f"decoder.layers.0.self_attention.{name}_proj.kernel"] for name in ("q", "k"))
    assert stats.ks_2samp(np.ravel(queries), np.ravel(keys)).pvalue < 1e-9
