"""A map of weights as a file of rules that can be edited, as arrays, and as code of a converter in both directions.

A rules file is TOML with one entry per parameter of the candidate:

    "q.kernel" = { source = "attention.q.weight", layout = "w.T.reshape(64, 4, 16)" }
    "qkv.bias" = { parts = [{ region = "0:64", source = "q.bias" }, { region = "64:128", source = "k.bias" }] }

`layout` is NumPy code of `w`, the source; without it, the source is only reshaped. `shift` is a number that is added,
`add` a second source that is added, and `padding` the value outside of the parts' regions.
"""

import ast
import json
import tomllib
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..matching.arrangements import Layout, find_layout
from ..matching.weights import Match, Part

Array = np.ndarray
Shapes = Mapping[str, tuple[int, ...]]
_FIELDS = {"source", "layout", "region", "parts", "shift", "add", "padding"}


class RulesError(ValueError):
    """A rules file cannot be used; the message states where, why, and what to do."""


def rules_text(found: Sequence[str], assumed: Sequence[str] = (), undecided: Sequence[str] = ()) -> str:
    """The rules file with these lines; undecided parameters follow as comments."""
    header = ["# Assumed from shapes, the order of use and names: check them."] if assumed else []
    footer = ["# Undecided: name the source, and the layout if it is not a reshape."] if undecided else []
    return "\n".join([*found, *header, *assumed, *footer, *(f"# {line}" for line in undecided)]) + "\n"


def rule_lines(matches: Mapping[str, Match], sources: Shapes) -> list[str]:
    """The lines of a rules file for these matches; sources: shapes of the reference's parameters."""
    return [f"{_quoted(name)} = {{ {_entry(match, sources)} }}" for name, match in matches.items()]


def _quoted(text: str) -> str:
    return json.dumps(text)


def _entry(match: Match, sources: Shapes) -> str:
    fields = []
    whole = len(match.parts) == 1 and match.padding is None
    for part in match.parts:
        region = [] if whole else [f"region = {_quoted(region_code(part.region))}"]
        layout = _quoted(part.layout.code("w", sources[part.source]))
        fields.append(", ".join([*region, f"source = {_quoted(part.source)}", f"layout = {layout}"]))
    text = fields[0] if whole else "parts = [" + ", ".join(f"{{ {part} }}" for part in fields) + "]"
    text += f", shift = {match.shift}" if match.shift else ""
    text += f", add = {_quoted(match.added_to)}" if match.added_to else ""
    return text + (f", padding = {float(match.padding)}" if match.padding is not None else "")


def region_code(region: Sequence[slice]) -> str:
    """A region as the index of an array."""
    return ", ".join(f"{part.start}:{part.stop}" for part in region)


def read_rules(path: Path | str, sources: Shapes, targets: Shapes) -> dict[str, Match]:
    """The matches in a rules file, by parameter of the candidate; shapes of both models' parameters are needed.

    Raises:
        RulesError: it is malformed, names an unknown parameter, or a size does not fit.
    """
    try:
        entries = tomllib.loads(Path(path).read_text())
    except FileNotFoundError:
        raise RulesError(f"{path}: there is no such file; --write-rules writes one") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RulesError(f"{path}: cannot be read as TOML: {error}; correct it or write it again") from error
    return {name: _read_match(f"{path}: {name}", name, entry, sources, targets) for name, entry in entries.items()}


def _read_match(place: str, name: str, entry: Any, sources: Shapes, targets: Shapes) -> Match:
    if name not in targets:
        raise RulesError(f"{place}: the candidate has no such parameter; remove the entry or correct its name")
    if not isinstance(entry, dict) or not entry.keys() <= _FIELDS or ("source" in entry) == ("parts" in entry):
        raise RulesError(
            f"{place}: give either a source or parts, and of other fields only {', '.join(sorted(_FIELDS))}"
        )
    shape = targets[name]
    parts = entry.get("parts", [entry])
    if not isinstance(parts, list) or not all(isinstance(p, dict) and "source" in p for p in parts):
        raise RulesError(f"{place}: parts must be a list of tables, each with a source")
    read = tuple(_read_part(place, part, shape, sources) for part in parts)
    shift, added, padding = entry.get("shift", 0), entry.get("add", ""), entry.get("padding")
    for source in [added] if added else []:
        if any(sources.get(source) != sources[part.source] for part in read):
            raise RulesError(f"{place}: add names {source}, which is no parameter of the source's shape")
    if not all(isinstance(n, int | float) for n in (shift, padding or 0)):
        raise RulesError(f"{place}: shift and padding must be numbers")
    covered = sum(prod(p.stop - p.start for p in part.region) for part in read)
    if padding is None and covered != prod(shape):
        raise RulesError(
            f"{place}: the parts have {covered} numbers, and the parameter {prod(shape)}; correct a region"
        )
    return Match(name, read, shift, added, padding)


