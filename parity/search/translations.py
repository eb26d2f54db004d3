"""Compares translations of a text token by token: Flax, PyTorch, and `transformers` if it has the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ... import flax_transformer, torch_reference
from ...configs.decoding import DecodingConfig
from ...formulas.padding import pad
from ...train.tracking.progress import progress_bar
from .decoding import ROUNDING, as_generate, compare_decoded, transformers_generate

BEAM_SIZES = (1, 5)
_BLOCK = 32  # sentences per decoding batch


@dataclass
class TextAgreement:
    """Agreement of a search with PyTorch's, over all sentences of a text."""

    equal: int = 0
    ties: dict[int, float] = field(default_factory=dict)  # line -> margin of its closest decision, in nats
    different: dict[int, float] = field(default_factory=dict)  # the same, if rounding cannot explain the difference
    tokens: int = 0  # of PyTorch's translations
    score_error: float = 0.0  # largest difference of the sums of log-probabilities of equal sentences, in nats


def compare_translations(
    flax: flax_transformer.Transformer,
    pytorch: torch_reference.Transformer,
    sources: Mapping[int, Sequence[int]],
    beam_size: int,
    transformers_model: Any = None,
    progress: Callable[[int], None] = lambda count: None,
    longest: int | None = None,
) -> dict[str, TextAgreement]:
    """Compare the translations of Flax, and of a `transformers` model, with those of the PyTorch model.

    `sources`: ids of each line of a text, by line number. `progress` receives the number of lines translated.
    `longest`: of a translation, in tokens; None: the model's maximum.
    """
    config = pytorch.config
    fields: dict[str, Any] = {"beam_size": beam_size, "max_length": longest or config.max_length}
    # `generate` truncates at the maximum unless the model forces EOS
    decoding = DecodingConfig(**fields) if transformers_model is None else as_generate(config, **fields)
    totals = {"Flax": TextAgreement()}
    if transformers_model is not None:
        totals["transformers"] = TextAgreement()
    order = sorted(sources, key=lambda line: len(sources[line]))
    progress(0)
    size = min(_BLOCK, len(order))
    for start in range(0, len(order), size):
        lines = order[start : start + size]
        full_block = [*lines, *[lines[-1]] * (size - len(lines))]  # one size, because each size is compiled
        src = pad([sources[line] for line in full_block], config.pad_id, dtype=np.int64)
        expected = torch_reference.generate(pytorch, torch.from_numpy(src), decoding)
        searches = {"Flax": flax_transformer.generate(flax, src, decoding)}
        if transformers_model is not None:
            searches["transformers"] = transformers_generate(transformers_model, config, src, decoding)
        for name, search in searches.items():
            rounding = ROUNDING["float64" if name == "Flax" and config.compute_dtype == "float64" else "float32"]
            agreement = compare_decoded(search, expected, decoding, rounding)
            total = totals[name]
            mismatches = {**agreement.ties, **agreement.different}
            total.equal += sum(i not in mismatches for i in range(len(lines)))
            total.ties |= {lines[i]: margin for i, margin in agreement.ties.items() if i < len(lines)}
            total.different |= {lines[i]: margin for i, margin in agreement.different.items() if i < len(lines)}
            total.tokens += int(expected.lengths[: len(lines), 0].sum())
            total.score_error = max(total.score_error, agreement.score_error)
        progress(start + len(lines))
    return totals


def show_translations(
    flax: flax_transformer.Transformer,
    pytorch: torch_reference.Transformer,
    sources: Mapping[int, Sequence[int]],
    transformers_model: Any = None,
    longest: int | None = None,
) -> tuple[bool, list[dict[str, Any]]]:
    """Compare translations for each of BEAM_SIZES and print a table; return (all equal, the table for JSON).

    `longest`: as in `compare_translations`.
    """
    documents, lines = [], []
    with progress_bar() as progress:
        for beam_size in BEAM_SIZES:
            totals = compare_translations(
                flax,
                pytorch,
                sources,
                beam_size,
                transformers_model,
                lambda count, beam_size=beam_size: progress(f"translations, beam {beam_size}", count, len(sources)),
                longest,
            )
            for name, total in totals.items():
                for kind, margins in (("within rounding", total.ties), ("DIFFERENT", total.different)):
                    lines += [f"beam {beam_size}, line {i}, {name}: {kind}, margin {m:.1e}" for i, m in margins.items()]
                documents.append({"beam_size": beam_size, "search": name, **vars(total)})
    console = Console()
    console.print(table(documents))
    for line in lines:
        console.print(line, style="red" if "DIFFERENT" in line else "", markup=False)
    return not any(document["different"] for document in documents), documents


def table(documents: Sequence[Mapping[str, Any]]) -> Table:
    """One row per beam size of what `show_translations` returns."""
    rows = Table("beam", title="translations", title_justify="left")
    for name in dict.fromkeys(document["search"] for document in documents):
        rows.add_column(f"{name} = PyTorch", justify="right")
    rows.add_column("tokens", justify="right")
    rows.add_column("score difference of Flax", justify="right")
    for beam_size, group in groupby(documents, key=itemgetter("beam_size")):
        flax, *others = group
        cells = [f"{d['equal']:,} of {d['equal'] + len(d['ties']) + len(d['different']):,}" for d in (flax, *others)]
        rows.add_row(str(beam_size), *cells, f"{flax['tokens']:,}", f"{flax['score_error']:.1e}")
    return rows
