"""torch.nn.Transformer and torch.nn.MultiheadAttention as independent oracles: outputs and gradients."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from twinax import TransformerConfig, convert, flax_transformer, torch_reference
from twinax.convert.arrays.frameworks import from_torch
from twinax.convert.arrays.lazy import Spec
from twinax.convert.layouts import torch_nn
from twinax.convert.rules import target_specs, translate
from twinax.parity import Criterion, compare_arrays
from twinax.parity.functions import random_arrays

# torch.nn.Transformer warns about its fast path, which needs evaluation mode without gradients
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor")

CRITERIA = (
    Criterion("outputs", 1e-12, "array", "the same layers"),
    Criterion("gradients", 1e-10, "rung", "the same layers"),
)


def rung_of(path):
    return "gradients" if path.startswith("gradients") else "outputs"


def randomise(module):
    """Perturbs all parameters, because the 0 biases and 1 gains of a new module hide mistakes."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return module


def twin_of(module):
    """(config, PyTorch twin) with the module's encoder and decoder; embeddings are random and unused."""
    fields, arrays = torch_nn.read_transformer(module)
    config = TransformerConfig(src_vocab_size=3, tgt_vocab_size=3, positions="none", **fields)
    state_dict = convert.to_state_dict({**random_arrays(config, 0), **arrays}, config)
    return config, torch_reference.Transformer.from_state_dict(config, state_dict)


@pytest.fixture(scope="module")
def inputs():
    """(src, tgt, src_keep, tgt_keep, cotangent): ragged padding, at least one token per row."""
    generator = torch.Generator().manual_seed(1)
    src, tgt, cotangent = (torch.randn(4, length, 14, generator=generator, dtype=torch.float64) for length in (7, 5, 5))
    src_keep = torch.arange(7) < torch.tensor([7, 1, 4, 6])[:, None]
    tgt_keep = torch.arange(5) < torch.tensor([5, 3, 1, 4])[:, None]
    return src, tgt, src_keep, tgt_keep, cotangent


def masks(src_keep, tgt_keep):
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    return (
        src_keep[:, None, None, :].expand(-1, 1, 7, -1),
        causal & tgt_keep[:, None, None, :],
        src_keep[:, None, None, :].expand(-1, 1, 5, -1),
    )


def torch_nn_outputs(module, src, tgt, src_keep, tgt_keep, cotangent):
    src, tgt = src.clone().requires_grad_(), tgt.clone().requires_grad_()
    memory = module.encoder(src, src_key_padding_mask=~src_keep)
    output = module.decoder(
        tgt,
        memory,
        tgt_mask=~torch.ones(5, 5, dtype=torch.bool).tril(),
        tgt_key_padding_mask=~tgt_keep,
        memory_key_padding_mask=~src_keep,
    )
    names, parameters = zip(*module.named_parameters(), strict=True)
    *grads, src_grad, tgt_grad = torch.autograd.grad((output * cotangent).sum(), (*parameters, src, tgt))
    fields, arrays = torch_nn.read_transformer(module)
    rules = torch_nn.transformer_rules(fields)
    targets = target_specs(rules, {name: Spec(a.shape, str(a.dtype)) for name, a in arrays.items()})
    by_name = {name: from_torch(g) for name, g in zip(names, grads, strict=True)}
    grads = translate([r.inverse for r in rules], by_name, targets) | {"src": src_grad, "tgt": tgt_grad}
    return {"memory": memory, "output": output, "gradients": grads}


def twin_outputs(module, src, tgt, src_keep, tgt_keep, cotangent):
    config, twin = twin_of(module)
    src, tgt = src.clone().requires_grad_(), tgt.clone().requires_grad_()
    encoder_mask, decoder_mask, cross_mask = masks(src_keep, tgt_keep)
    memory = twin.encoder(src, encoder_mask)
    output = twin.decoder(tgt, memory, decoder_mask, cross_mask)
    names, parameters = zip(*twin.named_parameters(), strict=True)
    *grads, src_grad, tgt_grad = torch.autograd.grad(
        (output * cotangent).sum(), (*parameters, src, tgt), materialize_grads=True
    )
    grads = convert.to_params(dict(zip(names, grads, strict=True)), config, trained_only=True)
    grads = {name: g for name, g in grads.items() if name.startswith(("encoder.", "decoder."))}
    return {"memory": memory, "output": output, "gradients": grads | {"src": src_grad, "tgt": tgt_grad}}


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu", functional.silu])
@pytest.mark.parametrize("bias", [True, False])
def test_transformer(norm_first, activation, bias, inputs):
    module = nn.Transformer(
        14, 2, 2, 1, 23, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first,
        bias=bias, layer_norm_eps=1e-3, dtype=torch.float64,
    )  # fmt: skip
    module = randomise(module)
    compare_arrays(torch_nn_outputs, twin_outputs, module, *inputs, criteria=CRITERIA, rung_of=rung_of).check()


