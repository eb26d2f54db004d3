"""Records a PyTorch module or function: every ATen operation of a forward pass in float64."""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only, tree_unflatten

from .arrays import LARGE, is_narrow, widened
from .encoding import is_complete
from .trace import CaptureError, Compute, Operation, Trace, named, own_lines, where_raised

try:
    from ml_dtypes import bfloat16  # pyright: ignore
except ImportError:  # it comes with JAX
    bfloat16 = None

_RANDOM = frozenset(
    (
        *("aten.bernoulli", "aten.bernoulli_", "aten.native_dropout", "aten.normal_", "aten.uniform_", "aten.rand"),
        *("aten.randn", "aten.randint", "aten.rand_like", "aten.randn_like", "aten.randint_like", "aten.exponential_"),
        *("aten.multinomial", "aten.randperm", "aten.rrelu_with_noise", "aten.normal", "aten.poisson"),
    )
)
_WRITTEN = "written in place"
_NO_GRAPH = "does not require grad"  # what PyTorch says where gradients are wanted under `no_grad`
# Changed values have other strides than those that a view was taken of.
_WITHOUT_STRIDES = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
_WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_FRESH = torch.ops.aten.lift_fresh.default  # of a tensor that nothing else refers to yet
_BATCH_NORM = torch.ops.aten.native_batch_norm.default  # it writes to running statistics, unlike what its schema says
_BATCH_NORM_WITH_STATISTICS = torch.ops.aten._native_batch_norm_legit_functional.default
_WIDE |= {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def capture_torch(
    model: nn.Module | tuple[Callable[..., Any], Any],
    inputs: Sequence[Any],
    cotangents: Mapping[str, np.ndarray] | None = None,
    random: bool = False,
) -> Trace:
    """The trace of `model(*inputs)`, or of `function(parameters, *inputs)`, in float64 on the CPU; the model is copied.

    Fused attention is taken apart. `cotangents`: factors of the outputs with these names; with them the trace has the
    backward pass too, and the gradients of Σ output · cotangent. `random`: whether the outputs may depend on random
    numbers, which are the same each time; the module may then be in training mode. Parameters and buffers of a module
    that the forward pass writes to are further outputs.

    Raises:
        CaptureError: the model cannot be copied or called, is in training mode, or draws random numbers.
    """
    leaves = model.parameters() if isinstance(model, nn.Module) else dict(named(model)).values()
    shared = {_memory(leaf) for leaf in leaves if cotangents is None and _is_large(leaf)}
    if shared:
        try:
            return _captured(model, inputs, cotangents, random, shared, backward=False)
        except CaptureError:  # the model writes to one, or insists on one dtype, as the cells of torch.nn do
            pass
    try:
        return _captured(model, inputs, cotangents, random, frozenset(), backward=cotangents is not None)
    except CaptureError as error:
        if cotangents is not None or _NO_GRAPH not in str(error):
            raise
    return _captured(model, inputs, None, random, frozenset(), backward=True)  # it computes gradients itself


def _captured(
    model: Any,
    inputs: Sequence[Any],
    cotangents: Mapping[str, np.ndarray] | None,
    random: bool,
    shared: Set[int],
    backward: bool,
) -> Trace:
    """The trace; `shared`: memory of parameters that are not copied, and become float64 where they are used."""
    function, parameters, module = _as_function(model, random, shared)
    recorder = _Recorder(module, shared)
    with _settings(backward), recorder.modules(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        arguments = [tree_map(_widen, value) for value in inputs]
        recorder.trace.parameters = {name: recorder.number(tensor) for name, tensor in parameters.items()}
        recorder.trace.buffers = frozenset(dict(module.named_buffers(remove_duplicate=False)) if module else ())
        flat = [(str(i), value) for i, value in enumerate(arguments)]
        recorder.trace.inputs = {
            name: recorder.number(tensor)
            for key, value in flat
            for name, tensor in named(value, key)
            if isinstance(tensor, Tensor)
        }
        with _one_line(f"{type(model).__name__}: the forward pass in float64 failed"), recorder:
            outputs = function(*arguments)
        tensors = {name: value for name, value in named(outputs) if isinstance(value, Tensor)}
        tensors |= recorder.written(module, tensors)
        recorder.trace.outputs = {name: recorder.number(tensor) for name, tensor in tensors.items()}
        if cotangents is not None:
            with _one_line(f"{type(model).__name__}: the backward pass in float64 failed"):
                recorder.backward(tensors, parameters, cotangents)
    trace = recorder.trace
    if not random:
        trace.check_deterministic("call eval() on the module, or compare the dropout too")
    return trace


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except Exception as error:  # whatever the model's code raises
        text = f"{type(error).__name__}: {error}".splitlines()[0] + where_raised(error)
        raise CaptureError(f"{what}: {text}") from error


def _as_function(
    model: Any, random: bool, shared: Set[int]
) -> tuple[Callable[..., Any], dict[str, Tensor], nn.Module | None]:
    if isinstance(model, nn.Module):
        training = next(
            (f"{n or type(m).__name__}" for n, m in model.named_modules() if _depends_on_mode(m, random)), None
        )
        if training is not None:
            way = "" if random else ", or compare the dropout too"
            raise CaptureError(f"{training}: is in training mode; call eval() on the module{way}")
        try:
            large = {id(p): nn.Parameter(p.detach()) for p in model.parameters() if _is_shared(p, shared)}
            twin = copy.deepcopy(model, large)._apply(lambda t: t if _is_shared(t, shared) else _widen_tensor(t))
            _widen_attributes(twin, shared)
        except Exception as error:
            raise CaptureError(f"{type(model).__name__}: cannot be copied: {error}") from error
        tensors = dict(twin.named_parameters(remove_duplicate=False)) | dict(twin.named_buffers(remove_duplicate=False))
        return twin, tensors, twin
    if isinstance(model, tuple) and len(model) == 2 and callable(model[0]):
        copies: dict[int, Any] = {}  # a tensor under two names stays one
        wide = tree_map(
            lambda leaf: copies.setdefault(id(leaf), leaf.detach() if _is_shared(leaf, shared) else _widen(leaf)),
            model[1],
        )
        tensors = {name: tensor for name, tensor in named(wide) if isinstance(tensor, Tensor)}
        for tensor in tensors.values():
            tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())
        return lambda *arguments: model[0](wide, *arguments), tensors, None
    raise CaptureError(
        f"{type(model).__name__}: is not a model; return a torch module, or a pair of a function of "
        "(parameters, *inputs) and its parameters"
    )


def _is_shared(leaf: Any, shared: Set[int]) -> bool:
    return isinstance(leaf, Tensor) and _memory(leaf) in shared


def _widen_attributes(module: nn.Module, shared: Set[int]) -> None:
    """Widen tensors that are neither parameters nor buffers, each memory once, so that views stay views."""
    wide: dict[tuple[int, torch.dtype], Tensor] = {}

    def widened(tensor: Tensor) -> Tensor:
        if tensor.dtype not in _WIDE or _is_shared(tensor, shared):
            return tensor
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        memory = wide.setdefault(
            (_memory(tensor), tensor.dtype), _widen_tensor(tensor.detach().as_strided((size,), (1,), 0))
        )
        return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    for part in module.modules():
        for name, value in [*vars(part).items()]:
            if name not in ("_parameters", "_buffers", "_modules"):
                vars(part)[name] = tree_map_only(Tensor, widened, value)


def _is_large(leaf: Any) -> bool:
    """Whether a copy of it in float64 may not fit into the memory."""
    is_tensor = type(leaf) in (Tensor, nn.Parameter) and leaf.device.type == "cpu" and leaf.layout == torch.strided
    return is_tensor and leaf.dtype in _WIDE and leaf.numel() >= LARGE


def _depends_on_mode(module: nn.Module, random: bool) -> bool:
    """Whether training mode changes what a module computes; with `random` it may."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0 and not random
    return isinstance(module, nn.modules.batchnorm._NormBase) and not random


def _widen(value: Any) -> Any:
    if not isinstance(value, Tensor) and hasattr(value, "__array__") and hasattr(value, "dtype"):  # NumPy's or JAX's
        value = torch.from_numpy(np.array(value))
    if not isinstance(value, Tensor):
        return value
    return _widen_tensor(value.detach()).clone()


def _widen_tensor(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", _WIDE.get(tensor.dtype, tensor.dtype))


@contextmanager
def _settings(backward: bool) -> Iterator[None]:
    """Attention and encoder layers operation by operation, float64 by default, gradients if they are needed."""
    default, fast = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    torch.set_default_dtype(torch.float64)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.set_grad_enabled(backward), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_default_dtype(default)
        torch.backends.mha.set_fastpath_enabled(fast)


class _Recorder(TorchDispatchMode):
    """Adds every ATen operation to a trace."""

    def __init__(self, module: nn.Module | None, shared: Set[int]):
        super().__init__()
        self.trace = Trace("PyTorch", random=_RANDOM)
        self.names = {id(m): name for name, m in module.named_modules()} if module is not None else {}
        self.shared = shared  # memory that belongs to the user's model
        self.path: list[str] = []
        # tensor -> (number, version of its contents, the tensor itself, so that its id stays its own)
        self.numbers: dict[int, tuple[int, int, Tensor]] = {}
        self.places: dict[tuple[Any, ...], tuple[int, int]] = {}  # memory, offset, shape, … -> (number, version)
        self.ends_graph = False  # whether the model runs a backward pass through which no gradient can be computed
        self.forward: dict[int, tuple[str, tuple[str, ...]]] = {}  # node of autograd -> (module, lines)
        self.writes: dict[int, list[tuple[int, np.ndarray]]] = {}  # memory -> (number, places) written to it in place
        self.views: dict[int, set[int]] = {}  # memory -> numbers of the values that are views of it

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Within the context, the current module's path is known."""

        def enter(module: nn.Module, args: Any) -> None:
            self.path.append(self.names.get(id(module), self.path[-1] if self.path else ""))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.path.pop()

        with ExitStack() as handles:
            handles.callback(hooks.register_module_forward_pre_hook(enter).remove)
            handles.callback(hooks.register_module_forward_hook(leave, always_call=True).remove)
            yield

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor; a new one if a tensor that shares its memory was written to."""
        number, version, _ = self.numbers.get(id(tensor), (-1, -1, None))
        if number < 0:  # perhaps another object for the same tensor, as autograd makes
            number, version = self.places.get(_place(tensor), (-1, -1))
        if number >= 0 and version == tensor._version:
            return number
        writes = [write for write in self.writes.get(_memory(tensor), []) if write[0] > number]
        if number >= 0 and not writes:
            self.numbers[id(tensor)] = number, tensor._version, tensor
            return number
        new = self._add(tensor)
        if number >= 0:
            inputs = (number, *(written for written, _ in writes))
            compute = Overwritten([_places(tensor), *(places for _, places in writes)])
            operation = Operation(_WRITTEN, inputs, (new,), *self._where(), {}, compute)
            self.trace.operations.append(operation)
        return new

    def _add(self, tensor: Tensor) -> int:
        if tensor.is_inference():
            place = next(iter(_lines()), self._module())
            raise CaptureError(f"{place}: torch.inference_mode hides in-place writes; use torch.no_grad")
        number = self.trace.add(_to_numpy(tensor))
        self.views.setdefault(_memory(tensor), set()).add(number)
        self.numbers[id(tensor)] = number, tensor._version, tensor
        self.places[_place(tensor)] = number, tensor._version
        return number

    def written(self, module: nn.Module | None, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters and buffers, but counters, that the forward pass wrote to; without those that it returns."""
        if module is None:
            return {}
        returned = set(map(id, outputs.values()))
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        return {
            name: tensor
            for name, tensor in tensors.items()
            if tensor.is_floating_point() and id(tensor) not in returned and name in self.trace.parameters
            if self.number(tensor) != self.trace.parameters[name]
        }

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        """Copy the values that are views of memory to which an operation may write."""
        for tensor in tensors:
            for number in self.views.pop(_memory(tensor), ()):
                self.trace.values[number] = self.trace.values.kept(number).copy()

    def backward(
        self, outputs: Mapping[str, Tensor], parameters: Mapping[str, Tensor], cotangents: Mapping[str, np.ndarray]
    ) -> None:
        """Record the gradients of the parameters."""
        if self.ends_graph:
            raise CaptureError("the model computes gradients itself, without create_graph=True")
        factors = {name: _widen(np.asarray(array)) for name, array in cotangents.items()}
        numbers = {f"cotangent.{name}": self.number(factor) for name, factor in factors.items()}
        self.trace.inputs |= numbers
        leaves = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        ends = {name: outputs[name] for name in factors if outputs[name].requires_grad}
        with self:
            gradients = torch.autograd.grad(
                list(ends.values()), list(leaves.values()), [factors[name] for name in ends], allow_unused=True
            )
        found = zip(leaves, gradients, strict=True)
        self.trace.gradients = {name: self.number(gradient) for name, gradient in found if gradient is not None}

    def _where(self) -> tuple[str, tuple[str, ...]]:
        """(module, lines) of the operation that is running; in the backward pass, of the one it belongs to."""
        where = self._module(), _lines()
        node = torch._C._current_autograd_node()
        if node is not None:
            return self.forward.get(node._sequence_nr(), where)
        self.forward.setdefault(torch.autograd._get_sequence_nr() - 1, where)  # pyright: ignore
        return where

    def _module(self) -> str:
        return self.path[-1] if self.path else ""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation in float64 and record it."""
        kwargs = dict(kwargs or {})
        args, kwargs = tree_map(_wide_dtype, (args, kwargs))
        leaves, structure = tree_flatten((args, kwargs))
        inputs = tuple(self.number(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        if function._schema.is_mutable:
            written = _written(function, args, kwargs)
            if any(_memory(tensor) in self.shared for tensor in written):
                raise CaptureError(f"{function}: writes to a parameter that is not copied")
            self._keep([leaf for leaf in leaves if isinstance(leaf, Tensor)])
            args, kwargs = tree_map_only(
                Tensor, lambda t: _widen_tensor(t) if _is_shared(t, self.shared) else t, (args, kwargs)
            )
        elif function is _FRESH or all(result.alias_info is None for result in function._schema.returns):
            # Tensors of a closure, or made from numpy's arrays, have another dtype. Their views must stay views.
            args, kwargs = tree_map_only(Tensor, _widen_tensor, (args, kwargs))
        statistics = args[3:5] if function is _BATCH_NORM and args[5] and args[3] is not None else ()
        if statistics:
            function = _BATCH_NORM_WITH_STATISTICS
        results = function(*args, **kwargs)
        if "empty" in function._schema.name:  # what is not written to is the same in every run
            tree_map_only(Tensor, Tensor.zero_, results)
        outputs = []
        for leaf in tree_flatten(results)[0]:
            if isinstance(leaf, Tensor):
                written = id(leaf) in self.numbers  # an input, into which the operation wrote
                outputs.append(self._add(leaf))
                if written:
                    self.writes.setdefault(_memory(leaf), []).append((outputs[-1], _places(leaf)))
        settings = {str(i): leaf for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor) and leaf is not None}
        if outputs:
            name = str(function.overloadpacket)
            fixed = name in _RANDOM or name.startswith("aten.empty")
            compute = None if fixed else Repeated(function, [isinstance(leaf, Tensor) for leaf in leaves], structure)
            operation = Operation(name, inputs, tuple(outputs), *self._where(), settings, compute)
            self.trace.operations.append(operation)
            if torch._C._current_autograd_node() is not None:
                self.trace.derived.update(outputs)
                self.ends_graph |= not torch.is_grad_enabled()
        if statistics:
            return self._with_statistics(results, statistics)
        return results

    def _with_statistics(self, results: Sequence[Tensor], statistics: Sequence[Tensor]) -> Sequence[Tensor]:
        """The results of batch norm; its running statistics are written to."""
        self._keep(statistics)
        for running, new in zip(statistics, results[3:], strict=True):
            number = self.number(new)
            running.copy_(new)
            self.numbers[id(running)] = number, running._version, running
            self.places[_place(running)] = number, running._version
            self.writes.setdefault(_memory(running), []).append((number, _places(running)))
        return results[:3]


class Repeated:
    """An operation of ATen as a function of its tensors and its settings."""

    def __init__(self, function: Any, tensors: Sequence[bool], structure: Any):
        self.own, self.structure = function, structure
        self.tensors = list(tensors)  # which of its arguments are
        self.function: Any = _WITHOUT_STRIDES.get(function, function)
        self.mutable = function._schema.is_mutable
        self.is_view = not self.mutable and any(result.alias_info is not None for result in function._schema.returns)

    def __call__(self, arrays: Sequence[np.ndarray], settings: Mapping[str, Any]) -> list[np.ndarray]:
        """The results."""
        rest = iter(arrays)
        full = [
            _tensor(next(rest), self.mutable, self.is_view) if is_tensor else settings.get(str(i))
            for i, is_tensor in enumerate(self.tensors)
        ]
        args, kwargs = tree_unflatten(full, self.structure)
        with torch.no_grad():
            results = self.function(*args, **kwargs)
        return [_to_numpy(leaf) for leaf in tree_flatten(results)[0] if isinstance(leaf, Tensor)]

    def description(self) -> dict[str, Any]:
        """What `repeated` needs to make it anew, beside the settings: true stands for a tensor."""
        args, kwargs = tree_unflatten(self.tensors, self.structure)
        return {"overload": self.own._overloadname, "args": list(args), "kwargs": dict(kwargs)}


class Overwritten:
    """A tensor's contents after others were written to the same memory, one after the other."""

    def __init__(self, places: Sequence[np.ndarray]):
        self.places = places  # of the tensor, then of what was written

    def __call__(self, arrays: Sequence[np.ndarray], settings: Mapping[str, Any]) -> list[np.ndarray]:
        """The contents of the tensor."""
        arrays = [*map(widened, arrays)]
        memory = np.zeros(max(int(p.max(initial=0)) for p in self.places) + 1, arrays[0].dtype)
        for where, array in zip(self.places, arrays, strict=True):
            memory[where] = array
        return [memory[self.places[0]]]

    def description(self) -> dict[str, Any]:
        """What `repeated` needs to make it anew."""
        return {"places": list(self.places)}


def repeated(name: str, settings: Mapping[str, Any], description: Mapping[str, Any] | None) -> Compute | None:
    """The operation of this name, described by a file, as a function; None if it cannot be computed here."""
    if description is None:
        return None
    if name == _WRITTEN:
        return Overwritten(description["places"])
    namespace, _, operation = name.partition(".")
    packet = getattr(torch.ops.aten, operation, None) if namespace == "aten" else None
    function: Any = getattr(packet, description["overload"] or "default", None)
    if function is None or not is_complete(settings) or not _is_of_tensors(function):
        return None
    tensors, structure = tree_flatten((tuple(description["args"]), description["kwargs"]))
    return Repeated(function, tensors, structure)


def _is_of_tensors(function: Any) -> bool:
    """Whether an operation makes tensors of tensors and numbers; others read and write files, such as `from_file`."""
    returned = {str(result.type).removesuffix("[]") for result in function._schema.returns}
    names = {argument.name for argument in function._schema.arguments}
    return returned <= {"Tensor", "List[Tensor]"} and bool(returned) and "filename" not in names


def as_tensor(array: np.ndarray) -> Tensor:
    """An array of any dtype as a tensor that shares its memory."""
    if bfloat16 is not None and array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _tensor(array: np.ndarray, copied: bool, narrow: bool) -> Tensor:
    """An array as a tensor, in float64 unless it may be narrow; a view of its memory if nothing writes to it."""
    array = array if narrow else widened(array)
    if is_narrow(array):
        return as_tensor(array)
    shared = not copied and array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(np.asarray(array) if shared else np.array(array))  # numpy makes scalars of no axes


def _places(tensor: Tensor) -> np.ndarray:
    """Where in its memory each element is."""
    steps = [np.arange(size) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return sum(np.meshgrid(*steps, indexing="ij"), np.array(tensor.storage_offset()))


def _to_numpy(tensor: Tensor) -> np.ndarray:
    """A view of the tensor's memory if that is large or has float64, integers or booleans; else a copy in float64."""
    array = tensor.resolve_conj().resolve_neg().detach()
    if array.numel() < LARGE or array.dtype not in _WIDE:
        return array.to(_WIDE.get(array.dtype, array.dtype)).numpy()
    if array.dtype == torch.bfloat16:  # which NumPy lacks
        return array.float().numpy() if bfloat16 is None else array.view(torch.int16).numpy().view(bfloat16)
    return array.numpy()


def _written(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors to which an operation writes."""
    given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | dict(kwargs)
    names = [a.name for a in function._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [leaf for name in names for leaf in tree_flatten(given.get(name))[0] if isinstance(leaf, Tensor)]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return _memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _wide_dtype(value: Any) -> Any:
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


def _lines() -> tuple[str, ...]:
    """The lines that are being executed."""

    def frames() -> Iterator[tuple[str, int]]:
        frame = sys._getframe(2)
        while frame is not None:
            yield frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back

    return own_lines(frames())
