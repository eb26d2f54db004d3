"""A port of nicolvisser/hubert-base-jax: Linen with layers made in `setup`."""

from importlib import import_module
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.source.ports.port import Port, linen_called, renamed, transposed


class _Padded(nn.Module):
    """A model of sound that gets 40 samples more at each end, as the port adds them itself."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        return self.inner(nn.functional.pad(sound, (40, 40))).last_hidden_state


def hubert(folder: Path) -> Pair:
    """`HubertModel`: strided convolutions of a waveform, a grouped one for positions, post-norm attention.

    The reference gets the port's tanh gelu, the epsilon of its blocks, and the samples that the port adds at both ends.
    """
    import transformers

    modeling = import_module("model")
    sizes: dict[str, Any] = {"hidden_size": 18, "intermediate_size": 22, "num_hidden_layers": 2, "conv_dim": [10] * 7}
    sizes |= {"num_attention_heads": 3, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    sizes |= {"hidden_act": "gelu_pytorch_tanh", "feat_extract_activation": "gelu_pytorch_tanh"}
    module = transformers.HubertModel(transformers.HubertConfig(**sizes))
    random_parameters(module)
    for part in module.encoder.layers.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 1e-6
    tensors = {name: t for name, t in module.state_dict().items() if name != "masked_spec_embed"}
    for i in range(2):
        for kind in ("weight", "bias"):
            own = [tensors.pop(f"encoder.layers.{i}.attention.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"encoder.layers.{i}.self_attn.qkv_proj.{kind}"] = torch.cat(own)
    weight = "encoder.pos_conv_embed.conv.parametrizations.weight.original"
    scale, kernel = tensors.pop(f"{weight}0").flatten(), tensors.pop(f"{weight}1")
    changes = [
        (r"feature_extractor\.conv_layers\.0\.layer_norm", "feature_extractor.norm0"),
        ("attention", "self_attn"),
    ]
    changes += [(r"conv_layers\.(\d)\.conv", r"conv\1"), (r"feature_projection\.layer_norm", "feature_projection.norm")]
    changes += [
        (r"layers\.(\d)\.layer_norm", r"layers_\1.norm1"),
        (r"layers\.(\d)\.final_layer_norm", r"layers_\1.norm2"),
    ]
    changes += [(r"layers\.", "layers_"), (r"^encoder\.layer_norm", "norm"), ("out_proj", "o_proj")]
    changes += [(r"feed_forward\.intermediate_dense", "linear_0"), (r"feed_forward\.output_dense", "linear_2")]
    changes += [(r"encoder\.pos_conv_embed\.conv\.bias", "positional_embedding.conv.layer_instance.bias")]
    changes += [(r"(norm\d?)\.weight", r"\1.scale"), (r"\.weight$", ".kernel")]
    named = transposed({renamed(name, changes): tensor for name, tensor in tensors.items()})
    named |= {"positional_embedding.conv.layer_instance.kernel": kernel.numpy().T}
    named |= {"positional_embedding.conv.layer_instance/kernel/scale": scale.numpy()}
    sound = np.random.default_rng(0).standard_normal((2, 2000))
    candidate = linen_called(modeling.HuBERTEncoder(2, jnp.float64), named, lambda model, x: model(x, train=False)[0])
    return Pair(_Padded(module).eval(), candidate, (sound,))


# small sizes, and the input that the published port does not add to its positions
_CHANGES = (
    ("512", "10"),
    ("768", "18"),
    ("128", "8"),
    ("3072", "22"),
    ("count=16", "count=2"),
    ("heads=12", "heads=3"),
)
_CHANGES += (("x = self.positional_embedding(x)", "x = x + self.positional_embedding(x)"),)
_FUNCTIONS = ("Feature", "Positional", "scaled_dot", "Multihead", "Encoder", "Transformer", "HuBERTEncoder")
HUBERT_BASE_JAX = {"hubert-base-jax": Port(hubert, "hubert-base-jax", "model.py", _FUNCTIONS, _CHANGES)}
