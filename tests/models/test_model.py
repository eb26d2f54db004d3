"""Both models as a user calls them: wrong input, odd sizes, and calls that leave no state behind."""

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
import torch
from flax import nnx

from twinax import TransformerConfig, convert, flax_transformer, torch_reference

CONFIG = TransformerConfig.preset("tiny", num_encoder_layers=1, num_decoder_layers=1)
SRC, TGT = np.array([[3, 4, 5, 0], [6, 7, 0, 0]]), np.array([[1, 2, 3], [3, 4, 0]])


@pytest.fixture(scope="module")
def twins():
    model = flax_transformer.Transformer(CONFIG, rngs=nnx.Rngs(0))
    return model, convert.to_torch(model)


@pytest.fixture
def no_shape_checker(monkeypatch):
    """Disable jaxtyping's shape checker, which would otherwise raise first."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def call(twins, framework, *arguments, run=lambda model, arrays, masks: model(*arrays, **masks), **keywords):
    to_array = {"flax": jnp.asarray, "torch": torch.as_tensor}[framework]
    model = twins[0 if framework == "flax" else 1]
    return run(model, [*map(to_array, arguments)], {name: to_array(value) for name, value in keywords.items()})


@nnx.jit
def compiled(model, arrays, masks):
    """Operation by operation, Flax compiles a hundred programs for each shape."""
    return model(*arrays, **masks)


def logits_of(twins, framework, *arguments, **keywords):
    run = {"run": compiled} if framework == "flax" else {}
    return np.asarray(call(twins, framework, *arguments, **run, **keywords).tolist())


BATCH3 = np.ones((3, 2), int)
LONG = np.ones((2, 65), int)
WRONG = [
    ((SRC - 3, TGT), {}, r"src_tokens\[0, 3\] is -3: 3 ids are outside the vocabulary, 0 to 100"),
    ((SRC, TGT + 100), {}, r"tgt_tokens\[0, 2\] is 103: 3 ids are outside the vocabulary, 0 to 102"),
    ((SRC, BATCH3), {}, "src_tokens and tgt_tokens: must have the same batch size, not 2 and 3 sentences"),
    ((SRC[0], TGT), {}, r"src_tokens: must be .* of shape \(batch, length\)"),
    ((SRC.astype(np.float32), TGT), {}, "src_tokens: must be .*float32"),
    ((SRC[:, :0], TGT), {}, "src_tokens: length 0 is not between 1 and the config's max_length=64"),
    ((SRC, LONG), {}, "tgt_tokens: length 65 is not between 1 and the config's max_length=64"),
    ((SRC, TGT), {"src_mask": np.ones((2, 3), bool)}, r"src_mask: must be booleans of shape \[2, 4\], as src_tokens"),
    ((SRC, TGT), {"tgt_mask": np.ones((2, 3), int)}, r"tgt_mask: must be booleans .*True = attend"),
]


@pytest.mark.parametrize("framework", ["flax", "torch"])
@pytest.mark.parametrize(("arguments", "keywords", "message"), WRONG, ids=[m[:24] for _, _, m in WRONG])
def test_wrong_input_gets_one_clear_line(twins, no_shape_checker, framework, arguments, keywords, message):
    with pytest.raises(ValueError, match=message) as error:
        call(twins, framework, *arguments, **keywords)
    assert "\n" not in str(error.value)


def test_wrong_dropout_rows(twins, no_shape_checker):
    flax_model, torch_model = twins
    with pytest.raises(ValueError, match=r"dropout_key.rows: must be 2 row numbers"):
        flax_model(jnp.asarray(SRC), jnp.asarray(TGT), dropout_key=flax_transformer.DropoutKey(0, 0, jnp.arange(3)))
    with pytest.raises(ValueError, match=r"dropout_key.rows: must be 2 row numbers"):
        torch_model(torch.tensor(SRC), torch.tensor(TGT), dropout_key=torch_reference.DropoutKey(0, 0, torch.arange(3)))


@pytest.mark.parametrize("token_id", [-1, 101, 2**31 - 1])
def test_inside_jit_a_wrong_id_makes_its_sentence_nan(twins, token_id):
    """Nothing can raise under jit, and JAX by default would clamp the id or wrap it around."""
    graphdef, state = nnx.split(twins[0])
    run = jax.jit(lambda state, src: nnx.merge(graphdef, state)(src, jnp.asarray(TGT)))
    assert np.isfinite(run(state, jnp.asarray(SRC))).all()
    src = SRC.copy()
    src[1, 0] = token_id
    logits = run(state, jnp.asarray(src))
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_the_longest_and_the_shortest(twins, framework):
    assert logits_of(twins, framework, np.ones((1, 64), int), np.ones((1, 64), int)).shape == (1, 64, 103)
    assert logits_of(twins, framework, np.ones((1, 1), int), np.ones((1, 1), int)).shape == (1, 1, 103)
    assert call(twins, framework, np.ones((0, 5), int), np.ones((0, 3), int)).shape == (0, 3, 103)


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_padding_changes_nothing_and_the_future_is_hidden(twins, framework):
    logits = logits_of(twins, framework, SRC, TGT)
    padded_src = np.pad(SRC, ((0, 0), (0, 3)))
    assert np.allclose(logits, logits_of(twins, framework, padded_src, TGT), atol=1e-5)
    other_tgt = TGT.copy()
    other_tgt[:, 2] = 50
    changed_logits = logits_of(twins, framework, SRC, other_tgt)
    assert np.array_equal(logits[:, :2], changed_logits[:, :2])
    assert not np.allclose(logits[:, 2], changed_logits[:, 2], atol=1e-3)
    other_logits = logits_of(twins, framework, SRC[::-1].copy(), TGT)
    assert not np.allclose(logits, other_logits, atol=1e-3)


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_a_given_source_mask_replaces_the_one_from_padding(twins, framework):
    default_logits = logits_of(twins, framework, SRC, TGT)
    assert np.array_equal(default_logits, logits_of(twins, framework, SRC, TGT, src_mask=SRC != 0))
    unmasked_logits = logits_of(twins, framework, SRC, TGT, src_mask=np.ones_like(SRC, bool))
    assert not np.allclose(default_logits, unmasked_logits, atol=1e-4)


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_a_token_hidden_by_the_source_mask_has_no_effect(twins, framework):
    """Neither in the encoder nor in cross-attention."""
    mask = np.array([[True, False, True, False], [True, True, False, False]])
    other = np.where(mask, SRC, 9)
    expected = logits_of(twins, framework, SRC, TGT, src_mask=mask)
    assert np.allclose(expected, logits_of(twins, framework, other, TGT, src_mask=mask), atol=1e-6)
    shown = logits_of(twins, framework, np.where(mask, SRC, 0), TGT)  # hidden as padding
    assert np.allclose(expected, shown, atol=1e-6)


def test_target_padding_is_not_hidden_by_its_id(twins):
    """Marian starts decoding from the pad id: hiding it would hide position 0."""
    start = np.array([[0, 2, 3], [0, 4, 5]])
    masked = logits_of(twins, "flax", SRC, start, tgt_mask=start != 0)
    assert not np.allclose(logits_of(twins, "flax", SRC, start), masked, atol=1e-4)


def test_a_call_leaves_no_state(twins):
    flax_model, torch_model = twins
    state = jax.tree.map(np.array, nnx.state(flax_model)), set(vars(flax_model.encoder))
    flax_model(jnp.asarray(SRC), jnp.asarray(TGT))
    flax_transformer.activations(flax_model, jnp.asarray(SRC), jnp.asarray(TGT))
    chex.assert_trees_all_equal(state[0], jax.tree.map(np.array, nnx.state(flax_model)))
    assert set(vars(flax_model.encoder)) == state[1]
    names = set(torch_model.state_dict()), {name for module in torch_model.modules() for name in vars(module)}
    torch_reference.activations(torch_model, torch.tensor(SRC), torch.tensor(TGT))
    assert names == (set(torch_model.state_dict()), {name for module in torch_model.modules() for name in vars(module)})


def test_activations_cleans_up_after_an_error(twins, no_shape_checker):
    for framework, package in (("flax", flax_transformer), ("torch", torch_reference)):
        model = twins[0 if framework == "flax" else 1]
        with pytest.raises(ValueError, match="outside the vocabulary"):
            package.activations(model, *map(jnp.asarray if framework == "flax" else torch.tensor, (SRC - 9, TGT)))
        call(twins, framework, SRC, TGT)
        assert not any("captures" in name for name in vars(model.encoder))


def test_one_trace_serves_all_contents(twins):
    graphdef, state = nnx.split(twins[0])

    @jax.jit
    @chex.assert_max_traces(n=1)
    def run(state, src, tgt, seed):
        key = flax_transformer.DropoutKey(seed, 0, jnp.arange(2))
        return nnx.merge(graphdef, state)(src, tgt, dropout_key=key)

    for seed in range(3):
        run(state, jnp.asarray((SRC + seed) % 90), jnp.asarray(TGT), seed)


def test_only_trained_values_are_params(twins):
    flax_model, torch_model = twins
    buffers = set(flax_transformer.named_arrays(flax_model, flax_transformer.Buffer))
    assert buffers == {"src_input.positions.table", "tgt_input.positions.table"}
    assert buffers == {name for name, _ in torch_model.named_buffers()}
    learned_model = flax_transformer.Transformer(CONFIG.replace(positions="learned"), rngs=nnx.Rngs(0))
    assert not flax_transformer.named_arrays(learned_model, flax_transformer.Buffer)


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_a_constant_row_has_finite_gradients(framework):
    """The derivative of the sample standard deviation at 0 is infinite."""
    if framework == "flax":
        gradient = jax.grad(lambda x: flax_transformer.layers.sample_std_norm(x, 1e-6).sum())(jnp.ones((1, 1, 5)))
    else:
        x = torch.ones(1, 1, 5, dtype=torch.float64, requires_grad=True)
        torch_reference.layers.sample_std_norm(x, 1e-6).sum().backward()
        gradient = x.grad
    assert np.isfinite(np.asarray(gradient)).all()


# our norm -> PyTorch's, at epsilon 1e-3
NORMS = {
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (7,), eps=1e-3),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (7,), eps=1e-3),
    "sample_std_norm": lambda x: (x - x.mean(-1, keepdim=True)) / (torch.std(x, -1, keepdim=True) + 1e-3),
    "layer_norm_over_length": lambda x: torch.nn.functional.layer_norm(x, (3, 7), eps=1e-3),
}


@pytest.mark.parametrize("norm", NORMS)
def test_norms_against_torch_s_own(norm):
    """Small values make epsilon matter."""
    x = 0.1 * torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.2
    outputs = torch_reference.layers.NORMS[norm](x, 1e-3), flax_transformer.layers.NORMS[norm](jnp.asarray(x), 1e-3)
    for output in outputs:
        assert np.allclose(np.asarray(output), NORMS[norm](x), atol=1e-14)


def test_a_bias_is_added_to_the_scores_before_the_mask():
    """Against PyTorch's attention, which takes bias and mask as one array."""
    config = TransformerConfig.preset("tiny", param_dtype="float64", compute_dtype="float64")
    attention = torch_reference.attention.MultiHeadAttention(config, 3, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    x, memory = (torch.randn(2, n, 32, dtype=torch.float64, generator=generator) for n in (3, 5))
    mask, bias = (
        torch.rand(2, 1, 3, 5, generator=generator) > 0.3,
        torch.randn(1, 3, 3, 5, generator=generator).double(),
    )
    mask[..., 0] = True
    q, k, v = (
        attention._split_heads(p(y)).transpose(1, 2)
        for p, y in zip((attention.q_proj, attention.k_proj, attention.v_proj), (x, memory, memory), strict=True)
    )
    scores = torch.where(mask, bias, -torch.inf)
    heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=scores)
    expected = attention.out_proj(heads.transpose(1, 2).flatten(2)).detach()
    assert torch.allclose(attention(x, memory, mask, bias=bias), expected, atol=1e-13)
    flax = flax_transformer.attention.MultiHeadAttention(config, 3, rngs=nnx.Rngs(0))
    for name, module in attention.named_children():
        if name.endswith("proj"):
            getattr(flax, name).kernel.set_value(jnp.asarray(module.weight.detach().T))
            getattr(flax, name).bias.set_value(jnp.asarray(module.bias.detach()))
    output = flax(*(jnp.asarray(array) for array in (x, memory, mask)), bias=jnp.asarray(bias))
    assert np.allclose(output, expected, atol=1e-13)


