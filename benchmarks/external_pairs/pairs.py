"""Pairs of models that compute the same: third-party code, PyTorch's layers, our twins, published modules and families.

Every model is small and has random parameters; the sentences have several lengths.
"""

import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import Tensor, nn

from benchmarks.external_pairs.layers import LAYERS
from benchmarks.external_pairs.pair import Pair, keep_mask, random_parameters
from parity_tests.support.conversion import VARIANTS, random_model
from twinax import TransformerConfig, convert, flax_transformer
from twinax.parity.functions import random_arrays, random_batch
from twinax.parity.oracles import published
from twinax.published.registry import ORACLES, SYSTEMS

TWINS: dict[str, dict[str, Any]] = {
    "twins": {},
    "twins, pre-norm, gelu": {"norm_placement": "pre", "activation": "gelu"},
    "twins, learned positions, RMSNorm": {"positions": "learned", "norm": "rms_norm"},
    "twins, tied embeddings, silu": {"activation": "silu", "norm_placement": "pre", "norm": "rms_norm"},
}
_SAMPLERS = ("BaseSampler", "GreedySampler", "Sampler", "SamplerType")


class _Logits(nn.Module):
    """A module of `transformers` that returns one of its outputs; boolean masks become its integers."""

    def __init__(self, inner: Any, output: str, names: tuple[str, ...], **settings: Any):
        super().__init__()
        self.inner, self.output, self.names, self.settings = inner, output, names, settings

    def forward(self, *inputs: Tensor) -> Tensor:
        values = [value.long() if value.dtype == torch.bool else value for value in inputs]
        return self.inner(**dict(zip(self.names, values, strict=True)), **self.settings)[self.output]


def only_output(module: nn.Module, output: str, names: tuple[str, ...], **settings: Any) -> nn.Module:
    """A model of `transformers`, called with inputs of these names, that returns one of its outputs."""
    return _Logits(module.eval(), output, names, **settings).eval()


def twins(settings: Mapping[str, Any]) -> Pair:
    """Our PyTorch and Flax models."""
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "param_dtype": "float64", "compute_dtype": "float64"}
    config = TransformerConfig.preset("tiny", **sizes, d_model=15, d_ff=17, num_heads=3, **settings)
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(a) for name, a in random_arrays(config, 0).items()}
        model = flax_transformer.Transformer.from_arrays(config, arrays)
        reference = convert.to_torch(model).eval()
    batch = random_batch(config, np.random.default_rng(0), 3, 7, 5)
    return Pair(reference, model, (batch.src_tokens, batch.tgt_tokens))


class _Published(nn.Module):
    def __init__(self, name: str, module: nn.Module, pad: int):
        super().__init__()
        self.name, self.module, self.pad = name, module, pad

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        return ORACLES[self.name].call(self.module, src, tgt, self.pad)


def published_system(name: str, as_published: bool) -> Pair:
    """A published module and our Flax model."""
    module = published.random_model(name, as_published=as_published, layers=1).eval()
    checkpoint = published.checkpoint_of(name, module, as_published=as_published)
    with jax.enable_x64(True):
        candidate = checkpoint.to_flax()
    length = published.LENGTH
    batch = random_batch(checkpoint.config, np.random.default_rng(1), 3, length, length if as_published else 5)
    reference = _Published(name, module, checkpoint.config.pad_id).eval()
    return Pair(reference, candidate, (batch.src_tokens, batch.tgt_tokens))


class _EncoderDecoder(nn.Module):
    """An encoder-decoder of `transformers` that is called with tokens alone."""

    def __init__(self, inner: Any, pad: int):
        super().__init__()
        self.inner, self.pad = inner, pad

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        keep = (src != self.pad).long()
        return self.inner(input_ids=src, attention_mask=keep, decoder_input_ids=tgt, use_cache=False).logits


