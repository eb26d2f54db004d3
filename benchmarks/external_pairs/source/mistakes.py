"""Mistakes that people make when they port a model, as edits of one expression of a source file.

No line moves: an edited expression keeps its number of lines, so a report's line is that of the original file.
"""

import ast
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

Change = tuple[str, ast.expr]  # what is wrong with it, and the wrong expression
_SWAPPED_CALLS = {
    "gelu": "silu",
    "silu": "gelu",
    "swish": "gelu",
    "relu": "gelu",
    "tanh": "sigmoid",
    "sigmoid": "tanh",
    "softplus": "relu",
    "mean": "sum",
    "sum": "mean",
    "max": "min",
    "cos": "sin",
    "sin": "cos",
    "rsqrt": "sqrt",
    "triu": "tril",
    "tril": "triu",
    "max_pool": "avg_pool",
}
_WITHOUT = ("norm", "ln", "scale", "gate", "act", "gamma", "softplus", "sigmoid", "tanh", "silu", "flip", "exp")
_SHIFTED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}


@dataclass(frozen=True)
class Mistake:
    """An edit of a file: the characters from `start` to `end` become `text`."""

    kind: str
    file: Path
    lines: range  # of the edited expression
    start: int
    end: int
    text: str

    def __str__(self) -> str:
        return f"{self.file.parent.name}/{self.file.name}:{self.lines.start}: {self.kind}: {self.text.strip()[:60]}"

    def apply(self, file: Path) -> None:
        """Write the mistake into a copy of the file."""
        source = self.file.read_bytes()
        file.write_bytes(source[: self.start] + self.text.encode() + source[self.end :])


def mistakes(file: Path, functions: tuple[str, ...] = ("",)) -> Iterator[Mistake]:
    """The mistakes that can be made in a file, within functions and classes whose names begin with one of these."""
    source = file.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for outer in ast.parse(source).body:
        if not isinstance(outer, ast.FunctionDef | ast.ClassDef) or not outer.name.startswith(functions):
            continue
        for node in _bodies(outer):
            for kind, wrong in _changes(node):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                text = f"({ast.unparse(wrong)}" + "\n" * (len(lines) - 1) + ")"
                start, end = (
                    starts[node.lineno - 1] + node.col_offset,
                    starts[lines[-1] - 1] + (node.end_col_offset or 0),
                )
                yield Mistake(kind, file, lines, start, end, text)


def _bodies(outer: ast.AST) -> Iterator[ast.expr]:
    """The expressions that a forward pass may evaluate: not decorators, defaults, annotations or messages."""
    for child in ast.iter_child_nodes(outer):
        if isinstance(child, ast.arguments | ast.Raise | ast.Assert | ast.JoinedStr):
            continue
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":  # whose lines no operation has
            continue
        if isinstance(outer, ast.FunctionDef | ast.ClassDef) and (
            child in outer.decorator_list or child is getattr(outer, "returns", None)
        ):
            continue
        if isinstance(outer, ast.AnnAssign) and child is outer.annotation:
            continue
        if isinstance(child, ast.expr):
            yield child
        yield from _bodies(child)


def _changes(node: ast.expr) -> Iterator[Change]:
    for change in _CHANGES:
        yield from change(node)


def _with(node: ast.expr, **fields: Any) -> Any:
    copy = deepcopy(node)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def _arithmetic(node: ast.expr) -> Iterator[Change]:
    if not isinstance(node, ast.BinOp):
        return
    match node.op:
        case ast.Mult() | ast.Div():
            yield "a factor is left out", node.left
            if isinstance(node.op, ast.Mult):
                yield "the other factor is left out", node.right
            else:
                yield "divides the wrong way", _with(node, left=node.right, right=node.left)
        case ast.Add():
            yield "a term is left out", node.left
            yield "the other term is left out", node.right
            yield "a sign is wrong", _with(node, op=ast.Sub())
        case ast.Sub():
            yield "a sign is wrong", _with(node, op=ast.Add())
            yield "subtracts the wrong way", _with(node, left=node.right, right=node.left)
        case ast.MatMult():
            yield "operands are exchanged", _with(node, left=node.right, right=node.left)
        case _:
            pass


def _signs(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "a sign is lost", node.operand
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert | ast.Not):
        yield "a mask is inverted", node.operand


