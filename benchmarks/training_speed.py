"""Compares the train step of twinax with that of `torch.nn.Transformer`, in float32 and bfloat16, on this CPU.

`python -m benchmarks.training_speed PAGE` alternates all programs, each in its own process, and writes the tables into
the page. The models have the same weights, and their first losses without dropout must agree. About ten minutes.
"""

import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import track

from benchmarks.pages import marks, write_table

NAME, HEADER = "training speed", ("model", "program", "dtype", "milliseconds", "time / that of twinax in float32")
ROUNDS, STEPS, VOCABULARY, LENGTH, DROPOUT, SMOOTHING, RATE = 5, 3, 8000, 32, 0.1, 0.1, 1e-4
# The rounding of a loss of about 9 nats, by dtype; one that skips a layer or a loss term differs more.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2}


class Size(NamedTuple):
    """A model and its batch."""

    label: str
    d_model: int
    num_heads: int
    layers: int  # per stack
    d_ff: int
    sentences: int


SIZES = (
    Size("256/1024, 3+3 layers, 64 pairs", 256, 8, 3, 1024, 64),
    Size("512/2048, 6+6 layers, 32 pairs", 512, 8, 6, 2048, 32),
)
PROGRAMS = tuple((name, dtype) for name in ("twinax", "PyTorch") for dtype in TOLERANCES)
Step = Callable[[], float]  # one update; its loss


def batch(size: Size) -> list[np.ndarray]:
    """Source, target and labels: all tokens of all sentences are real."""
    rng = np.random.default_rng(0)
    return [rng.integers(4, VOCABULARY, (size.sentences, LENGTH)) for _ in range(3)]


def in_torch(size: Size, dropout: float) -> Any:
    """`torch.nn.Transformer` between a tied embedding and its transpose, as a function of source and target."""
    import torch
    from torch import nn

    warnings.filterwarnings("ignore", "enable_nested_tensor")
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, size.d_model)
            nn.init.normal_(self.embedding.weight, std=size.d_model**-0.5)
            layers = size.layers, size.layers
            self.transformer = nn.Transformer(
                size.d_model, size.num_heads, *layers, size.d_ff, dropout, batch_first=True
            )
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

        def forward(self, src: Any, tgt: Any) -> Any:
            embedded = self.embedding(src), self.embedding(tgt)
            return self.transformer(*embedded, tgt_mask=self.mask, tgt_is_causal=True) @ self.embedding.weight.T

    return Model()


def torch_step(size: Size, dropout: float, dtype: str) -> Step:
    """A train step of eager PyTorch: with autocast if it is not float32, and with fused Adam."""
    import torch
    from torch.nn import functional

    model = in_torch(size, dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, fused=True)
    src, tgt, labels = (torch.from_numpy(array) for array in batch(size))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(src, tgt).flatten(0, 1)
            loss = functional.cross_entropy(logits, labels.flatten(), label_smoothing=SMOOTHING)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def twinax_step(size: Size, dropout: float, dtype: str) -> Step:
    """A train step of twinax with the weights of `in_torch`."""
    import jax.numpy as jnp

    from twinax import TransformerConfig
    from twinax.configs.training import TrainingConfig
    from twinax.convert.layouts.torch_nn import read_transformer
    from twinax.flax_transformer.model import Transformer
    from twinax.train.malloc import keep_freed_memory
    from twinax.train.step import Batch, init_state, make_train_step

    keep_freed_memory()
    module = in_torch(size, dropout)
    fields, arrays = read_transformer(module.transformer)
    arrays = {**arrays, "src_embedding.embedding": module.embedding.weight.detach().numpy()}
    fields |= {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "compute_dtype": dtype}
    fields |= {"shared_embeddings": True, "tied_output": True, "positions": "none", "embedding_scale": "none"}
    fields |= {"output_bias": "none"}
    fields |= {f"{site}_dropout": dropout for site in ("attention", "ffn", "residual")} | {"embedding_dropout": 0.0}
    config = TransformerConfig(**fields)
    training = TrainingConfig(
        label_smoothing=SMOOTHING, smoothing="all", optimizer="adam", schedule="constant", learning_rate=RATE,
        warmup_updates=0,
    )  # fmt: skip
    state = init_state(Transformer.from_arrays(config, {n: jnp.array(a) for n, a in arrays.items()}), training)
    compiled = make_train_step(config, training)
    tokens = [jnp.asarray(array, jnp.int32) for array in batch(size)]

    def step() -> float:
        nonlocal state
        state, metrics = compiled(state, Batch(*tokens, jnp.arange(size.sentences, dtype=jnp.int32)))
        return float(metrics.loss)

    return step


def make_step(program: str, dtype: str, size: Size, dropout: float) -> Step:
    """The train step of a program."""
    return (twinax_step if program == "twinax" else torch_step)(size, dropout, dtype)


def serve(program: str, dtype: str, size: Size, requests: Connection) -> None:
    """Sends the first loss without dropout, then the fastest of some steps at each request, until it is None."""
    requests.send(make_step(program, dtype, size, 0.0)())
    step = make_step(program, dtype, size, DROPOUT)
    step()  # compiles
    while requests.recv() is not None:
        seconds = []
        for _ in range(STEPS):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        requests.send(min(seconds))


def compare(size: Size) -> list[tuple[str, ...]]:
    """The rows of a model. Raises: SystemExit if a program computes another loss."""
    context = multiprocessing.get_context("spawn")
    pipes, losses = {}, {}
    for program, dtype in track(PROGRAMS, f"{size.label}: compiling", transient=True):
        here, there = context.Pipe()
        context.Process(target=serve, args=(program, dtype, size, there), daemon=True).start()
        pipes[program, dtype], losses[program, dtype] = here, here.recv()
    expected = losses["PyTorch", "float32"]
    for (program, dtype), loss in losses.items():
        if abs(loss - expected) > TOLERANCES[dtype]:
            sys.exit(f"{program} in {dtype}: has the loss {loss:.5f}, PyTorch in float32 {expected:.5f}")
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in PROGRAMS}
    for _ in track(range(ROUNDS), size.label, transient=True):
        for key, pipe in pipes.items():
            pipe.send(True)
            seconds[key].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(None)
    rows = []
    for (program, dtype), times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["twinax", "float32"], strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        rows.append((size.label, program, dtype, f"{1000 * statistics.median(times):,.0f}", spread))
    return rows


def main(page: Path) -> None:
    """Writes the table into the page."""
    marks(page, NAME)
    write_table(page, NAME, HEADER, [row for size in SIZES for row in compare(size)])


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.training_speed PAGE")
    main(Path(sys.argv[1]))