def converted(name: str, dtype: str = "float64") -> Pair:
    """A family of `transformers` and the Flax model that we convert it to; in float32 its constants are rounded."""
    with tempfile.TemporaryDirectory() as folder:
        random_model(name).save_pretrained(folder)
        checkpoint = convert.load(folder)
        model: Any = type(random_model(name)).from_pretrained(folder)
    config, rng = checkpoint.config.replace(param_dtype=dtype, compute_dtype=dtype), np.random.default_rng(1)
    with jax.enable_x64(True):
        arrays = {name: array.astype(dtype) for name, array in checkpoint.arrays.items()}
        candidate = replace(checkpoint, config=config, arrays=arrays).to_flax()
    batch = random_batch(config, rng, 3, 7, 5)
    # `transformers` does not mask the target's padding, whose logits nobody reads; here there is none
    tgt = rng.integers(0, config.tgt_vocab_size - 1, (3, 5))
    tgt += tgt >= config.pad_id
    return Pair(_EncoderDecoder(model.eval(), config.pad_id).eval(), candidate, (batch.src_tokens, tgt))


def bonsai(folder: Path) -> None:
    """Make bonsai importable; its samplers, which no forward pass uses, are not among the files."""
    if not (folder / "bonsai").is_dir():
        raise ModuleNotFoundError(f"{folder} has no folder bonsai")
    stub = types.ModuleType("bonsai.utils.samplers")
    for name in _SAMPLERS:
        setattr(stub, name, object)
    sys.modules.setdefault(stub.__name__, stub)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


class _Called(nnx.Module):
    """A module of bonsai with inputs in our order; `erf`: what it publishes as tanh gelu is computed with erf."""

    def __init__(self, inner: Any, call: Callable[..., Any], erf: bool):
        self.inner, self.call, self.erf = inner, call, erf

    def __call__(self, *inputs: jax.Array) -> Any:
        """Its output."""
        if not self.erf:
            return self.call(self.inner, *inputs)
        with mock.patch("jax.nn.gelu", partial(jax.nn.gelu, approximate=False)):
            return self.call(self.inner, *inputs)


def called(inner: Any, call: Callable[..., Any], erf: bool = False) -> nnx.Module:
    """A module of a port that is called by a function."""
    return _Called(inner, call, erf)


def vit(folder: Path, as_published: bool = False) -> Pair:
    """`ViTForImageClassification` and bonsai's."""
    import transformers

    bonsai(folder)
    from bonsai.models.vit import modeling, params  # type: ignore[import-not-found]

    sizes: dict[str, Any] = {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3, "num_labels": 7}
    config = transformers.ViTConfig(**sizes, intermediate_size=17, image_size=16, patch_size=4)
    module = transformers.ViTForImageClassification(config)
    random_parameters(module)
    settings = modeling.ModelConfig((16, 16), (4, 4), 3, 15, 0.0, 0.0, 3, 17, 1e-12, 2, 7)
    with tempfile.TemporaryDirectory() as place:
        module.save_pretrained(place)
        inner = params.create_vit_from_pretrained(place, settings)
    images = np.random.default_rng(0).standard_normal((2, 3, 16, 16))
    candidate = _Called(inner, lambda model, x: model(x, rngs=None), not as_published)
    reference = _Logits(module.eval(), "logits", ("pixel_values",)).eval()
    return Pair(reference, candidate, (images,), (images.transpose(0, 2, 3, 1),))


def _run_whisper(model: Any, features: jax.Array, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1])
    causal = (positions[:, None] >= positions[None, :])[None, None]
    return model.decoder(tokens, causal, model.encoder(features), None, decode=False)


