"""Linear maps, norms, embeddings, positions, feed-forward and residual connections.

Letters: B batch, L length, D d_model, F d_ff, I inputs, O outputs, V vocabulary, P rows of a position table.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from ..configs.schema import TransformerConfig
from ..formulas.position_tables import POSITION_TABLES
from ..formulas.relative_positions import relative_position_buckets
from .dropout import Dropout, DropoutKey
from .initializers import EMBEDDING_INITS, LINEAR_INITS, drawn
from .module import Buffer, at_least_float32, record
from .quantization import table_rows
from .xla_cpu.products import add_bias, product, scale


class Linear(nnx.Module):
    """x W + b with the config's initialization and dtypes."""

    def __init__(
        self,
        config: TransformerConfig,
        inputs: int,
        outputs: int,
        use_bias: bool,
        rngs: nnx.Rngs,
        heads: int = 1,  # number of heads of queries, keys or values
        role: str = "hidden",  # or "query" or "logits"
    ):
        kernel_init, bias_init = LINEAR_INITS[config.linear_init](inputs, config.d_model, heads, role)
        dtype = jnp.dtype(config.param_dtype)
        self.compute_dtype = jnp.dtype(config.compute_dtype)
        self.kernel = nnx.Param(drawn(kernel_init, rngs, (inputs, outputs), dtype))
        self.bias = nnx.Param(drawn(bias_init, rngs, (outputs,), dtype)) if use_bias else nnx.data(None)

    def __call__(self, x: Float[Array, "B L I"]) -> Float[Array, "B L O"]:
        y = product("BLI,IO->BLO", x.astype(self.compute_dtype), self.kernel.get_value())
        return y if self.bias is None else add_bias(y, self.bias[...].astype(self.compute_dtype))


def layer_norm(x: Float[Array, "B L D"], eps: float) -> Float[Array, "B L D"]:
    """(x - mean) / sqrt(variance + eps) over D. Source: Ba et al. 2016, eq. 4."""
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + eps)