def _read_part(place: str, part: Mapping[str, Any], shape: tuple[int, ...], sources: Shapes) -> Part:
    source = part["source"]
    if source not in sources:
        raise RulesError(f"{place}: the reference has no parameter {source}; correct the source")
    region = _read_region(place, part.get("region"), shape)
    wanted = tuple(s.stop - s.start for s in region)
    index = np.arange(prod(sources[source])).reshape(sources[source])
    code = part.get("layout", "w")
    try:
        result = np.asarray(_evaluate(ast.parse(code, mode="eval").body, index))
    except (SyntaxError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RulesError(f"{place}: layout {code!r}: {error}; use w, .T, .reshape, .transpose and indices") from error
    if result.size != prod(wanted):
        raise RulesError(
            f"{place}: {source} in layout {code} has {result.size} numbers, and {prod(wanted)} are needed; correct it"
        )
    layout = find_layout(result.reshape(wanted), index.size)
    if layout is None:
        raise RulesError(f"{place}: layout {code!r} is not an arrangement of axes")
    return Part(region, source, layout)


def _read_region(place: str, code: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    if code is None:
        return tuple(slice(0, n) for n in shape)
    try:
        ends = [tuple(map(int, part.split(":"))) for part in str(code).split(",") if part.strip()]
        region = tuple(slice(start, stop) for start, stop in ends)
    except ValueError as error:
        raise RulesError(f"{place}: region {code!r} is not like '0:4, 8:16'") from error
    if len(region) != len(shape) or any(not 0 <= s.start < s.stop <= n for s, n in zip(region, shape, strict=True)):
        raise RulesError(f"{place}: region {code!r} is not within an array of shape {shape}")
    return region


def _evaluate(node: ast.AST, w: Array) -> Any:
    """The value of an expression of w, its transpositions, reshapes and indices; no other code is run."""
    match node:
        case ast.Name(id="w"):
            return w
        case ast.Attribute(value=inner, attr="T"):
            return _evaluate(inner, w).T
        case ast.Call(func=ast.Attribute(value=inner, attr="reshape" | "transpose" as name), args=args, keywords=[]):
            return getattr(_evaluate(inner, w), name)(*(ast.literal_eval(arg) for arg in args))
        case ast.Subscript(value=inner, slice=index):
            parts = index.elts if isinstance(index, ast.Tuple) else [index]
            return _evaluate(inner, w)[tuple(_index(part) for part in parts)]
    raise ValueError(f"{ast.unparse(node)} is not allowed")


def _index(node: ast.expr) -> Any:
    if isinstance(node, ast.Slice):
        return slice(*(None if end is None else ast.literal_eval(end) for end in (node.lower, node.upper, node.step)))
    return ast.literal_eval(node)


def apply_rules(matches: Mapping[str, Match], state: Mapping[str, Array], shapes: Shapes) -> dict[str, Array]:
    """The candidate's parameters from the reference's; `shapes`: of the candidate's parameters."""
    arrays = {}
    for name, match in matches.items():
        dtype = np.asarray(state[match.parts[0].source]).dtype if match.parts else np.float32
        result = np.full(shapes[name], 0 if match.padding is None else match.padding, dtype)
        for part in match.parts:
            source = np.asarray(state[part.source])
            if match.added_to:
                source = source + np.asarray(state[match.added_to])
            result[part.region] = part.layout.apply(source) + np.asarray(match.shift, dtype)
        arrays[name] = result
    return arrays


def converter_code(matches: Mapping[str, Match], sources: Shapes, targets: Shapes) -> str:
    """Python code with `to_candidate` and `to_reference`, each from a dict of arrays to a dict of arrays.

    Where two biases of the reference are one of the candidate, `to_reference` gives the first the sum and the second 0.
    """
    forward = [line for name, match in matches.items() for line in _forward(name, match, sources, targets[name])]
    back = _backward(matches, sources, targets)
    return "\n".join(
        [
            "import numpy as np",
            *_function("to_candidate", "The candidate's parameters from the reference's.", forward),
            *_function("to_reference", "The reference's parameters from the candidate's.", back),
            "",
        ]
    )


def _function(name: str, text: str, lines: Sequence[str]) -> list[str]:
    body = [f'    """{text}"""', "    out = {}", *(f"    {line}" for line in lines), "    return out"]
    return ["", "", f"def {name}(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:", *body]


def _forward(name: str, match: Match, sources: Shapes, shape: tuple[int, ...]) -> list[str]:
    values = []
    for part in match.parts:
        source = f"state[{part.source!r}]"
        value = part.layout.code(source, sources[part.source])
        if match.added_to:
            value += " + " + part.layout.code(f"state[{match.added_to!r}]", sources[match.added_to])
        values.append(value + (f" + {match.shift}" if match.shift > 0 else f" - {-match.shift}" if match.shift else ""))
    if len(values) == 1 and match.padding is None:
        return [f"out[{name!r}] = {values[0]}"]
    dtype = f"state[{match.parts[0].source!r}].dtype" if match.parts else "np.float32"
    lines = [f"out[{name!r}] = np.full({shape}, {match.padding or 0}, {dtype})"]
    for part, value in zip(match.parts, values, strict=True):
        lines.append(f"out[{name!r}][{region_code(part.region)}] = {value}")
    return lines


def _backward(matches: Mapping[str, Match], sources: Shapes, targets: Shapes) -> list[str]:
    lines: list[str] = []
    begun: set[str] = set()
    for name, match in matches.items():
        for part in match.parts:
            value = f"state[{name!r}]"
            if tuple(s.stop - s.start for s in part.region) != targets[name]:
                value += f"[{region_code(part.region)}]"
            shift = f" - {match.shift}" if match.shift > 0 else f" + {-match.shift}" if match.shift else ""
            lines += _inverse(part, value, shift, sources[part.source], begun)
            if match.added_to and match.added_to not in begun:
                begun.add(match.added_to)
                lines.append(f"out[{match.added_to!r}] = np.zeros({sources[match.added_to]}, state[{name!r}].dtype)")
    return lines


def _inverse(part: Part, value: str, shift: str, shape: tuple[int, ...], begun: set[str]) -> list[str]:
    """Lines that set what a part has of its source."""
    layout, target = part.layout, f"out[{part.source!r}]"
    inverse = inverse_layout(layout, shape)
    if inverse is not None and part.source not in begun:
        begun.add(part.source)
        return [f"{target} = {inverse.code(value, layout.shape)}{shift}"]
    lines = [] if part.source in begun else [f"{target} = np.zeros({shape}, {value}.dtype)"]
    begun.add(part.source)
    if inverse is not None:  # a tied parameter that is already there
        return lines
    sizes, index, order, _ = layout.steps
    indices = ", ".join(str(i) if not isinstance(i, slice) else "::-1" if i.step else ":" for i in index)
    view = f"{target}.reshape({', '.join(map(str, sizes))})[{indices}].transpose({', '.join(map(str, order))})"
    digits = tuple(size for size, _ in layout.axes)
    return [*lines, f"{view}[...] = {value}.reshape({', '.join(map(str, digits))}){shift}"]


def inverse_layout(layout: Layout, shape: tuple[int, ...]) -> Layout | None:
    """The layout from the arranged array back to the source's shape; None if it has only a part of the source."""
    if prod(layout.shape) != layout.source_size:
        return None
    index = np.argsort(np.ravel(layout.apply(np.arange(layout.source_size)))).reshape(shape)
    return find_layout(index, layout.source_size)