@pytest.mark.parametrize("activation", [nn.GELU(approximate="tanh"), nn.GELU(), nn.SiLU(), nn.ReLU()])
def test_activation_modules(activation, inputs):
    module = randomise(nn.Transformer(14, 2, 2, 1, 23, dropout=0.0, batch_first=True, dtype=torch.float64))
    for layer in (*module.encoder.layers, *module.decoder.layers):
        layer.activation = activation
    compare_arrays(torch_nn_outputs, twin_outputs, module, *inputs, criteria=CRITERIA, rung_of=rung_of).check()


def test_torch_replaces_an_activation_module_by_relu_in_the_decoder():
    """Copying a decoder layer loses the activation (torch 2.13), so the module does not use its argument."""
    with pytest.raises(convert.ConversionError, match=r"decoder.layers.0: activation is 'relu', elsewhere 'silu'"):
        torch_nn.read_transformer(nn.Transformer(8, 2, 1, 1, 16, activation=nn.SiLU()))


def test_flax_transformer(inputs):
    module = randomise(nn.Transformer(14, 2, 2, 1, 23, dropout=0.0, batch_first=True, dtype=torch.float64))
    src, tgt, src_keep, tgt_keep, _ = inputs
    twin = convert.to_flax(twin_of(module)[1])
    encoder_mask, decoder_mask, cross_mask = (jnp.asarray(mask) for mask in masks(src_keep, tgt_keep))
    memory = twin.encoder(jnp.asarray(src), encoder_mask)
    output = twin.decoder(jnp.asarray(tgt), twin.decoder.keys_values(memory), decoder_mask, cross_mask)
    expected = torch_nn_outputs(module, *inputs)
    compare_arrays(
        {"memory": expected["memory"], "output": expected["output"]},
        {"memory": memory, "output": output},
        criteria=CRITERIA,
        rung_of=rung_of,
    ).check()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_attention(bias, causal, inputs):
    """Weights, outputs and gradients; torch masks where True, twinax attends where True."""
    module = randomise(nn.MultiheadAttention(14, 7, bias=bias, batch_first=True, dtype=torch.float64))
    src, tgt, src_keep, tgt_keep, cotangent = inputs
    memory, keep = (tgt, tgt_keep) if causal else (src, src_keep)
    visible = torch.ones(5, memory.shape[1], dtype=torch.bool)
    visible = visible.tril() if causal else visible

    x, m = tgt.clone().requires_grad_(), memory.clone().requires_grad_()
    output, weights = module(x, m, m, key_padding_mask=~keep, attn_mask=~visible, average_attn_weights=False)
    parameters = dict(module.named_parameters())
    grads = torch.autograd.grad((output * cotangent).sum(), (*parameters.values(), x, m))
    fields, arrays = torch_nn.read_attention(module)
    rules = [rule.inverse for rule in torch_nn.attention_rules("", "", bias)]
    by_name = {name: from_torch(g) for name, g in zip(parameters, grads, strict=False)}
    specs = {name: Spec(a.shape, "float64") for name, a in by_name.items()}
    expected = {"output": output, "weights": weights}
    expected |= {"gradients": translate(rules, by_name, specs) | {"x": grads[-2], "memory": grads[-1]}}

    config = TransformerConfig(src_vocab_size=3, tgt_vocab_size=3, **fields)
    twin = torch_reference.attention.MultiHeadAttention(config, config.num_heads)
    torch_names = {name: name.replace("kernel", "weight") for name in arrays}
    twin.load_state_dict(
        {
            torch_name: torch.from_numpy(arrays[n].T if "kernel" in n else arrays[n])
            for n, torch_name in torch_names.items()
        }
    )
    x, m = tgt.clone().requires_grad_(), memory.clone().requires_grad_()
    output, activations = torch_reference.activations(twin, x, m, (visible & keep[:, None, :])[:, None])
    parameters = dict(twin.named_parameters())
    grads = torch.autograd.grad((output * cotangent).sum(), (*parameters.values(), x, m))
    by_name = {name: g.T if name.endswith("weight") else g for name, g in zip(parameters, grads, strict=False)}
    actual = {"output": output, "weights": activations["weights"]}
    actual["gradients"] = {n: by_name[torch_name] for n, torch_name in torch_names.items()} | {
        "x": grads[-2],
        "memory": grads[-1],
    }
    compare_arrays(expected, actual, criteria=CRITERIA, rung_of=rung_of).check()


