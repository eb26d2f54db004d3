"""A port of n2cholas/jax-resnet: Linen's convolutions and batch norms, made by partial functions in a sequence."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from flax import traverse_util

from benchmarks.external_pairs.pair import Pair, random_parameters
from benchmarks.external_pairs.pairs import only_output
from benchmarks.external_pairs.source.ports.port import Port, random_statistics


def resnet(folder: Path) -> Pair:
    """`ResNetForImageClassification` of two stages; the second halves the picture."""
    import transformers

    modeling: Any = import_module("jax_resnet.resnet")
    sizes: dict[str, Any] = {"embedding_size": 64, "hidden_sizes": [6, 10], "depths": [1, 2], "layer_type": "basic"}
    module = transformers.ResNetForImageClassification(transformers.ResNetConfig(**sizes, num_labels=5)).eval()
    random_parameters(module)
    random_statistics(module)
    inner = modeling.ResNet(modeling.ResNetBlock, stage_sizes=[1, 2], n_classes=5, hidden_sizes=(6, 10))
    arrays: dict[str, np.ndarray] = {}
    state = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}

    def convolution(source: str, target: str) -> None:
        arrays[f"params.{target}.Conv_0.kernel"] = state[f"{source}.convolution.weight"].transpose(2, 3, 1, 0)
        for one, other in (("weight", "params scale"), ("bias", "params bias")):
            kind, leaf = other.split()
            arrays[f"{kind}.{target}.BatchNorm_0.{leaf}"] = state[f"{source}.normalization.{one}"]
        for one, other in (("running_mean", "mean"), ("running_var", "var")):
            arrays[f"batch_stats.{target}.BatchNorm_0.{other}"] = state[f"{source}.normalization.{one}"]

    convolution("resnet.embedder.embedder", "layers_0.ConvBlock_0")
    for number, place in enumerate(("0.layers.0", "1.layers.0", "1.layers.1"), 2):
        source, target = f"resnet.encoder.stages.{place}", f"layers_{number}"
        for i in range(2):
            convolution(f"{source}.layer.{i}", f"{target}.ConvBlock_{i}")
        if f"{source}.shortcut.convolution.weight" in state:
            convolution(f"{source}.shortcut", f"{target}.ResNetSkipConnection_0.ConvBlock_0")
    arrays["params.layers_6.kernel"] = state["classifier.1.weight"].T
    arrays["params.layers_6.bias"] = state["classifier.1.bias"]
    tree = traverse_util.unflatten_dict({tuple(name.split(".")): array for name, array in arrays.items()})
    picture = np.random.default_rng(0).standard_normal((2, 3, 21, 19))
    reference = only_output(module, "logits", ("pixel_values",))
    return Pair(reference, (inner, tree), (picture,), (picture.transpose(0, 2, 3, 1),))


JAX_RESNET = {
    "jax-resnet": Port(
        resnet, "jax-resnet", "jax_resnet/resnet.py", ("ResNetStem", "ResNetSkip", "ResNetBlock", "ResNet")
    ),
    "jax-resnet blocks": Port(resnet, "jax-resnet", "jax_resnet/common.py", ("ConvBlock",)),
}
