"""Plots of attention weights between target and source tokens.

Letters: T target tokens (rows), S source tokens (columns), N heads.
"""

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHADES = " ░▒▓█"
_LONGEST = 12  # characters of a column's token above the blocks


def attention_plot(
    weights: np.ndarray,
    targets: Sequence[str],
    sources: Sequence[str],
    path: str | PathLike[str] | None = None,
    *,
    titles: Sequence[str] | None = None,
) -> "Figure":
    """Attention weights (T, S), or (N, T, S) side by side, with the tokens on the axes; saved to `path`.

    The largest weight of each panel is the darkest. `titles`: one per panel; by default heads are numbered.

    Raises:
        ValueError: the shapes of weights, tokens and titles do not match.
    """
    from matplotlib.figure import Figure

    panels = _as_panels(weights, targets, sources)
    if titles is None:
        titles = [f"head {i}" for i in range(len(panels))] if len(panels) > 1 else [""]
    if len(titles) != len(panels):
        raise ValueError(f"titles: must have one title per panel, {len(panels)}, not {len(titles)}")
    columns = min(len(panels), 4)
    rows = -(-len(panels) // columns)
    width, height = 1.2 + 0.28 * len(sources), 1.2 + 0.28 * len(targets)  # inches: a token takes 0.28
    figure = Figure(figsize=(max(2.5, width) * columns, max(2.5, height) * rows), layout="constrained")
    for i, (panel, title) in enumerate(zip(panels, titles, strict=True)):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.imshow(panel, cmap="Greys", vmin=0, aspect="auto")
        # Tokens may contain dollar signs, which are not formulas.
        axes.set_xticks(range(len(sources)), list(sources), rotation=90, parse_math=False, fontsize=9)
        axes.set_yticks(range(len(targets)), list(targets), parse_math=False, fontsize=9)
        axes.set_title(title, fontsize=10, parse_math=False)
        axes.set_xlabel("source", fontsize=8)
        axes.set_ylabel("target", fontsize=8)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def attention_blocks(weights: np.ndarray, targets: Sequence[str], sources: Sequence[str]) -> str:
    """Attention weights (T, S) as text for a terminal, one line per target token; full blocks are the largest weight.

    Raises:
        ValueError: the shapes of weights and tokens do not match.
    """
    if np.ndim(weights) != 2:
        raise ValueError(f"weights: must have shape (target, source), not {list(np.shape(weights))}")
    panel = _as_panels(weights, targets, sources)[0]
    margin = max(cell_len(token) for token in targets)
    names = [token if len(token) <= _LONGEST else token[: _LONGEST - 1] + "…" for token in sources]
    lines = []
    for i in range(-max(map(len, names)), 0):  # column names from top to bottom, ending above their column
        letters = [name[i] if len(name) >= -i else " " for name in names]
        lines.append(" " * (margin + 1) + "".join(letter + " " * (2 - cell_len(letter)) for letter in letters).rstrip())
    levels = np.rint(panel / (panel.max() or 1) * (len(_SHADES) - 1)).astype(int)
    for token, row in zip(targets, levels, strict=True):
        blocks = "".join(_SHADES[level] * 2 for level in row)
        lines.append(f"{' ' * (margin - cell_len(token))}{token} {blocks}".rstrip())
    return "\n".join(lines)


def _as_panels(weights: np.ndarray, targets: Sequence[str], sources: Sequence[str]) -> np.ndarray:
    """The weights as (N, T, S)."""
    weights = np.asarray(weights, np.float64)
    if weights.ndim not in (2, 3) or weights.shape[-2:] != (len(targets), len(sources)) or not weights.size:
        raise ValueError(
            f"weights: must have shape (target, source) or (head, target, source) with {len(targets)} target and "
            f"{len(sources)} source tokens, not {list(weights.shape)}"
        )
    return weights.reshape(-1, len(targets), len(sources))
