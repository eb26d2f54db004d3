"""Seconds and memory of `twinax compare` on a large pair: PyTorch's encoder, and a function in JAX with its weights.

`python -m benchmarks.compare.comparison_cost PAGE` measures 12 layers of width 768 with 32,000 tokens, 110 million
parameters, equal and with tanh gelu for erf gelu in every layer, each in a fresh process; `--layers`, `--width` choose
others, and then nothing is written into the page.
"""

import argparse
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from benchmarks.pages import write_table
from twinax.compare.comparison import compare

Array = Any
LAYERS, WIDTH, VOCABULARY, TOKENS = 12, 768, 32_000, (2, 32)
HEADER = ("pair", "parameters", "verdict", "defects", "tracing (s)", "outputs (s)", "rounding (s)", "peak memory (GB)")


class Reference(nn.Module):
    """Embedding, pre-norm encoder layers, a final norm."""

    def __init__(self, layers: int, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            *(width, width // 64, 4 * width), activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05 if parameter.ndim > 1 else 0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """(batch, tokens) -> (batch, tokens, width)."""
        return self.encoder(self.embedding(ids))


def port(layers: int, approximate: bool) -> Any:
    """The same in JAX, as a function of (parameters, ids)."""

    def norm(p: Any, name: str, x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]

    def linear(p: Any, name: str, x: Array) -> Array:
        return x @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def attention(p: Any, name: str, x: Array) -> Array:
        packed = x @ p[f"{name}.in_proj_weight"] + p[f"{name}.in_proj_bias"]
        q, k, v = (a.reshape(*x.shape[:2], -1, 64) for a in jnp.split(packed, 3, -1))
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8, -1)
        return linear(p, f"{name}.out_proj", jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))

    def run(p: Any, ids: Array) -> Array:
        x = p["embedding.weight"][ids]
        for i in range(layers):
            name = f"encoder.layers.{i}"
            x = x + attention(p, f"{name}.self_attn", norm(p, f"{name}.norm1", x))
            hidden = jax.nn.gelu(linear(p, f"{name}.linear1", norm(p, f"{name}.norm2", x)), approximate=approximate)
            x = x + linear(p, f"{name}.linear2", hidden)
        return norm(p, "encoder.norm", x)

    return run


def measure(layers: int, width: int, approximate: bool) -> tuple[str, ...]:
    """A row of the table, measured in this process; both models are in its memory."""
    reference = Reference(layers, width).eval()
    weights = {
        name: jnp.asarray(p.detach().numpy().T if p.ndim == 2 and "embedding" not in name else p.detach().numpy())
        for name, p in reference.named_parameters()
    }
    ids = np.random.default_rng(0).integers(0, VOCABULARY, TOKENS)
    comparison = compare(reference, (port(layers, approximate), weights), (ids,))
    count = sum(p.numel() for p in reference.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    seconds = [comparison.seconds.get(part) for part in ("tracing", "outputs", "rounding")]
    name = "tanh gelu in every layer" if approximate else "equal"
    findings = f"{count / 1e6:.0f} million", comparison.verdict, str(len(comparison.forward.defects))
    return name, *findings, *("" if s is None else f"{s:.0f}" for s in seconds), f"{peak:.1f}"


def main() -> int:
    """Print the table, and write it into the page unless another size was chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--one", choices=("equal", "different"), help="measure one in this process")
    options = parser.parse_args()
    if options.one:
        print("|".join(measure(options.layers, options.width, options.one == "different")))
        return 0
    rows = []
    for one in ("equal", "different"):
        command = [sys.executable, "-m", "benchmarks.compare.comparison_cost", str(options.page), "--one", one]
        command += ["--layers", str(options.layers), "--width", str(options.width)]
        result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(tuple(result.stdout.splitlines()[-1].split("|")))
        print(*rows[-1], sep="; ")
    if (options.layers, options.width) == (LAYERS, WIDTH):
        write_table(options.page, "comparison-cost", HEADER, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
