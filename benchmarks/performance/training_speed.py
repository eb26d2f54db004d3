"""The train step of twinax, and of what people use instead: PyTorch, eager and compiled, and Flax Linen.

All have the weights of `torch.nn.Transformer`, and their losses in three updates without dropout must agree.
"""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from benchmarks.alternating import Program, alternate, started
from twinax.backend.xla_flags import FUSIONS

ROUNDS, STEPS, SMOOTHING, RATE = 5, 3, 0.1, 1e-5
BETAS, EPS = (0.9, 0.98), 1e-8  # with a larger rate, the losses of the larger model amplify the rounding
COMPARED = 3  # updates whose losses are compared
# The rounding of a loss of about 9 nats, by dtype; other betas or a layer or loss term less differ more.
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}
FUSED_SUMS = {"XLA_FLAGS": f"{FUSIONS}=+reduce"}


class Size(NamedTuple):
    """A model, its batch and its dropout."""

    label: str
    d_model: int
    num_heads: int
    layers: int  # per stack
    d_ff: int
    sentences: int
    dropout: float = 0.1
    attention_dropout: float | None = None  # None: as everywhere
    vocabulary: int = 8000
    length: int = 32  # of both sides, in tokens


SIZES = tuple(
    size._replace(label=f"{size.label}, dropout {dropout}", dropout=dropout)
    for size in (
        Size("256/1024, 3+3 layers, 64 pairs", 256, 8, 3, 1024, 64),
        Size("512/2048, 6+6 layers, 32 pairs", 512, 8, 6, 2048, 32),
    )
    for dropout in (0.1, 0.0)
)
Step = Callable[[], Any]  # one update; its loss, still on the device
TWINAX = "twinax, float32"


def batch(size: Size) -> list[np.ndarray]:
    """Source, target and labels: all tokens of all sentences are real."""
    rng = np.random.default_rng(0)
    return [rng.integers(4, size.vocabulary, (size.sentences, size.length)) for _ in range(3)]


def in_torch(size: Size) -> Any:
    """`torch.nn.Transformer` between a tied embedding and its transpose, as a function of source and target."""
    import torch
    from torch import nn

    warnings.filterwarnings("ignore", "enable_nested_tensor")
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(size.vocabulary, size.d_model)
            nn.init.normal_(self.embedding.weight, std=size.d_model**-0.5)
            layers = size.layers, size.layers
            self.transformer = nn.Transformer(
                size.d_model, size.num_heads, *layers, size.d_ff, size.dropout, batch_first=True
            )
            for module in self.transformer.modules():
                if isinstance(module, nn.MultiheadAttention) and size.attention_dropout is not None:
                    module.dropout = size.attention_dropout
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(size.length))

        def forward(self, src: Any, tgt: Any) -> Any:
            embedded = self.embedding(src), self.embedding(tgt)
            return self.transformer(*embedded, tgt_mask=self.mask, tgt_is_causal=True) @ self.embedding.weight.T

    return Model()