def test_a_gated_feed_forward():
    """Against T5's: gelu(x Wg) times x W1, without biases."""
    from transformers.models.t5.configuration_t5 import T5Config
    from transformers.models.t5.modeling_t5 import T5DenseGatedActDense

    oracle = T5DenseGatedActDense(T5Config(d_model=32, d_ff=20, feed_forward_proj="gated-gelu")).double().eval()
    config = TransformerConfig.preset(
        "tiny", activation="gelu_tanh", ffn_bias=False, ffn_gate=True, param_dtype="float64"
    )
    config = config.replace(compute_dtype="float64")
    x = torch.randn(2, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    module = torch_reference.layers.FeedForward(config, 20)
    flax = flax_transformer.layers.FeedForward(config, 20, rngs=nnx.Rngs(0))
    for name, linear in (("gate_proj", oracle.wi_0), ("inner_proj", oracle.wi_1), ("outer_proj", oracle.wo)):
        getattr(module, name).weight.data.copy_(linear.weight)
        getattr(flax, name).kernel.set_value(jnp.asarray(linear.weight.detach().T))
    expected = oracle(x).detach()
    assert torch.allclose(module(x), expected, atol=1e-14)
    assert np.allclose(flax(jnp.asarray(x)), expected, atol=1e-14)


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_what_stands_around_the_layers(framework):
    """Embedding scale, position offset, tie, logit scale and output bias, against the formulas in numpy.

    Both models could share such a mistake, which comparing them would not reveal.
    """
    config = CONFIG.replace(tied_output=True, logit_scale="rsqrt_d_model", position_offset=3, positions="learned")
    model = flax_transformer.Transformer(config, rngs=nnx.Rngs(0))
    arrays = {name: np.asarray(a) for name, a in flax_transformer.named_arrays(model).items()}
    arrays["output.bias"] = np.linspace(-1, 1, 103, dtype=np.float32)
    model = flax_transformer.Transformer.from_arrays(config, {name: jnp.asarray(a) for name, a in arrays.items()})
    package, to_array = (flax_transformer, jnp.asarray) if framework == "flax" else (torch_reference, torch.tensor)
    model = model if framework == "flax" else convert.to_torch(model)
    _, activations = package.activations(model, to_array(SRC), to_array(TGT))
    activations = {
        path: np.asarray(value.detach() if framework == "torch" else value) for path, value in activations.items()
    }

    for side, tokens in (("src", SRC), ("tgt", TGT)):
        rows = arrays[f"{side}_input.positions.table"][3 : 3 + tokens.shape[1]]
        expected = arrays[f"{side}_embedding.embedding"][tokens] * 32**0.5 + rows
        assert np.allclose(activations[f"{side}_input.output"], expected, atol=1e-6)
    logits = activations["decoder.output"] @ arrays["tgt_embedding.embedding"].T * 32**-0.5 + arrays["output.bias"]
    assert np.allclose(activations["logits"], logits, atol=1e-5)


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_gradients_of_frequent_tokens_survive_bfloat16(framework):
    """4,096 gradients of 1 add up to 4,096; summed in bfloat16 they would stop at 256."""
    config = CONFIG.replace(compute_dtype="bfloat16", embedding_scale="none", positions="none", max_length=4096)
    tokens = np.full((1, 4096), 5)
    if framework == "flax":
        table = flax_transformer.layers.Embedding(config, 7, rngs=nnx.Rngs(0))
        graphdef, state = nnx.split(table)
        grads = jax.grad(lambda state: nnx.merge(graphdef, state)(jnp.asarray(tokens)).astype(jnp.float32).sum())(state)
        gradient = np.asarray(flax_transformer.named_arrays(grads)["embedding"])
    else:
        table = torch_reference.layers.Embedding(config, 7)
        table(torch.tensor(tokens)).float().sum().backward()
        gradient = table.weight.grad.numpy()
    assert (gradient[5] == 4096).all()


@pytest.mark.parametrize("framework", ["flax", "torch"])
def test_frozen_padding_is_torch_s_padding_idx(framework):
    config = CONFIG.replace(embedding_padding="frozen", embedding_scale="none")
    weight = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))
    cotangent = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(0))
    embedding = torch.nn.Embedding.from_pretrained(weight.clone(), freeze=False, padding_idx=0)
    (embedding(torch.tensor(SRC)) * cotangent).sum().backward()
    if framework == "torch":
        table = torch_reference.layers.Embedding(config, 9)
        table.weight.data = weight.clone()
        (table(torch.tensor(SRC)) * cotangent).sum().backward()
        gradient = table.weight.grad.numpy()
    else:
        graphdef, state = nnx.split(flax_transformer.layers.Embedding(config, 9, rngs=nnx.Rngs(0)))
        state["embedding"].set_value(jnp.asarray(weight))
        gradients = jax.grad(lambda s: (nnx.merge(graphdef, s)(jnp.asarray(SRC)) * jnp.asarray(cotangent)).sum())(state)
        gradient = np.asarray(gradients["embedding"].get_value())
    assert np.allclose(gradient, embedding.weight.grad, rtol=1e-6)
    assert (gradient[0] == 0).all()
    assert (np.asarray(SRC) == 0).any()


