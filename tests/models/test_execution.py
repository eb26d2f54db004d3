"""Rematerialization, scanned layers and fused attention: the same loss, gradients and dropout masks."""

import os
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twinax import TransformerConfig
from twinax.backend.errors import ConfigError
from twinax.configs.data import CorpusConfig
from twinax.configs.execution import PLAIN, ExecutionConfig
from twinax.configs.run import RunConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer import activations, fused_attention
from twinax.flax_transformer.attention import ATTENTIONS
from twinax.flax_transformer.dropout import DropoutKey
from twinax.flax_transformer.fused_attention import uses_cudnn
from twinax.flax_transformer.model import Transformer
from twinax.flax_transformer.module import at_least_float32
from twinax.parity.functions import random_arrays, random_batch
from twinax.train.step.losses import cross_entropy
from twinax.train.step.step import make_train_step

pytestmark = pytest.mark.newest

ROOT = str(Path(__file__).parents[2])  # of parity_tests
SITES = ("embedding", "attention", "ffn", "residual", "final")
SIZES = {"d_model": 8, "num_heads": 2, "d_ff": 12, "max_length": 8, "src_vocab_size": 11, "tgt_vocab_size": 13}
BASE = TransformerConfig(
    **SIZES,
    **{f"{site}_dropout": 0.0 for site in SITES},
    **{"num_encoder_layers": 3, "num_decoder_layers": 2, "param_dtype": "float64", "compute_dtype": "float64"},
)
RELATIVE = {"positions": "none", "relative_position_buckets": 4, "relative_position_max_distance": 4}
MODELS = {
    "post-norm": BASE,
    "pre-norm": BASE.replace(norm_placement="pre", final_norm=True, activation="gelu", ffn_gate=True),
    "T5": BASE.replace(norm_placement="pre", norm="rms_norm", norm_bias=False, relative_positions="shared", **RELATIVE),
    "biases per layer": BASE.replace(relative_positions="per_layer", **RELATIVE),
    "dropout": BASE.replace(**{f"{site}_dropout": 0.2 for site in SITES}),
    "threefry": BASE.replace(residual_dropout=0.2, encoder_layerdrop=0.5, dropout_generator="threefry"),
    "T5 with layerdrop": BASE.replace(
        **{"norm_placement": "pre", "norm": "rms_norm", "norm_bias": False, "relative_positions": "shared"},
        **{"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5, "residual_dropout": 0.2, "num_encoder_layers": 2},
        **RELATIVE,
    ),
}
EXECUTIONS = [
    ExecutionConfig(remat=remat, scan_layers=scan) for remat in ("none", "layers", "dots") for scan in (False, True)
]
BATCH = random_batch(BASE, np.random.default_rng(0), 3, 5, 4)


def loss_and_gradients(config, execution):
    """The function of (arrays, seed), not yet compiled."""

    def loss(arrays, seed):
        model = Transformer.from_arrays(config, arrays, execution)
        logits = model(BATCH.src_tokens, BATCH.tgt_tokens, dropout_key=DropoutKey(seed, 2, jnp.arange(3)))
        total, tokens = cross_entropy(logits, jnp.asarray(BATCH.labels), config.pad_id, TrainingConfig())
        return total / tokens

    return jax.jit(jax.value_and_grad(loss))


def arrays_of(config):
    return {name: jnp.asarray(array) for name, array in random_arrays(config, 0).items()}


@lru_cache
def plain_results(name):
    run = loss_and_gradients(MODELS[name], PLAIN)
    return [run(arrays_of(MODELS[name]), jnp.uint32(seed)) for seed in range(4)]


def check(name, execution):
    run = loss_and_gradients(MODELS[name], execution)
    for seed, (loss, gradients) in enumerate(plain_results(name)):
        other_loss, other_gradients = run(arrays_of(MODELS[name]), jnp.uint32(seed))
        assert abs(other_loss - loss) <= 1e-12 * abs(loss)
        largest = max(float(jnp.abs(gradient).max()) for gradient in gradients.values())
        for parameter, gradient in gradients.items():
            assert jnp.abs(other_gradients[parameter] - gradient).max() <= 1e-12 * largest, parameter


@pytest.mark.parametrize("scan_layers", [True, False])
def test_the_same_loss_and_gradients(scan_layers):
    """A dropout mask that differs in one element would change the loss by far more than rounding."""
    check("T5 with layerdrop", ExecutionConfig(remat="layers", scan_layers=scan_layers))


@pytest.mark.slow
@pytest.mark.parametrize("execution", EXECUTIONS[1:], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_combination(name, execution):
    check(name, execution)


def lowered(execution, layers):
    config = BASE.replace(num_encoder_layers=layers, num_decoder_layers=layers)
    return loss_and_gradients(config, execution).lower(arrays_of(config), jnp.uint32(1)).as_text()


def test_a_scanned_program_does_not_grow_with_depth():
    """One loop per stack and direction; each product and each exponential stands there once, however many layers."""
    shallow, deep = (lowered(ExecutionConfig(scan_layers=True), layers) for layers in (2, 5))
    loops = [text.count("stablehlo.while") for text in (lowered(PLAIN, 2), shallow, deep)]
    assert loops == [loops[0], loops[0] + 4, loops[0] + 4]
    for operation in ("stablehlo.dot_general", "stablehlo.exponential", "stablehlo.rsqrt"):
        assert shallow.count(operation) == deep.count(operation) > 0


def residuals(remat, dtype="float32"):
    """What the backward pass keeps of the forward pass, the parameters included, as shapes and dtypes."""
    config, execution = BASE.replace(num_encoder_layers=2, compute_dtype=dtype), ExecutionConfig(remat=remat)

    def backward(arrays):
        def loss(arrays):
            return Transformer.from_arrays(config, arrays, execution)(*BATCH[:2]).sum()

        return jax.vjp(loss, arrays)[1]

    return jax.tree.leaves(jax.eval_shape(backward, arrays_of(config)))


def test_rematerialization_keeps_less():
    kept = {remat: residuals(remat) for remat in ("layers", "dots", "none")}
    sizes = [sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for leaves in kept.values()]
    assert sizes == sorted(set(sizes))
    weights = [sum(leaf.shape == (3, 2, 5, 5) for leaf in leaves) for leaves in kept.values()]
    assert weights[:2] == [0, 0]
    assert weights[2] >= 2  # of the encoder, at least one per layer


def test_rematerialization_keeps_each_product_once_in_bfloat16():
    """Not its float32 sums, which the program of a CPU rounds."""
    numbers = {
        (dtype, kept): sum(leaf.ndim == 3 and leaf.dtype == kept for leaf in residuals("dots", dtype))
        for dtype, kept in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
    }
    assert numbers["float32", "float32"] == numbers["bfloat16", "bfloat16"] > 0
    assert numbers["bfloat16", "float32"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fused_attention_is_as_accurate_as_the_formula(dtype):
    """The outputs and all gradients, by the ladder's rule; a fully masked row is 0 in both."""
    rng = np.random.default_rng(0)
    shapes = [(96, 6, 2, 8), (96, 2, 8, 9), (96, 2, 9, 8), (1, 2, 6, 9)]
    narrow = [jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype) for shape in shapes]
    mask = jnp.asarray(rng.random((96, 1, 6, 9)) < 0.7).at[0, 0, :3].set(False)
    attention = Transformer(BASE.replace(num_encoder_layers=1), rngs=nnx.Rngs(0)).decoder.layers[0].cross_attention

    def compute(name, arrays):
        def function(q, k, v, bias):
            return ATTENTIONS[name](attention, q, k, v, mask, None, at_least_float32(bias))

        heads, backward = jax.vjp(function, *arrays)
        return heads, *backward(jnp.cos(jnp.arange(heads.size, dtype=heads.dtype)).reshape(heads.shape))

    compiled = jax.jit(compute, static_argnums=0)
    reference = compiled("exact", [array.astype("float64") for array in narrow])
    outputs = {name: compiled(name, narrow) for name in ATTENTIONS}
    errors = {
        name: [float(jnp.square(a - b).mean()) ** 0.5 for a, b in zip(outputs[name], reference, strict=True)]
        for name in outputs
    }
    assert not any(heads[0, :3].any() for heads, *_ in outputs.values())
    for exact, fused in zip(errors["exact"], errors["fused"], strict=True):
        assert 0 < fused <= 1.5 * exact


def test_a_model_with_fused_attention():
    """Relative positions as biases; while activations are recorded, attention is the formula, with its weights."""
    config = MODELS["T5 with layerdrop"]
    arrays = arrays_of(config)

    def compute(attention, function):
        execution = ExecutionConfig(attention=attention)
        return jax.jit(lambda a: function(Transformer.from_arrays(config, a, execution), *BATCH[:2]))(arrays)

    exact, fused = (compute(attention, lambda model, *tokens: model(*tokens)) for attention in ATTENTIONS)
    logits, outputs = compute("fused", activations)
    assert "encoder.layers.0.self_attention.weights" in outputs
    assert np.allclose(logits, exact, rtol=0, atol=1e-12)
    # In float64, which a run refuses, its float32 softmax shows.
    assert 1e-10 < np.abs(fused - exact).max() < 1e-5


def test_where_cudnn_applies(monkeypatch):
    """On a GPU whose operations may be in any order; the other conditions are those of JAX's source."""
    q = jnp.zeros((1, 6, 2, 8), jnp.bfloat16)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert not uses_cudnn(q, q)  # this process has no GPU
    monkeypatch.setattr(fused_attention, "get_backend", lambda: SimpleNamespace(platform_version="cuda 13000"))
    assert uses_cudnn(q, q)
    assert not uses_cudnn(q, q[:, 1:])
    assert not uses_cudnn(q.astype(jnp.float32), q.astype(jnp.float32))
    on, off = "--xla_gpu_deterministic_ops=true", "--xla_gpu_deterministic_ops=false"
    expected = {on: False, off: True, f"{on} {off}": True, f"{off} {on}": False}
    expected |= {"--xla_gpu_exclude_nondeterministic_ops": False, "--xla_gpu_autotune_level=0": True}
    expected |= {"flags.txt": False}  # a file, which may ask for deterministic operations
    for flags, applies in expected.items():
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert uses_cudnn(q, q) == applies, flags


INVALID = {
    "attention_dropout=0.1: attention='fused' cannot drop attention weights": {"attention_dropout": 0.1},
    "mask_value=-10000.0: attention='fused' gives masked keys the weight 0": {"mask_value": -1e4},
    "compute_dtype='float64': attention='fused' computes its softmax in float32": {"compute_dtype": "float64"},
    "v_head_dim=3: attention='fused' needs queries, keys and values of equal width": {"v_head_dim": 3},
}


@pytest.mark.parametrize("message", INVALID)
def test_what_fused_attention_cannot_compute_is_one_line(message):
    model = BASE.replace(**{"compute_dtype": "float32", "param_dtype": "float32", **INVALID[message]})
    execution = ExecutionConfig(attention="fused")
    for create in (
        lambda: RunConfig(corpus=CorpusConfig(src="a", tgt="b"), model=model, execution=execution),
        lambda: make_train_step(model, TrainingConfig(), execution=execution),
    ):
        with pytest.raises(ConfigError) as error:
            create()
        assert str(error.value) == f"{message}; use attention='exact', or change the model"


def test_older_runs_have_the_default():
    run = RunConfig(corpus=CorpusConfig(src="a", tgt="b"), execution=ExecutionConfig(remat="dots"))
    values = run.to_dict()
    assert RunConfig.from_dict(values) == run
    del values["execution"]
    assert RunConfig.from_dict(values).execution == PLAIN


def test_a_wrong_value_is_one_line():
    with pytest.raises(ConfigError, match=r"^remat='all': must be one of 'none', 'layers', 'dots'$"):
        ExecutionConfig(remat="all")  # pyright: ignore[reportArgumentType]


DEVICES = """
import jax, numpy as np
jax.config.update("jax_enable_x64", True)
from dataclasses import replace
from twinax.configs.execution import ExecutionConfig
from twinax.configs.sharding import ShardingConfig
from parity_tests.support.meshes import MODEL, TRAINING, MeshTraining
from twinax.train.step.step import make_train_step

rates = dict.fromkeys(("embedding_dropout", "attention_dropout", "ffn_dropout"), 0.0)
model = MODEL.replace(**rates, num_decoder_layers=1, param_dtype="float64", compute_dtype="float64")
training = replace(TRAINING, accumulation=1)
meshes = ShardingConfig(data=2, fsdp=2, tensor=2), ShardingConfig(data=1)
run, alone = (MeshTraining(mesh, model, training) for mesh in meshes)
run.step = make_train_step(model, training, run.placement, ExecutionConfig(remat="layers", scan_layers=True))
losses = [[each.update(2 * number) for number in range(3)] for each in (run, alone)]
print(np.abs(np.subtract(*losses)).max())
"""


@pytest.mark.slow
def test_scanned_layers_on_eight_devices(forks):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    result = forks(f"import sys\nsys.path.append({ROOT!r})\n{DEVICES}", XLA_FLAGS=flags)
    assert result.returncode == 0, result.stderr
    assert 0 < float(result.stdout) < 1e-10
