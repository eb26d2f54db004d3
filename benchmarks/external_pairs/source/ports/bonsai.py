"""Ports of jax-ml/bonsai: the diagnosis was improved on these."""

import tempfile
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from safetensors.torch import save_file
from torch import nn

from benchmarks.external_pairs import pairs
from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import called, only_output
from benchmarks.external_pairs.source.ports.port import Build, Port, random_statistics, random_tokens, renamed


def _modules(folder: Path, name: str) -> tuple[Any, Any]:
    pairs.bonsai(folder)
    return import_module(f"bonsai.models.{name}.modeling"), import_module(f"bonsai.models.{name}.params")


def qwen3(folder: Path) -> Pair:
    """`Qwen3ForCausalLM`: grouped queries, norms of queries and keys, rotary positions, a cache that is filled."""
    import transformers

    modeling, params = _modules(folder, "qwen3")
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 18, "intermediate_size": 22, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-6}
    config = transformers.Qwen3Config(**sizes, rope_theta=1e6, tie_word_embeddings=False, pad_token_id=0)
    module = transformers.Qwen3ForCausalLM(config)
    random_parameters(module)
    fields = {"num_layers": 2, "vocab_size": 29, "emb_dim": 18, "mlp_dim": 22, "num_heads": 4, "head_dim": 6}
    fields |= {"num_kv_heads": 2, "rope_theta": 1_000_000, "rope_scaling_factor": 8.0, "local_rope_theta": 1e4}
    settings = modeling.ModelConfig(**fields, norm_eps=1e-6, tie_word_embeddings=False)
    with tempfile.TemporaryDirectory() as place:
        module.save_pretrained(place)
        inner = params.create_model_from_safe_tensors(place, settings)

    def run(model: Any, tokens: Any) -> Any:
        cache = modeling.init_cache(settings, len(tokens), tokens.shape[1], 1, jnp.float64)
        return model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))

    return Pair(
        only_output(module, "logits", ("input_ids",), use_cache=False), called(inner, run), (random_tokens(29),)
    )


def dinov3(folder: Path) -> Pair:
    """`DINOv3ViTModel`: registers, two-dimensional rotary positions, layer scale."""
    import transformers

    modeling, params = _modules(folder, "dinov3")
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 17, "num_hidden_layers": 2, "image_size": 16}
    sizes |= {"num_attention_heads": 3, "num_register_tokens": 2, "layer_norm_eps": 1e-5, "rope_theta": 100.0}
    config = transformers.DINOv3ViTConfig(**sizes, patch_size=4, hidden_act="gelu_pytorch_tanh")
    module = transformers.DINOv3ViTModel(config)
    random_parameters(module)
    with tempfile.TemporaryDirectory() as place:
        module.save_pretrained(place)
        inner = params.create_model_from_safe_tensors(place, modeling.ModelConfig(**sizes, patch_size=(4, 4)))
    images = np.random.default_rng(0).standard_normal((2, 3, 16, 16))
    reference = only_output(module, "last_hidden_state", ("pixel_values",))
    return Pair(reference, called(inner, lambda model, x: model(x)["last_hidden_state"]), (images,))


def mamba2(folder: Path) -> Pair:
    """`Mamba2ForCausalLM`: a selective state-space model in chunks, a depthwise convolution, a gated norm."""
    import transformers

    modeling, params = _modules(folder, "mamba2")
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 12, "state_size": 5, "head_dim": 6, "chunk_size": 4}
    sizes |= {"expand": 2, "conv_kernel": 3, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5}
    config = transformers.Mamba2Config(**sizes, num_heads=4, n_groups=1, tie_word_embeddings=True, pad_token_id=0)
    module = transformers.Mamba2ForCausalLM(config)
    random_parameters(module)
    inner, _, left = params.load_pytorch_weights(
        params.create_random_model(modeling.ModelConfig(**sizes)),
        {name.replace("embeddings", "embedding"): t.numpy() for name, t in module.state_dict().items()},
    )
    assert not left, left
    reference = only_output(module, "logits", ("input_ids",), use_cache=False)
    return Pair(reference, called(inner, lambda model, tokens: model(tokens)["logits"]), (random_tokens(29, 8),))


