"""Mistakes that leave a JAX model's outputs as they are and change its gradients, at an equation or a parameter.

The model's jaxpr is evaluated equation by equation, each at its own line, and one of them is computed with the
mistake: what results is a function like any other port.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core, source_info_util

from twinax.compare.capture.jax_models import as_function, with_buffers_fixed
from twinax.compare.capture.jax_trace import scan_counts
from twinax.compare.capture.trace import as_float64, dotted, is_library, own_lines

Path = tuple[int, ...]  # an equation: its index, then the one in the jaxpr that it calls, and so on
Run = Callable[[Sequence[Any]], list[Any]]  # inputs of an equation -> its outputs
Stop = Callable[[Any], Any]  # a stop_gradient that is called at the equation's line
Change = Callable[[Run, Sequence[Any], Stop], list[Any]]
Model = tuple[Callable[..., Any], Any]

_CALLS = ("jit", "pjit", "closed_call", "remat2", "checkpoint")
_CURVED = ("tanh", "logistic", "erf", "erfc", "exp", "log", "sqrt", "rsqrt", "integer_pow", "square")
_CURVED = (*_CURVED, "custom_jvp_call")
_WRONG: dict[
    str, Callable[..., Any]
] = {  # what JAX's own functions are called -> another one, whose derivative is used
    "gelu": jax.nn.sigmoid,
    "relu": jax.nn.silu,
    "silu": jax.nn.sigmoid,
    "sigmoid": jnp.tanh,
    "tanh": jax.nn.sigmoid,
}


@dataclass(frozen=True)
class GradientSite:
    """A place for a mistake: an equation's line, or a parameter; `model` returns the one with the mistake."""

    operator: str
    detail: str
    line: str
    parameters: tuple[str, ...]
    model: Callable[[], Model]


@dataclass(frozen=True)
class Place:
    """An equation through which gradients pass; `active`: the indices of the inputs that depend on parameters."""

    path: Path
    equation: Any
    line: str
    active: tuple[int, ...]


def gradient_sites(model: Any, inputs: Sequence[Any]) -> Iterator[GradientSite]:
    """Every place for a mistake in the gradients of a JAX model."""
    function, parameters = as_function(model)
    function = with_buffers_fixed(model, function)
    jaxpr = jaxpr_of(function, parameters, inputs)
    names = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(parameters)]
    trained = {v: index for v, index in zip(jaxpr.invars, range(len(names)), strict=False) if is_float(v)}
    uses = [v for equation in jaxpr.eqns for v in equation.invars if not isinstance(v, core.Literal)]
    tied = {v for v in trained if uses.count(v) > 1}
    for place in places(jaxpr, set(trained)):
        for operator, detail, change in _changes(place, tied):
            plant = partial(with_change, function, parameters, place.path, change)
            yield GradientSite(operator, detail, place.line, (), plant)
    for variable, index in trained.items():
        changes = {"not trained": _frozen, "gradient scaled": _gradient_scaled}
        if variable.aval.ndim == 2 and any(word in names[index].lower() for word in ("embed", "lut", "vocab")):
            changes["row not trained"] = _row_stopped
        for operator, change in changes.items():
            model = partial(_with_parameter, function, parameters, index, change)
            yield GradientSite(f"parameter: {operator}", names[index], _LINES[operator], (names[index],), model)


def jaxpr_of(function: Any, parameters: Any, inputs: Sequence[Any]) -> Any:
    """In float64, or in the model's own dtypes if its code insists on them, as the diagnosis traces it."""
    arguments = parameters, tuple(inputs)
    try:
        with jax.enable_x64(True):
            return jax.make_jaxpr(lambda p, i: function(p, *i))(*jax.tree.map(as_float64, arguments)).jaxpr
    except TypeError:
        return jax.make_jaxpr(lambda p, i: function(p, *i))(*arguments).jaxpr


def places(jaxpr: Any, active: set[Any], path: Path = (), outer: str = "") -> Iterator[Place]:
    """The equations that depend on `active`, lead to an output and have a line; those of calls and loops too."""
    active, needed = set(active), _needed(jaxpr)
    for index, equation in _numbered(jaxpr):
        entering = tuple(i for i, v in enumerate(equation.invars) if not isinstance(v, core.Literal) and v in active)
        leaving = [v for v in equation.outvars if is_float(v) and v in needed]
        if not entering or not leaving or equation.primitive.name == "stop_gradient":
            continue
        active.update(v for v in equation.outvars if is_float(v))
        line = next(iter(own_lines(_frames(equation.source_info.traceback))), outer)
        if line:
            yield Place((*path, index), equation, line, entering)
        inner = _inner(equation)
        if inner is not None:
            inside = {inner.invars[i] for i in entering}
            if equation.primitive.name == "scan":  # the carry depends on parameters from the second step on
                constants, carried = scan_counts(equation.params)
                inside |= {v for v in inner.invars[constants : constants + carried] if is_float(v)}
            yield from places(inner, inside, (*path, index), line)


