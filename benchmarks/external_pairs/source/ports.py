"""Ports of other projects beside the torch classes of `transformers`: how each is built, not its code.

Each builder gets the folder that contains the project's package, so that a copy with a mistake can be built too.
"""

import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.external_pairs import pairs
from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import called, only_output

Build = Callable[[Path], Pair]


@dataclass(frozen=True)
class Port:
    """A port, the file in which mistakes are made, and the functions or classes of it that its forward pass runs."""

    build: Build
    file: str  # from the folder of the package
    functions: tuple[str, ...]


@contextmanager
def imported_from(folder: Path, package: str) -> Iterator[None]:
    """Import a package from this folder, even if another copy of it has been imported."""
    _forget(package)
    sys.path.insert(0, str(folder))
    invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        _forget(package)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        del sys.modules[name]


def _modules(folder: Path, name: str) -> tuple[Any, Any]:
    pairs.bonsai(folder)
    return import_module(f"bonsai.models.{name}.modeling"), import_module(f"bonsai.models.{name}.params")


def _tokens(vocab_size: int, length: int = 7) -> np.ndarray:
    return np.random.default_rng(0).integers(1, vocab_size, (2, length))


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

    return Pair(only_output(module, "logits", ("input_ids",), use_cache=False), called(inner, run), (_tokens(29),))


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
    return Pair(reference, called(inner, lambda model, tokens: model(tokens)["logits"]), (_tokens(29, 8),))


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


def _bonsai(build: Build, name: str, functions: str) -> Port:
    return Port(build, f"bonsai/models/{name}/modeling.py", tuple(functions.split()))


PORTS: dict[str, Port] = {
    "bonsai ViT": _bonsai(pairs.vit, "vit", "ViT Transformer Feed Multi Patch Embed"),
    "bonsai Whisper": _bonsai(pairs.whisper, "whisper", "Whisper"),
    "bonsai UMT5": _bonsai(pairs.umt5, "umt5", "T5 UMT5"),
    "bonsai Qwen3": _bonsai(qwen3, "qwen3", "Attention MLP Decoder Qwen3 _generate apply compute count"),
    "bonsai DINOv3": _bonsai(dinov3, "dinov3", "D rotate apply"),
    "bonsai Mamba2": _bonsai(mamba2, "mamba2", "Mamba2Mixer Mamba2Block Mamba2Model segsum ssd RMSNorm Depthwise"),
    "bonsai V-JEPA 2": _bonsai(vjepa2, "vjepa2", "VJEPA2 rotate gelu"),
}