def test_narrow_token_types_inside_jit(twins):
    """Ids that no int8 can be compared with must not wrap into the table."""
    config = CONFIG.replace(src_vocab_size=300)
    graphdef, state = nnx.split(flax_transformer.Transformer(config, rngs=nnx.Rngs(0)))
    run = jax.jit(lambda state, src: nnx.merge(graphdef, state)(src, jnp.asarray(TGT)))
    assert np.isnan(run(state, jnp.asarray(SRC - 20, jnp.int8))).all()
    assert np.isfinite(run(state, jnp.asarray(SRC, jnp.int8))).all()


@pytest.mark.parametrize("framework", ["flax", "torch"])
@pytest.mark.parametrize("wrong", [[[3, 4]], None, "ab"])
def test_what_is_no_array(twins, no_shape_checker, framework, wrong):
    with pytest.raises(ValueError, match=r"src_tokens: must be a.* not a"):
        twins[0 if framework == "flax" else 1](wrong, wrong)


@pytest.mark.parametrize("settings", [{}, {"positions": "stored", "norm": "rms_norm", "output_bias": "stored"}])
def test_an_abstract_model_has_the_arrays_of_a_model(settings):
    config = CONFIG.replace(param_dtype="float64", **settings)
    model = flax_transformer.Transformer(config, rngs=nnx.Rngs(0))
    abstract = flax_transformer.Transformer.abstract(config)
    assert nnx.graphdef(abstract) == nnx.graphdef(model)
    chex.assert_trees_all_equal_shapes_and_dtypes(*map(flax_transformer.module.named_arrays, (abstract, model)))
    with jax.enable_x64(False):  # although the structure is known from before
        for build in (
            flax_transformer.Transformer.abstract,
            lambda config: flax_transformer.Transformer.from_arrays(config, {}),
        ):
            with pytest.raises(ValueError, match="float64"):
                build(config)