def rms_norm(x: Float[Array, "B L D"], eps: float) -> Float[Array, "B L D"]:
    """x / sqrt(mean(x²) + eps) over D. Source: Zhang and Sennrich 2019, eq. 4."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def sample_std_norm(x: Float[Array, "B L D"], eps: float) -> Float[Array, "B L D"]:
    """(x - mean) / (sample standard deviation + eps) over D: divides by D - 1, with eps outside the root.

    Source: The Annotated Transformer, LayerNorm.
    """
    centered = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centered).sum(-1, keepdims=True) / (x.shape[-1] - 1)
    positive = variance > 0  # the root's derivative at 0 is infinite: a constant row would have NaN gradients
    return centered / (jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0) + eps)


def layer_norm_over_length(x: Float[Array, "B L D"], eps: float) -> Float[Array, "B L D"]:
    """(x - mean) / sqrt(variance + eps) over L and D together: later positions and padding change earlier ones.

    Source: lucky_glass, as published.
    """
    centered = x - x.mean((1, 2), keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean((1, 2), keepdims=True) + eps)


NORMS: dict[str, Callable[..., Array]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "sample_std_norm": sample_std_norm,
    "layer_norm_over_length": layer_norm_over_length,
}


class Norm(nnx.Module):
    """scale · normalized(x) + bias, in float32 or wider."""

    def __init__(self, config: TransformerConfig):
        self.config = config
        shape, dtype = (config.d_model,), jnp.dtype(config.param_dtype)
        self.scale = nnx.Param(jnp.ones(shape, dtype)) if config.norm_scale else nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if config.norm_bias else nnx.data(None)

    def __call__(self, x: Float[Array, "B L D"]) -> Float[Array, "B L D"]:
        y = NORMS[self.config.norm](at_least_float32(x), self.config.norm_eps)
        if self.scale is not None:
            y = scale(y, self.scale[...])
        if self.bias is not None:
            y = add_bias(y, self.bias[...])
        y = y.astype(x.dtype)
        record(self, "output", y)
        return y


EMBEDDING_SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda d_model: 1.0,
    "sqrt_d_model": lambda d_model: d_model**0.5,
}


# (rows, whether each is padding) -> rows; frozen: no gradient from looking up padding, as with torch's padding_idx
EMBEDDING_PADDINGS: dict[str, Callable[[Array, Array], Array]] = {
    "trained": lambda rows, padding: rows,
    "frozen": lambda rows, padding: jnp.where(padding, jax.lax.stop_gradient(rows), rows),
}


class Embedding(nnx.Module):
    """Rows of a table (V, D), scaled. Source: Vaswani et al. 2017, section 3.4."""

    def __init__(self, config: TransformerConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config = config
        initializer = EMBEDDING_INITS[config.embedding_init](config.d_model, config.pad_id)
        shape, dtype = (vocab_size, config.d_model), jnp.dtype(config.param_dtype)
        self.embedding = nnx.Param(drawn(initializer, rngs, shape, dtype))

    def __call__(self, tokens: Int[Array, "B L"]) -> Float[Array, "B L D"]:
        config, table = self.config, self.embedding.get_value()
        # An id outside the table gives NaN, because nothing can raise inside jit and JAX would wrap or clamp the id.
        tokens = tokens.astype(jnp.int32)
        rows = table_rows(table, jnp.where(tokens < 0, jnp.iinfo(jnp.int32).max, tokens))
        rows = EMBEDDING_PADDINGS[config.embedding_padding](rows, (tokens == config.pad_id)[..., None])
        # Cast last: in bfloat16, summed gradients of frequent tokens and digits of the scale would be lost.
        scale = EMBEDDING_SCALES[config.embedding_scale](config.d_model)
        return (at_least_float32(rows) * scale).astype(config.compute_dtype)


def count_all(tokens: Int[Array, "B L"], pad_id: int) -> Int[Array, "1 L"]:
    """Positions: the number of tokens before each token, padding included."""
    return jnp.arange(tokens.shape[1])[None]


def count_non_padding(tokens: Int[Array, "B L"], pad_id: int) -> Int[Array, "B L"]:
    """Positions: the number of non-padding tokens before each token; -1 for padding.

    Source: fairseq `make_positions`, as in M2M100.
    """
    keep = (tokens != pad_id).astype(jnp.int32)
    return jnp.cumsum(keep, 1) * keep - 1


POSITION_COUNTINGS: dict[str, Callable[..., Array]] = {"all": count_all, "non_padding": count_non_padding}


def count_positions(config: TransformerConfig, tokens: Int[Array, "B L"]) -> Int[Array, "... L"]:
    """The positions of tokens, from 0; -1 for a token without a position."""
    return POSITION_COUNTINGS[config.position_counting](tokens, config.pad_id)


class Positions(nnx.Module):
    """The rows of a position table (P, D) at the given positions; zeros at -1."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        shape, dtype = (config.table_length, config.d_model), jnp.dtype(config.param_dtype)
        if config.positions in POSITION_TABLES:
            self.table = Buffer(jnp.asarray(POSITION_TABLES[config.positions](*shape), dtype))
        else:
            kind = nnx.Param if config.positions == "learned" else Buffer
            initializer = EMBEDDING_INITS[config.embedding_init](config.d_model, None)
            self.table = kind(drawn(initializer, rngs, shape, dtype))

    def __call__(self, positions: Int[Array, "... L"]) -> Float[Array, "... L D"]:
        config = self.config
        rows = jnp.take(self.table[...], positions + config.position_offset, axis=0, mode="fill")
        return jnp.where((positions >= 0)[..., None], rows, 0).astype(config.compute_dtype)


class RelativePositions(nnx.Module):
    """A bias per head and bucket of distances, which attention adds to its scores.

    Source: Raffel et al. 2020, section 2.1; the buckets of `formulas.relative_positions`.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, *, bidirectional: bool, rngs: nnx.Rngs):
        self.config, self.bidirectional = config, bidirectional
        shape, dtype = (config.relative_position_buckets, num_heads), jnp.dtype(config.param_dtype)
        initializer = EMBEDDING_INITS["normal_rsqrt_d_model"](config.d_model, None)
        self.embedding = nnx.Param(drawn(initializer, rngs, shape, dtype))

    def __call__(self, distances: Int[Array, "T S"]) -> Float[Array, "1 N T S"]:
        """The biases for `distances`, each a key's index minus its query's."""
        config = self.config
        longest = config.relative_position_max_distance
        table = relative_position_buckets(config.relative_position_buckets, longest, self.bidirectional)
        buckets = jnp.asarray(table, jnp.int32)[jnp.clip(distances, -longest, longest) + longest]
        biases = jnp.take(self.embedding[...], buckets, axis=0).transpose(2, 0, 1)[None]
        biases = at_least_float32(biases.astype(config.compute_dtype))
        record(self, "output", biases)
        return biases


class InputStage(nnx.Module):
    """The stage between an embedding and the first layer: positions, a norm, dropout."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.positions = Positions(config, rngs=rngs) if config.positions != "none" else nnx.data(None)
        self.norm = Norm(config) if config.embedding_norm != "none" else nnx.data(None)
        self.dropout = Dropout(config.embedding_dropout, config.dropout_generator)

    def __call__(
        self, x: Float[Array, "B L D"], positions: Int[Array, "... L"], dropout_key: DropoutKey | None
    ) -> Float[Array, "B L D"]:
        record(self, "embedded", x)
        if self.positions is not None:
            rows = self.positions(positions)
            record(self, "positioned", rows)
            x = x + rows
        x = EMBEDDING_NORMS[self.config.embedding_norm](x, self.norm, partial(self.dropout, key=dropout_key))
        record(self, "output", x)
        return x


