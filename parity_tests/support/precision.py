"""Lists the operations that a bfloat16 model computes in bfloat16, from its program rather than from its errors.

A ratio of errors does not detect a softmax or a norm's statistics in bfloat16, because the products around it round as
much. So every operation on narrow operands is listed, except moves, comparisons, additions and matrix products.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from twinax import convert, flax_transformer, torch_reference
from twinax.configs.decoding import DecodingConfig
from twinax.configs.schema import TransformerConfig
from twinax.flax_transformer.decoding import programs, scoring
from twinax.formulas.decoding import without_cache
from twinax.parity.functions import Batch

NARROW = ("bfloat16", "float16")
# Exact operations; matrix products, which accumulate in float32; additions of residuals and feature biases.
_EXACT_IN_JAX = re.compile(
    "dot_general|add|add_any|max|reduce_max|argmax|select_n|gather|dynamic_slice|dynamic_update_slice|slice|squeeze|"
    "reshape|transpose|broadcast_in_dim|concatenate|pad|convert_element_type|copy|stop_gradient|name|scatter|"
    "eq|ne|lt|le|gt|ge|neg|abs|min|reduce_min|argmin|rev|tile|split|top_k|sort"
)
_EXACT_IN_TORCH = re.compile(
    "mm|bmm|addmm|baddbmm|add|relu|gelu|silu|where|masked_fill|embedding|gather|index_select|index|select|slice|view|"
    "_unsafe_view|reshape|expand|permute|transpose|t|unsqueeze|squeeze|cat|stack|clone|copy_|_to_copy|alias|detach|"
    "(empty|zeros|ones|full)(_like|_strided)?|new_zeros|amax|argmax|eq|ne|lt|le|gt|ge|repeat|neg|abs|amin|argmin|flip|"
    "split|unbind|tril|triu|maximum|minimum|sort|topk"
)
_CALLS = re.compile("p?jit|(closed|core|custom_[jv][vj]p)_call(_jaxpr)?|scan|while|cond|remat2?|checkpoint")
_MOVES = re.compile("reshape|transpose|broadcast_in_dim|squeeze|slice|copy|stop_gradient")


def narrow_in_jax(function: Callable[..., Any], *args: Any, vocab_size: int) -> list[str]:
    """Inexact operations of a traced function on narrow operands, such as "exp on bfloat16[2,3]".

    An addition to an array whose last axis is `vocab_size` counts too: it is the bias of the logits.
    """
    return sorted({*_walk(jax.make_jaxpr(function)(*args).jaxpr, vocab_size)})


def _walk(jaxpr: Jaxpr, vocab_size: int) -> Iterator[str]:
    for equation in jaxpr.eqns:
        inner = [part for value in equation.params.values() for part in _jaxprs(value)]
        name, operands = equation.primitive.name, [variable.aval for variable in equation.invars]
        if _CALLS.fullmatch(name):
            for part in inner:
                yield from _walk(part, vocab_size)
            continue
        of_logits = name == "add" and any(getattr(a, "shape", ())[-1:] == (vocab_size,) for a in operands)
        if _EXACT_IN_JAX.fullmatch(name) and not of_logits:
            continue
        for operand in operands:
            if str(getattr(operand, "dtype", "")) in NARROW:
                yield f"{name} on {operand.str_short()}"


def rounded_between(function: Callable[..., Any], *args: Any, shapes: Collection[tuple[int, ...]]) -> list[str]:
    """Arrays of these shapes that a traced function rounds to a narrow dtype and widens again, such as "bfloat16[2,3]".

    Use the shapes of scores and logits: the residual stream is rounded between float32 operations on purpose.
    """
    return sorted({*_round_trips(jax.make_jaxpr(function)(*args).jaxpr, shapes)})


def _round_trips(jaxpr: Jaxpr, shapes: Collection[tuple[int, ...]]) -> Iterator[str]:
    rounded: set[Any] = set()
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if _CALLS.fullmatch(name):
            for part in (part for value in equation.params.values() for part in _jaxprs(value)):
                yield from _round_trips(part, shapes)
        elif equation.invars and not isinstance(source := equation.invars[0], Literal):
            target: Any = equation.outvars[0]
            source_aval: Any = source.aval
            if name == "convert_element_type" and source in rounded and source_aval.shape in shapes:
                yield source_aval.str_short()
            if (
                name == "convert_element_type"
                and str(target.aval.dtype) in NARROW
                and str(source_aval.dtype) not in NARROW
            ):
                rounded.add(target)
            if _MOVES.fullmatch(name) and source in rounded:
                rounded.add(target)


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    for item in value if isinstance(value, tuple | list) else (value,):
        if isinstance(item, ClosedJaxpr):
            yield item.jaxpr
        elif isinstance(item, Jaxpr):
            yield item


class _Recorder(TorchDispatchMode):
    """Collects the operations on narrow operands that are not exact."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.operations: set[str] = set()

    def _is_exact(self, name: str, leaves: list[Any]) -> bool:
        tensors = [a for a in leaves if isinstance(a, torch.Tensor)]
        arrays = len(tensors) == len(leaves) and all(a.ndim > 1 for a in tensors)  # no scalars, no gains
        if name == "mul":  # einsum multiplies elementwise if it has no axis to sum over
            return arrays and tensors[0] is not tensors[1]
        of_logits = name in ("add", "addmm") and any(tuple(a.shape[-1:]) == (self.vocab_size,) for a in tensors)
        if name == "add" and not all(isinstance(a, torch.Tensor) for a in leaves[:2]):
            return False
        return bool(_EXACT_IN_TORCH.fullmatch(name)) and not of_logits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        # A zero-dimensional tensor does not determine the dtype of a result.
        operands = [a for a in leaves if isinstance(a, torch.Tensor) and a.is_floating_point() and a.ndim]
        if not self._is_exact(name, leaves) and all(str(a.dtype).removeprefix("torch.") in NARROW for a in operands):
            self.operations |= {f"{name} on {a.dtype}{list(a.shape)}" for a in operands}
        return func(*args, **(kwargs or {}))