def vjepa2(folder: Path) -> Pair:
    """`VJEPA2ForVideoClassification`: patches of videos, rotary positions in three dimensions, a pooler."""
    import transformers

    modeling, params = _modules(folder, "vjepa2")
    sizes: dict[str, Any] = {"patch_size": 4, "tubelet_size": 2, "crop_size": 8, "frames_per_clip": 4}
    sizes |= {"hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2, "mlp_ratio": 4.0}
    sizes |= {"pred_hidden_size": 12, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1}
    sizes |= {"pred_num_mask_tokens": 2, "num_pooler_layers": 1, "layer_norm_eps": 1e-6}
    module = transformers.VJEPA2ForVideoClassification(transformers.VJEPA2Config(**sizes, num_labels=5))
    random_parameters(module)
    with tempfile.TemporaryDirectory() as place:
        module.save_pretrained(place)
        settings = modeling.ModelConfig(**sizes, num_labels=5)
        inner = params.create_model_from_safe_tensors(place, settings, classifier=True)
    videos = np.random.default_rng(0).standard_normal((2, 4, 3, 8, 8))
    reference = only_output(module, "logits", ("pixel_values_videos",))
    inputs = (videos.transpose(0, 1, 3, 4, 2),)
    return Pair(reference, called(inner, lambda model, x: model(x)["logits"]), (videos,), inputs)


def _fill(model: Any, arrays: Mapping[str, Any]) -> None:
    """Set parameters of a port by their dotted names; kernels come in PyTorch's order."""
    for name, tensor in arrays.items():
        *path, last = name.split(".")
        owner = model
        for part in path:
            owner = owner[int(part)] if part.isdigit() else getattr(owner, part)
        array = np.asarray(tensor)
        if last == "kernel":
            array = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array.T
        parameter = getattr(owner, last)
        assert parameter.shape == array.shape, (name, parameter.shape, array.shape)
        parameter.set_value(jnp.asarray(array))


def _save(place: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a checkpoint with the names that a loader wants."""
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, Path(place) / "model.safetensors")


def convnext(folder: Path) -> Pair:
    """`ConvNextForImageClassification`: depthwise convolutions of 7 by 7, layer scale, halvings between stages."""
    import transformers

    pairs.bonsai(folder)
    modeling = import_module("bonsai.models.convnext.modeling")  # its loader reads files of Keras
    sizes: dict[str, Any] = {"num_stages": 2, "depths": [2, 1], "hidden_sizes": [6, 10], "patch_size": 2}
    config = transformers.ConvNextConfig(**sizes, image_size=20, num_labels=7, layer_norm_eps=1e-6)
    module = transformers.ConvNextForImageClassification(config)
    random_parameters(module)
    settings = modeling.ModelConfig((2, 1), (6, 10), 0.0, 7, patch_size=(2, 2), layernorm_eps=1e-6)
    inner = modeling.ConvNeXt(settings, rngs=nnx.Rngs(0))
    changes = [(r"^convnext\.(encoder\.)?", ""), (r"^embeddings\.patch_embeddings", "embedding_layer.layers.0")]
    changes += [(r"^embeddings\.layernorm\.weight", "embedding_layer.layers.1.scale")]
    changes += [(r"^embeddings\.layernorm", "embedding_layer.layers.1"), (r"^classifier", "head")]
    changes += [(r"downsampling_layer\.0\.weight", "downsample_layers.0.scale"), ("layer_scale_parameter", "gamma")]
    changes += [("downsampling_layer", "downsample_layers"), (r"layernorm\.weight", "norm.scale")]
    changes += [("layernorm", "norm"), (r"\.weight$", ".kernel")]
    _fill(inner, {renamed(name, changes): tensor for name, tensor in module.state_dict().items()})
    images = np.random.default_rng(0).standard_normal((2, 3, 20, 16))
    candidate = called(inner, lambda model, x: model(x, rngs=None))
    return Pair(only_output(module, "logits", ("pixel_values",)), candidate, (images,), (images.transpose(0, 2, 3, 1),))


def gemma3(folder: Path) -> Pair:
    """`Gemma3ForConditionalGeneration`: SigLIP's images among the tokens, sliding and full attention, four norms."""
    import transformers

    modeling, params = _modules(folder, "gemma3")
    text: dict[str, Any] = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 22, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rms_norm_eps": 1e-6}
    text |= {"sliding_window": 5, "attention_bias": False, "attention_dropout": 0.0, "max_position_embeddings": 32}
    eyes: dict[str, Any] = {"hidden_size": 12, "image_size": 16, "intermediate_size": 14, "num_attention_heads": 3}
    eyes |= {"layer_norm_eps": 1e-6, "num_channels": 3, "num_hidden_layers": 2, "patch_size": 4}
    eyes |= {"attention_dropout": 0.0, "vision_use_head": False}
    rotary = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
    rotary |= {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    words = {"query_pre_attn_scalar": 6, "rope_parameters": rotary, "pad_token_id": 0, "eos_token_id": 1}
    words |= {"layer_types": ["sliding_attention", "full_attention"], "bos_token_id": 2}
    config = transformers.Gemma3Config(
        text_config=text | words, vision_config=eyes, mm_tokens_per_image=4, image_token_id=28, image_token_index=28
    )
    module = transformers.Gemma3ForConditionalGeneration(config)
    random_parameters(module)
    modes = modeling.AttentionMode
    text |= {"layer_types": [modes.SLIDE, modes.FULL], "norm_dtype": jnp.float32, "rope_full_factor": 8.0}
    text |= {"rope_full_theta": 1e6, "rope_slide_factor": 1.0, "rope_slide_theta": 1e4}
    parts = modeling.VisionConfig(**eyes), modeling.TextConfig(**text)
    settings = modeling.ModelConfig(*parts, 4, "float32", None)
    with tempfile.TemporaryDirectory() as place:
        changes = [("^model.(vision_tower)", r"\1.vision_model"), ("^model.language_model", "language_model.model")]
        changes += [(r"^model\.(multi)", r"\1")]
        _save(place, {renamed(name, changes): tensor for name, tensor in module.state_dict().items()})
        inner = params.create_gemma3_from_pretrained(place, settings)

    def run(model: Any, tokens: Any, kinds: Any, images: Any) -> Any:
        cache = modeling.init_cache(settings, len(tokens), tokens.shape[1], 1, jnp.float64)
        ones = jnp.ones_like(tokens)
        return model(tokens, images, cache=cache, segment_ids=ones, token_type_ids=kinds)

    rng = np.random.default_rng(0)
    tokens, kinds, images = rng.integers(3, 28, (2, 7)), np.zeros((2, 7), int), rng.standard_normal((2, 3, 16, 16))
    kinds[0, 1:5] = kinds[1, 2:6] = 1
    tokens[kinds == 1] = 28
    names = ("input_ids", "token_type_ids", "pixel_values")
    reference = only_output(module, "logits", names, use_cache=False)
    inputs = (tokens, kinds, images.transpose(0, 2, 3, 1))
    return Pair(reference, called(inner, run), (tokens, kinds, images), inputs)


def resnet(folder: Path) -> Pair:
    """`ResNetForImageClassification`: bottlenecks, batch normalization with running statistics, a max pool."""
    import transformers

    modeling, params = _modules(folder, "resnet")  # its channels are those of the published models
    sizes: dict[str, Any] = {"embedding_size": 64, "hidden_sizes": [256, 512, 1024, 2048], "depths": [2, 1, 1, 1]}
    module = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, num_labels=7))
    random_parameters(module, scale=0.05)
    random_statistics(module)
    with tempfile.TemporaryDirectory() as place:
        module.save_pretrained(place)
        inner = params.create_resnet_from_pretrained(place, modeling.ModelConfig([2, 1, 1, 1], 7))
    images = np.random.default_rng(0).standard_normal((2, 3, 40, 48))
    reference = only_output(module, "logits", ("pixel_values",))
    return Pair(reference, called(inner, lambda model, x: model(x)), (images,), (images.transpose(0, 2, 3, 1),))


def qwen3_vl(folder: Path) -> Pair:
    """`Qwen3VLForConditionalGeneration`: an image among the tokens, without the features of its early layers.

    The port adds no such features to the text and gives image tokens plain positions, which the reference gets too.
    Its gelu of merged patches is computed with erf.
    """
    import transformers

    modeling, params = _modules(folder, "qwen3_vl")
    text: dict[str, Any] = {"vocab_size": 29, "hidden_size": 18, "intermediate_size": 22, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6}
    eyes: dict[str, Any] = {"depth": 2, "hidden_size": 24, "intermediate_size": 14, "num_heads": 3, "patch_size": 3}
    eyes |= {"in_channels": 3, "out_hidden_size": 18, "num_position_embeddings": 25, "deepstack_visual_indexes": ()}
    rotary = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": rotary}, vision_config=eyes, image_token_id=28, tie_word_embeddings=False
    )
    module = transformers.Qwen3VLForConditionalGeneration(config)
    random_parameters(module)
    words = modeling.Qwen3VLTextConfig(**text, rope_theta=1e4, tie_word_embeddings=False)
    settings = modeling.ModelConfig(modeling.Qwen3VLVisionConfig(**eyes), words)
    with tempfile.TemporaryDirectory() as place:
        _save(place, module.state_dict())
        inner = params.create_model_from_safe_tensors(place, settings)
    grid = np.array([[1, 4, 6]])

    def run(model: Any, tokens: Any, patches: Any) -> Any:
        cache = modeling.init_cache(settings, 1, 9, 1, jnp.float64)
        with mock.patch("flax.nnx.gelu", partial(jax.nn.gelu, approximate=False)):
            return model(tokens, patches, grid, cache=cache, token_type_ids=tokens == 28)

    rng = np.random.default_rng(0)
    tokens, patches = rng.integers(1, 28, (1, 9)), rng.standard_normal((24, 54))
    tokens[:, 2:8] = 28
    places = {"image_grid_thw": torch.tensor(grid), "position_ids": torch.arange(9).expand(3, 1, 9)}
    reference = only_output(module, "logits", ("input_ids", "pixel_values"), use_cache=False, **places)
    return Pair(reference, called(inner, run), (tokens, patches))


