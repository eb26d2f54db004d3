"""The published system whose model a checkpoint is, as a third function beside the twins."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from ..configs.schema import TransformerConfig
from ..convert.arrays import to_torch_tensor
from ..convert.checkpoint import Checkpoint
from ..convert.file_layouts import PUBLISHED, to_named
from ..torch_reference.published import annotated_transformer, d2l_note, jadore801120, leftover, lucky_glass
from .functions import Batch, Outputs
from .published import oracle_of


class Found(NamedTuple):
    """A system's own module of a checkpoint's weights."""

    name: str
    function: Callable[[Batch], Outputs]


def find_oracle(checkpoint: Checkpoint) -> Found | None:
    """The system whose config it has, if there is one and its module takes sentences of any length."""
    for name, layout in PUBLISHED.items():
        as_published = layout.variant(name, checkpoint.config)
        if as_published is not None and _takes(name, checkpoint.config, as_published):
            wide = checkpoint.config.replace(param_dtype="float64", compute_dtype="float64")
            arrays = {key: array.astype("float64") for key, array in checkpoint.arrays.items()}
            checkpoint = replace(checkpoint, config=wide, arrays=arrays, unused={})
            return Found(name, oracle_of(name, _module(name, checkpoint, as_published), checkpoint))
    return None


def _takes(name: str, config: TransformerConfig, as_published: bool) -> bool:
    """Whether the module has such a model: what its arguments cannot say is as they have it."""
    if config.num_encoder_layers != config.num_decoder_layers:
        return False
    if name == "jadore801120" and not config.tied_output:
        return (config.embedding_scale == "none") == as_published
    if name == "lucky_glass":
        return config.pad_id == lucky_glass.PAD
    return name != "d2l_note" or not as_published  # which takes inputs of one length alone


def _module(name: str, checkpoint: Checkpoint, as_published: bool) -> nn.Module:
    """The system's module with the checkpoint's weights, in float64, in evaluation mode."""
    module = _MODULES[name](checkpoint.config, as_published).double().eval()
    theirs = to_named(checkpoint.arrays, checkpoint.config, name)
    state: dict[str, Any] = module.state_dict()  # with what nothing reads
    state |= {key: to_torch_tensor(array) for key, array in theirs.items()}
    for path, owner in module.named_modules():
        for key in owner._buffers:  # tables of other lengths than the module's
            owner.register_buffer(key, torch.empty_like(state[f"{path}.{key}"]))
    if name == "lucky_glass":
        table = state["pos_embed.additive"]
        module.get_submodule("pos_embed").additive = nn.Parameter(torch.empty_like(table), requires_grad=False)
    module.load_state_dict(state)
    return module


def _lucky_glass(config: TransformerConfig, as_published: bool) -> nn.Module:
    return lucky_glass.Transformer(*_vocabularies(config), **_sizes(config, as_published))


def _jadore801120(config: TransformerConfig, as_published: bool) -> nn.Module:
    scales = {"prj": config.logit_scale, "emb": config.embedding_scale}
    return jadore801120.Transformer(
        *_vocabularies(config),
        config.pad_id,
        config.pad_id,
        d_model=config.d_model,
        d_inner=config.d_ff,
        n_layers=config.num_encoder_layers,
        n_head=config.num_heads,
        d_k=config.query_key_width(config.num_heads),
        d_v=config.value_width(config.num_heads),
        dropout=0.0,
        n_position=config.table_length,
        trg_emb_prj_weight_sharing=config.tied_output,
        emb_src_trg_weight_sharing=config.shared_embeddings,
        scale_emb_or_prj=next((where for where, scale in scales.items() if scale != "none"), "none"),
        as_published=as_published,
    )


def _leftover(config: TransformerConfig, as_published: bool) -> nn.Module:
    sizes = _sizes(config, as_published)
    return leftover.Transformer(*_vocabularies(config), seq_len=config.table_length, pad=config.pad_id, **sizes)


def _d2l_note(config: TransformerConfig, as_published: bool) -> nn.Module:
    sizes = _sizes(config, as_published)
    return d2l_note.Transformer(*_vocabularies(config), seq_len=config.table_length, **sizes)


def _annotated_transformer(config: TransformerConfig, as_published: bool) -> nn.Module:
    sizes = _sizes(config, as_published)
    sizes["h"] = sizes.pop("heads")
    return annotated_transformer.Transformer(*_vocabularies(config), **sizes)


def _vocabularies(config: TransformerConfig) -> tuple[int, int]:
    return config.src_vocab_size, config.tgt_vocab_size


def _sizes(config: TransformerConfig, as_published: bool) -> dict[str, Any]:
    return {
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "heads": config.num_heads,
        "layers": config.num_encoder_layers,
        "dropout": 0.0,
        "as_published": as_published,
    }


_MODULES: dict[str, Callable[[TransformerConfig, bool], nn.Module]] = {
    "lucky_glass": _lucky_glass,
    "jadore801120": _jadore801120,
    "leftover": _leftover,
    "d2l_note": _d2l_note,
    "annotated_transformer": _annotated_transformer,
}
