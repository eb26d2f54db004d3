"""The ladder as one HTML page, which needs no other file and no script."""

import base64
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend.environment import environment
from ..backend.page import render
from ..compare.page import differences
from .attention import LONGEST, Attention, AttentionMap
from .harness import Criterion
from .heat_map import BOUNDS, COLORS, blocks, levels, outside_layers
from .ladder import Ladder, numbers
from .report import caption

_LISTED = 20  # arrays that differ, and sentences whose translations do
_OPEN = 3  # attentions whose images are shown at first
_LABEL = 9  # characters of a token beside an image
_WEIGHT_LEVELS = 255  # the color of a weight w is number round(255 w)
_SCALES = {"one": "", "array": " · max(1, largest value)", "rung": " · largest value of the rung"}
_WEIGHT_COLORS = tuple((37, 99, 235, round(255 * (i / _WEIGHT_LEVELS) ** 0.5)) for i in range(_WEIGHT_LEVELS + 1))


def page(
    ladder: Ladder,
    names: tuple[str, str],
    *,
    oracle_name: str = "",
    assumed: Sequence[str] = (),
    labels: tuple[Sequence[str], Sequence[str]] | None = None,
    translations: Sequence[Mapping[str, Any]] = (),
    texts: Mapping[int, str] | None = None,
) -> str:
    """The page; `names` of the models that PyTorch and Flax compute.

    `assumed`: settings that a checkpoint does not state. `labels`: the tokens of `ladder.attention`, source and target.
    `translations`: as `show_translations` returns them; `texts`: their sources by line.
    """
    reports = {"Flax against PyTorch": ladder.report}
    reports |= {f"{framework} against {oracle_name}": report for framework, report in ladder.oracle_reports.items()}
    attention = ladder.attention
    positions = () if attention is None else [[str(i) for i in range(len(ids))] for ids in attention.tokens]
    axes = [
        [label if len(label) <= _LABEL else f"{label[: _LABEL - 1]}…" for label in side] for side in labels or positions
    ]
    return render(
        "parity/page.html",
        ("compare/differences.css", "parity/page.css"),
        images=True,
        names=names,
        equal=ladder.ok and not any(document["different"] for document in translations),
        reasons=list(_reasons(ladder, oracle_name, translations)),
        assumed=assumed,
        oracle_name=oracle_name,
        rungs=[(rung, criterion, numbers(rung, oracle_name)) for rung, criterion in _criteria(ladder)],
        caption=caption(ladder, oracle_name),
        gaps=ladder.coverage.gaps,
        reports={name: report for name, report in reports.items() if not report.ok},
        comparison=ladder.comparison,
        defects=[] if ladder.comparison is None else differences(ladder.comparison),
        listed=_LISTED,
        blocks=list(blocks(ladder.report)),
        outside=outside_layers(ladder.report),
        legend=list(_legend()),
        colors=[f"rgba({r}, {g}, {b}, {opacity / 255:.2f})" for r, g, b, opacity in COLORS],
        level=lambda finding: int(levels(np.inf if finding.problem else finding.error, finding.tolerance)),
        attention=attention,
        longest=LONGEST,
        labels=labels,
        axes=axes,
        margin=4 + 5 * max((len(label) for side in axes for label in side), default=0),
        maps=[] if attention is None else list(_maps(attention)),
        weight_colors=_png(np.arange(_WEIGHT_LEVELS + 1)[None], _WEIGHT_COLORS),
        translations=translations,
        texts=texts or {},
        machine=environment(),
        command=ladder.report.reproduce,
    )


