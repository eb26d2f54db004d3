"""Small models as the Flax classes of `transformers` 4.55.4 save them, with the logits that these classes compute.

`python benchmarks/legacy_flax.py FOLDER` writes one directory per model (`make legacy-flax`). It runs in an environment
of its own, because later releases have no Flax classes. Beside config.json and the weights, `outputs.npz` holds token
ids, logits in float32 and in float64, and the names and CRC-32 sums of the tensors of the PyTorch class, for which
`transformers` itself converts the weights. In float64, position tables are those of float32, rounded, and T5's norms
compute in float64, not in float32.
"""

import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from transformers.modeling_flax_pytorch_utils import load_flax_weights_in_pytorch_model
from transformers.models.marian import modeling_flax_marian
from transformers.models.pegasus import modeling_flax_pegasus
from transformers.models.t5 import modeling_flax_t5

_BART = {
    "vocab_size": 31,
    "d_model": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 11,
    "decoder_ffn_dim": 7,
    "max_position_embeddings": 9,
}
_MARIAN = {"pad_token_id": 28, "decoder_start_token_id": 28, "activation_function": "swish", "scale_embedding": True}
_T5 = {
    "vocab_size": 31,
    "d_model": 8,
    "d_kv": 5,
    "d_ff": 11,
    "num_layers": 2,
    "num_decoder_layers": 1,
    "num_heads": 2,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 5,
}
_GATED = _T5 | {"num_layers": 1, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
# directory -> (Flax class, settings, dtype of the weights, arguments of `save_pretrained`)
MODELS: dict[str, tuple[str, dict[str, Any], Any, dict[str, Any]]] = {
    "marian": ("MarianMTModel", _BART | _MARIAN, jnp.float32, {}),
    "bart": ("BartForConditionalGeneration", _BART, jnp.float32, {}),
    "bart_untied_bfloat16": (
        "BartForConditionalGeneration",
        _BART | {"tie_word_embeddings": False, "scale_embedding": True},
        jnp.bfloat16,
        {},
    ),
    "mbart_float16": ("MBartForConditionalGeneration", _BART | {"scale_embedding": True}, jnp.float16, {}),
    "pegasus": ("PegasusForConditionalGeneration", _BART | {"activation_function": "relu"}, jnp.float32, {}),
    "blenderbot_safetensors": (
        "BlenderbotForConditionalGeneration",
        _BART,
        jnp.float32,
        {"safe_serialization": True},
    ),
    "t5": ("T5ForConditionalGeneration", _T5, jnp.float32, {}),
    "t5_gated_sharded": ("T5ForConditionalGeneration", _GATED, jnp.float32, {"max_shard_size": "4KB"}),
    "mt5": ("MT5ForConditionalGeneration", _GATED, jnp.float32, {}),
}


def _clip(array: Any, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None) -> jax.Array:
    """`jnp.clip` with the old names of its bounds, which T5 uses."""
    return _CLIP(array, a_min if min is None else min, a_max if max is None else max)


_CLIP = jnp.clip
jnp.clip = _clip


class _Norm(modeling_flax_t5.FlaxT5LayerNorm):
    """T5's norm in the dtype of its input."""

    def __call__(self, hidden_states: jax.Array) -> jax.Array:
        return self.weight * hidden_states / jnp.sqrt(jnp.square(hidden_states).mean(-1, keepdims=True) + self.eps)


@contextmanager
def _float64() -> Iterator[None]:
    """Everything in float64 except position tables, which have float32 values."""
    with ExitStack() as stack:
        stack.enter_context(jax.enable_x64(True))
        stack.enter_context(mock.patch.object(modeling_flax_t5, "FlaxT5LayerNorm", _Norm))
        for module in (modeling_flax_marian, modeling_flax_pegasus):
            table = partial(_rounded, module.create_sinusoidal_positions)
            stack.enter_context(mock.patch.object(module, "create_sinusoidal_positions", table))
        yield


def _rounded(table: Callable[..., Any], *sizes: int) -> Any:
    return table(*sizes).astype(jnp.float32)


def write(name: str, folder: Path) -> None:
    """Write the directory of a model."""
    architecture, settings, dtype, arguments = MODELS[name]
    config = getattr(transformers, architecture).config_class(**settings)
    flax_class = getattr(transformers, f"Flax{architecture}")
    rng = np.random.default_rng([*MODELS].index(name))
    params = jax.tree.map(lambda a: _noisy(a, rng).astype(dtype), flax_class(config).params)
    flax_class(config).save_pretrained(folder, params=params, **arguments)
    inputs = _inputs(config, rng)
    logits = {"float32": _logits(flax_class(config), params, inputs, jnp.float32)}
    with _float64():
        logits["float64"] = _logits(flax_class(config, dtype=jnp.float64), params, inputs, jnp.float64)
    module = getattr(transformers, architecture)(config)
    tensors = load_flax_weights_in_pytorch_model(module, params).state_dict()
    sums = [_checksum(tensor, getattr(torch, jnp.dtype(dtype).name)) for tensor in tensors.values()]
    np.savez_compressed(folder / "outputs.npz", **inputs, **logits, names=[*tensors], sums=np.array(sums, np.uint32))


def _noisy(array: Any, rng: np.random.Generator) -> Any:
    """The array with noise of scale width^-0.5; a bias of 0 or a gain of 1 would hide mistakes."""
    width = 4 if array.ndim == 1 else array.shape[-1]
    return np.asarray(array) + rng.standard_normal(array.shape).astype(np.float32) * np.float32(width**-0.5)


def _inputs(config: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Token ids of both sides; the second source has padding, inside and at its end."""
    ids = [i for i in range(config.vocab_size) if i != config.pad_token_id]
    src, tgt = rng.choice(ids, (3, 7)), rng.choice(ids, (3, 5))
    src[1, [2, 5, 6]] = config.pad_token_id
    return {"src": src.astype(np.int32), "tgt": tgt.astype(np.int32)}


def _logits(model: Any, params: Any, inputs: dict[str, np.ndarray], dtype: Any) -> np.ndarray:
    params = jax.tree.map(lambda a: jnp.asarray(a).astype(dtype), params)
    keep = (inputs["src"] != model.config.pad_token_id).astype(np.int32)
    outputs = model(inputs["src"], keep, decoder_input_ids=jnp.asarray(inputs["tgt"]), params=params)
    assert outputs.logits.dtype == dtype
    return np.asarray(outputs.logits)


def _checksum(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """The sum of a tensor's bytes in the dtype of the weights, which `transformers` loads as float32."""
    return zlib.crc32(tensor.to(dtype).contiguous().view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/legacy_flax.py FOLDER")
    for name in MODELS:
        write(name, Path(sys.argv[1]) / name)
