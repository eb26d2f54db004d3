"""Ports of other projects beside the torch classes of `transformers`: how each is built, not its code.

Each builder gets the folder that contains the project's package, so that a copy with a mistake can be built too.
"""

from benchmarks.external_pairs.source.ports.bart_base_jax import BART_BASE_JAX
from benchmarks.external_pairs.source.ports.bonsai import BONSAI
from benchmarks.external_pairs.source.ports.dac_jax import DAC_JAX
from benchmarks.external_pairs.source.ports.diffusers import DIFFUSERS
from benchmarks.external_pairs.source.ports.esmjax import ESMJAX
from benchmarks.external_pairs.source.ports.hubert_base_jax import HUBERT_BASE_JAX
from benchmarks.external_pairs.source.ports.jax_resnet import JAX_RESNET
from benchmarks.external_pairs.source.ports.language_models.easylm import EASYLM
from benchmarks.external_pairs.source.ports.language_models.flax_mixtral import FLAX_MIXTRAL
from benchmarks.external_pairs.source.ports.language_models.flaxmodels import FLAXMODELS
from benchmarks.external_pairs.source.ports.language_models.gpt_jax import GPT_JAX
from benchmarks.external_pairs.source.ports.language_models.llama_2_jax import LLAMA_2_JAX
from benchmarks.external_pairs.source.ports.language_models.minimal_gpt_neox import MINIMAL_GPT_NEOX
from benchmarks.external_pairs.source.ports.language_models.mistral_jax import MISTRAL_JAX
from benchmarks.external_pairs.source.ports.mamba_jax import MAMBA_JAX
from benchmarks.external_pairs.source.ports.port import Port
from benchmarks.external_pairs.source.ports.t5_jax import T5_JAX
from benchmarks.external_pairs.source.ports.tpu_rwkv import TPU_RWKV

_PROJECTS = BONSAI, FLAXMODELS, ESMJAX, TPU_RWKV, MAMBA_JAX, BART_BASE_JAX, DAC_JAX, LLAMA_2_JAX, MISTRAL_JAX
_PROJECTS += FLAX_MIXTRAL, HUBERT_BASE_JAX, T5_JAX, GPT_JAX, MINIMAL_GPT_NEOX, EASYLM, JAX_RESNET, DIFFUSERS
PORTS: dict[str, Port] = {name: port for project in _PROJECTS for name, port in project.items()}
