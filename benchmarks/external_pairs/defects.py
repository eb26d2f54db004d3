"""The mistakes that ports make, at every place of a trace where they can be made."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.external_pairs.planting import Draft, Planted, Site, planted, planted_parameters
from twinax.compare.capture.trace import Operation, Trace
from twinax.compare.repair.alternatives import UNARY

Array = np.ndarray
_ORDERED = ("sub", "div", "pow", "atan2", "dot_general", "lt", "le", "gt", "ge", "rem", "concatenate", "select_n")
_COMPARISONS: dict[str, Callable[..., Any]] = {"lt": jnp.less, "le": jnp.less_equal, "gt": jnp.greater}
_COMPARISONS |= {"ge": jnp.greater_equal, "eq": jnp.equal, "ne": jnp.not_equal}
_NEIGHBORS = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt"}
_ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "erf gelu": partial(jax.nn.gelu, approximate=False),
    "tanh gelu": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
    "softplus": jax.nn.softplus,
}
_MISTAKEN = {"erf gelu": ("tanh gelu", "relu"), "tanh gelu": ("erf gelu", "silu"), "relu": ("erf gelu", "silu")}
_MISTAKEN |= {"silu": ("erf gelu", "relu"), "sigmoid": ("tanh",), "tanh": ("sigmoid", "relu"), "softplus": ("relu",)}
Change = Callable[[Draft], None]
_STEPS = 12  # operations of an activation


def sites(trace: Trace) -> Iterator[Site]:
    """Every place for a defect, in order of execution, then those of the parameters."""
    graph = _Graph(trace)
    sources = (_swapped, _transposed, _axes, _literals, _masks, _dropped, _positions, _heads, _groups)
    used = trace.ancestors()
    activations = _activations(graph)
    changes_of: dict[int, dict[tuple[str, str], Change]] = {}
    for operation in trace.operations:
        if operation.compute is not None and not used.isdisjoint(operation.outputs):
            changes = {
                (name, detail): change for source in sources for name, detail, change in source(graph, operation)
            }
            changes_of[id(operation)] = changes | activations.get(id(operation), {})
    for copies in _steps(trace):
        for key, change in changes_of.get(id(copies[0]), {}).items():
            others = [changes_of.get(id(copy), {}).get(key) for copy in copies[1:]]
            changes = [change, *(other for other in others if other is not None)]
            yield Site(*key, partial(planted, trace, copies[0], partial(_apply, changes)))
    yield from _parameters(trace)


def _apply(changes: Sequence[Change], draft: Draft) -> None:
    for change in changes:
        change(draft)


def _steps(trace: Trace) -> Iterator[tuple[Operation, ...]]:
    """Each operation; those of a loop's body with their copies in the later steps, because the code is the same."""
    steps: list[list[Operation]] = []
    row = None
    for operation in trace.operations:
        if operation.name == "scan.row" and operation.settings["row"] != row:
            steps.append([])
            row = operation.settings["row"]
        if operation.name == "scan.stack" and steps:
            same = len({len(step) for step in steps}) == 1
            yield from zip(*steps, strict=True) if same else ((one,) for step in steps for one in step)
            steps, row = [], None
        if steps:
            steps[-1].append(operation)
        else:
            yield (operation,)


class _Graph:
    """What uses and what makes each value."""

    def __init__(self, trace: Trace):
        self.trace, self.values = trace, trace.values
        self.made = {number: operation for operation in trace.operations for number in operation.outputs}
        self.users: dict[int, list[Operation]] = {}
        for operation in trace.operations:
            for number in operation.inputs:
                self.users.setdefault(number, []).append(operation)
        self.inputs = {*trace.inputs.values()}
        self.parameters = {*trace.parameters.values()}
        self.fixed = self._fixed()

    def _fixed(self) -> set[int]:
        """Values that depend on parameters and constants alone."""
        fixed = {n for n in range(len(self.values)) if n not in self.made and n not in self.inputs}
        for operation in self.trace.operations:
            if fixed.issuperset(operation.inputs):
                fixed.update(operation.outputs)
        return fixed


Found = Iterator[tuple[str, str, Change]]


def _with(operation: Operation, **fields: Any) -> Change:
    return lambda draft: draft.replace(operation, [replace(operation, **fields)])


def _swapped(graph: _Graph, operation: Operation) -> Found:
    """Two inputs the other way round."""
    if operation.name not in _ORDERED:
        return
    first = 1 if operation.name == "select_n" else 0
    for i, j in combinations(range(first, len(operation.inputs)), 2):
        one, other = (graph.values[operation.inputs[k]] for k in (i, j))
        if one.shape == other.shape and not np.array_equal(one, other):
            order = list(operation.inputs)
            order[i], order[j] = order[j], order[i]
            yield "inputs swapped", f"{operation.name} {i} {j}", _with(operation, inputs=tuple(order))