def _numbered(jaxpr: Any) -> Iterator[tuple[int, Any]]:
    """The equations with their indices; stop_gradient is not counted, because the diagnosis leaves it out on trial."""
    index = 0
    for equation in jaxpr.eqns:
        yield index, equation
        index += equation.primitive.name != "stop_gradient"


def _needed(jaxpr: Any) -> set[Any]:
    """The variables that an output depends on."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            needed.update(v for v in equation.invars if not isinstance(v, core.Literal))
    return needed


def is_float(variable: Any) -> bool:
    """Whether a variable of a jaxpr has floating-point numbers."""
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)


def _frames(traceback: Any) -> list[tuple[str, int]]:
    return [(frame.file_name, frame.line_num) for frame in traceback.frames] if traceback is not None else []


def _inner(equation: Any) -> Any:
    """The jaxpr of a call or a loop, whose equations are places too; None of all others."""
    if equation.primitive.name in (*_CALLS, "scan"):
        return getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
    return None


def _changes(place: Place, tied: set[Any]) -> Iterator[tuple[str, str, Change]]:
    """(mistake, detail, change) of every mistake that can be made at an equation."""
    equation, name = place.equation, place.equation.primitive.name
    single = len(place.active) == 1
    for index in place.active:
        if equation.invars[index] in tied:
            yield "tied use detached", f"input {index} of {name}", partial(_detached, index)
    if name in (*_CALLS, "scan"):
        other = _WRONG.get(equation.params.get("name", ""))
        if other is not None and len(equation.invars) == len(equation.outvars) == 1:
            yield "wrong derivative", f"of {equation.params['name']}", partial(_derived, other)
        return
    yield "stop_gradient", name, _stopped
    yield "gradient halved", name, _all_halved
    if not single:
        for index in place.active:
            yield "input detached", f"input {index} of {name}", partial(_detached, index)
    same = equation.invars[place.active[0]].aval.shape == equation.outvars[0].aval.shape
    if name in _CURVED and single and same and len(equation.outvars) == 1:
        yield "straight-through", name, partial(_straight, place.active[0])
    if name == "select_n" and len(equation.invars) == 3:
        for index in place.active:
            if index:
                yield "NaN behind a mask", f"case {index - 1}", partial(_divided, index)


def _stopped(run: Run, inputs: Sequence[Any], stop: Stop) -> list[Any]:
    return [stop(output) for output in run(inputs)]


def _all_halved(run: Run, inputs: Sequence[Any], stop: Stop) -> list[Any]:
    return [_halved(output, stop) for output in run(inputs)]


def _halved(value: Any, stop: Stop) -> Any:
    """The same numbers with half the gradient."""
    return value * 0.5 + stop(value * 0.5) if jnp.issubdtype(value.dtype, jnp.floating) else value


def _detached(index: int, run: Run, inputs: Sequence[Any], stop: Stop) -> list[Any]:
    return run([stop(value) if i == index else value for i, value in enumerate(inputs)])


def _straight(index: int, run: Run, inputs: Sequence[Any], stop: Stop) -> list[Any]:
    """The derivative of the identity."""
    (output,) = run(inputs)
    return [inputs[index] + stop(output - inputs[index])]


def _divided(index: int, run: Run, inputs: Sequence[Any], stop: Stop) -> list[Any]:
    """A case is multiplied by 0 / 0 where the other one is selected: its gradient is 0 · NaN there."""
    which = inputs[0].astype(int) == index - 1
    ones = jnp.where(which, 1.0, 0.0)
    return run([value * (ones / ones) if i == index else value for i, value in enumerate(inputs)])


def _derived(other: Callable[..., Any], run: Run, inputs: Sequence[Any], stop: Stop) -> list[Any]:
    """The derivative of another function, as in a custom_vjp with a mistake."""

    @jax.custom_vjp
    def wrong(value: Any) -> Any:
        return run([value])[0]

    def forward(value: Any) -> tuple[Any, Any]:
        return run([value])[0], value

    def backward(value: Any, cotangent: Any) -> tuple[Any]:
        return jax.vjp(other, value)[1](cotangent)

    wrong.defvjp(forward, backward)
    return [wrong(*inputs)]


def _frozen(array: Any) -> Any:
    return jax.lax.stop_gradient(array)


def _row_stopped(table: Any) -> Any:
    """An embedding whose second row is not trained, as PyTorch's `padding_idx` does."""
    return table.at[1].set(jax.lax.stop_gradient(table[1]))


