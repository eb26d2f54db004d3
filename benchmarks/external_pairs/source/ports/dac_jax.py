"""A port of DBraun/DAC-JAX: Linen's sequences of convolutions with weight norms."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, linen_called, renamed, without

_MISSING = ("audiotree", "audiotree.resample", "dm_aux", "jaxloudnorm", "librosa", "argbind", "omegaconf", "soundfile")


def dac(folder: Path) -> Pair:
    """`DacModel`: an audio codec of dilated and transposed convolutions, whose code is quantized in steps."""
    import transformers

    with without(*_MISSING):
        modeling, loader = import_module("dac_jax.model.dac"), import_module("dac_jax.utils.load_torch_weights")
    sizes: dict[str, Any] = {"encoder_hidden_size": 4, "decoder_hidden_size": 16, "downsampling_ratios": [2, 4]}
    sizes |= {"upsampling_ratios": [4, 2], "n_codebooks": 2, "codebook_size": 8, "codebook_dim": 3}
    module = transformers.DacModel(transformers.DacConfig(**sizes))
    module.apply_weight_norm()
    random_parameters(module)
    changes = [(rf"^encoder\.block\.{i}\.", f"encoder.block.{i + 1}.block.") for i in (1, 0)]
    changes += [(rf"^decoder\.block\.{i}\.", f"decoder.model.{i + 1}.block.") for i in (1, 0)]
    changes += [(r"\.parametrizations\.weight\.original0", ".weight_g"), (r"encoder\.conv1", "encoder.block.0")]
    changes += [(r"\.parametrizations\.weight\.original1", ".weight_v"), (r"decoder\.conv1", "decoder.model.0")]
    changes += [(r"encoder\.snake1", "encoder.block.3"), (r"encoder\.conv2", "encoder.block.4")]
    changes += [(r"decoder\.snake1", "decoder.model.3"), (r"decoder\.conv2", "decoder.model.4")]
    changes += [(rf"^(encoder.*)res_unit{i}", rf"\g<1>{i - 1}") for i in (1, 2, 3)]
    changes += [(rf"^(decoder.*)res_unit{i}", rf"\g<1>{i + 1}") for i in (1, 2, 3)]
    changes += [(r"block\.(\d)\.snake1", r"block.\1.block.0"), (r"block\.(\d)\.conv1", r"block.\1.block.1")]
    changes += [(r"block\.(\d)\.snake2", r"block.\1.block.2"), (r"block\.(\d)\.conv2", r"block.\1.block.3")]
    changes += [(r"^(encoder.*block)\.snake1", r"\1.3"), (r"^(encoder.*block)\.conv1", r"\1.4")]
    changes += [(r"^(decoder.*block)\.snake1", r"\1.0"), (r"^(decoder.*block)\.conv_t1", r"\1.1")]
    state = {renamed(name, changes): tensor.numpy() for name, tensor in module.state_dict().items()}
    arrays = loader.torch_to_linen(state, (2, 4), (4, 2), num_codebooks=2)["params"]
    fields: dict[str, Any] = {"encoder_dim": 4, "encoder_rates": (2, 4), "decoder_dim": 16, "decoder_rates": (4, 2)}
    inner = modeling.DAC(**fields, num_codebooks=2, codebook_size=8, codebook_dim=3)
    named = traverse_util.flatten_dict(arrays, sep=".")
    candidate = linen_called(inner, named, lambda model, x: model(x, train=False).recons[:, 0])
    audio = np.random.default_rng(0).standard_normal((2, 1, 64))
    return Pair(only_output(module, "audio_values", ("input_values",)), candidate, (audio,))


DAC_JAX = {
    "DAC-JAX model": Port(dac, "DAC-JAX/src", "dac_jax/model/dac.py", ("ResidualUnit", "Encoder", "Decoder", "DAC")),
    "DAC-JAX quantizer": Port(dac, "DAC-JAX/src", "dac_jax/nn/quantize.py", ("normalize", "Vector", "Residual")),
}
