"""`torch.nn.Transformer` and `torch.nn.MultiheadAttention`: their names, settings and packed projections.

`torch.nn.Transformer` has an encoder and a decoder, but no embeddings, positions or output layer. The caller sets the
config fields of those.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ...backend.errors import ConversionError
from ...configs.schema import TransformerConfig
from ..arrays.frameworks import from_torch, to_torch_tensor
from ..arrays.lazy import Spec
from ..port import flax_specs
from ..rules import IDENTITY, PACK_QKV, TRANSPOSE, Rule, Transform, target_specs, translate
from .canonical import up_to_rounding

_QKV = ("q_proj", "k_proj", "v_proj")
# A mask is an argument of the module. After `causal_padding_and_query`, rows without a key would be NaN.
_ARGUMENTS = ("causal", "causal_and_padding", "causal_in_training")
# Fields of the parts outside encoder and decoder, and fields that do not affect evaluation.
_OUTSIDE = (
    *("max_length", "shared_embeddings", "embedding_norm", "embedding_scale", "embedding_padding", "decoder_start"),
    *("positions", "position_counting", "position_offset", "position_table_length"),
    *("tied_output", "output_bias", "logit_scale", "output_activation"),
    *("embedding_dropout", "attention_dropout", "ffn_dropout", "residual_dropout", "final_dropout"),
    *("encoder_layerdrop", "decoder_layerdrop", "dropout_generator", "linear_init", "embedding_init"),
    *("pad_id", "bos_id", "eos_id", "decoder_start_id", "forced_bos_id", "forced_eos_id"),
    "compute_dtype",
)
# sublayer -> (torch's name of the attention, torch's name of the norm), per layer
_ENCODER = {"self_attention": ("self_attn", "norm1"), "feed_forward": ("", "norm2")}
_DECODER = {
    "self_attention": ("self_attn", "norm1"),
    "cross_attention": ("multihead_attn", "norm2"),
    "feed_forward": ("", "norm3"),
}


def attention_rules(source: str, target: str, bias: bool) -> list[Rule]:
    """The rules of one attention; `source` and `target` are prefixes that are empty or end with a dot."""
    kernels = tuple(f"{source}{name}.kernel" for name in _QKV)
    rules = [
        Rule(kernels, (f"{target}in_proj_weight",), PACK_QKV),
        *_linear(f"{source}out_proj", f"{target}out_proj", bias),
    ]
    if bias:
        rules.append(Rule(tuple(f"{source}{name}.bias" for name in _QKV), (f"{target}in_proj_bias",), PACK_QKV))
    return rules


def transformer_rules(fields: dict[str, Any], prefix: str = "") -> list[Rule]:
    """The rules from Flax names to a `torch.nn.Transformer` with these config fields; its names get the prefix."""
    bias, rules = fields["ffn_bias"], []
    stacks = (("encoder", fields["num_encoder_layers"], _ENCODER), ("decoder", fields["num_decoder_layers"], _DECODER))
    for stack, num_layers, table in stacks:
        for layer in (f"{stack}.layers.{i}." for i in range(num_layers)):
            target = f"{prefix}{layer}"
            for sublayer, (attention, norm) in table.items():
                rules += _norm(f"{layer}{sublayer}_residual.norm", f"{target}{norm}", bias)
                if attention:
                    rules += attention_rules(f"{layer}{sublayer}.", f"{target}{attention}.", bias)
            rules += _linear(f"{layer}feed_forward.inner_proj", f"{target}linear1", bias)
            rules += _linear(f"{layer}feed_forward.outer_proj", f"{target}linear2", bias)
        if fields["final_norm"]:
            rules += _norm(f"{stack}.final_norm", f"{prefix}{stack}.norm", bias)
    return rules


def read_transformer(module: nn.Transformer) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config fields, encoder and decoder arrays by Flax name) of a `torch.nn.Transformer`.

    Raises:
        ConversionError: lists every setting that twinax does not support, or that differs between layers.
    """
    fields = transformer_fields(module)
    return fields, _read(module, transformer_rules(fields), _specs(fields, ("encoder.", "decoder.")))