def test_write_is_the_inverse_of_read():
    module = randomise(nn.Transformer(14, 2, 2, 1, 23))
    fields, arrays = torch_nn.read_transformer(module)
    tensors = torch_nn.write_transformer(arrays, fields)
    state_dict = module.state_dict()
    assert set(tensors) == set(state_dict)
    assert all(torch.equal(tensors[name], state_dict[name]) for name in state_dict)
    nn.Transformer(14, 2, 2, 1, 23).load_state_dict(tensors)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_packed_projections_in_the_wrong_order_are_seen(name, inputs, monkeypatch):
    module = randomise(nn.Transformer(14, 2, 1, 1, 23, dropout=0.0, batch_first=True, dtype=torch.float64))
    expected = torch_nn_outputs(module, *inputs)
    other_names = [n for n in ("q_proj", "k_proj", "v_proj") if n != name]
    monkeypatch.setattr(
        torch_nn, "_QKV", (other_names[0], other_names[1], name) if name != "v_proj" else ("k_proj", "q_proj", name)
    )
    assert not compare_arrays(expected, twin_outputs(module, *inputs), criteria=CRITERIA, rung_of=rung_of).ok


class CustomEncoder(nn.Module):
    pass


def _with(change):
    module = nn.Transformer(8, 2, 1, 1, 16)
    change(module)
    return module


REFUSED = {
    "activation": lambda m: setattr(m.encoder.layers[0], "activation", torch.tanh),
    "add_bias_kv": lambda m: setattr(m.encoder.layers[0], "self_attn", nn.MultiheadAttention(8, 2, add_bias_kv=True)),
    "add_zero_attn": lambda m: setattr(
        m.decoder.layers[0], "self_attn", nn.MultiheadAttention(8, 2, add_zero_attn=True)
    ),
    "kdim": lambda m: setattr(m.decoder.layers[0], "multihead_attn", nn.MultiheadAttention(8, 2, kdim=4, vdim=4)),
    "RMSNorm": lambda m: setattr(m.encoder.layers[0], "norm1", nn.RMSNorm(8)),
    "final norm": lambda m: setattr(m.encoder, "norm", None),
    "norm_eps": lambda m: setattr(m.decoder.layers[0].norm3, "eps", 1e-3),
    "norm_placement": lambda m: setattr(m.decoder.layers[0], "norm_first", True),
    "num_heads": lambda m: setattr(m.encoder.layers[0], "self_attn", nn.MultiheadAttention(8, 4)),
    "residual_dropout": lambda m: setattr(m.encoder.layers[0].dropout1, "p", 0.5),
    "custom encoder": lambda m: setattr(m, "encoder", CustomEncoder()),
}


@pytest.mark.parametrize("setting", REFUSED)
def test_refuses_what_it_does_not_know(setting):
    with pytest.raises(convert.ConversionError, match=setting):
        torch_nn.read_transformer(_with(REFUSED[setting]))


def test_refuses_foreign_tensors_by_name():
    module = nn.Transformer(8, 2, 1, 1, 16)
    nn.utils.parametrizations.weight_norm(module.encoder.layers[0].linear1)
    with pytest.raises(convert.ConversionError, match=r"missing: encoder.layers.0.linear1.weight"):
        torch_nn.read_transformer(module)


def test_fully_masked_rows_differ_from_theirs_on_purpose():
    """torch.nn returns NaN, twinax 0, so the comparisons above exclude such rows."""
    module = nn.MultiheadAttention(14, 7, batch_first=True, dtype=torch.float64)
    x = torch.ones(1, 2, 14, dtype=torch.float64)
    _, weights = module(x, x, x, key_padding_mask=torch.ones(1, 2, dtype=torch.bool))
    assert np.isnan(weights.detach().numpy()).all()
    twin_weights = flax_transformer.attention.exact_softmax(jnp.zeros((1, 1, 2, 2)), jnp.zeros((1, 1, 2, 2), bool))
    assert (np.asarray(twin_weights) == 0).all()