def llada(folder: Path) -> Pair:
    """LLaDA, whose blocks are those of `LlamaForCausalLM` that look both ways."""
    import transformers

    modeling, params = _modules(folder, "llada")
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 18, "intermediate_size": 22, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "pad_token_id": 0}
    rotary = {"rope_type": "default", "rope_theta": 5e5}
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, rope_parameters=rotary))
    random_parameters(module)
    module.config.is_causal = False
    for layer in module.model.layers:
        layer.self_attn.is_causal = False
    fields: dict[str, Any] = {"dtype": jnp.float32, "d_model": 18, "n_heads": 3, "n_kv_heads": 3, "n_layers": 2}
    fields |= {"embedding_dropout": 0.0, "max_sequence_length": 32, "rope_theta": 5e5, "mlp_hidden_size": 22}
    fields |= {"include_qkv_bias": False, "include_bias": False, "vocab_size": 29, "embedding_size": 29}
    fields |= {"shd_cfg": modeling.ShardingConfig(*[None] * 10), "return_hidden_states": False}  # no mesh
    changes = [("^model.embed_tokens", "model.transformer.wte"), ("^lm_head", "model.transformer.ff_out")]
    changes += [("^model.layers", "model.transformer.blocks"), ("^model.norm", "model.transformer.ln_f")]
    changes += [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ff_norm"), (r"self_attn\.o_", "attn_")]
    changes += [("attn_proj", "attn_out"), (r"self_attn\.", ""), (r"mlp\.gate", "ff"), (r"mlp\.down_proj", "ff_out")]
    changes += [(r"mlp\.", "")]
    with tempfile.TemporaryDirectory() as place:
        _save(place, {renamed(name, changes): tensor for name, tensor in module.state_dict().items()})
        inner = params.create_llada_from_pretrained(place, modeling.ModelConfig(**fields))
    reference = only_output(module, "logits", ("input_ids",), use_cache=False)
    candidate = called(inner, lambda model, tokens: model(tokens, jnp.ones_like(tokens), jax.random.key(0))[0])
    return Pair(reference, candidate, (random_tokens(29),))


class _Graph(nnx.Module, pytree=False):
    """A module as in Flax before 0.12, whose lists may contain modules."""

    def __init_subclass__(cls, **settings: Any):
        super().__init_subclass__(pytree=False, **settings)


def hiera(folder: Path) -> Pair:
    """`Sam2HieraDetModel`: attention in padded windows, queries pooled between stages, positions of two kinds."""
    from transformers.models.sam2.configuration_sam2 import Sam2HieraDetConfig
    from transformers.models.sam2.modeling_sam2 import Sam2HieraDetModel

    pairs.bonsai(folder)
    with mock.patch("flax.nnx.Module", _Graph):  # its modules hold others in plain lists
        modeling = import_module("bonsai.models.sam2.model_hiera_det")
    sizes: dict[str, Any] = {"embed_dim_per_stage": [6, 12, 24], "num_attention_heads_per_stage": [1, 2, 4]}
    sizes |= {"blocks_per_stage": [1, 2, 1], "window_size_per_stage": [4, 3, 2], "global_attention_blocks": [3]}
    sizes |= {"window_positional_embedding_background_size": [8, 12], "num_query_pool_stages": 1}
    config = Sam2HieraDetConfig(**sizes, hidden_size=6, image_size=[32, 48], hidden_act="gelu_pytorch_tanh")
    module = Sam2HieraDetModel(config)
    random_parameters(module)
    windows: dict[str, Any] = {"window_pos_embed_bkg_spatial_size": (8, 12), "window_spec": (4, 3, 2)}
    windows |= {"stages": (1, 2, 1), "q_pool": 1, "global_att_blocks": (3,)}
    inner = modeling.Hiera(embed_dim=6, num_heads=1, **windows, rngs=nnx.Rngs(0))
    changes = [(r"layer_norm([12])\.weight", r"norm\1.scale"), ("layer_norm", "norm"), ("projection", "proj")]
    changes += [("proj_in", "layers.0"), ("proj_out", "layers.1"), (r"\.weight$", ".kernel")]
    _fill(inner, {renamed(name, changes): tensor for name, tensor in module.state_dict().items()})
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 48))
    reference = only_output(module, "intermediate_hidden_states", ("pixel_values",))
    return Pair(reference, called(inner, lambda model, x: model(x)), (images,), (images.transpose(0, 2, 3, 1),))


