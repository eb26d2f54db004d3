"""A port of ayaka14732/llama-2-jax: compiled functions of named tuples, layers in `jax.lax.scan`, einops' products."""

from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.external_pairs.pair import Pair, keep_mask, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port


def llama(folder: Path) -> Pair:
    """`LlamaForCausalLM` with as many keys as queries, as the port's converter confuses the heads of groups."""
    import transformers

    modules, convert = import_module("lib.llama"), import_module("lib.llama_params.convert_params")
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 18, "intermediate_size": 22, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "rms_norm_eps": 1e-6, "pad_token_id": 0}
    module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    random_parameters(module)
    fields: dict[str, Any] = {"d_ff": 22, "d_k": 6, "d_model": 18, "d_v": 6, "n_heads_kv": 3, "n_layers": 2}
    settings = modules.model_config_llama2_7B._replace(**fields, vocab_size=29, dropout_rate=None)
    parameters = convert.convert_llama(module, model_config=settings)

    def run(parameters: Any, tokens: Any, keep: Any) -> Any:
        batch, length = tokens.shape
        mask = jnp.tril(jnp.ones((length, length), bool))[None, None, None] & keep[:, None, None, None]
        angles = modules.make_rotary_values(None, batch, length, model_config=settings)
        tokens = tokens.astype(jnp.uint16)
        return modules.forward_llama(parameters, tokens, mask, rotary_values=angles, model_config=settings)[0]

    tokens = np.random.default_rng(0).integers(1, 29, (2, 7))
    reference = only_output(module, "logits", ("input_ids", "attention_mask"), use_cache=False)
    return Pair(reference, (run, parameters), (tokens, keep_mask(2, 7)))


# what JAX has renamed, and assertions that float64 contradicts
_CHANGES = (("jax.tree_map", "jax.tree.map"), ("_val.dtype == jnp.float32", "_val.dtype != jnp.int32"))


def _port(name: str, *functions: str) -> Port:
    return Port(llama, "llama-2-jax", f"lib/llama/{name}.py", functions, _CHANGES)


LLAMA_2_JAX = {
    "llama-2-jax attention": _port("attention", "forward_"),
    "llama-2-jax block": _port("decoder_block", "forward_"),
    "llama-2-jax rotary positions": _port("rotary_embedding", "_make_weights", "_rotate_half", "forward_", "make_"),
}