def transformer_fields(module: nn.Transformer) -> dict[str, Any]:
    """The config fields of a `torch.nn.Transformer`.

    Raises:
        ConversionError: lists every setting that twinax does not support, or that differs between layers.
    """
    problems: list[str] = []
    encoder, decoder = module.encoder, module.decoder
    if type(encoder) is not nn.TransformerEncoder or type(decoder) is not nn.TransformerDecoder:
        raise ConversionError("torch.nn.Transformer: custom encoders and decoders are not supported")
    fields: dict[str, Any] = {
        "norm": "layer_norm",
        "norm_scale": True,
        "mask_value": "exact",
        "score_scaling": "product",
    }
    fields["param_dtype"] = fields["compute_dtype"] = _dtype(module)
    fields["final_norm"] = encoder.norm is not None
    if fields["final_norm"] != (decoder.norm is not None):
        problems.append("final norm: encoder and decoder must both have one, or neither")
    fields["num_encoder_layers"], fields["num_decoder_layers"] = len(encoder.layers), len(decoder.layers)
    for stack in (encoder, decoder):
        prefix = "encoder" if stack is encoder else "decoder"
        for i, layer in enumerate(stack.layers):
            _merge(fields, _layer_fields(f"{prefix}.layers.{i}", layer, problems), f"{prefix}.layers.{i}", problems)
        if stack.norm is not None:
            _merge(fields, _norm_fields(f"{prefix}.norm", stack.norm, problems), f"{prefix}.norm", problems)
    _refuse(problems)
    return fields


def fields_of(config: TransformerConfig) -> dict[str, Any]:
    """The config fields of the `torch.nn.Transformer` that is equivalent to a config's encoder and decoder.

    Raises:
        ConversionError: lists every field that no `torch.nn.Transformer` matches.
    """
    config = up_to_rounding(config)
    try:
        with warnings.catch_warnings(action="ignore"):  # about its fast path, which does not affect parameters
            module = nn.Transformer(
                config.d_model,
                config.num_heads,
                config.num_encoder_layers,
                config.num_decoder_layers,
                config.d_ff,
                norm_first=config.norm_placement == "pre",
                layer_norm_eps=config.norm_eps,
                bias=config.ffn_bias,
                device="meta",
                dtype=getattr(torch, config.param_dtype),
            )
    except AssertionError as error:  # d_model is not divisible by the number of heads
        raise ConversionError(f"torch.nn.Transformer has no such model: {error}") from None
    activations: dict[str, Any] = {name: function for function, name in _ACTIVATIONS.items()}
    activations["gelu_tanh"] = nn.GELU("tanh")
    layers: list[Any] = [*module.encoder.layers, *module.decoder.layers]
    for layer in layers:
        layer.activation = activations[config.activation]
    if not config.final_norm:
        module.encoder.norm = module.decoder.norm = None
    fields = transformer_fields(module)
    sizes = {"src_vocab_size": config.src_vocab_size, "tgt_vocab_size": config.tgt_vocab_size}
    outside = (*_OUTSIDE, "decoder_mask") if config.decoder_mask in _ARGUMENTS else _OUTSIDE
    nearest = TransformerConfig(**sizes, **fields).replace(**{name: getattr(config, name) for name in outside})
    problems = [
        f"{name}={getattr(config, name)!r}: must be {getattr(nearest, name)!r}"
        for name in (f.name for f in dataclasses.fields(config))
        if getattr(config, name) != getattr(nearest, name)
    ]
    if problems:
        raise ConversionError("torch.nn.Transformer has no such model:\n  " + "\n  ".join(problems))
    return fields