EMBEDDING_NORMS: dict[str, Callable[..., Array]] = {
    "none": lambda x, norm, dropout: dropout(x),
    "before_dropout": lambda x, norm, dropout: dropout(norm(x)),
    "after_dropout": lambda x, norm, dropout: norm(dropout(x)),
}


def _at_least_float32(activation: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The activation in float32 or wider; in bfloat16 JAX would round its constants, such as 1/sqrt(2) to 0.70703."""
    return lambda x: activation(at_least_float32(x)).astype(x.dtype)


@jax.custom_jvp
def _relu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """max(x, 0), as `jax.nn.relu`, with a gradient that needs the output only.

    The gradient passes where x is NaN, as in PyTorch; that of `jax.nn.relu` is 0 there.

    On a GPU, cuBLAS then applies it to its product. XLA would turn `y > 0` back into `x > 0`, but not `y != 0`.
    """
    return jnp.maximum(x, 0)


@_relu.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    y: Array = _relu(*primals)
    return y, jnp.where(y != 0, tangents[0], 0)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": _relu,
    "gelu": _at_least_float32(partial(jax.nn.gelu, approximate=False)),
    "gelu_tanh": _at_least_float32(partial(jax.nn.gelu, approximate=True)),
    "silu": _at_least_float32(jax.nn.silu),
}


class FeedForward(nnx.Module):
    """activation(x W1 + b1) W2 + b2; if gated, (activation(x Wg + bg) ⊙ (x W1 + b1)) W2 + b2.

    Source: Vaswani et al. 2017, section 3.3; Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """

    def __init__(self, config: TransformerConfig, d_ff: int, *, rngs: nnx.Rngs):
        self.config = config
        self.inner_proj = Linear(config, config.d_model, d_ff, config.ffn_bias, rngs)
        gated = config.ffn_gate
        self.gate_proj = Linear(config, config.d_model, d_ff, config.ffn_bias, rngs) if gated else nnx.data(None)
        self.outer_proj = Linear(config, d_ff, config.d_model, config.ffn_bias, rngs)
        self.dropout = Dropout(config.ffn_dropout, config.dropout_generator)

    def __call__(self, x: Float[Array, "B L D"], dropout_key: DropoutKey | None = None) -> Float[Array, "B L D"]:
        activation, inner = ACTIVATIONS[self.config.activation], self.inner_proj(x)
        if self.gate_proj is None:
            inner = activation(inner)
        else:
            inner = (at_least_float32(activation(self.gate_proj(x))) * at_least_float32(inner)).astype(inner.dtype)
        record(self, "inner", inner)
        output = self.outer_proj(self.dropout(inner, dropout_key))
        record(self, "output", output)
        return output


# (x, sublayer, norm, dropout, add) -> the residual stream after the sublayer
NORM_PLACEMENTS: dict[str, Callable[..., Array]] = {
    "pre": lambda x, sublayer, norm, dropout, add: add(x, dropout(sublayer(norm(x)))),
    "post": lambda x, sublayer, norm, dropout, add: norm(add(x, dropout(sublayer(x)))),
}
RESIDUALS: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda x, y: x + y,
    "query_only": lambda x, y: x,  # lucky_glass's operator-precedence mistake: the decoder never sees the source
}


class Residual(nnx.Module):
    """norm(x + dropout(f(x))), or x + dropout(f(norm(x))). Source: Vaswani et al. 2017, sections 3.1 and 5.4."""

    def __init__(self, config: TransformerConfig, add: str = "add"):
        self.config, self.add = config, add
        self.norm = Norm(config)
        self.dropout = Dropout(config.residual_dropout, config.dropout_generator)

    def __call__(
        self, x: Float[Array, "B L D"], sublayer: Callable[[Array], Array], dropout_key: DropoutKey | None
    ) -> Float[Array, "B L D"]:
        place = NORM_PLACEMENTS[self.config.norm_placement]
        x = place(x, sublayer, self.norm, partial(self.dropout, key=dropout_key), RESIDUALS[self.add])
        record(self, "output", x)
        return x
