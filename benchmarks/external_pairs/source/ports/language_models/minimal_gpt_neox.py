"""A port of zphang/minimal-gpt-neox-20b: Linen modules whose layers `jax.lax.scan` calls, added by its function."""

from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, random_tokens, renamed


def gpt_neox(folder: Path) -> Pair:
    """`GPTNeoXForCausalLM`: parallel residuals, rotary positions in half of a head, gelu by tanh."""
    import transformers

    modeling: Any = import_module("minimal20b_flax.model")
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes |= {"intermediate_size": 96, "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16}
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    module = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes, rope_parameters=rotary))
    random_parameters(module)
    fields = {"vocab_size": 29, "hidden_size": 24, "num_attention_heads": 3, "num_layers": 2, "rotary_pct": 0.5}
    config = modeling.NeoX20BConfig(**fields, tp_num=3)  # then each head has its queries, keys and values together
    changes = [("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ff_norm")]
    changes += [("attention.query_key_value", "qkv_proj"), ("attention.dense", "output_proj")]
    changes += [("mlp.dense_h_to_4h", "ff_up_proj"), ("mlp.dense_4h_to_h", "ff_down_proj")]
    changes += [(r"norm\.weight", "norm.scale"), (r"\.weight", ".kernel")]
    arrays = {
        tuple(renamed(name, changes).split(".")): (tensor.T if tensor.ndim == 2 else tensor).numpy()
        for name, tensor in module.state_dict().items()
    }
    tree = traverse_util.unflatten_dict(arrays)
    body = tree["gpt_neox"]
    parameters = {
        "embed_in": {"embed": {"kernel": body["embed_in"]["kernel"].T}},
        "transformer": jax.tree.map(lambda *layers: np.stack(layers), *body["layers"].values()),
        "embed_out": {"norm": body["final_layer_norm"], "embed_out": tree["lm_head"]},
    }
    model = modeling.GPTNeoX20BModel(config)
    mask = jnp.zeros((2, 1, 7, 7))
    reference = only_output(module, "logits", ("input_ids",), use_cache=False)
    return Pair(reference, (lambda p, tokens: model._eval_apply_fn(p, tokens, mask), parameters), (random_tokens(29),))


# what JAX has renamed or no longer has; nothing is rounded to float16
_CHANGES = (("from jax.experimental import PartitionSpec", "from jax.sharding import PartitionSpec"),)
_CHANGES += (("from .create import load_model_weights", "pass"), ("np.float16", "np.float32"))
_FUNCTIONS = ("GPTNeoX20BModel", "ShardedEmbed", "ShardedTransformerLayer", "fixed_pos", "apply_rotary", "rotate_half")
MINIMAL_GPT_NEOX = {
    "minimal-gpt-neox": Port(gpt_neox, "minimal-gpt-neox-20b", "minimal20b_flax/model.py", _FUNCTIONS, _CHANGES)
}
