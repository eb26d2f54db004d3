"""A port of jenkspt/gpt-jax: Linen modules in one file, queries, keys and values split by heads, tied logits."""

from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, linen_called, random_tokens, renamed


def gpt2(folder: Path) -> Pair:
    """`GPT2LMHeadModel`: pre-norm blocks, a table of positions, logits from the embedding."""
    import transformers

    modeling: Any = import_module("model")
    sizes: dict[str, Any] = {"vocab_size": 29, "n_positions": 16, "n_embd": 18, "n_layer": 2, "n_head": 3}
    module = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    random_parameters(module)
    fields = {"block_size": 16, "vocab_size": 29, "num_layers": 2, "num_heads": 3, "num_embeds": 18}
    inner = modeling.GPT(modeling.GPTConfig(**fields, dtype="float32"))
    changes = [(r"(wte|wpe)\.weight", r"\1.embedding"), (r"(ln_\w)\.weight", r"\1.scale"), (r"\.weight", ".kernel")]
    state = module.transformer.state_dict()  # whose matrices are kernels already
    names = {name: renamed(name.removeprefix("h."), changes) for name in state}
    arrays = {names[name]: tensor.detach().numpy() for name, tensor in state.items()}
    candidate = linen_called(inner, arrays, lambda model, tokens: model(tokens, deterministic=True))
    reference = only_output(module, "logits", ("input_ids",), use_cache=False)
    return Pair(reference, candidate, (random_tokens(29),))


GPT_JAX = {"gpt-jax": Port(gpt2, "gpt-jax", "model.py", ("SelfAttention", "MLP", "Block", "GPT"))}