def whisper(folder: Path, as_published: bool = False, frozen: bool = False) -> Pair:
    """`WhisperModel` and bonsai's; frozen: the positions of the encoder are not trained, as bonsai does."""
    import transformers

    bonsai(folder)
    from bonsai.models.whisper import modeling, params  # type: ignore[import-not-found]

    sizes: dict[str, Any] = {"d_model": 18, "vocab_size": 29, "num_mel_bins": 5, "max_source_positions": 7}
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    sizes |= {"encoder_ffn_dim": 17, "decoder_ffn_dim": 17}
    tokens: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    module = transformers.WhisperModel(transformers.WhisperConfig(**sizes, max_target_positions=11, **tokens))
    random_parameters(module)
    module.encoder.embed_positions.requires_grad_(not frozen)
    fields = modeling.ModelConfig.whisper_tiny().__dict__ | sizes | {"max_length": 11}
    small = modeling.ModelConfig(**fields)
    with tempfile.TemporaryDirectory() as place:
        transformers.WhisperForConditionalGeneration(module.config).save_pretrained(place)
        complete = transformers.WhisperForConditionalGeneration.from_pretrained(place)
        complete.model.load_state_dict(module.state_dict())
        complete.save_pretrained(place)
        with mock.patch.object(modeling.ModelConfig, "whisper_tiny", return_value=small):
            inner = params.create_whisper_from_pretrained(place)
    rng = np.random.default_rng(0)
    features, ids = rng.standard_normal((2, 5, 14)), rng.integers(4, 29, (2, 5))
    names = ("input_features", "decoder_input_ids")
    reference = _Logits(module.eval(), "last_hidden_state", names, use_cache=False).eval()
    return Pair(
        reference, _Called(inner, _run_whisper, not as_published), (features, ids), (features.transpose(0, 2, 1), ids)
    )


def umt5(folder: Path) -> Pair:
    """`UMT5Model` and bonsai's, which returns its decoder's states."""
    import transformers

    bonsai(folder)
    from bonsai.models.umt5 import modeling, params  # type: ignore[import-not-found]

    sizes: dict[str, Any] = {"vocab_size": 29, "d_model": 15, "d_kv": 5, "d_ff": 17, "num_layers": 1, "num_heads": 3}
    sizes |= {"num_decoder_layers": 1, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 13}
    module = transformers.UMT5Model(transformers.UMT5Config(**sizes, feed_forward_proj="gated-gelu"))
    random_parameters(module)
    with tempfile.TemporaryDirectory() as place:
        state = {name: tensor.float().clone() for name, tensor in module.state_dict().items()}
        torch.save(state, Path(place) / "model.pth")
        with mock.patch.object(nnx, "eval_shape", lambda build: build()):  # so that unused arrays have values
            inner = params.create_model(modeling.UMT5Model, place, modeling.ModelConfig(**sizes, dropout_rate=0.0))
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(2, 29, (3, 7)), rng.integers(2, 29, (3, 5))
    keep = keep_mask(3, 7)
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    reference = _Logits(module.eval(), "last_hidden_state", names, use_cache=False).eval()
    call = _Called(inner, lambda model, src, keep, tgt: model(src, keep.astype(jnp.int32), tgt), False)
    return Pair(reference, call, (src, keep, tgt))


def pairs(folder: Path) -> dict[str, Callable[[], Pair]]:
    """Name -> builder of every pair that should be equal."""
    repaired = {
        "bonsai ViT": lambda: vit(folder),
        "bonsai Whisper": lambda: whisper(folder),
        "bonsai UMT5": lambda: umt5(folder),
    }
    ours = {name: partial(twins, settings) for name, settings in TWINS.items()}
    systems = {f"{name}": partial(published_system, name, True) for name in SYSTEMS}
    families = {f"transformers {name}": partial(converted, name) for name in VARIANTS}
    families["transformers BART, float32"] = partial(converted, "BART", "float32")
    return {**repaired, **LAYERS, **ours, **systems, **families}


def published_defects(folder: Path) -> dict[str, Callable[[], Pair]]:
    """Name -> builder of pairs with a defect that their authors published."""
    return {
        "bonsai ViT": lambda: vit(folder, True),
        "bonsai Whisper": lambda: whisper(folder, True),
        "bonsai Whisper, gradients": lambda: whisper(folder, frozen=True),
    }
