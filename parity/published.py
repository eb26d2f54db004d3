"""The published systems' own modules as a third function, beside the twins: written apart from them, names and all."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..convert.arrays import from_torch
from ..convert.checkpoint import Checkpoint
from ..convert.file_layouts import PUBLISHED, from_named, published_config
from ..convert.port import flax_specs
from ..torch_reference.published import annotated_transformer, d2l_note, jadore801120, leftover, lucky_glass
from .coverage import coverage
from .functions import GRADIENTS, Batch, Outputs, random_batch
from .harness import Report
from .ladder import compare_with_oracle, run_twins

SYSTEMS = tuple(PUBLISHED)
PAD, SIZE, D_FF, HEADS, LAYERS, LENGTH = 1, 13, 20, 4, 2, 7  # of small models
D_MODEL = 12

# Where our activations are in theirs: `<` is what goes into a module, `>` what comes out. Layers are *, heads #.
_PLACES: dict[str, tuple[str, dict[str, str], str, dict[str, str], dict[str, str]]] = {
    "lucky_glass": (
        "encoder.layers.*.",
        {
            "self_attention.weights": "attention.attentions.#.weights<",
            "self_attention.output": "attention.dropout<",
            "self_attention_residual.output": "attention>",
            "feed_forward.output": "feed_forward.dropout<",
            "feed_forward_residual.output": "feed_forward>",
        },
        "decoder.layers.*.",
        {
            "self_attention.weights": "masked_attention.attentions.#.weights<",
            "self_attention.output": "masked_attention.dropout<",
            "self_attention_residual.output": "masked_attention>",
            "cross_attention.weights": "attention.attentions.#.weights<",
            "cross_attention.output": "attention.dropout<",
            "cross_attention_residual.output": "attention>",
            "feed_forward.output": "feed_forward.dropout<",
            "feed_forward_residual.output": "feed_forward>",
        },
        {"encoder.output": "encoder>", "decoder.output": "decoder>"},
    ),
    "jadore801120": (
        "encoder.layer_stack.*.",
        {
            "self_attention.weights": "slf_attn.attention_dropout<",
            "self_attention.output": "slf_attn.dropout<",
            "self_attention_residual.output": "slf_attn>",
            "feed_forward.output": "pos_ffn.dropout<",
            "feed_forward_residual.output": "pos_ffn>",
        },
        "decoder.layer_stack.*.",
        {
            "self_attention.weights": "slf_attn.attention_dropout<",
            "self_attention.output": "slf_attn.dropout<",
            "self_attention_residual.output": "slf_attn>",
            "cross_attention.weights": "enc_attn.attention_dropout<",
            "cross_attention.output": "enc_attn.dropout<",
            "cross_attention_residual.output": "enc_attn>",
            "feed_forward.output": "pos_ffn.dropout<",
            "feed_forward_residual.output": "pos_ffn>",
        },
        {
            "src_input.output": "encoder.layer_norm>",
            "tgt_input.output": "decoder.layer_norm>",
            "encoder.output": "encoder>",
            "decoder.output": "decoder>",
        },
    ),
    "leftover": (
        "encoder.encoder_blocks.*.",
        {
            "self_attention.weights": "multi_head_attention.dropout<",
            "self_attention.output": "multi_head_attention>",
            "self_attention_residual.output": "layer_norm1>",
            "feed_forward.output": "ffn>",
            "feed_forward_residual.output": "layer_norm2>",
        },
        "decoder.decoder_layers.*.",
        {
            "self_attention.weights": "multi_head_attention1.dropout<",
            "self_attention.output": "multi_head_attention1>",
            "self_attention_residual.output": "layer_norm1>",
            "cross_attention.weights": "cross_attention.dropout<",
            "cross_attention.output": "cross_attention>",
            "cross_attention_residual.output": "layer_norm2>",
            "feed_forward.output": "ffn>",
            "feed_forward_residual.output": "layer_norm3>",
        },
        {
            "src_input.output": "encoder.pos_embedding>",
            "tgt_input.output": "decoder.pos_embedding>",
            "encoder.output": "encoder>",
            "decoder.output": "decoder>",
        },
    ),
    "d2l_note": (
        "encoder.blocks.block_*.",
        {
            "self_attention.weights": "attention.dropout<",
            "self_attention.output": "attention>",
            "self_attention_residual.output": "addnorm1>",
            "feed_forward.output": "ffn>",
            "feed_forward_residual.output": "addnorm2>",
        },
        "decoder.blocks.block_*.",
        {
            "self_attention.weights": "attention1.dropout<",
            "self_attention.output": "attention1>",
            "self_attention_residual.output": "addnorm1>",
            "cross_attention.weights": "attention2.dropout<",
            "cross_attention.output": "attention2>",
            "cross_attention_residual.output": "addnorm2>",
            "feed_forward.output": "ffn>",
            "feed_forward_residual.output": "addnorm3>",
        },
        {
            "src_input.output": "encoder.positions>",
            "tgt_input.output": "decoder.positions>",
            "encoder.output": "encoder>",
            "decoder.output": "decoder.f<",
        },
    ),
    "annotated_transformer": (
        "encoder.layers.*.",
        {
            "self_attention.weights": "self_attn.dropout<",
            "self_attention.output": "self_attn>",
            "self_attention_residual.output": "sublayer.0>",
            "feed_forward.output": "feed_forward>",
            "feed_forward_residual.output": "sublayer.1>",
        },
        "decoder.layers.*.",
        {
            "self_attention.weights": "self_attn.dropout<",
            "self_attention.output": "self_attn>",
            "self_attention_residual.output": "sublayer.0>",
            "cross_attention.weights": "src_attn.dropout<",
            "cross_attention.output": "src_attn>",
            "cross_attention_residual.output": "sublayer.1>",
            "feed_forward.output": "feed_forward>",
            "feed_forward_residual.output": "sublayer.2>",
        },
        {
            "src_input.output": "src_embed>",
            "tgt_input.output": "tgt_embed>",
            "encoder.output": "encoder>",
            "decoder.output": "decoder>",
        },
    ),
}


def random_model(
    name: str, as_published: bool, dropout: float = 0.0, length: int = LENGTH, layers: int = LAYERS, **settings: Any
) -> nn.Module:
    """A small model in float64; every parameter that trains is moved, so that none is 0 or 1."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"d_model": D_MODEL, "dropout": dropout, "as_published": as_published}
    if name == "lucky_glass":
        sizes |= {"d_ff": D_FF, "heads": HEADS, "layers": layers}
        model: nn.Module = lucky_glass.Transformer(SIZE, SIZE, **sizes)
    elif name == "jadore801120":
        sizes |= {"d_k": 5, "d_v": 3, "d_inner": D_FF, "n_head": 8, "n_layers": layers} | settings
        model = jadore801120.Transformer(SIZE, SIZE, PAD, PAD, **sizes)
    elif name == "leftover":
        sizes |= {"d_ff": D_FF, "heads": HEADS, "layers": layers, "seq_len": length}
        model = leftover.Transformer(SIZE, SIZE, **sizes)
    elif name == "d2l_note":
        sizes |= {"d_ff": D_FF, "heads": HEADS, "layers": layers, "seq_len": length}
        model = d2l_note.Transformer(SIZE, SIZE, **sizes)
    else:
        sizes |= {"d_ff": D_FF, "h": HEADS, "layers": layers}
        model = annotated_transformer.Transformer(SIZE, SIZE, **sizes)
    model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def call(model: nn.Module, src: Tensor, tgt: Tensor, pad: int = PAD) -> Tensor:
    """(B, T, V), as each system is called."""
    if isinstance(model, jadore801120.Transformer):
        return model(src, tgt).unflatten(0, tgt.shape)
    if isinstance(model, leftover.Transformer):
        return model(src, tgt, *leftover.make_masks(src, tgt, pad, model.projection.as_published))
    if isinstance(model, d2l_note.Transformer):
        return model(src, tgt, (src == pad)[:, None, :])[0]
    if isinstance(model, annotated_transformer.Transformer):
        return model.generator(model(src, tgt, *annotated_transformer.make_masks(src, tgt, pad)))
    return model(src, tgt)


