"""The modules of the published systems as oracles: independent implementations, compared with both twins."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ...configs.schema import TransformerConfig
from ...convert.arrays.frameworks import from_torch, to_torch_tensor
from ...convert.checkpoint import Checkpoint
from ...convert.formats.file_layouts import from_named, published_config, to_named
from ...convert.layouts.published import IDS
from ...convert.port import flax_specs
from ...published.registry import LAYOUTS, ORACLES, SYSTEMS
from ..coverage import coverage
from ..functions import GRADIENTS, Batch, Outputs, random_batch
from ..harness import Report
from ..ladder import compare_with_oracle, run_twins

PAD, SIZE, D_FF, HEADS, LAYERS, LENGTH = 1, 13, 20, 4, 2, 7  # sizes of the small models
D_MODEL = 12


def small_config(
    name: str, as_published: bool, length: int = LENGTH, layers: int = LAYERS, **settings: Any
) -> TransformerConfig:
    """A system's config at a small size; `settings`: more fields."""
    sizes = {"src_vocab_size": SIZE, "tgt_vocab_size": SIZE, "d_model": D_MODEL, "d_ff": D_FF, "num_heads": HEADS}
    sizes |= {"num_encoder_layers": layers, "num_decoder_layers": layers, "pad_id": PAD}
    sizes |= ORACLES[name].small(length) | settings
    return TransformerConfig.published(name, as_published=as_published, **sizes)


def random_model(name: str, as_published: bool, dropout: float = 0.0, **sizes: Any) -> nn.Module:
    """A small model in float64, of `small_config`; noise is added to all trained parameters, so that none is 0 or 1."""
    torch.manual_seed(3)
    model = ORACLES[name].build(small_config(name, as_published, **sizes), as_published, dropout).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def variant_of(name: str, as_published: bool, length: int = LENGTH) -> str:
    """The variant name of a random model's config, with the settings that its tensors do not determine."""
    config = small_config(name, as_published, length)
    standard = TransformerConfig.published(name, as_published=as_published)
    open_fields = (field for field in LAYOUTS[name].undetermined(config) if field not in IDS)
    settings = [f"{f}={getattr(config, f)}" for f in open_fields if getattr(config, f) != getattr(standard, f)]
    return f"{name}:{','.join([*([] if as_published else ['repaired']), *settings])}"


def checkpoint_of(name: str, model: nn.Module, as_published: bool, length: int = LENGTH) -> Checkpoint:
    """The checkpoint that a file with the model's state dict would give."""
    arrays = {key: from_torch(tensor) for key, tensor in model.state_dict().items()}
    config, _ = published_config(arrays, name, variant_of(name, as_published, length))
    config = config.replace(pad_id=PAD, compute_dtype="float64")
    flax_arrays, unused = from_named(arrays, config, name)
    return Checkpoint(config, flax_arrays, unused=unused)


def oracle_of(name: str, model: nn.Module, checkpoint: Checkpoint) -> Callable[[Batch], Outputs]:
    """f(batch) -> the activations that both models have, logits, loss and every gradient, by the twins' paths."""
    config = checkpoint.config

    def run(batch: Batch) -> Outputs:
        src, tgt, labels = (torch.from_numpy(array) for array in (batch.src_tokens, batch.tgt_tokens, batch.labels))
        recorded: dict[str, list[Tensor]] = {}
        with ExitStack() as hooks:
            for path, module in model.named_modules():
                for activation, side in _activations_at(name, path):
                    hooks.enter_context(_hook(module, side, recorded.setdefault(activation, [])))
            logits = ORACLES[name].call(model, src, tgt, config.pad_id)
        # in lucky_glass every head is a separate module
        activations = {
            path: torch.stack(values, 1) if values[0].dim() == 3 and path.endswith("weights") else values[0]
            for path, values in recorded.items()
        }
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=config.pad_id, reduction="sum")
        loss = losses / (labels != config.pad_id).sum().clamp(min=1)
        return activations | {"logits": logits, "loss": loss} | _gradients(name, model, loss, checkpoint)

    return run