def efficientnet(folder: Path) -> Pair:
    """`EfficientNetForImageClassification`: inverted bottlenecks, squeeze and excitation, uneven padding."""
    import transformers

    pairs.bonsai(folder)
    modeling = import_module("bonsai.models.efficientnet.modeling")  # its loader reads names of timm
    sizes: dict[str, Any] = {"in_channels": [32, 64], "out_channels": [64, 96], "kernel_sizes": [3, 5]}
    sizes |= {"strides": [1, 2], "num_block_repeats": [1, 2], "expand_ratios": [1, 3], "hidden_dim": 320}
    sizes |= {"width_coefficient": 0.25, "depth_coefficient": 1.0, "batch_norm_eps": 1e-5, "num_labels": 7}
    module = transformers.EfficientNetForImageClassification(transformers.EfficientNetConfig(**sizes))
    random_parameters(module)
    random_statistics(module)
    blocks = [
        modeling.BlockConfig(32, 64, 3, 1, 1, 1, 0.25, "SAME"),
        modeling.BlockConfig(64, 96, 5, 2, 3, 2, 0.25, "SAME"),
    ]
    settings = modeling.ModelConfig(0.25, 1.0, 32, 0.0, "SAME", 0.99, 1e-5, modeling.BlockConfigs(blocks), 7)
    inner = modeling.EfficientNet(settings, rngs=nnx.Rngs(0))
    changes = [(r"^efficientnet\.(encoder\.)?", ""), (r"embeddings\.batchnorm", "stem_bn"), ("top_", "head_")]
    changes += [(r"embeddings\.convolution", "stem_conv"), (r"expansion\.expand_bn", "bn0"), (r"expansion\.", "")]
    changes += [(r"depthwise_conv\.depthwise_norm", "bn1"), (r"depthwise_conv\.depthwise", "depthwise")]
    changes += [(r"squeeze_excite\.reduce", "se.conv1"), (r"squeeze_excite\.expand", "se.conv2")]
    changes += [(r"projection\.project_bn", "bn2"), (r"projection\.", ""), (r"(bn\d?)\.weight", r"\1.scale")]
    changes += [("running_", ""), (r"\.weight$", ".kernel")]
    tensors = {name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()}
    _fill(inner, {renamed(name, changes): tensor for name, tensor in tensors.items()})
    images = np.random.default_rng(0).standard_normal((2, 3, 32, 40))
    reference = only_output(module, "logits", ("pixel_values",))
    return Pair(reference, called(inner, lambda model, x: model(x)), (images,), (images.transpose(0, 2, 3, 1),))


