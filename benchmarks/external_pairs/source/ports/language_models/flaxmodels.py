"""Ports of matthias-wright/flaxmodels: Linen with modules that are made in the forward pass."""

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, linen_called, random_tokens, without


def gpt2(folder: Path) -> Pair:
    """`GPT2Model`: learned positions, one projection for queries, keys and values, tanh gelu written out."""
    import transformers

    with without("h5py"):
        modeling = import_module("flaxmodels.gpt2.gpt2")
    sizes: dict[str, Any] = {"vocab_size": 29, "n_positions": 16, "n_embd": 18, "n_layer": 2, "n_head": 3}
    sizes |= {"bos_token_id": 1, "eos_token_id": 1}
    config = transformers.GPT2Config(**sizes)
    module = transformers.GPT2Model(config)
    random_parameters(module)
    inner = modeling.GPT2Model(SimpleNamespace(**config.to_dict()))
    state = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    arrays = {"Embed_0.embedding": state["wte.weight"]}
    arrays |= {"Embed_1.embedding": state["wpe.weight"]}
    layers = {"attn.c_attn": "GPT2SelfAttention_0.Dense_0", "attn.c_proj": "GPT2SelfAttention_0.Dense_1"}
    layers |= {"mlp.c_fc": "GPT2MLP_0.Dense_0", "mlp.c_proj": "GPT2MLP_0.Dense_1"}
    layers |= {"ln_1": "LayerNorm_0", "ln_2": "LayerNorm_1"}
    names = {f"h.{i}.{a}": f"GPT2Block_{i}.{b}" for i in range(2) for a, b in layers.items()}
    for source, target in (names | {"ln_f": "LayerNorm_0"}).items():
        kernel = "scale" if "LayerNorm" in target else "kernel"  # the reference's matrices are kernels already
        arrays |= {f"{target}.{kernel}": state[f"{source}.weight"], f"{target}.bias": state[f"{source}.bias"]}
    candidate = linen_called(inner, arrays, lambda model, tokens: model(tokens)["last_hidden_state"])
    reference = only_output(module, "last_hidden_state", ("input_ids",), use_cache=False)
    return Pair(reference, candidate, (random_tokens(29),))


_NEW = (("newshape=", "shape="),)  # an argument that JAX has renamed
FLAXMODELS = {
    "flaxmodels GPT-2": Port(
        gpt2, "flaxmodels", "flaxmodels/gpt2/gpt2.py", ("GPT2Self", "GPT2MLP", "GPT2Block", "GPT2Model"), _NEW
    ),
    "flaxmodels GPT-2 operations": Port(
        gpt2, "flaxmodels", "flaxmodels/gpt2/ops.py", ("apply_", "split_heads", "merge_heads", "attention"), _NEW
    ),
}