def compare_published(name: str, as_published: bool, *, training: bool = False, **settings: Any) -> dict[str, Report]:
    """Compare both twins with the module in float64, on lengths that it accepts. Needs `jax_enable_x64`."""
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


class NamedOracle(NamedTuple):
    """A system's name, and its own module with a checkpoint's weights as an oracle."""

    name: str
    function: Callable[[Batch], Outputs]


def find_oracle(checkpoint: Checkpoint) -> NamedOracle | None:
    """The oracle of the system that matches the config, or None; its module must accept sentences of any length."""
    for name in SYSTEMS:
        as_published = LAYOUTS[name].variant(name, checkpoint.config)
        if as_published is not None and _accepts(name, checkpoint.config, as_published):
            wide = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64")
            arrays = {key: array.astype("float64") for key, array in checkpoint.arrays.items()}
            checkpoint = replace(checkpoint, config=wide, arrays=arrays, unused={})
            return NamedOracle(name, oracle_of(name, _module(name, checkpoint, as_published), checkpoint))
    return None


def _accepts(name: str, config: TransformerConfig, as_published: bool) -> bool:
    """Whether the module can represent the model and accepts sentences of any length."""
    oracle = ORACLES[name]
    same_depth = config.num_encoder_layers == config.num_decoder_layers
    return same_depth and oracle.accepts(config, as_published) and oracle.lengths_are_free(as_published)


def _module(name: str, checkpoint: Checkpoint, as_published: bool) -> nn.Module:
    """The system's module with the checkpoint's weights, in float64, in evaluation mode."""
    module = ORACLES[name].build(checkpoint.config, as_published, 0.0).double().eval()
    state: dict[str, Any] = module.state_dict()  # includes unused tensors
    module_arrays = to_named(checkpoint.arrays, checkpoint.config, name)
    state |= {key: to_torch_tensor(array) for key, array in module_arrays.items()}
    for path, owner in module.named_modules():  # tables may differ in length from the module's
        for key in owner._buffers:
            owner.register_buffer(key, torch.empty_like(state[f"{path}.{key}"]))
        for key, parameter in owner._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                table = torch.empty_like(state[f"{path}.{key}"])
                owner.register_parameter(key, nn.Parameter(table, requires_grad=False))
    module.load_state_dict(state)
    return module


def _activations_at(name: str, path: str) -> list[tuple[str, str]]:
    """(activation of the twins, side) for every one that is recorded at this module of the system."""
    activations = []
    for activation, location in ORACLES[name].activations.items():
        pattern = re.escape(location[:-1]).replace(r"\*", r"(?P<layer>\d+)").replace(r"\#", r"\d+")
        if match := re.fullmatch(pattern, path):
            activations.append((activation.replace("*", match.groupdict().get("layer", "")), location[-1]))
    return activations


def _hook(module: nn.Module, side: str, values: list[Tensor]) -> Any:
    if side == "<":
        return module.register_forward_pre_hook(lambda module, inputs: values.append(inputs[0].detach()))
    return module.register_forward_hook(lambda module, inputs, output: values.append(output.detach()))


def _gradients(name: str, model: nn.Module, loss: Tensor, checkpoint: Checkpoint) -> Outputs:
    """The gradient of every trained array by Flax name, through the same rules as the weights."""
    state = model.state_dict(keep_vars=True)
    trained = {key: tensor for key, tensor in state.items() if tensor.requires_grad}
    grads = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    arrays = {key: from_torch(torch.zeros_like(tensor)) for key, tensor in state.items()}
    arrays |= {key: from_torch(g) for key, g in zip(trained, grads, strict=True)}
    flax_gradients, _ = from_named(arrays, checkpoint.config, name)
    return {GRADIENTS + key: flax_gradients[key] for key in flax_specs(checkpoint.config, trained_only=True)}