def _transposed(graph: _Graph, operation: Operation) -> Found:
    """A contraction over the other axis of a square array; another permutation."""
    settings = operation.settings
    if operation.name == "dot_general" and len(operation.inputs) == 2:
        contract, batch = settings["dimension_numbers"]
        for side in (0, 1):
            shape = graph.values[operation.inputs[side]].shape
            if len(contract[side]) == 1:
                for axis in range(len(shape)):
                    if axis not in (*contract[side], *batch[side]) and shape[axis] == shape[contract[side][0]] > 1:
                        axes = tuple((axis,) if k == side else tuple(contract[k]) for k in (0, 1))
                        new = {**settings, "dimension_numbers": (axes, batch)}
                        yield "transposed", f"input {side} over axis {axis}", _with(operation, settings=new)
    if operation.name == "transpose":
        order = list(settings["permutation"])
        shape = [graph.values[operation.inputs[0]].shape[axis] for axis in order]
        for i, j in combinations(range(len(order)), 2):
            if shape[i] == shape[j] > 1:
                other = list(order)
                other[i], other[j] = other[j], other[i]
                new = {**settings, "permutation": tuple(other)}
                yield "transposed", f"permutation {other}", _with(operation, settings=new)


def _axes(graph: _Graph, operation: Operation) -> Found:
    """A softmax, or another reduction, over the wrong axis: all reductions of one line, and their broadcasts."""
    if not operation.name.startswith("reduce_") or len(operation.settings.get("axes", ())) != 1:
        return
    (axis,) = operation.settings["axes"]
    shape = graph.values[operation.inputs[0]].shape
    group = [o for o in _nearby(graph, operation) if o.settings.get("axes") == (axis,)]
    group = [o for o in group if graph.values[o.inputs[0]].shape == shape]
    if group[0] is not operation:
        return
    for other in range(len(shape)):
        if other != axis and shape[other] > 1 and (shape[other] == shape[axis] or operation.name == "reduce_max"):
            change = partial(_reduce_over, graph, group, axis, other, len(shape))
            yield "wrong axis", f"{operation.name} over {other} instead of {axis}", change


def _nearby(graph: _Graph, operation: Operation) -> list[Operation]:
    """The reductions of the same call."""
    operations = graph.trace.operations
    index = operations.index(operation)
    close = operations[max(0, index - _STEPS) : index + _STEPS]
    same = (operation.lines, operation.module)
    return [o for o in close if o.name.startswith("reduce_") and (o.lines, o.module) == same]


def _reduce_over(graph: _Graph, group: list[Operation], axis: int, other: int, ndim: int, draft: Draft) -> None:
    for operation in group:
        draft.replace(operation, [replace(operation, settings={**operation.settings, "axes": (other,)})])
        open_values, changed = list(operation.outputs), set()
        while open_values:
            for user in graph.users.get(open_values.pop(), []):
                (result, *_) = user.outputs
                if graph.values[result].ndim == ndim - 1:
                    open_values.append(result)
                elif user.name == "broadcast_in_dim" and id(user) not in changed:
                    changed.add(id(user))
                    shape = list(user.settings["shape"])
                    shape[axis], shape[other] = graph.values[operation.inputs[0]].shape[axis], 1
                    kept = tuple(i for i in range(ndim) if i != other)
                    new = {**user.settings, "shape": tuple(shape), "broadcast_dimensions": kept}
                    draft.replace(user, [replace(user, settings=new)])
                else:
                    raise ValueError(f"{user.name}: not a reduction with its axis kept")


def _literals(graph: _Graph, operation: Operation) -> Found:
    """Another number in the code."""
    for key, value in operation.settings.items():
        if key.isdigit() and isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind == "f":
            for other in _mistaken(operation.name, float(value)):
                new = {**operation.settings, key: np.asarray(other)}
                yield "literal", f"{float(value):.6g} → {other:.6g}", _with(operation, settings=new)
    for number in operation.inputs:
        value = graph.values[number]
        own = number not in graph.made and number not in graph.parameters and number not in graph.inputs
        if own and value.size == 1 and value.dtype.kind == "f" and graph.users[number][0] is operation:
            for other in _mistaken(operation.name, float(value.reshape(()))):
                yield "literal", f"{float(value.reshape(())):.6g} → {other:.6g}", partial(_constant, number, other)


def _constant(number: int, other: float, draft: Draft) -> None:
    """Replace a constant: what uses it is computed anew because its users are new objects."""
    draft.trace.values[number] = np.full_like(draft.trace.values[number], other)
    for user in [o for o in draft.trace.operations if number in o.inputs]:
        draft.replace(user, [replace(user)])