def variant_of(name: str, as_published: bool, length: int = LENGTH) -> str:
    """What a random model's config is called, with what its tensors do not say."""
    said = [] if as_published else ["repaired"]
    said += [f"num_heads={HEADS}"] if name in ("leftover", "d2l_note", "annotated_transformer") else []
    said += [f"max_length={length}"] if name == "d2l_note" else []
    return f"{name}:{','.join(said)}"


def checkpoint_of(name: str, model: nn.Module, as_published: bool, length: int = LENGTH) -> Checkpoint:
    """What a file of the model's state dict would be read as; heads and the length of positions are the model's."""
    arrays = {key: from_torch(tensor) for key, tensor in model.state_dict().items()}
    config, _ = published_config(arrays, name, variant_of(name, as_published, length))
    config = config.replace(pad_id=PAD, compute_dtype="float64")
    ours, unused = from_named(arrays, config, name)
    return Checkpoint(config, ours, unused=unused)


def oracle_of(name: str, model: nn.Module, checkpoint: Checkpoint) -> Callable[[Batch], Outputs]:
    """f(batch) -> activations that both have, logits, loss and every gradient, by our paths."""
    config = checkpoint.config

    def run(batch: Batch) -> Outputs:
        src, tgt, labels = (torch.from_numpy(array) for array in (batch.src_tokens, batch.tgt_tokens, batch.labels))
        found: dict[str, list[Tensor]] = {}
        with ExitStack() as hooks:
            for path, module in model.named_modules():
                for ours, side in _found_in(name, path):
                    hooks.enter_context(_hook(module, side, found.setdefault(ours, [])))
            logits = call(model, src, tgt, config.pad_id)
        # the heads of lucky_glass are modules of their own
        heads = {
            path: torch.stack(values, 1) if values[0].dim() == 3 and path.endswith("weights") else values[0]
            for path, values in found.items()
        }
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=config.pad_id, reduction="sum")
        loss = losses / (labels != config.pad_id).sum().clamp(min=1)
        return heads | {"logits": logits, "loss": loss} | _gradients(name, model, loss, checkpoint)

    return run


