"""Records a JAX function: its jaxpr, evaluated operation by operation in NumPy and float64."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import primitives

from .arrays import LARGE, dtype_of, is_narrow, widened
from .encoding import is_complete
from .primitives import PRIMITIVES, VIEWS, read, scan_counts, unknown_parameters
from .trace import DEPTH, CaptureError, Compute, Operation, Trace, as_float64, dotted, own_lines, where_raised

# Scopes that name a module's path begin with it (see `jax_models`); others are part of the name stack.
MODULE_SCOPE = "twinax:"
_DRAWS = {f"_{name}": f"random.{name}" for name in ("normal", "uniform", "randint", "exponential", "gumbel")}
_RANDOM = frozenset(("random_bits", "threefry2x32", "random_gamma", "rng_bit_generator", "rng_uniform"))
_RANDOM |= frozenset(_DRAWS.values())
# Primitives whose operations are not in the jaxpr.
_OPAQUE = ("pallas_call", "tpu_custom_call", "ffi_call", "custom_call", "triton_kernel_call", "io_callback")
_SHARDED = ("shard_map", "xla_pmap", "psum", "all_gather", "ppermute", "all_to_all", "axis_index")


@np.errstate(all="ignore")  # infinities and NaN are values here
def capture_jax(
    function: Callable[..., Any],
    parameters: Any,
    inputs: Sequence[Any],
    cotangents: Mapping[str, np.ndarray] | None = None,
    random: bool = False,
) -> Trace:
    """The trace of `function(parameters, *inputs)` in float64; `parameters` is any tree of arrays.

    `cotangents`: factors of the outputs with these names; with them the trace has the backward pass too, and the
    gradients of Σ output · cotangent. `random`: whether the outputs may depend on random numbers.

    Raises:
        CaptureError: the function cannot be traced, draws random numbers, or calls code that JAX does not show.
    """
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        arguments = parameters, tuple(inputs), dict(cotangents or {})
        wide = jax.tree.map(_widen, arguments)
        shapes = jax.tree.map(_shape, wide)
        closed, shape = _trace(function if cotangents is None else _with_gradients(function), arguments, shapes)
        recorder = _Recorder(Trace("JAX", random=_RANDOM))
        trace = recorder.trace
        flat = jax.tree.leaves(wide)
        numbers = [trace.add(_to_numpy(array)) for array in flat]
        sides = jax.tree.unflatten(jax.tree.structure(wide), numbers)
        trace.parameters = dict(_paths(sides[0]))
        trace.inputs = dict(_paths(sides[1])) | {f"cotangent.{name}": number for name, number in sides[2].items()}
        arguments = [recorder.known(array, number) for array, number in zip(flat, numbers, strict=True)]
        results = recorder.evaluate(closed, arguments, "", ())
        numbers = jax.tree.unflatten(jax.tree.structure(shape), [r.number for r in results])
        outputs, gradients = (numbers, {}) if cotangents is None else numbers
        trace.outputs, trace.gradients = by_name(outputs), dict(_paths(gradients))
    if not random:
        trace.check_deterministic("switch them off, as with deterministic=True or eval(), or compare the dropout too")
    return trace


def _trace(function: Any, original: Any, wide: Any) -> tuple[Any, Any]:
    """(jaxpr, structure of the outputs), in float64; in the model's own dtypes if its code insists on them."""
    failures = []
    for arguments, x64 in ((wide, True), (original, False)):
        try:
            with jax.enable_x64(x64):
                return jax.make_jaxpr(lambda p, i, c: function(p, *i, **c), return_shape=True)(*arguments)
        except Exception as error:  # whatever the model's code raises
            failures.append(error)
    text = f"{type(failures[1]).__name__}: {failures[1]}".splitlines()[0] + where_raised(failures[1])
    raise CaptureError(f"{getattr(function, '__name__', 'the function')}: JAX cannot trace it: {text}") from failures[1]


