"""A port of Additrien/FlaxMixtral: Linen modules as those of older `transformers`, on which they depend."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, linen_called, random_tokens, renamed, transposed, without

_MISSING = ("parts", "parts.modeling_flax_outputs", "parts.modeling_flax_utils", "parts.utils")


def mixtral(folder: Path) -> Pair:
    """`MixtralForCausalLM`: the two best of three experts per token, whose tokens are gathered and scattered.

    There is one sequence, as the port gives each expert at most the tokens of one; its window, which does not count the
    token itself, is one smaller.
    """
    import transformers

    with without(*_MISSING):
        modeling: Any = import_module("mixtral.modeling_flax_mixtral")
    modeling.ACT2FN = {"silu": jax.nn.silu}
    sizes: dict[str, Any] = {"vocab_size": 29, "hidden_size": 18, "intermediate_size": 14, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1, "num_local_experts": 3, "sliding_window": 4}
    sizes |= {"max_position_embeddings": 16, "pad_token_id": 0}
    rotary = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.MixtralConfig(**sizes, rope_parameters=rotary)
    config._experts_implementation = "eager"
    module = transformers.MixtralForCausalLM(config)
    random_parameters(module)
    fields = config.to_dict() | {"rope_theta": 1e4, "sliding_window": 3, "output_router_logits": False}
    inner = modeling.FlaxMixtralForCausalLMModule(SimpleNamespace(**fields))
    tensors = dict(module.state_dict())
    for i in range(2):
        place = f"model.layers.{i}.mlp.experts"
        both, down = tensors.pop(f"{place}.gate_up_proj"), tensors.pop(f"{place}.down_proj")
        for j in range(3):
            gate, up = both[j].chunk(2)
            tensors |= {f"{place}.{j}.w1.weight": gate, f"{place}.{j}.w2.weight": down[j], f"{place}.{j}.w3.weight": up}
    changes = [(r"(embed_tokens)\.weight", r"\1.embedding"), ("mlp", "block_sparse_moe")]
    changes += [(r"(proj|w\d|gate|lm_head)\.weight", r"\1.kernel")]
    named = transposed({renamed(name, changes): tensor for name, tensor in tensors.items()})
    positions = jnp.arange(7)[None]

    def run(model: Any, tokens: Any) -> Any:
        return model(tokens, jnp.ones_like(tokens), positions, return_dict=False)[0]

    reference = only_output(module, "logits", ("input_ids",), use_cache=False)
    return Pair(reference, linen_called(inner, named, run), (random_tokens(29)[:1],))


# what is imported from older `transformers`
_CHANGES = (("from ...", "from parts."), ("from .configuration_mixtral", "from transformers"))
_CHANGES += (("sys.modules[__name__] = ", "_ = "),)
_FOLDER = "FlaxMixtral/src/transformers/models"
FLAX_MIXTRAL = {
    "FlaxMixtral": Port(
        mixtral,
        _FOLDER,
        "mixtral/modeling_flax_mixtral.py",
        ("create_sin", "rotate_half", "apply_rotary", "FlaxMixtral"),
        _CHANGES,
    )
}
