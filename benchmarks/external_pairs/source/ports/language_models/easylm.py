"""A port of young-geng/EasyLM: Linen modules with einops and complex rotary positions."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from benchmarks.external_pairs.pair import Pair, keep_mask, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, linen_called, random_tokens, renamed, transposed, without

_MISSING = ("mlxu", "ml_collections", "ml_collections.config_dict", "ml_collections.config_dict.config_dict")
_MISSING += ("transformers.modeling_flax_outputs", "transformers.modeling_flax_utils")


def llama(folder: Path) -> Pair:
    """`LlamaForCausalLM` with groups of queries; a head's rows are reordered, as the port rotates neighbors."""
    import transformers

    with without(*_MISSING):
        modeling: Any = import_module("EasyLM.models.llama.llama_model")
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 24, "intermediate_size": 22, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 16}
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, pad_token_id=0))
    random_parameters(module)
    fields = sizes | dict.fromkeys(("embedding_dropout", "feedforward_dropout", "attention_dropout"), 0.0)
    fields |= {"residue_dropout": 0.0, "fcm_min_ratio": 0.0, "fcm_max_ratio": 0.0, "initializer_range": 0.02}
    fields |= {"remat_policy": "", "scan_attention": False, "scan_mlp": False, "tie_word_embeddings": False}
    fields |= {"output_attentions": False, "output_hidden_states": False, "rope_theta": 1e4}
    inner = modeling.FlaxLLaMAForCausalLMModule(SimpleNamespace(**fields))
    changes = [(r"^model\.", "transformer."), (r"layers\.", "h."), ("embed_tokens.weight", "wte.embedding")]
    changes += [(r"self_attn\.(\w)_proj", r"attention.w\1"), ("mlp.gate_proj", "feed_forward.w1")]
    changes += [("mlp.down_proj", "feed_forward.w2"), ("mlp.up_proj", "feed_forward.w3")]
    changes += [("input_layernorm", "attention_norm"), ("post_attention_layernorm", "ffn_norm")]
    changes += [(r"transformer\.norm", "transformer.ln_f"), (r"\.weight", ".kernel")]
    tensors = {renamed(name, changes): tensor for name, tensor in module.state_dict().items()}
    for name, tensor in tensors.items():
        if name.endswith(("wq.kernel", "wk.kernel")):  # halves become neighbors
            tensors[name] = tensor.reshape(-1, 2, 3, 24).transpose(1, 2).reshape(-1, 24)
    arrays = transposed({name: tensor for name, tensor in tensors.items() if tensor.ndim == 2})
    arrays |= {name: tensor.detach().numpy() for name, tensor in tensors.items() if tensor.ndim == 1}
    positions = jnp.arange(7)[None] + jnp.zeros((2, 1), int)

    def run(model: Any, tokens: Any, keep: Any) -> Any:
        return model(tokens, keep, positions, return_dict=False)[0]

    reference = only_output(module, "logits", ("input_ids", "attention_mask"), use_cache=False)
    return Pair(reference, linen_called(inner, arrays, run), (random_tokens(29), keep_mask(2, 7)))


# what older `transformers` has
_CHANGES = (("from transformers import FlaxLogitsWarper", "FlaxLogitsWarper = object"),)
_FUNCTIONS = ("RMSNorm", "apply_rotary", "FlaxLLaMAAttention", "FlaxLLaMAMLP", "FlaxLLaMABlock", "FlaxLLaMAForCausal")
EASYLM = {"EasyLM": Port(llama, "EasyLM", "EasyLM/models/llama/llama_model.py", _FUNCTIONS, _CHANGES)}