@jax.custom_vjp
def _scaled(array: Any) -> Any:
    """Its gradient is scaled, as if a mean over four were taken for a sum."""
    return array * 1.0


def _scaled_forward(array: Any) -> Any:
    return array * 1.0, None


def _scaled_backward(_: None, cotangent: Any) -> tuple[Any]:
    return (cotangent / 4,)


_scaled.defvjp(_scaled_forward, _scaled_backward)


def _gradient_scaled(array: Any) -> Any:
    return _scaled(array)


_LINES = {  # where the mistakes in parameters are made
    name: next(iter(own_lines([(__file__, function.__code__.co_firstlineno + offset)])))
    for name, function, offset in (
        ("not trained", _frozen, 1),
        ("row not trained", _row_stopped, 2),
        ("gradient scaled", _gradient_scaled, 1),
    )
}


def _with_parameter(function: Any, parameters: Any, index: int, change: Callable[[Any], Any]) -> Model:
    def run(parameters: Any, *inputs: Any) -> Any:
        leaves, structure = jax.tree.flatten(parameters)
        leaves[index] = change(jnp.asarray(leaves[index]))
        return function(jax.tree.unflatten(structure, leaves), *inputs)

    return run, parameters


def with_change(function: Any, parameters: Any, path: Path, change: Change) -> Model:
    """The model with one equation changed."""

    def run(parameters: Any, *inputs: Any) -> Any:
        closed, shape = jax.make_jaxpr(lambda p, i: function(p, *i), return_shape=True)(parameters, inputs)
        arguments = jax.tree.leaves((parameters, inputs))
        results = evaluate(closed.jaxpr, closed.consts, arguments, path, change)
        return jax.tree.unflatten(jax.tree.structure(shape), results)

    return run, parameters


def evaluate(
    jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any], path: Path, change: Change, outer: Any = None
) -> list[Any]:
    """The outputs of a jaxpr of which one equation is changed; each is computed at its own line and in its module.

    outer: the traceback of the equation that calls the jaxpr, for equations without a line of their own.
    """
    values = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values[atom]

    for index, equation in _numbered(jaxpr):
        source = equation.source_info
        traceback = source.traceback if outer is None or own_lines(_frames(source.traceback)) else outer
        stack = source_info_util.current_name_stack() + source.name_stack
        with source_info_util.user_context(traceback, name_stack=stack), equation.ctx.manager:
            inputs = [read(atom) for atom in equation.invars]
            is_stop = equation.primitive.name == "stop_gradient"
            if path == (index,) and not is_stop:
                results = change(partial(_bound, equation), inputs, partial(_stop, traceback))
            elif path[:1] == (index,) and not is_stop:
                results = _inside(equation, inputs, path[1:], change, traceback)
            else:
                results = _bound(equation, inputs)
        values |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bound(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return list(results) if equation.primitive.multiple_results else [results]


def _inside(equation: Any, inputs: Sequence[Any], path: Path, change: Change, outer: Any) -> list[Any]:
    """A call or a loop, an equation of which is changed."""
    inner = equation.params["jaxpr"]
    run = partial(evaluate, _inner(equation), getattr(inner, "consts", ()), path=path, change=change, outer=outer)
    if equation.primitive.name != "scan":
        return run(inputs)
    constants, carried = scan_counts(equation.params)
    ends = constants, constants + carried

    def step(carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = run([*inputs[: ends[0]], *carry, *rows])
        return results[:carried], results[carried:]

    settings = {name: equation.params[name] for name in ("length", "reverse")}
    carry, rows = jax.lax.scan(step, list(inputs[ends[0] : ends[1]]), list(inputs[ends[1] :]), **settings)
    return [*carry, *rows]


def _stop(traceback: Any, value: Any) -> Any:
    """`stop_gradient`, called from the model's own line, where the diagnosis looks for it."""
    file, number = next((frame for frame in _frames(traceback) if not is_library(frame[0])), ("", 1))
    code = compile("\n" * (number - 1) + "jax.lax.stop_gradient(value)", file, "eval")
    return eval(code, {"jax": jax, "value": value})
