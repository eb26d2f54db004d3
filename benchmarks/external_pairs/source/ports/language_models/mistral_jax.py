"""A port of AakashKumarNain/mistral_jax: Equinox, layers stacked and run in `jax.lax.scan`, a cache that is filled."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import torch

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, random_tokens


class _Batched(eqx.Module):
    """A model of one sequence, over a batch, with an empty cache of 4 keys with 6 numbers in 2 layers."""

    inner: Any
    rope: Any = eqx.field(static=True)

    def __call__(self, tokens: Any) -> Any:
        length = tokens.shape[1]
        cos, sin = self.rope.precompute_frequencies(6, length)
        cache = jnp.zeros((2, 4, 1, 6))
        positions = jnp.arange(length)
        return jax.vmap(lambda row: self.inner(row, cos, sin, positions, None, cache, cache)[0])(tokens)


def _interleaved(weight: torch.Tensor) -> torch.Tensor:
    """The weight of queries or keys with heads of 6 whose halves are mixed: the port rotates neighbors."""
    return weight.reshape(-1, 2, 3, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def mistral(folder: Path) -> Pair:
    """`MistralForCausalLM`: grouped queries, rotary positions of neighboring numbers, a window.

    The port's window, which does not count the token itself, is one smaller.
    """
    import transformers

    modeling, rope = import_module("mistral_jax.model"), import_module("mistral_jax.rope")
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 18, "intermediate_size": 22, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 6, "rms_norm_eps": 1e-5}
    rotary = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.MistralConfig(**sizes, sliding_window=5, rope_parameters=rotary, pad_token_id=0)
    module = transformers.MistralForCausalLM(config)
    random_parameters(module)
    fields: dict[str, Any] = {"dim": 18, "n_layers": 2, "n_heads": 3, "n_kv_heads": 1, "head_dim": 6, "hidden_dim": 22}
    settings = SimpleNamespace(**fields, vocab_size=29, sliding_window=4, norm_eps=1e-5)
    inner = modeling.Transformer(settings, key=jax.random.key(0), dtype=jnp.float32)
    layers: list[Any] = list(module.model.layers)

    def places(model: Any) -> list[Any]:
        block = model.layers
        own = [block.attention.wqkv, block.attention.wo, block.attention_norm, block.ffn_norm]
        own += [block.feed_forward.w1, block.feed_forward.w2, block.feed_forward.w3]
        return [part.weight for part in (*own, model.tok_embeddings, model.norm, model.output)]

    attention = [layer.self_attn for layer in layers]
    stacks: list[list[Any]] = [
        [torch.cat([_interleaved(a.q_proj.weight), _interleaved(a.k_proj.weight), a.v_proj.weight]) for a in attention],
        [a.o_proj.weight for a in attention],
        [layer.input_layernorm.weight for layer in layers],
        [layer.post_attention_layernorm.weight for layer in layers],
        [layer.mlp.gate_proj.weight for layer in layers],
        [layer.mlp.down_proj.weight for layer in layers],
        [layer.mlp.up_proj.weight for layer in layers],
    ]
    whole = [module.model.embed_tokens.weight, module.model.norm.weight, module.lm_head.weight]
    arrays = [jnp.asarray(t.detach().numpy()) for t in [*map(torch.stack, stacks), *whole]]
    candidate = _Batched(eqx.tree_at(places, inner, arrays), rope)
    return Pair(only_output(module, "logits", ("input_ids",), use_cache=False), candidate, (random_tokens(29),))


_CHANGES = (("from rope import", "from mistral_jax.rope import"),)  # a script beside it
_FUNCTIONS = ("RMSNorm", "FeedForward", "Attention", "TransformerBlock", "Transformer")
MISTRAL_JAX = {
    "mistral_jax model": Port(mistral, "mistral_jax", "mistral_jax/model.py", _FUNCTIONS, _CHANGES),
}