def _mistaken(name: str, value: float) -> Iterator[float]:
    if 0 < value < 1e-2:
        yield value * 10 if value <= 1e-6 else value / 10
    elif value <= -1e4:
        yield -1e-9
    elif value >= 100:
        yield value / 10
    elif name in ("mul", "div") and value > 0 and not value.is_integer():
        yield value**0.5


def _masks(graph: _Graph, operation: Operation) -> Found:
    """A mask shifted by one, inverted, or with the neighboring comparison."""
    if len(operation.outputs) != 1:
        return
    (output,) = operation.outputs
    value = graph.values[output]
    reads_input = any(n in graph.inputs and graph.values[n].dtype == bool for n in operation.inputs)
    if value.dtype != bool or value.size < 2 or not (operation.name in _COMPARISONS or reads_input):
        return
    yield "mask inverted", operation.name, lambda draft: draft.append(operation, jnp.logical_not)
    for axis in range(value.ndim):
        if value.shape[axis] > 1:
            shift = partial(jnp.roll, shift=1, axis=axis)
            yield "mask shifted", f"axis {axis}", lambda draft, f=shift: draft.append(operation, f)
    if operation.name in _NEIGHBORS and len(operation.inputs) == 2:
        other = _NEIGHBORS[operation.name]
        function = _COMPARISONS[other]
        yield (
            "mask shifted",
            f"{operation.name} → {other}",
            lambda draft: draft.insert(operation, function, operation.inputs, output),
        )


def _copy(operation: Operation, number: int) -> Operation:
    """An operation that passes a value on."""
    return replace(operation, name="copy", inputs=(number,), settings={}, compute=lambda arrays, _: [arrays[0]])


def _pass_through(operation: Operation, number: int, draft: Draft) -> None:
    draft.replace(operation, [_copy(operation, number)])


def _dropped(graph: _Graph, operation: Operation) -> Found:
    """A bias, a residual connection or a scale that is left out."""
    if operation.name not in ("add", "mul", "div", "sub") or len(operation.outputs) != 1:
        return
    shape = graph.values[operation.outputs[0]].shape
    if graph.values[operation.outputs[0]].dtype.kind != "f" or len(shape) < 2:
        return
    for i, number in enumerate(operation.inputs):
        others = [n for n in operation.inputs if n != number]
        if graph.values[number].shape != shape or number in graph.fixed:
            continue
        drop = partial(_pass_through, operation, number)
        if not others:
            if operation.name in ("mul", "div") and len(operation.inputs) == 1:
                yield "scale dropped", operation.name, drop
        elif others[0] in graph.fixed:
            kind = "bias dropped" if operation.name in ("add", "sub") else "scale dropped"
            yield kind, operation.name, drop
        elif graph.values[others[0]].shape == shape and operation.name == "add":
            yield "residual dropped", f"without input {1 - i}", drop


def _positions(graph: _Graph, operation: Operation) -> Found:
    """Positions that start at 1, and rows of a table that start one later."""
    (output, *_) = operation.outputs
    if operation.name == "iota" and graph.values[output].dtype.kind in "iu":
        yield "position + 1", "iota", lambda draft: draft.append(operation, lambda x: x + 1)
    if operation.name == "slice" and operation.inputs[0] in graph.parameters:
        starts, limits = (list(operation.settings[key]) for key in ("start_indices", "limit_indices"))
        for axis, size in enumerate(graph.values[operation.inputs[0]].shape):
            if starts[axis] == 0 and limits[axis] < size:
                first, last = list(starts), list(limits)
                first[axis] += 1
                last[axis] += 1
                new = {**operation.settings, "start_indices": tuple(first), "limit_indices": tuple(last)}
                yield "position + 1", f"slice of axis {axis}", _with(operation, settings=new)


def _regrouped(operation: Operation, shape: Sequence[int], swapped: bool, draft: Draft) -> None:
    """Put a reshape in the place of an operation, with the last two axes swapped after it if so."""

    def reshaped(x: Any) -> Any:
        return x.reshape(shape).swapaxes(-1, -2) if swapped else x.reshape(shape)

    draft.insert(operation, reshaped, operation.inputs, operation.outputs[0])


def _heads(graph: _Graph, operation: Operation) -> Found:
    """A reshape in the place of a transpose, and heads split in the other order."""
    (output, *_) = operation.outputs
    shape = graph.values[output].shape
    if operation.name == "transpose" and len(shape) > 2:
        yield "head order", "reshape for transpose", partial(_regrouped, operation, shape, False)
    if operation.name == "reshape" and len(operation.inputs) == 1:
        old = graph.values[operation.inputs[0]].shape
        if len(shape) == len(old) + 1 and shape[:-2] == old[:-1] and min(shape[-2:]) > 1:
            other = (*shape[:-2], shape[-1], shape[-2])
            yield "head order", f"split as {other}", partial(_regrouped, operation, other, True)