def narrow_in_torch(function: Callable[..., Any], *args: Any, vocab_size: int) -> list[str]:
    """The same for the operations that PyTorch dispatches while it computes the function, without gradients."""
    with torch.no_grad(), _Recorder(vocab_size) as recorder:
        function(*args)
    return sorted(recorder.operations)


def narrow_operations(
    config: TransformerConfig, arrays: Mapping[str, np.ndarray], batch: Batch
) -> dict[str, list[str]]:
    """Inexact bfloat16 operations of each framework's forward pass, scoring and beam search."""
    model = torch_reference.Transformer.from_state_dict(config, convert.to_state_dict(arrays, config))
    jax_arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    src, tgt = jnp.asarray(batch.src_tokens), jnp.asarray(batch.tgt_tokens)
    key = flax_transformer.DropoutKey(1, 2, jnp.arange(len(src)))
    torch_key = torch_reference.DropoutKey(1, 2, torch.arange(len(src)))

    def forward(arrays: Mapping[str, Any], dropout_key: Any) -> jax.Array:
        return flax_transformer.Transformer.from_arrays(config, arrays)(src, tgt, dropout_key=dropout_key)

    keep = src != config.pad_id

    def scores(arrays: Mapping[str, Any]) -> jax.Array:
        return scoring._compiled(config)[0](arrays, src, keep, tgt, tgt)

    def cached(arrays: Mapping[str, Any]) -> Any:
        begin, continue_search = programs.search_programs((config,), decoding)
        memory, state, past = begin([arrays], [(src, keep)], *given)
        return continue_search([arrays], memory, [(src, keep)], state, past, 4, 0)

    def uncached(arrays: Mapping[str, Any]) -> Any:
        encode, step = programs.programs_without_cache((config,), decoding)
        return step(
            [arrays], encode([arrays], [(src, keep)]), [(src, keep)], programs.first_state(config, decoding, *given), 1
        )

    size = config.tgt_vocab_size
    decoding = DecodingConfig(beam_size=2, max_length=4)
    given = np.zeros((len(src), 2, 0), np.float32), np.zeros((len(src), 0), np.int32)
    searches = {"Flax, beam search without a cache": narrow_in_jax(uncached, jax_arrays, vocab_size=size)}
    if without_cache(config) is None:
        searches["Flax, beam search"] = narrow_in_jax(cached, jax_arrays, vocab_size=size)
    tensors = torch.from_numpy(batch.src_tokens), torch.from_numpy(batch.tgt_tokens)
    return {
        "Flax": narrow_in_jax(forward, jax_arrays, key, vocab_size=size),
        "Flax, scores and logits": rounded_between(
            lambda a: forward(a, None), jax_arrays, shapes=_shapes(config, src, tgt)
        ),
        "Flax, score": narrow_in_jax(scores, jax_arrays, vocab_size=size),
        "PyTorch": narrow_in_torch(lambda *ids: model(*ids, dropout_key=torch_key), *tensors, vocab_size=size),
        "PyTorch, score": narrow_in_torch(lambda *ids: torch_reference.score(model, *ids), *tensors, vocab_size=size),
        "PyTorch, beam search": narrow_in_torch(
            lambda ids: torch_reference.generate(model, ids, decoding), tensors[0], vocab_size=size
        ),
        **searches,
    }


def _shapes(config: TransformerConfig, src: Any, tgt: Any) -> set[tuple[int, ...]]:
    """The shapes of attention scores and logits."""
    (batch, source), target = src.shape, tgt.shape[1]
    heads = {config.num_heads, config.decoder_num_heads or config.num_heads}
    pairs = ((source, source), (target, target), (target, source))
    return {(batch, n, *pair) for n in heads for pair in pairs} | {(batch, target, config.tgt_vocab_size)}
