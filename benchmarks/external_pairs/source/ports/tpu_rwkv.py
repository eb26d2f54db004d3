"""A port of tensorpro/tpu_rwkv: Linen, a recurrence in `jax.lax.scan`, a batch by `nn.vmap`."""

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, linen_called, random_tokens, renamed, transposed


def rwkv(folder: Path) -> Pair:
    """`RwkvForCausalLM`: a weighted average of all values before, with decay, as a recurrence; shifts of tokens."""
    import transformers

    modeling = import_module("tpu_rwkv.model")
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 14, "num_hidden_layers": 2, "rescale_every": 0}
    module = transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, context_length=16))
    random_parameters(module)
    fields: dict[str, Any] = {"embedding_size": 14, "num_layers": 2, "vocab_size": 29, "context_length": 16}
    inner = modeling.BatchRWKV(modeling.Config(**fields, dtype="float32"))
    changes = [(r"^rwkv\.", ""), ("embeddings.weight", "embed.embedding"), (r"blocks\.0\.pre_ln", "input_layernorm")]
    changes += [("ln1", "time_mix.layernorm"), ("ln2", "channel_mix.layernorm"), ("ln_out", "output_layernorm")]
    changes += [("attention", "time_mix"), ("feed_forward", "channel_mix"), (r"blocks\.", "blocks_")]
    changes += [(r"(layernorm)\.weight", r"\1.scale"), (r"\.weight$", ".kernel")]
    changes += [(r"(time_mix_[kvr])[a-z]+$", r"\1")]
    tensors = {renamed(name, changes): tensor for name, tensor in module.state_dict().items()}
    tensors = {name: t.flatten() if "time_mix_" in name else t for name, t in tensors.items()}
    candidate = linen_called(inner, transposed(tensors), lambda model, tokens: model(tokens))
    reference = only_output(module, "logits", ("input_ids",), use_cache=False)
    return Pair(reference, candidate, (random_tokens(29),))


_WITHOUT_JIT = (("@partial(nn.jit, static_argnums=3)", "@(lambda function: function)"),)  # Flax counts otherwise now
_FUNCTIONS = ("TimeMix", "ChannelMix", "empty", "Block", "RWKV")
TPU_RWKV = {"tpu_rwkv RWKV": Port(rwkv, "tpu_rwkv", "tpu_rwkv/model.py", _FUNCTIONS, _WITHOUT_JIT)}
