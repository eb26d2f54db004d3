"""A port of vvvm23/mamba-jax: Equinox, a recurrence in `jax.lax.scan` that is checkpointed."""

from importlib import import_module
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, random_tokens


class _Batched(eqx.Module):
    """A model of one sequence, over a batch; its fields that are no arrays, as dtypes, are kept apart."""

    inner: Any
    static: Any = eqx.field(static=True)

    def __call__(self, tokens: Any) -> Any:
        return jax.vmap(eqx.combine(self.inner, self.static))(tokens)


def mamba(folder: Path) -> Pair:
    """`MambaForCausalLM`: a selective state-space model, step by step."""
    import transformers

    loader, kernels = import_module("mamba_jax.modelling.equinox.loader"), import_module("mamba_jax.kernels")
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 20, "num_hidden_layers": 2, "layer_norm_epsilon": 1e-5}
    module = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes, pad_token_id=0))
    random_parameters(module)
    fields: dict[str, Any] = {"d_model": 20, "n_layer": 2, "vocab_size": 32, "residual_in_fp32": True}
    fields |= {"pad_vocab_size_multiple": 8, "kernel_mode": kernels.KernelType.XLA, "dtype": jnp.float32}
    tensors = {name.replace("embeddings", "embedding"): tensor.detach() for name, tensor in module.state_dict().items()}
    inner = loader.init_mamba_from_raw_pytree(loader.pt_to_raw_pytree(tensors), fields)
    reference = only_output(module, "logits", ("input_ids",), use_cache=False)
    return Pair(reference, _Batched(*eqx.partition(inner, eqx.is_array)), (random_tokens(32),))


_NEW = (("a_min=", "min="),)  # an argument that JAX has renamed


def _port(file: str, *functions: str) -> Port:
    return Port(mamba, "mamba-jax", f"mamba_jax/{file}.py", functions, _NEW)


MAMBA_JAX = {
    "mamba-jax blocks": _port("modelling/equinox/blocks", "MambaBlock", "ResidualBlock"),
    "mamba-jax model": _port("modelling/equinox/model", "Mamba"),
    "mamba-jax scan": _port("kernels/reference", "mamba_ssm"),
}