def _groups(graph: _Graph, operation: Operation) -> Found:
    """Parts of a packed array in another order."""
    if operation.name == "split":
        for i, j in combinations(range(len(operation.outputs)), 2):
            if graph.values[operation.outputs[i]].shape == graph.values[operation.outputs[j]].shape:
                order = list(operation.outputs)
                order[i], order[j] = order[j], order[i]
                yield "group order", f"parts {i} and {j}", _with(operation, outputs=tuple(order))
    if operation.name == "slice":
        shape = graph.values[operation.outputs[0]].shape
        later = [o for o in graph.users[operation.inputs[0]] if o.name == "slice" and o is not operation]
        for other in later:
            if graph.values[other.outputs[0]].shape == shape and other.outputs[0] > operation.outputs[0]:

                def change(draft: Draft, other: Operation = other) -> None:
                    draft.replace(operation, [replace(operation, settings=other.settings)])
                    draft.replace(other, [replace(other, settings=operation.settings)])

                yield "group order", f"slices {operation.settings['start_indices']}", change


def _activations(graph: _Graph) -> dict[int, dict[tuple[str, str], Change]]:
    """Another activation in the place of one that is recognized by its values."""
    last: dict[int, tuple[Operation, str]] = {}
    operations = graph.trace.operations
    for index, operation in enumerate(operations):
        output = graph.values[operation.outputs[0]]
        if len(operation.outputs) == 1 and output.dtype.kind == "f" and output.size > 4:
            sources = {n for o in operations[max(0, index - _STEPS) : index + 1] for n in o.inputs}
            for number in sources - graph.fixed:
                value = graph.values[number]
                if value.shape == output.shape and value.dtype.kind == "f" and np.isfinite(value).all():
                    for name in _ACTIVATIONS:
                        if np.abs(UNARY[name](value) - output).max() < 1e-12:
                            last[number] = operation, name
    changes: dict[int, dict[tuple[str, str], Change]] = {}
    for number, (operation, name) in last.items():
        for other in _MISTAKEN[name]:
            change = partial(_activate, operation, _ACTIVATIONS[other], number)
            changes.setdefault(id(operation), {})["activation", f"{name} → {other}"] = change
    return changes


def _activate(operation: Operation, function: Callable[..., Any], number: int, draft: Draft) -> None:
    draft.insert(operation, function, [number], operation.outputs[0])


def _parameters(trace: Trace) -> Iterator[Site]:
    """What a converter does wrong."""
    arrays = {name: trace.values[number] for name, number in trace.parameters.items()}
    arrays = {
        name: array for name, array in arrays.items() if array.dtype.kind == "f" and array.ndim and array.size > 1
    }

    def site(operator: str, detail: str, changed: Mapping[str, Array]) -> Site:
        plant: Callable[[], Planted | None] = partial(planted_parameters, trace, changed)
        return Site(f"parameter: {operator}", detail, plant)

    rng = np.random.default_rng(0)
    for name, array in arrays.items():
        for i, j in combinations(range(array.ndim), 2):
            if array.shape[i] == array.shape[j] > 1:
                yield site("transposed", name, {name: array.swapaxes(i, j)})
        if array.ndim == 1 and name.rpartition(".")[2].startswith("bias"):
            yield site("bias left at zero", name, {name: np.zeros_like(array)})
        if array.ndim == 1 and name.endswith(("scale", "norm.weight")):
            yield site("scale without + 1", name, {name: array - 1})
        if array.ndim > 1:
            yield site("rows off by one", name, {name: np.roll(array, 1, 0)})
            yield site("initial values", name, {name: array.std() * rng.standard_normal(array.shape)})
        if array.ndim > 2:
            regrouped = array.reshape(array.shape[0], array.shape[2], array.shape[1], -1).swapaxes(1, 2)
            yield site("head order", name, {name: regrouped.reshape(array.shape)})
        if "_ih" in name or "_hh" in name or "qkv" in name or "in_proj" in name:
            count = 4 if array.shape[0] % 4 == 0 else 3
            blocks = np.split(array, count, 0)
            yield site("group order", name, {name: np.concatenate([blocks[1], blocks[0], *blocks[2:]])})
    for (name, one), (other, array) in pairwise(arrays.items()):
        if one.shape == array.shape:
            yield site("exchanged", f"{name}, {other}", {name: array, other: one})