def _constants(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is float and node.value not in (0.0, 1.0):
        factor = 0.1 if abs(node.value) < 1e-2 or abs(node.value) > 100 else 1.25
        yield "a constant is wrong", ast.Constant(node.value * factor)
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield "a switch is wrong", ast.Constant(not node.value)


def _comparisons(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and (other := _SHIFTED.get(type(node.ops[0]))):
        yield "a boundary is off by one", _with(node, ops=[other()])


def _calls(node: ast.expr) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in _SWAPPED_CALLS and isinstance(function, ast.Attribute):
        yield f"{_SWAPPED_CALLS[name]} for {name}", _with(node, func=_with(function, attr=_SWAPPED_CALLS[name]))
    if len(node.args) == 1 and not isinstance(node.args[0], ast.Starred) and any(w in name.lower() for w in _WITHOUT):
        yield f"{name} is left out", node.args[0]
    if name == "where" and len(node.args) == 3:
        yield "the cases are exchanged", _with(node, args=[node.args[0], node.args[2], node.args[1]])
    if name in ("transpose", "swapaxes", "permute") and len(node.args) >= 1:
        yield (
            "a transposition is left out",
            function.value if isinstance(function, ast.Attribute) and not _is_module(function.value) else node.args[0],
        )
    if name in ("matmul", "einsum", "dot", "subtract", "divide") and len(node.args) >= 2:
        yield "operands are exchanged", _with(node, args=[*node.args[:-2], node.args[-1], node.args[-2]])
    for i, keyword in enumerate(node.keywords):
        if keyword.arg == "axis" and isinstance(keyword.value, ast.UnaryOp | ast.Constant):
            wrong = ast.Constant(-2 if ast.unparse(keyword.value) == "-1" else -1)
            keywords = [*node.keywords[:i], _keyword(keyword, wrong), *node.keywords[i + 1 :]]
            yield "the axis is wrong", _with(node, keywords=keywords)


def _keyword(keyword: ast.keyword, value: ast.expr) -> ast.keyword:
    return ast.keyword(keyword.arg, value)


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("jnp", "jax", "np", "nnx", "nn", "lax")


def _order(node: ast.expr) -> Iterator[Change]:
    """Exchanged entries: of a concatenation, of what is unpacked, of the axes of a reshape or transposition."""
    if isinstance(node, ast.Tuple | ast.List) and isinstance(node.ctx, ast.Store) and 2 <= len(node.elts) <= 4:
        yield "unpacked in another order", _with(node, elts=[node.elts[1], node.elts[0], *node.elts[2:]])
    if not isinstance(node, ast.Call):
        return
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("concatenate", "stack", "concat") and node.args and isinstance(node.args[0], ast.List | ast.Tuple):
        entries = node.args[0].elts
        if len(entries) >= 2:
            wrong = _with(node.args[0], elts=[entries[1], entries[0], *entries[2:]])
            yield "concatenated in another order", _with(node, args=[wrong, *node.args[1:]])
    if name in ("reshape", "transpose"):
        groups = [(None, node.args)] + [(i, a.elts) for i, a in enumerate(node.args) if isinstance(a, ast.Tuple)]
        for place, entries in groups:
            for i, (one, other) in enumerate(pairwise(entries)):
                if place is None and (i == 0 and _is_module(getattr(function, "value", node))):
                    continue
                if isinstance(one, ast.Tuple) or ast.unparse(one) == ast.unparse(other):
                    continue
                swapped = [*entries[:i], other, one, *entries[i + 2 :]]
                args = swapped if place is None else [*node.args]
                if place is not None:
                    args[place] = _with(node.args[place], elts=swapped)
                yield f"axes of a {name} are exchanged", _with(node, args=args)


def _slices(node: ast.expr) -> Iterator[Change]:
    """The other half; a row too late."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
        return
    entries = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    for i, entry in enumerate(entries):
        if not isinstance(entry, ast.Slice) or (entry.lower is None) == (entry.upper is None):
            continue
        if entry.step is not None:
            continue
        wrong: ast.expr = ast.Slice(entry.upper, entry.lower)
        index = _with(node.slice, elts=[*entries[:i], wrong, *entries[i + 1 :]]) if len(entries) > 1 else wrong
        yield "the other part", _with(node, slice=index)
    for i, entry in enumerate(entries):
        if isinstance(entry, ast.Constant) and type(entry.value) is int and entry.value in (0, 1):
            wrong = ast.Constant(1 - entry.value)
            index = _with(node.slice, elts=[*entries[:i], wrong, *entries[i + 1 :]]) if len(entries) > 1 else wrong
            yield "the other entry", _with(node, slice=index)


def _attributes(node: ast.expr) -> Iterator[Change]:
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        yield "a transposition is left out", node.value
    pairs = {"q_proj": "k_proj", "gate_proj": "up_proj", "wq": "wk", "input_layernorm": "post_attention_layernorm"}
    for one, other in [*pairs.items(), *((b, a) for a, b in pairs.items())]:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr == one:
            yield f"{other} for {one}", _with(node, attr=other)


_CHANGES: tuple[Callable[[ast.expr], Iterator[Change]], ...] = (
    _arithmetic,
    _signs,
    _constants,
    _comparisons,
    _calls,
    _order,
    _slices,
    _attributes,
)