def compare_published(name: str, as_published: bool, *, training: bool = False, **settings: Any) -> dict[str, Report]:
    """Either twin against the module in float64, on sentences of lengths that it takes. Needs `jax_enable_x64`."""
    model = random_model(name, as_published, **settings).train(training)
    checkpoint = checkpoint_of(name, model, as_published)
    config = checkpoint.config.replace(
        embedding_dropout=0.0, attention_dropout=0.0, ffn_dropout=0.0, residual_dropout=0.0
    )
    batch = random_batch(config, np.random.default_rng(1), 3, LENGTH, LENGTH if as_published else 5)
    batch = batch._replace(dropout=(1, 2) if training else None)
    coverage(batch, checkpoint.arrays, config.pad_id).check()
    oracle = oracle_of(name, model, checkpoint)
    return compare_with_oracle(run_twins(config, checkpoint.arrays, batch), oracle(batch), batch, config.pad_id)


def _found_in(name: str, path: str) -> list[tuple[str, str]]:
    """(our activation, side) of every one that is at a module of theirs."""
    encoder, of_encoder, decoder, of_decoder, whole = _PLACES[name]
    named = {f"encoder.layers.*.{ours}": encoder + theirs for ours, theirs in of_encoder.items()}
    named |= {f"decoder.layers.*.{ours}": decoder + theirs for ours, theirs in of_decoder.items()} | whole
    found = []
    for ours, theirs in named.items():
        pattern = re.escape(theirs[:-1]).replace(r"\*", r"(?P<layer>\d+)").replace(r"\#", r"\d+")
        if match := re.fullmatch(pattern, path):
            layer = match.groupdict().get("layer", "")
            found.append((ours.replace("*", layer), theirs[-1]))
    return found


def _hook(module: nn.Module, side: str, values: list[Tensor]) -> Any:
    if side == "<":
        return module.register_forward_pre_hook(lambda module, inputs: values.append(inputs[0].detach()))
    return module.register_forward_hook(lambda module, inputs, output: values.append(output.detach()))


def _gradients(name: str, model: nn.Module, loss: Tensor, checkpoint: Checkpoint) -> Outputs:
    """Of every trained array of ours, through the same rules as the weights."""
    state = model.state_dict(keep_vars=True)
    trained = {key: tensor for key, tensor in state.items() if tensor.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    arrays = {key: from_torch(torch.zeros_like(tensor)) for key, tensor in state.items()}
    arrays |= {key: from_torch(g) for key, g in zip(trained, grads, strict=True)}
    ours, _ = from_named(arrays, checkpoint.config, name)
    return {GRADIENTS + key: ours[key] for key in flax_specs(checkpoint.config, trained_only=True)}
