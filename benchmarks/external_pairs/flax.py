"""The Flax classes of `transformers` 4.55.4, the last release that has them, beside its torch classes.

`python -m benchmarks.external_pairs.flax PAGE` writes the table into the page. It runs in an environment of its own
(`make external-pairs-flax`). Each model is small and random; the weights are converted by `transformers` itself.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax

from benchmarks.external_pairs.pair import Pair, keep_mask, random_parameters
from benchmarks.pages import write_table
from twinax.compare.capture.models import capture
from twinax.compare.capture.trace import CaptureError
from twinax.compare.repair.diagnosis import diagnose_traces
from twinax.compare.training.gradients import diagnose_gradients

_VOCABULARY, _PAD = 29, 1
_SIZES = {"vocab_size": _VOCABULARY, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
_ENCODER = {**_SIZES, "intermediate_size": 17, "max_position_embeddings": 16, "pad_token_id": _PAD}
_SEQ2SEQ = {"vocab_size": _VOCABULARY, "d_model": 12, "encoder_layers": 1, "decoder_layers": 1, "pad_token_id": _PAD}
_SEQ2SEQ |= {"encoder_attention_heads": 3, "decoder_attention_heads": 3, "max_position_embeddings": 16}
_SEQ2SEQ |= {"encoder_ffn_dim": 17, "decoder_ffn_dim": 17, "decoder_start_token_id": 2, "eos_token_id": 3}
_TOKENS = {"bos_token_id": 2, "eos_token_id": 3}
_GPT = {"vocab_size": _VOCABULARY, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 16, "n_inner": 17, **_TOKENS}
_T5 = {"vocab_size": _VOCABULARY, "d_model": 12, "d_kv": 4, "d_ff": 17, "num_layers": 2, "num_heads": 3}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 13}
_LLAMA = {**_ENCODER, **_TOKENS, "num_attention_heads": 2, "hidden_size": 8, "num_key_value_heads": 1}
_IMAGE = {"image_size": 16, "patch_size": 4, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3}
_OPT = {**_SIZES, "ffn_dim": 17, "max_position_embeddings": 16, "word_embed_proj_dim": 12, "pad_token_id": _PAD}
_WHISPER = {**_SEQ2SEQ, **_TOKENS, "num_mel_bins": 5, "max_source_positions": 7, "max_target_positions": 11}
# class of the torch model -> (settings, inputs)
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "BertModel": (_ENCODER, "encoder"),
    "RobertaModel": (_ENCODER, "encoder"),
    "AlbertModel": ({**_ENCODER, "embedding_size": 5}, "encoder"),
    "ElectraModel": ({**_ENCODER, "embedding_size": 5}, "encoder"),
    "DistilBertModel": (
        {"vocab_size": _VOCABULARY, "dim": 12, "n_layers": 2, "n_heads": 3, "hidden_dim": 17, "pad_token_id": _PAD},
        "encoder",
    ),
    "RobertaPreLayerNormModel": (_ENCODER, "encoder"),
    "GPT2LMHeadModel": (_GPT, "decoder"),
    "GPTNeoModel": (
        {**_SIZES, "num_layers": 2, "num_heads": 3, "attention_types": [[["global", "local"], 1]], "window_size": 3},
        "decoder",
    ),
    "LlamaForCausalLM": (_LLAMA, "decoder"),
    "MistralForCausalLM": ({**_LLAMA, "sliding_window": 3}, "decoder"),
    "GemmaForCausalLM": ({**_LLAMA, "head_dim": 4}, "decoder"),
    "OPTForCausalLM": (_OPT, "decoder"),
    "BartForConditionalGeneration": (_SEQ2SEQ, "encoder-decoder"),
    "MBartForConditionalGeneration": (_SEQ2SEQ, "encoder-decoder"),
    "MarianMTModel": (_SEQ2SEQ, "encoder-decoder"),
    "PegasusForConditionalGeneration": (_SEQ2SEQ, "encoder-decoder"),
    "BlenderbotForConditionalGeneration": (_SEQ2SEQ, "encoder-decoder"),
    "T5ForConditionalGeneration": ({**_T5, "feed_forward_proj": "gated-gelu"}, "encoder-decoder"),
    "MT5ForConditionalGeneration": ({**_T5, "feed_forward_proj": "gated-gelu"}, "encoder-decoder"),
    "ViTModel": ({**_IMAGE, "intermediate_size": 17}, "image"),
    "BeitModel": ({**_IMAGE, "intermediate_size": 17, "use_relative_position_bias": True}, "image"),
    "Dinov2Model": ({**_IMAGE, "mlp_ratio": 2}, "image"),
    "WhisperForConditionalGeneration": (_WHISPER, "speech"),
}
_NAMES = {
    "encoder": ("input_ids", "attention_mask"),
    "decoder": ("input_ids", "attention_mask"),
    "encoder-decoder": ("input_ids", "attention_mask", "decoder_input_ids"),
    "image": ("pixel_values",),
    "speech": ("input_features", "decoder_input_ids"),
}


class _Torch(nn.Module):
    """A torch model whose masks are booleans, and which returns its first output."""

    def __init__(self, inner: Any, names: tuple[str, ...]):
        super().__init__()
        self.inner, self.names = inner, names

    def forward(self, *inputs: Tensor) -> Tensor:
        values = [value.long() if value.dtype == torch.bool else value for value in inputs]
        settings = {} if self.names == _NAMES["image"] else {"use_cache": False}
        settings = settings if hasattr(self.inner.config, "use_cache") else {}
        return self.inner(**dict(zip(self.names, values, strict=True)), **settings)[0]


def _clip(array: Any, min: Any = None, max: Any = None, *, a_min: Any = None, a_max: Any = None) -> jax.Array:
    """`jnp.clip` with the old names of its bounds, which T5 uses."""
    return _CLIP(array, a_min if min is None else min, a_max if max is None else max)


_CLIP = jnp.clip
jnp.clip = _clip


def pair(name: str) -> Pair:
    """The torch model, and the Flax model with its weights."""
    settings, kind = MODELS[name]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    module = cls(cls.config_class(**settings)).eval()
    tables = {name: array.clone() for name, array in module.named_parameters() if not array.requires_grad}
    random_parameters(module)
    module.load_state_dict(tables, strict=False)  # sinusoidal positions, which Flax computes
    module.config._attn_implementation = "eager"
    with jax.enable_x64(True):  # so that constants are not rounded to float32
        flax_model = getattr(transformers, f"Flax{name}")(module.config, dtype=jnp.float64)
        parameters = convert_pytorch_state_dict_to_flax(module.state_dict(), flax_model)
    names = _NAMES[kind]

    def port(parameters: Any, *inputs: jax.Array) -> Any:
        values = [value.astype(int) if value.dtype == bool else value for value in inputs]
        return flax_model(**dict(zip(names, values, strict=True)), params=parameters)[0]

    return Pair(_Torch(module, names).eval(), (port, parameters), _inputs(kind))


def _inputs(kind: str) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    src, tgt = (rng.integers(4, _VOCABULARY, (3, length)) for length in (7, 5))
    keep = keep_mask(3, 7)
    return {
        "encoder": (src, keep),
        "decoder": (src, np.ones_like(keep)),
        "encoder-decoder": (src, keep, tgt),
        "image": (rng.standard_normal((2, 3, 16, 16)),),
        "speech": (rng.standard_normal((2, 5, 14)), tgt[:2]),
    }[kind]


def main() -> int:
    """Print the table, and write it into the page unless some models were chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--words", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(name) for name in MODELS if not options.words or any(word in name for word in options.words)]
    header = ("model", "operations", "outputs", "gradients", "named first", "seconds")
    if options.words:
        print(*("; ".join(cells) for cells in (header, *rows)), sep="\n")
    else:
        write_table(options.page, "external-pairs-flax", header, rows)
    return 0


def row(name: str) -> tuple[str, ...]:
    """The verdicts on a model, and what is named first."""
    models = pair(name)
    start = time.perf_counter()
    try:
        traces = capture(models.reference, models.inputs), capture(models.candidate, models.inputs)
    except CaptureError as error:
        return (name, "", f"left out: {error}"[:80], "", "", "")
    outputs = gradients = diagnose_traces(*traces)
    assert outputs.weights is not None
    if outputs.verdict == "equal":  # beside rounded constants it takes minutes
        both = (models.reference, models.candidate), (models.inputs, models.inputs)
        gradients = diagnose_gradients(*both, traces, outputs)
    seconds = f"{time.perf_counter() - start:.1f}"
    first = next(iter((*outputs.defects, *gradients.defects)), None)
    named = "" if first is None else first.note or f"{', '.join(first.lines)}: {first.repair or 'none found'}"
    verdicts = outputs.verdict, gradients.verdict if outputs.verdict == "equal" else ""
    print(name, *verdicts, named, seconds, sep="; ", flush=True, file=sys.stderr)
    return (name, str(len(traces[1].operations)), *verdicts, named, seconds)


if __name__ == "__main__":
    sys.exit(main())