class _First(nn.Module):
    """A decoder of masks, called with the features in two resolutions, whose outputs are those of the first image."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        *first, fine, coarse = inputs
        outputs = self.inner(*first, multimask_output=True, high_resolution_features=[fine, coarse])
        return [output[0] for output in outputs]


def sam2_decoder(folder: Path) -> Pair:
    """`Sam2MaskDecoder`: tokens and an image that attend to each other, transposed convolutions, a network per mask.

    The reference gets the port's epsilon of the two-way blocks, the port the reference's gelu with erf.
    """
    from transformers.models.sam2.configuration_sam2 import Sam2MaskDecoderConfig
    from transformers.models.sam2.modeling_sam2 import Sam2MaskDecoder

    pairs.bonsai(folder)
    with mock.patch("flax.nnx.Module", _Graph):
        modeling = import_module("bonsai.models.sam2.model_mask_decoder")
        blocks = import_module("bonsai.models.sam2.model_transformer")
    config = Sam2MaskDecoderConfig(hidden_size=16, mlp_dim=14, num_attention_heads=2, iou_head_hidden_dim=10)
    config._attn_implementation = "sdpa"
    module = Sam2MaskDecoder(config)
    random_parameters(module)
    for part in module.transformer.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 1e-6
    settings: dict[str, Any] = {"iou_head_hidden_dim": 10, "use_high_res_features": True, "pred_obj_scores": True}
    settings |= {
        "iou_prediction_use_sigmoid": True,
        "pred_obj_scores_mlp": True,
        "use_multimask_token_for_obj_ptr": True,
    }
    settings |= {"activation": partial(jax.nn.gelu, approximate=False), "rngs": nnx.Rngs(0)}
    inner = modeling.MaskDecoder(16, blocks.TwoWayTransformer(2, 16, 2, 14, rngs=nnx.Rngs(0)), **settings)
    tensors = dict(module.state_dict())
    for name in ("upscale_conv1.weight", "upscale_conv2.weight"):
        tensors[name] = tensors[name].flip(2, 3).transpose(0, 1)  # Flax does not turn kernels around
    changes = [("^transformer.layers", "transformer.blocks"), (r"(mlps\.\d|head)\.layers\.0", r"\1.layers.1")]
    changes += [
        (r"(mlps\.\d|head)\.proj_out", r"\1.layers.2"),
        ("proj_in", "layers.0"),
        ("mlp.proj_out", "mlp.layers.1"),
    ]
    changes += [("o_proj", "out_proj"), (r"layer_norm(\d|_final_attn)\.weight", r"norm\1.scale")]
    changes += [(r"layer_norm(\d|_final_attn)", r"norm\1"), (r"(tokens?)\.weight", r"\1.embedding")]
    changes += [("upscale_layer_norm.weight", "output_upscaling.layers.1.gain"), (r"\.weight$", ".kernel")]
    changes += [(r"\.gain$", ".weight"), ("upscale_layer_norm", "output_upscaling.layers.1")]
    changes += [("upscale_conv1", "output_upscaling.layers.0"), ("upscale_conv2", "output_upscaling.layers.3")]
    _fill(inner, {renamed(name, changes): tensor for name, tensor in tensors.items()})
    shapes = [(1, 16, 3, 5), (1, 16, 3, 5), (1, 2, 7, 16), (1, 16, 3, 5), (1, 2, 12, 20), (1, 4, 6, 10)]
    rng = np.random.default_rng(0)
    image, places, prompts, dense, fine, coarse = (rng.standard_normal(shape) for shape in shapes)

    def run(model: Any, image: Any, places: Any, prompts: Any, dense: Any, fine: Any, coarse: Any) -> Any:
        return model(image, places, prompts, dense, True, True, [fine, coarse])

    inputs = (image, places, prompts, dense, fine, coarse)
    return Pair(_First(module).eval(), called(inner, run), inputs, (image, places, prompts[0], dense, fine, coarse))


class _Prompts(nn.Module):
    """An encoder of prompts, called without boxes, whose points are those of the first image."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, points: torch.Tensor, labels: torch.Tensor, masks: torch.Tensor) -> list[torch.Tensor]:
        sparse, dense = self.inner(points, labels, None, masks)
        return [sparse[0], dense]


