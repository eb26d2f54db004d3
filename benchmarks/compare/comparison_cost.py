"""Seconds and memory of `twinax compare` by size: PyTorch's encoder, and a function in JAX with its weights.

`python -m benchmarks.compare.comparison_cost PAGE` measures 0.1, 0.5 and 1.5 billion parameters, equal and with tanh
gelu for erf gelu, each in a fresh process. `--one LAYERS WIDTH WRONG TOKENS` measures one in this process.
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
VOCABULARY = 32_000
# layers, width, layers with a mistake, tokens of each of two sentences
CASES = ((12, 768, 0, 8), (12, 768, 0, 64), (12, 768, 12, 8), (36, 1024, 0, 8), (48, 1600, 0, 8))
HEADER = (
    *("parameters", "of both in float32 (GB)", "tokens", "layers with tanh gelu", "verdict", "defects"),
    *("tracing (s)", "outputs (s)", "rounding (s)", "peak memory (GB)"),
)


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


def port(layers: int, wrong: int) -> Any:
    """The same in JAX, as a function of (parameters, ids); the last `wrong` layers approximate gelu."""

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
            inner = linear(p, f"{name}.linear1", norm(p, f"{name}.norm2", x))
            x = x + linear(p, f"{name}.linear2", jax.nn.gelu(inner, approximate=i >= layers - wrong))
        return norm(p, "encoder.norm", x)

    return run


def measure(layers: int, width: int, wrong: int, tokens: int) -> tuple[str, ...]:
    """A row of the table, measured in this process; both models are in its memory."""
    reference = Reference(layers, width).eval()
    weights = {
        name: jnp.asarray(p.detach().numpy().T if p.ndim == 2 and "embedding" not in name else p.detach().numpy())
        for name, p in reference.named_parameters()
    }
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (2, tokens))
    comparison = compare(reference, (port(layers, wrong), weights), (ids,))
    count = sum(p.numel() for p in reference.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    seconds = [comparison.seconds.get(part) for part in ("tracing", "outputs", "rounding")]
    findings = f"{count / 1e9:.2f} billion", f"{2 * 4 * count / 1e9:.1f}", str(2 * tokens), f"{wrong} of {layers}"
    findings = *findings, comparison.verdict, str(len(comparison.forward.defects))
    return *findings, *("" if s is None else f"{s:.0f}" for s in seconds), f"{peak:.1f}"


def main() -> int:
    """Write the table into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--one", type=int, nargs=4, metavar=("LAYERS", "WIDTH", "WRONG", "TOKENS"))
    options = parser.parse_args()
    if options.one:
        print("|".join(measure(*options.one)))
        return 0
    rows = []
    for case in CASES:
        command = [sys.executable, "-m", "benchmarks.compare.comparison_cost", str(options.page), "--one"]
        result = subprocess.run([*command, *map(str, case)], check=True, stdout=subprocess.PIPE, text=True)
        rows.append(tuple(result.stdout.splitlines()[-1].split("|")))
        print(*rows[-1], sep="; ", flush=True)
    write_table(options.page, "comparison-cost", HEADER, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