def torch_step(size: Size, dtype: str, is_compiled: bool = False) -> Step:
    """A train step of PyTorch on a GPU if it sees one: autocast if it is not float32, else TF32, and fused Adam."""
    import torch
    from torch.nn import functional

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU, as JAX computes; no effect on a CPU
    model = in_torch(size).to(device)
    forward = torch.compile(model, dynamic=False) if is_compiled else model
    optimizer = torch.optim.Adam(model.parameters(), RATE, BETAS, EPS, fused=True)
    src, tgt, labels = (torch.from_numpy(array).to(device) for array in batch(size))

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = forward(src, tgt).flatten(0, 1)
            loss = functional.cross_entropy(logits, labels.flatten(), label_smoothing=SMOOTHING)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def twin_weights(size: Size) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(fields of the twin's config, the weights of `in_torch` by its names)."""
    from twinax.convert.layouts.torch_nn import read_transformer

    module = in_torch(size)
    fields, arrays = read_transformer(module.transformer)
    return fields, {**arrays, "src_embedding.embedding": module.embedding.weight.detach().numpy()}


def twin_config(size: Size, dtype: str) -> tuple[Any, dict[str, np.ndarray]]:
    """(the config of `in_torch` in twinax, its weights)."""
    from twinax import TransformerConfig

    fields, arrays = twin_weights(size)
    fields |= {"src_vocab_size": size.vocabulary, "tgt_vocab_size": size.vocabulary, "compute_dtype": dtype}
    fields |= {"shared_embeddings": True, "tied_output": True, "positions": "none", "embedding_scale": "none"}
    fields |= {"output_bias": "none", "embedding_dropout": 0.0}
    fields |= {f"{site}_dropout": size.dropout for site in ("attention", "ffn", "residual")}
    if size.attention_dropout is not None:
        fields["attention_dropout"] = size.attention_dropout
    return TransformerConfig(**fields), arrays


def twinax_program(size: Size, dtype: str, attention: Any = "exact") -> tuple[Any, Any, Any]:
    """(the train step of twinax, its first state, its batch)."""
    import jax.numpy as jnp

    from twinax.configs.execution import ExecutionConfig
    from twinax.configs.training import TrainingConfig
    from twinax.flax_transformer.model import Transformer
    from twinax.train.step.step import Batch, init_state, make_train_step

    config, arrays = twin_config(size, dtype)
    training = TrainingConfig(
        label_smoothing=SMOOTHING, smoothing="all", optimizer="adam", beta1=BETAS[0], beta2=BETAS[1], eps=EPS,
        schedule="constant", learning_rate=RATE, warmup_updates=0,
    )  # fmt: skip
    state = init_state(Transformer.from_arrays(config, {n: jnp.array(a) for n, a in arrays.items()}), training)
    tokens = [jnp.asarray(array, jnp.int32) for array in batch(size)]
    step = make_train_step(config, training, execution=ExecutionConfig(attention=attention))
    return step, state, Batch(*tokens, jnp.arange(size.sentences, dtype=jnp.int32))


def twinax_step(size: Size, dtype: str, attention: Any = "exact") -> Step:
    """A train step of twinax."""
    from twinax.backend.malloc import keep_freed_memory

    keep_freed_memory()
    compiled, state, pairs = twinax_program(size, dtype, attention)

    def step() -> Any:
        nonlocal state
        state, metrics = compiled(state, pairs)
        return metrics.loss

    return step


def linen_step(size: Size, dtype: str) -> Step:
    """A train step of `LinenTransformer`, with optax."""
    import jax
    import jax.numpy as jnp
    import optax

    from benchmarks.performance.linen_transformer import LinenTransformer, from_twin

    params = from_twin(twin_weights(size)[1], size.num_heads)
    model = LinenTransformer(size.vocabulary, size.d_model, size.num_heads, size.layers, size.d_ff, size.dropout)
    optimizer = optax.adam(RATE, *BETAS, EPS)
    state, key = (params, optimizer.init(params)), jax.random.key(0)
    src, tgt, labels = (jnp.asarray(array, jnp.int32) for array in batch(size))

    def loss(params: Any, key: jax.Array) -> jax.Array:
        logits: Any = model.apply({"params": params}, src, tgt, rngs={"dropout": key})
        targets = optax.smooth_labels(jax.nn.one_hot(labels, size.vocabulary), SMOOTHING)
        return optax.softmax_cross_entropy(logits, targets).mean()

    def update(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, key)
        changes, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, changes), moments), value

    compiled: Any = jax.jit(update, donate_argnums=0)

    def step() -> Any:
        nonlocal state, key
        key, this_key = jax.random.split(key)
        state, value = compiled(state, this_key)
        return value

    return step


PROGRAMS: dict[str, tuple[Callable[[Size, str], Step], str, dict[str, str]]] = {
    TWINAX: (twinax_step, "float32", {}),
    "twinax, float32, sums fused": (twinax_step, "float32", FUSED_SUMS),
    "PyTorch eager, float32": (torch_step, "float32", {}),
    "PyTorch compiled, float32": (partial(torch_step, is_compiled=True), "float32", {}),
    "Flax Linen, float32": (linen_step, "float32", {}),
    "twinax, bfloat16": (twinax_step, "bfloat16", {}),
    "PyTorch eager, bfloat16": (torch_step, "bfloat16", {}),
    "PyTorch compiled, bfloat16": (partial(torch_step, is_compiled=True), "bfloat16", {}),
}


def update(step: Step, count: int = 1) -> float:
    """Make `count` updates; the loss of the last one, for which this waits."""
    for _ in range(count - 1):
        step()
    return float(step())


def prepare(make_step: Callable[[Size, str], Step], dtype: str, size: Size) -> tuple[list[float], Callable[[], float]]:
    """(the first losses without dropout, an update of the size)."""
    without_dropout = make_step(size._replace(dropout=0.0), dtype)
    return [update(without_dropout) for _ in range(COMPARED)], partial(update, make_step(size, dtype))


def compare(size: Size, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of a step in each program, per round. Raises: SystemExit if a program computes other losses."""
    programs = [
        Program(name, partial(prepare, make_step, dtype, size), environment)
        for name, (make_step, dtype, environment) in PROGRAMS.items()
    ]
    with started(programs, size.label) as running:
        expected = running["PyTorch eager, float32"].about
        for name, (_, dtype, _) in PROGRAMS.items():
            losses = running[name].about
            if not np.allclose(losses, expected, rtol=0, atol=TOLERANCES[dtype]):
                sys.exit(f"{name}: has the losses {losses}, but eager PyTorch in float32 {expected}")
        return alternate(running, rounds, size.label, repeats=STEPS)[0]