def sam2_prompts(folder: Path) -> Pair:
    """`Sam2PromptEncoder`: points as random Fourier features with an embedding per label, masks made small."""
    from transformers.models.sam2.configuration_sam2 import Sam2PromptEncoderConfig
    from transformers.models.sam2.modeling_sam2 import Sam2PromptEncoder

    pairs.bonsai(folder)
    with mock.patch("flax.nnx.Module", _Graph):
        modeling = import_module("bonsai.models.sam2.model_prompt_encoder")
    module = Sam2PromptEncoder(
        Sam2PromptEncoderConfig(hidden_size=18, image_size=32, patch_size=8, mask_input_channels=12)
    )
    random_parameters(module)
    gelu = partial(jax.nn.gelu, approximate=False)
    inner = modeling.PromptEncoder(18, (4, 4), (32, 32), 12, gelu, rngs=nnx.Rngs(0))
    tensors = dict(module.state_dict())
    labels = tensors.pop("point_embed.weight")
    tensors |= {f"point_embeddings.{i}.weight": labels[i : i + 1] for i in range(4)}
    changes = [
        ("shared_embedding.positional_embedding", "pe_layer.gaussian_matrix"),
        ("^mask_embed", "mask_downscaling"),
    ]
    changes += [("layer_norm1.weight", "layers.1.gain"), ("layer_norm2.weight", "layers.4.gain")]
    changes += [("layer_norm1", "layers.1"), ("layer_norm2", "layers.4"), ("conv1", "layers.0"), ("conv2", "layers.3")]
    changes += [("conv3", "layers.6"), (r"(embed|embeddings\.\d)\.weight", r"\1.embedding"), (r"\.weight$", ".kernel")]
    changes += [(r"\.gain$", ".weight")]
    _fill(inner, {renamed(name, changes): tensor for name, tensor in tensors.items()})
    rng = np.random.default_rng(0)
    points, labels, masks = (
        rng.uniform(0, 32, (1, 2, 3, 2)),
        np.array([[0, 1, 3], [2, -1, 1]]),
        rng.random((2, 1, 16, 16)),
    )

    def run(model: Any, points: Any, labels: Any, masks: Any) -> Any:
        return model((points, labels), None, masks)

    inputs = (points[0], labels, masks.transpose(0, 2, 3, 1))
    return Pair(_Prompts(module).eval(), called(inner, run), (points, labels[None], masks), inputs)


