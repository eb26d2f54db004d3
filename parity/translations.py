"""Translations of a text, compared token for token: Flax, PyTorch, and `transformers` where it has the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from .. import flax_transformer, torch_reference
from ..configs.decoding import DecodingConfig
from ..formulas.padding import pad
from ..train.tracking.progress import counted
from .decoding import ROUNDING, compare_decoded, transformers_generate

BEAM_SIZES = (1, 5)
_BLOCK = 32  # sentences that are decoded at once


@dataclass
class Compared:
    """How far one search agrees with PyTorch's, over all sentences."""

    equal: int = 0
    ties: dict[int, float] = field(default_factory=dict)  # line -> margin of its closest decision, in nats
    different: dict[int, float] = field(default_factory=dict)  # the same, where rounding cannot turn it
    tokens: int = 0  # of PyTorch's translations
    score_error: float = 0.0  # largest difference of the sums of log-probabilities of equal sentences, in nats


def compare_translations(
    flax: flax_transformer.Transformer,
    pytorch: torch_reference.Transformer,
    sources: Mapping[int, Sequence[int]],
    beam_size: int,
    theirs: Any = None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Compared]:
    """How far Flax, and `transformers`' model where it is given, find the translations of the PyTorch model.

    `sources`: ids of each line of a text, by its number.
    """
    config, how = pytorch.config, DecodingConfig(beam_size=beam_size, max_length=pytorch.config.max_length)
    found = {"Flax": Compared()} | ({} if theirs is None else {"transformers": Compared()})
    order = sorted(sources, key=lambda line: len(sources[line]))
    for start in range(0, len(order), _BLOCK):
        lines = order[start : start + _BLOCK]
        filled = [*lines, *[lines[-1]] * (_BLOCK - len(lines))]  # of one size, for each is compiled
        src = pad([sources[line] for line in filled], config.pad_id, dtype=np.int64)
        expected = torch_reference.generate(pytorch, torch.from_numpy(src), how)
        searches = {"Flax": flax_transformer.generate(flax, src, how)}
        if theirs is not None:
            searches["transformers"] = transformers_generate(theirs, config, src, how)
        for name, search in searches.items():
            rounding = ROUNDING["float64" if name == "Flax" and config.compute_dtype == "float64" else "float32"]
            agreement, total = compare_decoded(search, expected, how, rounding), found[name]
            apart = {**agreement.ties, **agreement.different}
            total.equal += sum(i not in apart for i in range(len(lines)))
            total.ties |= {lines[i]: margin for i, margin in agreement.ties.items() if i < len(lines)}
            total.different |= {lines[i]: margin for i, margin in agreement.different.items() if i < len(lines)}
            total.tokens += int(expected.lengths[: len(lines), 0].sum())
            total.score_error = max(total.score_error, agreement.score_error)
        progress(start + len(lines))
    return found


def show_translations(
    flax: flax_transformer.Transformer,
    pytorch: torch_reference.Transformer,
    sources: Mapping[int, Sequence[int]],
    theirs: Any = None,
) -> tuple[bool, list[dict[str, Any]]]:
    """Compares translations for each of BEAM_SIZES and prints it: (nothing differs, the same as JSON has it)."""
    console = Console()
    table, documents, lines = Table("beam", title="translations", title_justify="left"), [], []
    names = ["Flax", *(["transformers"] if theirs is not None else [])]
    for name in names:
        table.add_column(f"{name} = PyTorch", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("sums, Flax to PyTorch", justify="right")
    with counted() as progress:
        for beam_size in BEAM_SIZES:
            found = compare_translations(
                flax,
                pytorch,
                sources,
                beam_size,
                theirs,
                lambda done, beam_size=beam_size: progress(f"translations, beam {beam_size}", done, len(sources)),
            )
            cells = [f"{found[name].equal:,} of {len(sources):,}" for name in names]
            ours = found["Flax"]
            table.add_row(str(beam_size), *cells, f"{ours.tokens:,}", f"{ours.score_error:.1e}")
            for name, compared in found.items():
                for kind, apart in (("tied", compared.ties), ("DIFFERENT", compared.different)):
                    lines += [f"beam {beam_size}, line {i}, {name}: {kind}, margin {m:.1e}" for i, m in apart.items()]
                documents.append({"beam_size": beam_size, "search": name, **vars(compared)})
    console.print(table)
    for line in lines:
        console.print(line, style="red" if "DIFFERENT" in line else "", markup=False)
    return not any(document["different"] for document in documents), documents