def _reasons(ladder: Ladder, oracle_name: str, translations: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What the verdict says."""
    arrays = len(ladder.report.findings)
    if ladder.report.ok:
        yield f"In float64, all {arrays} arrays of both models agree within their tolerances."
    elif ladder.report.first is not None:
        count = len(ladder.report.failures)
        yield f"In float64, {count} of {arrays} arrays differ, first {ladder.report.first.path}."
    for framework, report in ladder.oracle_reports.items():
        count = f"{len(report.failures)} of {len(report.findings)} arrays"
        verdict = f"agrees with {oracle_name}" if report.ok else f"differs from {oracle_name} in {count}"
        yield f"In float64, {framework} {verdict}."
    narrow = [rung.name for rung in ladder.rungs if not rung.ok and not _differs(ladder, rung.name)]
    if narrow:
        yield f"In float32 or bfloat16, the errors of the two models are too far apart: {', '.join(narrow)}."
    if translations:
        different = sum(len(document["different"]) for document in translations)
        yield (
            f"{different} translations differ beyond rounding."
            if different
            else "No translation differs beyond rounding."
        )


def _differs(ladder: Ladder, rung: str) -> bool:
    """Whether a rung fails in float64."""
    return any(not finding.ok for report in ladder.reports for finding in report.findings if finding.rung == rung)


def _criteria(ladder: Ladder) -> Iterator[tuple[Any, str]]:
    """Each rung with its tolerance in float64 and the reason for it."""
    criteria = {criterion.rung: criterion for criterion in ladder.report.criteria}
    for rung in ladder.rungs:
        yield rung, _tolerance(criteria[rung.name])


def _tolerance(criterion: Criterion) -> str:
    bound = f"{criterion.bound:g}{_SCALES[criterion.scale]}" if criterion.bound else "equal"
    return f"{bound}: {criterion.reason}"


def _legend() -> Iterator[str]:
    """The errors relative to the tolerance of each color."""
    yield from (f"≤ {bound:g}" for bound in BOUNDS)
    yield f"> {BOUNDS[-1]:g}"


def _maps(attention: Attention) -> Iterator[dict[str, Any]]:
    """The images of each attention. Those that differ are open, or else those of the last layers."""
    different = [entry.path for entry in attention.maps if not entry.error <= entry.tolerance]
    parts = {entry.path: entry.path.split(".") for entry in attention.maps}
    last = {(stack, module): path for path, (stack, _, _, module) in parts.items()}
    shown = different[:_OPEN] or list(last.values())
    for entry in attention.maps:
        stack, _, layer, module = parts[entry.path]
        yield {
            "title": f"{stack} layer {layer}, {module.replace('_', '-')}",
            "map": entry,
            "open": entry.path in shown,
            "ok": entry.error <= entry.tolerance,
            "images": [_images(entry, index) for index in range(2 if entry.heads > 1 else 1)],
        }


def _images(entry: AttentionMap, index: int) -> dict[str, str]:
    """Model -> image of the weights, and of the difference."""
    pytorch, flax = entry.pytorch[index], entry.flax[index]
    weights = {
        name: _png(np.nan_to_num(np.rint(side.clip(0, 1) * _WEIGHT_LEVELS)), _WEIGHT_COLORS)
        for name, side in (("PyTorch", pytorch), ("Flax", flax))
    }
    return weights | {"difference": _png(levels(np.abs(pytorch - flax), entry.tolerance), COLORS)}


def _png(colors: np.ndarray, palette: Sequence[tuple[int, int, int, int]]) -> str:
    """A PNG whose pixels are these numbers of the palette's colors, as a data URI."""
    height, width = colors.shape
    rows = b"".join(b"\0" + row.tobytes() for row in colors.astype(np.uint8))  # 0: rows are not filtered
    chunks = {
        b"IHDR": struct.pack(">2I5B", width, height, 8, 3, 0, 0, 0),  # 8 bits, of a palette
        b"PLTE": b"".join(bytes(color[:3]) for color in palette),
        b"tRNS": bytes(color[3] for color in palette),
        b"IDAT": zlib.compress(rows, 9),
        b"IEND": b"",
    }
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks.items():
        content += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return "data:image/png;base64," + base64.b64encode(content).decode()