class _Autoencoder(nn.Module):
    """An encoder and a decoder of Janus, between which the mean alone is kept, as in latent diffusion."""

    def __init__(self, encoder: nn.Module, decoder: nn.Module, channels: int):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.quant_conv = nn.Conv2d(2 * channels, 2 * channels, 1)
        self.post_quant_conv = nn.Conv2d(channels, channels, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean, _ = self.quant_conv(self.encoder(images)).chunk(2, dim=1)
        return self.decoder(self.post_quant_conv(mean))


def vae(folder: Path) -> Pair:
    """The autoencoder of latent diffusion, of the parts of `JanusVQVAE`: group norms, attention in the middle."""
    from transformers.models.janus.configuration_janus import JanusVQVAEConfig
    from transformers.models.janus.modeling_janus import JanusVQVAEDecoder, JanusVQVAEEncoder

    pairs.bonsai(folder)
    modeling = import_module("bonsai.models.vae.modeling")
    sizes: dict[str, Any] = {"base_channels": 32, "channel_multiplier": [1, 2], "latent_channels": 5}
    config = JanusVQVAEConfig(**sizes, double_latent=True)
    encoder, decoder = JanusVQVAEEncoder(config), JanusVQVAEDecoder(config)
    encoder.down[-1].attn, decoder.up[0].attn = nn.ModuleList(), nn.ModuleList()  # attention is in the middle alone
    module = _Autoencoder(encoder, decoder, 5)
    for part in module.modules():
        if isinstance(part, nn.GroupNorm):
            part.num_groups = 8
    random_parameters(module, scale=0.1)
    inner = modeling.VAE(modeling.ModelConfig((32, 64), 5, 8), rngs=nnx.Rngs(0))
    changes = [("mid.block_1", "mid_block.resnets.0"), ("mid.block_2", "mid_block.resnets.1")]
    changes += [("mid.attn_1.norm", "mid_block.attentions.0.group_norm"), ("norm_out", "conv_norm_out")]
    changes += [("mid.attn_1.proj_out", "mid_block.attentions.0.to_out")]
    changes += [
        ("mid.attn_1.", "mid_block.attentions.0.to_"),
        (r"\.block\.", ".resnets."),
        (r"(down|up)\.(\d)", r"\1_blocks.\2"),
    ]
    changes += [("downsample.conv", "downsamplers"), ("upsample.conv", "upsamplers.conv"), ("nin_short", "conv_short")]
    changes += [(r"(norm\w*)\.weight", r"\1.scale"), (r"\.weight$", ".kernel")]
    tensors = {renamed(name, changes): tensor for name, tensor in module.state_dict().items()}
    _fill(inner, {name: t[:, :, 0, 0] if "to_" in name and t.ndim == 4 else t for name, t in tensors.items()})
    images = np.random.default_rng(0).standard_normal((2, 3, 8, 12))
    return Pair(module.eval(), called(inner, lambda model, x: model(x)), (images,), (images.transpose(0, 2, 3, 1),))


def _bonsai(build: Build, name: str, functions: str) -> Port:
    return Port(build, "bonsai", f"bonsai/models/{name}/modeling.py", tuple(functions.split()))


_GEMMA3 = """SiglipVision SiglipAttention SiglipMLP SiglipEncoder Gemma3 sharded _generate apply count_left compute
repeat make merge batched LayerCache init_cache"""
_QWEN3_VL = """RMSNorm Sharded Qwen3VLPatch Qwen3VLVisionM Qwen3VLVisionA Qwen3VLVisionB Qwen3VLMLP Qwen3VLAttention
Qwen3VLDecoder Qwen3VLTextM Qwen3VLFor Qwen3VLModel LayerCache init_cache _generate rotate apply _apply repeat merge
batched make"""
BONSAI = {
    "bonsai ViT": _bonsai(pairs.vit, "vit", "ViT Transformer Feed Multi Patch Embed"),
    "bonsai Whisper": _bonsai(pairs.whisper, "whisper", "Whisper"),
    "bonsai UMT5": _bonsai(pairs.umt5, "umt5", "T5 UMT5"),
    "bonsai Qwen3": _bonsai(qwen3, "qwen3", "Attention MLP Decoder Qwen3 _generate apply compute count"),
    "bonsai DINOv3": _bonsai(dinov3, "dinov3", "D rotate apply"),
    "bonsai Mamba2": _bonsai(mamba2, "mamba2", "Mamba2Mixer Mamba2Block Mamba2Model segsum ssd RMSNorm Depthwise"),
    "bonsai V-JEPA 2": _bonsai(vjepa2, "vjepa2", "VJEPA2 rotate gelu"),
    "bonsai ConvNeXt": _bonsai(convnext, "convnext", "drop_path Block Stage ConvNeXt"),
    "bonsai Gemma 3": _bonsai(gemma3, "gemma3", _GEMMA3),
    "bonsai Qwen3-VL": _bonsai(qwen3_vl, "qwen3_vl", _QWEN3_VL),
    "bonsai LLaDA": _bonsai(llada, "llada", "Sharded count compute RMSNorm sharded_attention LLaDA"),
    "bonsai SAM 2 Hiera": Port(hiera, "bonsai", "bonsai/models/sam2/model_hiera_det.py", ("",)),
    "bonsai SAM 2 masks": Port(sam2_decoder, "bonsai", "bonsai/models/sam2/model_mask_decoder.py", ("",)),
    "bonsai SAM 2 attention": Port(
        sam2_decoder, "bonsai", "bonsai/models/sam2/model_transformer.py", ("Attention", "TwoWay")
    ),
    "bonsai SAM 2 prompts": Port(sam2_prompts, "bonsai", "bonsai/models/sam2/model_prompt_encoder.py", ("",)),
    "bonsai VAE": _bonsai(vae, "vae", "Resnet Down scaled Attention UNet Encoder Up Decoder VAE"),
    "bonsai EfficientNet": _bonsai(efficientnet, "efficientnet", "Squeeze MBConv EfficientNet round"),
    "bonsai ResNet": _bonsai(resnet, "resnet", "Bottleneck Downsample BlockGroup Stem ResNet"),
}
