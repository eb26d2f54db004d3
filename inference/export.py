"""A model as two programs that run with JAX alone: the encoder, and one step of the decoder with a key-value cache.

Both take the weights as an argument, so that a file has them once. Batch size and lengths are symbolic.

Letters: B rows, S source length, T length of the cache, V vocabulary, N heads, H and U the widths of keys and values.
In the shapes that a file states, B, S and T are "b", "s" and "t".
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import export
from jaxtyping import Array, Bool, Float, Int

from ..backend.errors import ConfigError, MissingPackageError
from ..configs.decoding import DecodingConfig
from ..configs.schema import TransformerConfig
from ..convert.arrays.lazy import Spec
from ..flax_transformer.attention import CROSS_MASKS, DECODER_MASKS, KeysValues
from ..flax_transformer.decoding.programs import write_to_cache
from ..flax_transformer.layers import count_positions
from ..flax_transformer.model import Transformer
from ..flax_transformer.module import at_least_float32
from ..flax_transformer.xla_cpu.maxima import log_softmax
from ..formulas.decoding import check, without_cache

PLATFORMS = ("cpu", "cuda", "tpu")
ENCODER, DECODER_STEP = "encoder", "decoder_step"
ARGUMENTS = {
    ENCODER: ("weights", "src_tokens"),
    DECODER_STEP: ("weights", "tokens", "position", "memory", "cache"),
}
RESULTS = {ENCODER: ("memory",), DECODER_STEP: ("log_probs", "cache")}

Weights = Mapping[str, Array]
Named = dict[str, Array]


class Programs(NamedTuple):
    """The exported programs of a model."""

    encoder: export.Exported  # (weights, src_tokens) -> memory
    decoder_step: export.Exported  # (weights, tokens, position, memory, cache) -> (log_probs, cache)

    def shapes(self) -> dict[str, Any]:
        """Shapes and dtypes of all arguments and results by name, as JSON values."""
        shapes: dict[str, Any] = {}
        for name, program in zip((ENCODER, DECODER_STEP), self, strict=True):
            arguments, _ = jax.tree.unflatten(program.in_tree, map(_described, program.in_avals))
            results = jax.tree.unflatten(program.out_tree, map(_described, program.out_avals))
            shapes |= dict(zip(ARGUMENTS[name], arguments, strict=True))
            shapes |= dict(zip(RESULTS[name], results if len(RESULTS[name]) > 1 else (results,), strict=True))
        return shapes


def check_exportable(config: TransformerConfig) -> None:
    """Check that a model can be exported.

    Raises:
        ConfigError: it cannot be decoded with a key-value cache, or computes in float64.
        MissingPackageError: flatbuffers, with which JAX serializes programs, is not installed.
    """
    check(config, DecodingConfig())
    if reason := without_cache(config):
        raise ConfigError(f"{reason}, which the cache of a decoder step excludes")
    if "float64" in (config.param_dtype, config.compute_dtype):
        raise ConfigError("the model computes in float64, which is off in JAX by default; pass --dtype float32")
    if find_spec("flatbuffers") is None:
        raise MissingPackageError(
            "exporting a model needs flatbuffers, with which JAX serializes programs: pip install 'twinax[export]'"
        )


def export_programs(config: TransformerConfig, weights: Mapping[str, Spec]) -> Programs:
    """The programs of a model for CPUs, NVIDIA GPUs and TPUs.

    The encoder maps source tokens (B, S), padded with `pad_id`, to `memory`: per layer the keys (B, N, H, S) and values
    (B, N, S, U) of the cross-attention, and the mask (B, S).

    The decoder step maps one token per row (B,) at `position`, which counts from 0 and is the same for all rows, to the
    log-probabilities (B, V) of the next token, in nats, and the cache with this position: per layer keys (B, N, H, T)
    and values (B, N, T, U), and the tokens (B, T). The first cache is zeros. The first axis of all arrays of memory and
    cache is that of the rows, so that a beam search selects hypotheses by index.

    As in the model, an id outside the vocabulary makes its row NaN. So does a position outside the cache.

    Raises:
        ConfigError, MissingPackageError: as `check_exportable`.
    """
    check_exportable(config)
    source, both = f"s <= {config.max_length}", [f"{length} <= {config.max_length}" for length in "st"]

    def encode(weights: Weights, src_tokens: Int[Array, "B S"]) -> Named:
        model = Transformer.from_arrays(config, weights)
        memory = model.decoder.keys_values(model.encode(src_tokens))
        return {"mask": model.source_mask(src_tokens, None)} | _named(dict(enumerate(memory)))

    def step(
        weights: Weights, tokens: Int[Array, " B"], position: Int[Array, ""], memory: Named, cache: Named
    ) -> tuple[Float[Array, "B V"], Named]:
        model = Transformer.from_arrays(config, weights)
        history = jax.lax.dynamic_update_slice_in_dim(cache["tokens"], tokens[:, None], position, axis=1)
        places = jnp.arange(history.shape[1], dtype=jnp.int32)
        written: dict[int, KeysValues] = {}

        def update_cache(layer: int, new: KeysValues) -> KeysValues:
            written[layer] = write_to_cache(_layer(cache, layer), new, position)
            return written[layer]

        def of_this_position(values: Array, axis: int) -> Array:
            return jax.lax.dynamic_slice_in_dim(values, position, 1, axis)

        # The masks and positions of all tokens, as without a cache; XLA computes what is selected.
        self_mask: Bool[Array, "B 1 T T"] = DECODER_MASKS[config.decoder_mask](history, None, config.pad_id, False)
        logits = model.next_logits(
            tokens[:, None],
            of_this_position(count_positions(config, history), axis=1),
            position[None] == 0,
            [_layer(memory, layer) for layer in range(config.num_decoder_layers)],
            of_this_position(self_mask, axis=2),
            CROSS_MASKS[config.cross_mask](memory["mask"], 1),
            update_cache=update_cache,
            distances=places[None] - position,
        )
        log_probs = log_softmax(at_least_float32(logits))[:, 0]
        return jnp.where((places == position).any(), log_probs, jnp.nan), {"tokens": history} | _named(written)

    with jax.enable_x64(False), _without_source_paths():
        weight_specs = {name: jax.ShapeDtypeStruct(*spec) for name, spec in sorted(weights.items())}
        scope = export.SymbolicScope([source])
        encoder = _export(encode, weight_specs, _spec(("b", "s"), "int32", scope))
        scope = export.SymbolicScope(both)  # of its own: an encoder has no cache
        memory = jax.tree.unflatten(encoder.out_tree, encoder.out_avals)
        memory = {name: _spec(array.shape, array.dtype, scope) for name, array in memory.items()}
        inputs = _spec(("b",), "int32", scope), _spec((), "int32", scope)
        decoder_step = _export(step, weight_specs, *inputs, memory, _cache(config, scope))
    return Programs(encoder, decoder_step)


def _export(program: Any, *arguments: Any) -> export.Exported:
    return export.export(jax.jit(program), platforms=PLATFORMS)(*arguments)


def _cache(config: TransformerConfig, scope: export.SymbolicScope) -> dict[str, jax.ShapeDtypeStruct]:
    heads, dtype = config.decoder_num_heads or config.num_heads, config.compute_dtype
    keys: Any = _spec(("b", heads, config.query_key_width(heads), "t"), dtype, scope)
    values: Any = _spec(("b", heads, "t", config.value_width(heads)), dtype, scope)
    layers = {layer: KeysValues(keys, values) for layer in range(config.num_decoder_layers)}
    return {"tokens": _spec(("b", "t"), "int32", scope)} | _named(layers)


def _named(layers: Mapping[int, KeysValues]) -> dict[str, Any]:
    """Keys and values by name. A caller has to know no class of this project."""
    return {f"layers.{i}.{part}": array for i, layer in layers.items() for part, array in layer._asdict().items()}


def _layer(arrays: Named, layer: int) -> KeysValues:
    return KeysValues(*(arrays[f"layers.{layer}.{part}"] for part in KeysValues._fields))


def _spec(shape: tuple[Any, ...], dtype: Any, scope: export.SymbolicScope) -> jax.ShapeDtypeStruct:
    """The spec of an array, whose symbolic dimensions are of this scope."""
    return jax.ShapeDtypeStruct(export.symbolic_shape(",".join(map(str, shape)), scope=scope), dtype)


def _described(array: Any) -> dict[str, Any]:
    shape = [n if isinstance(n, int) else str(n) for n in array.shape]
    return {"shape": shape, "dtype": str(array.dtype)}


@contextmanager
def _without_source_paths() -> Iterator[None]:
    """Lower programs without tracebacks, which have this machine's paths."""
    config: Any = jax.config
    limit = config.jax_traceback_in_locations_limit
    config.update("jax_traceback_in_locations_limit", 0)
    try:
        yield
    finally:
        config.update("jax_traceback_in_locations_limit", limit)
