"""A port of ztjhz/t5-jax: functions of nested dictionaries, the whole compiled."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, renamed, transposed


def t5(folder: Path) -> Pair:
    """`T5ForConditionalGeneration`: learned biases of relative positions in buckets, shared embeddings.

    The targets are so short that the buckets of both directions, which the port's decoder has, are those of one.
    """
    import transformers

    forward = import_module("model.t5").fwd_t5
    sizes: dict[str, Any] = {"vocab_size": 29, "d_model": 18, "d_kv": 6, "d_ff": 22, "num_layers": 2, "num_heads": 3}
    module = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_decoder_layers=2))
    random_parameters(module)
    tied = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    changes = [(r"(shared|relative_attention_bias)\.weight", r"\1.embedding"), (r"\.(\w|w[io])\.weight", r".\1.kernel")]
    tensors = {renamed(name, changes): t for name, t in module.state_dict().items() if name not in tied}
    parameters = traverse_util.unflatten_dict(transposed(tensors), sep=".")
    rng = np.random.default_rng(0)
    source, target = rng.integers(1, 29, (2, 9)), rng.integers(1, 29, (2, 6))
    source[1, -2:] = 0

    def run(parameters: Any, source: Any, keep: Any, target: Any) -> Any:
        return forward(parameters, source * keep, target)[0]

    names = ("input_ids", "attention_mask", "decoder_input_ids")
    reference = only_output(module, "logits", names, use_cache=False)
    return Pair(reference, (run, parameters), (source, (source != 0).astype(int), target))


# what JAX has renamed or removed, and the sizes that the code contains
_CHANGES = (("jnp.NINF", "-jnp.inf"), ("newshape=", "shape="), ("a_max=", "max="))
_CHANGES += (("n_head = 12", "n_head = 3"), ("range(12)", "range(2)"))


def _port(name: str, *functions: str) -> Port:
    return Port(t5, "t5-jax", f"model/{name}.py", functions, _CHANGES, ("utils", "config"))


T5_JAX = {
    "t5-jax attention": _port("attention", "fwd_"),
    "t5-jax positions": _port("relative_attention_bias", "fwd_", "calculate"),
    "t5-jax decoder block": _port("transformer_decoder_block", "fwd_"),
}