def write_transformer(arrays: Mapping[str, np.ndarray], fields: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The state dict of a `torch.nn.Transformer`; the inverse of `read_transformer`.

    Raises:
        ConversionError: lists all arrays that are missing, unknown, of a wrong shape or of a wrong dtype.
    """
    specs = _specs(fields, ("encoder.", "decoder."))
    targets = translate(transformer_rules(fields), arrays, specs)
    return {name: to_torch_tensor(a) for name, a in targets.items()}


def read_attention(module: nn.MultiheadAttention) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(config fields, arrays by Flax name within the attention) of a `torch.nn.MultiheadAttention`.

    Raises:
        ConversionError: lists every setting that twinax does not support.
    """
    problems: list[str] = []
    fields = _attention_fields("attention", module, problems)
    _refuse(problems)
    fields["param_dtype"] = fields["compute_dtype"] = _dtype(module)
    specs = _specs(fields, (_ONE_ATTENTION,))
    specs = {name.removeprefix(_ONE_ATTENTION): spec for name, spec in specs.items()}
    return fields, _read(module, attention_rules("", "", fields["q_proj_bias"]), specs)


_ONE_ATTENTION = "encoder.layers.0.self_attention."


def _read(module: nn.Module, rules: list[Rule], specs: dict[str, Spec]) -> dict[str, np.ndarray]:
    arrays = {name: from_torch(tensor) for name, tensor in module.state_dict().items()}
    return translate([rule.inverse for rule in rules], arrays, target_specs(rules, specs))


def _specs(fields: dict[str, Any], prefixes: tuple[str, ...]) -> dict[str, Spec]:
    """Specs of the Flax arrays with these prefixes; torch.nn has no vocabulary, so any size will do."""
    specs = flax_specs(TransformerConfig(src_vocab_size=3, tgt_vocab_size=3, positions="none", **fields))
    return {name: spec for name, spec in specs.items() if name.startswith(prefixes)}


def _dtype(module: nn.Module) -> str:
    return str(next(module.parameters()).dtype).removeprefix("torch.")


def _linear(source: str, target: str, bias: bool) -> list[Rule]:
    return _pair(source, target, "kernel", TRANSPOSE, bias)


def _norm(source: str, target: str, bias: bool) -> list[Rule]:
    return _pair(source, target, "scale", IDENTITY, bias)


def _pair(source: str, target: str, leaf: str, transform: Transform, bias: bool) -> list[Rule]:
    rules = [Rule((f"{source}.{leaf}",), (f"{target}.weight",), transform)]
    return [*rules, Rule((f"{source}.bias",), (f"{target}.bias",))] if bias else rules


def _layer_fields(path: str, layer: Any, problems: list[str]) -> dict[str, Any]:
    if type(layer) not in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer):
        problems.append(f"{path}: a {type(layer).__name__} is not supported")
        return {}
    fields: dict[str, Any] = {"norm_placement": "pre" if layer.norm_first else "post"}
    fields["activation"] = _activation(path, layer.activation, problems)
    fields["d_ff"], fields["ffn_bias"] = layer.linear1.out_features, layer.linear1.bias is not None
    fields["ffn_dropout"] = layer.dropout.p
    for name, child in layer.named_children():
        if isinstance(child, nn.MultiheadAttention):
            _merge(fields, _attention_fields(f"{path}.{name}", child, problems), f"{path}.{name}", problems)
        elif name.startswith("norm"):
            _merge(fields, _norm_fields(f"{path}.{name}", child, problems), f"{path}.{name}", problems)
        elif name.startswith("dropout") and name != "dropout":
            _merge(fields, {"residual_dropout": child.p}, f"{path}.{name}", problems)
    return fields


def _attention_fields(path: str, module: nn.MultiheadAttention, problems: list[str]) -> dict[str, Any]:
    if not module._qkv_same_embed_dim:
        problems.append(f"{path}: kdim and vdim other than embed_dim are not supported")
    if module.bias_k is not None or module.add_zero_attn:
        problems.append(f"{path}: add_bias_kv and add_zero_attn are not supported")
    bias = module.in_proj_bias is not None
    fields: dict[str, Any] = {f"{name}_bias": bias for name in (*_QKV, "out_proj")}
    return fields | {"d_model": module.embed_dim, "num_heads": module.num_heads, "attention_dropout": module.dropout}


def _norm_fields(path: str, module: nn.Module, problems: list[str]) -> dict[str, Any]:
    if type(module) is not nn.LayerNorm or module.weight is None:
        problems.append(f"{path}: a {type(module).__name__} is not supported, only LayerNorm with a gain")
        return {}
    return {"norm_eps": module.eps, "norm_bias": module.bias is not None}


_ACTIVATIONS: dict[Callable[..., torch.Tensor], str] = {
    functional.relu: "relu",
    torch.relu: "relu",
    functional.gelu: "gelu",
    functional.silu: "silu",
}


def _activation(path: str, activation: Any, problems: list[str]) -> str | None:
    if type(activation) is nn.ReLU:
        return "relu"
    if type(activation) is nn.SiLU:
        return "silu"
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if activation not in _ACTIVATIONS:
        problems.append(f"{path}: the activation {activation!r} is not supported")
    return _ACTIVATIONS.get(activation)


def _merge(fields: dict[str, Any], additions: dict[str, Any], path: str, problems: list[str]) -> None:
    for name, value in additions.items():
        if fields.setdefault(name, value) != value:
            problems.append(f"{path}: {name} is {value!r}, elsewhere {fields[name]!r}")


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConversionError("torch.nn settings that twinax does not support:\n  " + "\n  ".join(problems))