def _with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns (outputs, gradients of the parameters that are floating-point numbers)."""

    def run(parameters: Any, *inputs: Any, **cotangents: Any) -> Any:
        leaves, structure = jax.tree.flatten(parameters)
        floating = [jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) for leaf in leaves]

        def selected(trained: list[Any]) -> Any:
            rest = iter(trained)
            full = [next(rest) if is_float else leaf for leaf, is_float in zip(leaves, floating, strict=True)]
            outputs = function(jax.tree.unflatten(structure, full), *inputs)
            leaves_by_name = by_name(outputs)
            return {name: leaves_by_name[name] for name in cotangents}, outputs

        trained = [leaf for leaf, is_float in zip(leaves, floating, strict=True) if is_float]
        ends, pull, outputs = jax.vjp(selected, trained, has_aux=True)
        (gradients,) = pull({name: cotangents[name].astype(end.dtype) for name, end in ends.items()})
        rest = iter(gradients)
        full = [next(rest) if is_float else None for is_float in floating]
        return outputs, jax.tree.unflatten(structure, full)

    return run


class _Known:
    """An array with its number; `array` is a NumPy array, or a JAX array of keys."""

    def __init__(self, array: Any, number: int):
        self.array, self.number = array, number


class _Recorder:
    """Evaluates jaxprs and adds their operations to a trace."""

    def __init__(self, trace: Trace):
        self.trace = trace

    def known(self, array: Any, number: int | None = None) -> _Known:
        """An array of the trace, with a new number by default."""
        number = self.trace.add(_to_numpy(array)) if number is None else number
        return _Known(array if _is_key(array) else self.trace.values.kept(number), number)

    def evaluate(self, closed: Any, arguments: Sequence[_Known], module: str, lines: tuple[str, ...]) -> list[_Known]:
        """The results of a closed jaxpr; `module` and `lines`: where it is called."""
        jaxpr = getattr(closed, "jaxpr", closed)
        values = {v: self.known(_widen(c)) for v, c in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True)}
        values |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> _Known:
            return _Known(_literal(atom), -1) if hasattr(atom, "val") else values[atom]

        for equation in jaxpr.eqns:
            results = self._run(equation, [read(atom) for atom in equation.invars], module, lines)
            values |= dict(zip(equation.outvars, results, strict=True))
        return [result if result.number >= 0 else self.known(result.array) for result in map(read, jaxpr.outvars)]

    def _run(self, equation: Any, inputs: list[_Known], module: str, lines: tuple[str, ...]) -> list[_Known]:
        name = equation.primitive.name
        module, lines = _module(equation, module), _with_callers(_lines(equation), lines)
        if name in _OPAQUE or (name in _SHARDED and not _is_local(equation)):
            remedy = "compare the model on one device" if name in _SHARDED else "switch to an implementation in JAX"
            raise CaptureError(f"{next(iter(lines), module)}: {name} does not expose its operations; {remedy}")
        if name in _CONTROL:
            return _CONTROL[name](self, equation.params, inputs, module, lines)
        inner = _inner(equation)
        if inner is not None and (draw := _draw(equation, inputs)):
            inputs, scratch = [self._numbered(value) for value in inputs], _Recorder(Trace("JAX"))
            results = scratch.evaluate(inner, [scratch.known(value.array) for value in inputs], module, lines)
            outputs = [self.known(result.array) for result in results]
            self._record(draw, inputs, outputs, module, lines, {}, None)
            return outputs
        if inner is not None:
            return self.evaluate(inner, [self._numbered(value) for value in inputs], module, lines)
        arrays = [value.array for value in inputs]
        primitive = _primitive(equation)
        unknown = unknown_parameters(name, equation.params)
        if unknown:
            self.trace.notes.append(
                f"{next(iter(lines), module)}: {name}: computed by JAX, because of {', '.join(unknown)}"
            )
        try:
            results = primitive.results(equation.params, arrays)
        except Exception as error:  # whatever a primitive that is not known here raises
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CaptureError(f"{next(iter(lines), module)}: {name} cannot be computed by itself: {text}") from error
        outputs = [self.known(result) for result in results]
        literals = {str(i): value.array for i, value in enumerate(inputs) if value.number < 0}
        settings = {key: value for key, value in equation.params.items() if value is not None} | literals
        compute = None if any(map(_is_key, arrays)) else Repeated(primitive, equation.params, settings)
        self._record(name, inputs, outputs, module, lines, settings, compute)
        if "transpose(" in str(equation.source_info.name_stack):
            self.trace.derived.update(output.number for output in outputs)
        return outputs

    def _record(
        self,
        name: str,
        inputs: Sequence[_Known],
        outputs: Sequence[_Known],
        module: str,
        lines: tuple[str, ...],
        settings: Mapping[str, Any],
        compute: Compute | None,
    ) -> None:
        entering, leaving = (tuple(v.number for v in values if v.number >= 0) for values in (inputs, outputs))
        self.trace.operations.append(Operation(name, entering, leaving, module, lines, settings, compute))

    def _numbered(self, value: _Known) -> _Known:
        return value if value.number >= 0 else self.known(value.array)

    def scan(self, params: Any, inputs: list[_Known], module: str, lines: tuple[str, ...]) -> list[_Known]:
        """Each step as it is computed; its module is `module[step]`."""
        constants, carried = scan_counts(params)
        inputs = [self._numbered(value) for value in inputs]
        fixed, carry, rows = inputs[:constants], inputs[constants : constants + carried], inputs[constants + carried :]
        length, reverse, body = read("scan", params, "length", "reverse", "jaxpr")
        steps = range(length)[:: -1 if reverse else 1]
        outputs: list[list[_Known]] = []
        for step in steps:
            parts = [self._part("scan", row, step, module, lines) for row in rows]
            results = self.evaluate(body, [*fixed, *carry, *parts], f"{module}[{step}]", lines)
            carry = results[:carried]
            outputs.append(results[carried:])
        ordered = outputs[:: -1 if reverse else 1]
        avals = body.out_avals[carried:]
        stacked = [[step[i] for step in ordered] for i in range(len(avals))]
        return [*carry, *(self._stack(s, a, module, lines) for s, a in zip(stacked, avals, strict=True))]

    def _part(self, name: str, rows: _Known, step: int, module: str, lines: tuple[str, ...]) -> _Known:
        part = self.known(rows.array[step])
        self._record(f"{name}.row", [rows], [part], module, lines, {"row": step}, _row)
        return part

    def _stack(self, rows: list[_Known], aval: Any, module: str, lines: tuple[str, ...]) -> _Known:
        arrays = [row.array for row in rows]
        empty = np.zeros((0, *aval.shape), dtype_of(aval.dtype))
        stack = self.known(np.stack([*map(widened, arrays)]) if arrays else empty)
        self._record("scan.stack", rows, [stack], module, lines, {}, _stacked)
        return stack

    def while_loop(self, params: Any, inputs: list[_Known], module: str, lines: tuple[str, ...]) -> list[_Known]:
        """Each repetition as it is computed; its module is `module[number]`."""
        inputs = [self._numbered(value) for value in inputs]
        first, second, test, repeated = read(
            "while", params, "cond_nconsts", "body_nconsts", "cond_jaxpr", "body_jaxpr"
        )
        condition, body, carry = inputs[:first], inputs[first : first + second], inputs[first + second :]
        step = 0
        while bool(self.evaluate(test, [*condition, *carry], module, lines)[0].array):
            carry = self.evaluate(repeated, [*body, *carry], f"{module}[{step}]", lines)
            step += 1
        return carry

    def cond(self, params: Any, inputs: list[_Known], module: str, lines: tuple[str, ...]) -> list[_Known]:
        """The branch that the inputs take; the others are named in `branches`."""
        (branches,), platforms = read("cond", params, "branches"), params.get("branches_platforms")
        if platforms is not None:  # `platform_dependent`: the default, because the others may need the true dtypes
            return self.evaluate(branches[platforms.index(None)], inputs[1:], module, lines)
        taken = min(max(int(inputs[0].array), 0), len(branches) - 1)
        for i in range(len(branches)):
            if i != taken:
                self.trace.branches.append(f"{next(iter(lines), module)}: branch {i} of {len(branches)}")
        return self.evaluate(branches[taken], [self._numbered(value) for value in inputs[1:]], module, lines)


_CONTROL: dict[str, Callable[..., list[_Known]]] = {
    "scan": _Recorder.scan,
    "while": _Recorder.while_loop,
    "cond": _Recorder.cond,
}
_JAXPRS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _inner(equation: Any) -> Any:
    """The jaxpr that a call stands for, such as that of `jit`, `checkpoint`, `custom_jvp` and `custom_vjp`."""
    for name in _JAXPRS:
        jaxpr = equation.params.get(name)
        if jaxpr is not None and len(getattr(jaxpr, "jaxpr", jaxpr).invars) == len(equation.invars):
            return jaxpr
    return None


def _is_local(equation: Any) -> bool:
    """Whether a collective is over axes of its array alone, as in `vmap` with an `axis_name`."""
    axes = equation.params.get("axes")
    return equation.primitive.name == "psum" and axes is not None and all(isinstance(axis, int) for axis in axes)


def _draw(equation: Any, inputs: Sequence[_Known]) -> str:
    """The name of a function of `jax.random` that a call stands for, if it is one of these; else empty."""
    name = _DRAWS.get(equation.params.get("name", ""), "")
    return name if name and inputs and _is_key(inputs[0].array) else ""


class Primitive:
    """A primitive, with the dtypes of its results and the places of its inputs that are literals."""

    def __init__(
        self,
        name: str,
        own: Any,
        dtypes: Sequence[np.dtype | None],
        places: Sequence[str],
        params: Mapping[str, Any],
    ):
        self.name, self.own, self.dtypes = name, own, dtypes
        self.places = places if any(places) else ()  # of each input, its key in the settings; empty: no literal
        self.function = None if unknown_parameters(name, params) else PRIMITIVES.get(name)

    def results(self, params: Mapping[str, Any], arrays: Sequence[Any]) -> list[Any]:
        """The results in the dtypes of a computation in float64. NumPy's warnings are the caller's."""
        if self.function is not None and _are_ready(arrays):  # thousands of times a diagnosis
            results = self.function(*arrays, **params)
            if type(results) is np.ndarray and results.dtype == self.dtypes[0]:
                return [results]
        elif self.name in VIEWS and self.function is not None and not _is_key(arrays[0]) and is_narrow(arrays[0]):
            results = self.function(*arrays, **params)
            return list(results) if isinstance(results, list) else [results]
        else:
            arrays = [array if _is_key(array) else widened(array) for array in arrays]
            if self.function is None or any(_is_key(array) or array.size == 0 for array in arrays):
                results = self._through_jax(params, arrays)
            else:
                results = self.function(*arrays, **params)
        results = results if isinstance(results, (list, tuple)) else [results]
        return [
            result if dtype is None else np.asarray(result).astype(dtype, copy=False)
            for result, dtype in zip(results, self.dtypes, strict=True)
        ]

    def _through_jax(self, params: Mapping[str, Any], arrays: Sequence[Any]) -> Any:
        params = {key: _wide_dtype(value) for key, value in params.items()}
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            if params.get("update_jaxpr") is not None:  # of a scatter, in the model's own dtype
                function = getattr(jax.lax, self.name.replace("-", "_"))
                settings = {k: v for k, v in params.items() if k not in _OF_SCATTER}
                return function(*map(jax.numpy.asarray, arrays), **settings)
            return self.own.bind(*(a if _is_key(a) else jax.numpy.asarray(a) for a in arrays), **params)


def _primitive(equation: Any) -> Primitive:
    dtypes = [None if _has_keys(v.aval) else dtype_of(v.aval.dtype) for v in equation.outvars]
    places = [str(i) if hasattr(atom, "val") else "" for i, atom in enumerate(equation.invars)]
    return Primitive(equation.primitive.name, equation.primitive, dtypes, places, equation.params)


class Repeated:
    """A primitive as a function of the inputs that are not literals, and of its settings.

    A diagnosis computes it thousands of times, mostly with its own settings.
    """

    def __init__(self, primitive: Primitive, params: Mapping[str, Any], own: Mapping[str, Any]):
        self.primitive, self.params, self.own = primitive, dict(params), own

    def __call__(self, values: Sequence[np.ndarray], settings: Mapping[str, Any]) -> list[Any]:
        """The results."""
        places, complete = self.primitive.places, values
        if places:
            rest = iter(values)
            complete = [settings[place] if place else next(rest) for place in places]
        if settings is self.own:
            return self.primitive.results(self.params, complete)
        return self.primitive.results({k: settings.get(k, value) for k, value in self.params.items()}, complete)

    def description(self) -> dict[str, Any]:
        """What `repeated` needs to make it anew, beside the settings."""
        dtypes = [None if dtype is None else dtype.name for dtype in self.primitive.dtypes]
        unset = [key for key, value in self.params.items() if value is None]
        return {"dtypes": dtypes, "places": [*self.primitive.places], "unset": unset}


def repeated(name: str, settings: Mapping[str, Any], description: Mapping[str, Any] | None) -> Compute | None:
    """The operation of this name, described by a file, as a function; None if it cannot be computed here."""
    if description is None:
        return next((function for suffix, function in _OF_LOOPS.items() if name.endswith(suffix)), None)
    own = next((getattr(m, p) for m in (jax.lax, primitives) if hasattr(m, p := f"{name.replace('-', '_')}_p")), None)
    dtypes = [None if dtype is None else np.dtype(dtype) for dtype in description["dtypes"]]
    params = {key: value for key, value in settings.items() if key not in description["places"]}
    primitive = Primitive(name, own, dtypes, description["places"], params)
    complete = is_complete({key: value for key, value in params.items() if key not in _OF_SCATTER})
    if any(dtype is None for dtype in dtypes) or (primitive.function is None and (own is None or not complete)):
        return None
    return Repeated(primitive, params | dict.fromkeys(description["unset"]), settings)


def _row(arrays: Sequence[np.ndarray], settings: Mapping[str, Any]) -> list[np.ndarray]:
    return [arrays[0][settings["row"]]]


def _stacked(arrays: Sequence[np.ndarray], settings: Mapping[str, Any]) -> list[np.ndarray]:
    return [np.stack([*map(widened, arrays)])]


_OF_LOOPS: dict[str, Compute] = {".row": _row, "scan.stack": _stacked}
_OF_SCATTER = ("update_jaxpr", "update_consts")


def _has_keys(aval: Any) -> bool:
    return jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _wide_dtype(value: Any) -> Any:
    is_dtype = isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic))
    return dtype_of(value) if is_dtype else value


def _is_key(array: Any) -> bool:
    if type(array) is np.ndarray:
        return False
    return hasattr(array, "dtype") and jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)


def _are_ready(arrays: Sequence[Any]) -> bool:
    """Whether NumPy computes with arrays as they are."""
    return all(type(array) is np.ndarray and array.size > 0 and not is_narrow(array) for array in arrays)


def _widen(array: Any) -> Any:
    """In float64; a large array as it is, because a copy for each may not fit into the memory."""
    if _is_key(array):
        return array
    whole = np.asarray(array)
    return whole if whole.size >= LARGE and is_narrow(whole) else as_float64(whole)


def _shape(array: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype if _is_key(array) else dtype_of(array.dtype))


def _to_numpy(array: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(array)) if _is_key(array) else np.asarray(array)


def _literal(atom: Any) -> np.ndarray:
    if atom.aval.dtype == jax.dtypes.float0:  # the tangent of integers, which has no value
        return np.zeros(atom.aval.shape, bool)
    return np.asarray(atom.val).astype(dtype_of(atom.aval.dtype))


def by_name(outputs: Any) -> dict[str, Any]:
    """The outputs of a function by their paths."""
    return {name or "output": leaf for name, leaf in _paths(outputs)}


def _paths(tree: Any) -> list[tuple[str, int]]:
    """(dotted path, leaf) of any tree that JAX knows."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(dotted(path), leaf) for path, leaf in leaves]


def _module(equation: Any, outer: str) -> str:
    """The path of the module that an equation belongs to: the innermost named one, else the name stack."""
    scopes = str(equation.source_info.name_stack)
    if MODULE_SCOPE in scopes:
        return scopes.rpartition(MODULE_SCOPE)[2].partition("/")[0]
    return outer or scopes


def _with_callers(lines: tuple[str, ...], callers: tuple[str, ...]) -> tuple[str, ...]:
    """The lines of an equation, with those of the call of its program: JAX may know no caller of what it has cached."""
    is_whole = len(lines) == DEPTH or {*callers[-1:]} <= {*lines}
    return lines if is_whole else (*lines, *callers)[:DEPTH]


def _lines(equation: Any) -> tuple[str, ...]:
    """The lines that called a primitive."""
    traceback = equation.source_info.traceback
    return own_lines((f.file_name, f.line_num) for f in traceback.frames) if traceback is not None else ()
