"""A port of ayaka14732/bart-base-jax: functions of nested dictionaries, without any library of layers."""

from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.external_pairs.pair import Pair, keep_mask, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, without


def bart(folder: Path) -> Pair:
    """`BartModel`: an encoder and a decoder with post-norm, learned positions from the third, padded sources.

    The reference gets the port's tanh gelu.
    """
    import transformers

    with without("typeguard"):
        forward = import_module("lib.model.fwd_transformer").fwd_transformer
        convert = import_module("lib.param_utils.pt2jax").pt2jax
    sizes: dict[str, Any] = {"vocab_size": 29, "d_model": 18, "max_position_embeddings": 16, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 3, f"{side}_ffn_dim": 22}
    config = transformers.BartConfig(**sizes, activation_function="gelu_pytorch_tanh", pad_token_id=1)
    module = transformers.BartModel(config)
    random_parameters(module)
    parameters = convert(dict(module.state_dict()))

    def run(parameters: Any, source: Any, keep: Any, target: Any) -> Any:
        within, across = (
            jnp.broadcast_to(keep[:, None, None], (len(source), 1, length, source.shape[1]))
            for length in (source.shape[1], target.shape[1])
        )
        own = jnp.tril(jnp.ones((len(target), 1, target.shape[1], target.shape[1]), bool))
        return forward(parameters, source, target, within, own, across)

    rng = np.random.default_rng(0)
    inputs = rng.integers(3, 29, (2, 7)), keep_mask(2, 7), rng.integers(3, 29, (2, 5))
    names = ("input_ids", "attention_mask", "decoder_input_ids")
    return Pair(only_output(module, "last_hidden_state", names, use_cache=False), (run, parameters), inputs)


# what JAX has renamed or removed, and the sizes that the converter contains
_CHANGES = (("jax.tree_map", "jax.tree.map"), ("np.NINF", "-np.inf"), ("range(6)", "range(2)"))
_CHANGES += (("reshape(768, 12, 64)", "reshape(18, 3, 6)"), ("reshape(12, 64, 768)", "reshape(3, 6, 18)"))
_CHANGES += (("reshape(12, 64)", "reshape(3, 6)"), ("@jaxtyped", "@jaxtyped(typechecker=None)"))


def _port(name: str) -> Port:
    return Port(bart, "bart-base-jax", f"lib/model/fwd_{name}.py", (f"fwd_{name}",), _CHANGES)


BART_BASE_JAX = {
    "bart-base-jax attention": _port("attention"),
    "bart-base-jax encoder": _port("transformer_encoder"),
    "bart-base-jax decoder": _port("transformer_decoder"),
    "bart-base-jax model": _port("transformer"),
}
