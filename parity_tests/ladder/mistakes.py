"""Known mistakes in the PyTorch model, one at a time: the first rung that detects each, and its error.

`python -m parity_tests.ladder.mistakes` prints the table.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from twinax.configs.schema import TransformerConfig
from twinax.parity.functions import flax_function, random_arrays, random_batch, torch_function
from twinax.parity.harness import Report, compare_arrays
from twinax.parity.ladder import CRITERIA, rung_of
from twinax.torch_reference import attention, dropout, layers

# All widths are equal, so that no mistake is detected by shape.
CONFIG = TransformerConfig(
    src_vocab_size=14,
    tgt_vocab_size=14,
    d_model=14,
    num_heads=2,
    d_ff=14,
    num_encoder_layers=2,
    num_decoder_layers=2,
    max_length=14,
    norm_placement="pre",
    activation="gelu",
    param_dtype="float64",
    compute_dtype="float64",
)


@dataclass(frozen=True)
class TwinMistake:
    """A mistake that replaces part of the PyTorch model or changes its weights."""

    name: str
    rung: str  # the first rung that must fail
    patch: tuple[Any, str, Any] | None = None  # (module or class, attribute, replacement)
    table: tuple[dict[str, Any], str, Any] | None = None  # (registry, value's name, replacement)
    arrays: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]] = field(default=lambda arrays: arrays)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Applies the mistake to the PyTorch model within the `with` block."""
        if self.patch:
            with mock.patch.object(*self.patch):
                yield
        elif self.table:
            registry, key, replacement = self.table
            with mock.patch.dict(registry, {key: replacement}):
                yield
        else:
            yield


def _changed(part: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[..., dict[str, np.ndarray]]:
    return lambda arrays: {name: change(a) if part in name else a for name, a in arrays.items()}


def _swap_q_and_k(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    counterparts = {"q_proj": "k_proj", "k_proj": "q_proj"}
    result = {}
    for name in arrays:
        projection = next((part for part in counterparts if part in name), None)
        result[name] = arrays[name.replace(projection, counterparts[projection])] if projection else arrays[name]
    return result


MISTAKES = (
    TwinMistake(
        "causal mask off by one",
        "masks",
        table=(
            attention.DECODER_MASKS,
            "causal",
            lambda tokens, mask, pad_id, training: (
                torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril(1).expand(len(tokens), 1, -1, -1)
            ),
        ),
    ),
    TwinMistake(
        "key padding missing in cross-attention",
        "masks",
        table=(attention.CROSS_MASKS, "source", lambda keep, length: attention.source_mask(keep | True, length)),
    ),
    TwinMistake(
        "scores not divided by sqrt(head width)",
        "attention weights",
        table=(attention.SCORE_SCALINGS, "product", lambda q, k: torch.einsum("BTNH,BSNH->BNTS", q, k)),
    ),
    TwinMistake("query matrix transposed", "attention weights", arrays=_changed("q_proj.kernel", np.transpose)),
    TwinMistake("q and k swapped", "attention weights", arrays=_swap_q_and_k),
    TwinMistake(
        "heads split as (width, head)",
        "attention weights",
        patch=(
            attention.MultiHeadAttention,
            "_split_heads",
            lambda self, x: x.unflatten(-1, (-1, self.num_heads)).transpose(-1, -2),
        ),
    ),
    TwinMistake(
        "softmax in float32",
        "attention weights",
        patch=(
            attention,
            "exact_softmax",
            lambda scores, mask: torch.where(mask, torch.where(mask, scores.float(), -1e30).softmax(-1), 0).double(),
        ),
    ),
    TwinMistake(
        "fully masked rows attend to every key (fill of -1e9)",
        "attention weights",
        patch=(attention, "exact_softmax", lambda scores, mask: attention.filled_softmax(scores, mask, -1e9)),
    ),
    TwinMistake(
        "positions off by one",
        "attention weights",
        table=(layers.POSITION_COUNTINGS, "all", lambda tokens, pad_id: torch.arange(tokens.shape[1])[None] + 1),
    ),
    TwinMistake(
        "embedding not scaled by sqrt(d_model)",
        "attention weights",
        table=(layers.EMBEDDING_SCALES, "sqrt_d_model", lambda d_model: 1.0),
    ),
    TwinMistake(
        "LayerNorm eps 1e-6 for 1e-5",
        "attention weights",
        table=(layers.NORMS, "layer_norm", lambda x, eps: layers.layer_norm(x, 1e-6)),
    ),
    TwinMistake(
        "post-norm for pre-norm",
        "attention weights",
        table=(layers.NORM_PLACEMENTS, "pre", layers.NORM_PLACEMENTS["post"]),
    ),
    TwinMistake(
        "tanh gelu for erf gelu",
        "attention weights",
        table=(layers.ACTIVATIONS, "gelu", layers.ACTIVATIONS["gelu_tanh"]),
    ),
    TwinMistake("value bias dropped", "attention weights", arrays=_changed("v_proj.bias", np.zeros_like)),
    TwinMistake(
        "dropout without 1/(1 - rate)",
        "attention weights",
        patch=(
            dropout.Dropout,
            "forward",
            lambda self, x, key: torch.where(self.keep(key, self.rate, tuple(x.shape)), x, 0),
        ),
    ),
    TwinMistake("output matrix transposed", "logits", arrays=_changed("output.proj.kernel", np.transpose)),
    TwinMistake(
        "no gradient into the target embedding",
        "gradients",
        patch=(
            layers.Embedding,
            "forward",
            lambda self, tokens: (
                torch.nn.functional.embedding(tokens, self.weight.detach())
                * layers.EMBEDDING_SCALES[self.config.embedding_scale](self.config.d_model)
            ),
        ),
    ),
)


def run(mistake: TwinMistake | None) -> Report:
    """Runs the ladder on the model with the mistake, in float64 with dropout; one source is all padding."""
    batch = random_batch(CONFIG, np.random.default_rng(0), 4, 7, 5)._replace(dropout=(1, 2))
    batch.src_tokens[3] = CONFIG.pad_id
    arrays = random_arrays(CONFIG, 0)
    torch_outputs, flax_outputs = torch_function(CONFIG)(arrays, batch), flax_function(CONFIG)(arrays, batch)
    expected = {path: flax_outputs[path] for path in torch_outputs}  # in the order of the computation
    if mistake is None:
        return compare_arrays(expected, torch_outputs, criteria=CRITERIA, rung_of=rung_of)
    with mistake.applied():
        mutated_outputs = torch_function(CONFIG)(mistake.arrays(arrays), batch)
    return compare_arrays(expected, mutated_outputs, criteria=CRITERIA, rung_of=rung_of)


def main() -> None:
    """Prints the table."""
    table = Table("mistake", "first rung", "first differing array", "its error", "differing arrays")
    for mistake in (None, *MISTAKES):
        report = run(mistake)
        first = report.first
        cells = (str(report.failed_rung), first.path, f"{first.error:.1e}") if first else ("–", "", "")
        table.add_row(mistake.name if mistake else "none", *cells, f"{len(report.failures)}/{len(report.findings)}")
    Console(width=160).print(table)


if __name__ == "__main__":
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        main()
