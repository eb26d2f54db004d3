"""Linear maps, norms, embeddings, positions, feed-forward and residual connections.

Letters: B batch, L length, D d_model, F d_ff, V vocabulary, P rows of a position table.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional

from ..configs.schema import TransformerConfig
from ..formulas.position_tables import POSITION_TABLES
from ..formulas.relative_positions import relative_position_buckets
from .dropout import Dropout, DropoutKey
from .initializers import BIAS_INITS, EMBEDDING_INITS, LINEAR_INITS
from .module import at_least_float32, dtype_of, record


class Linear(nn.Module):
    """x Wᵀ + b with the config's initialization and dtypes."""

    def __init__(
        self,
        config: TransformerConfig,
        inputs: int,
        outputs: int,
        use_bias: bool,
        generator: Generator | None = None,
        heads: int = 1,  # number of heads of queries, keys or values
        role: str = "hidden",  # or "query" or "logits"
    ):
        super().__init__()
        dtype = dtype_of(config.param_dtype)
        self.compute_dtype = dtype_of(config.compute_dtype)
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype)) if use_bias else None
        LINEAR_INITS[config.linear_init](self.weight, inputs, config.d_model, heads, role, generator)
        if self.bias is not None and config.linear_init in BIAS_INITS:
            BIAS_INITS[config.linear_init](self.bias, inputs, generator)

    def forward(self, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return functional.linear(x.to(self.compute_dtype), self.weight.to(self.compute_dtype), bias)


def layer_norm(x: Float[Tensor, "B L D"], eps: float) -> Float[Tensor, "B L D"]:
    """(x - mean) / sqrt(variance + eps) over D. Source: Ba et al. 2016, eq. 4."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Float[Tensor, "B L D"], eps: float) -> Float[Tensor, "B L D"]:
    """x / sqrt(mean(x²) + eps) over D. Source: Zhang and Sennrich 2019, eq. 4."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def sample_std_norm(x: Float[Tensor, "B L D"], eps: float) -> Float[Tensor, "B L D"]:
    """(x - mean) / (sample standard deviation + eps) over D: divides by D - 1, with eps outside the root.

    Source: The Annotated Transformer, LayerNorm.
    """
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)


def layer_norm_over_length(x: Float[Tensor, "B L D"], eps: float) -> Float[Tensor, "B L D"]:
    """(x - mean) / sqrt(variance + eps) over L and D together: later positions and padding change earlier ones.

    Source: lucky_glass, as published.
    """
    centered = x - x.mean((1, 2), keepdim=True)
    return centered * torch.rsqrt(centered.square().mean((1, 2), keepdim=True) + eps)


NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": layer_norm,
    "rms_norm": rms_norm,
    "sample_std_norm": sample_std_norm,
    "layer_norm_over_length": layer_norm_over_length,
}


class Norm(nn.Module):
    """weight · normalized(x) + bias, in float32 or wider."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        shape, dtype = (config.d_model,), dtype_of(config.param_dtype)
        self.weight = nn.Parameter(torch.ones(shape, dtype=dtype)) if config.norm_scale else None
        self.bias = nn.Parameter(torch.zeros(shape, dtype=dtype)) if config.norm_bias else None

    def forward(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        y = NORMS[self.config.norm](at_least_float32(x), self.config.norm_eps)
        if self.weight is not None:
            y = y * self.weight
        if self.bias is not None:
            y = y + self.bias
        y = y.to(x.dtype)
        record(self, "output", y)
        return y


EMBEDDING_SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda d_model: 1.0,
    "sqrt_d_model": lambda d_model: d_model**0.5,
}


# (rows, whether each is padding) -> rows; frozen: no gradient from looking up padding, as with torch's padding_idx
EMBEDDING_PADDINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "trained": lambda rows, padding: rows,
    "frozen": lambda rows, padding: torch.where(padding, rows.detach(), rows),
}


class Embedding(nn.Module):
    """Rows of a table (V, D), scaled. Source: Vaswani et al. 2017, section 3.4."""

    def __init__(self, config: TransformerConfig, vocab_size: int, generator: Generator | None = None):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(vocab_size, config.d_model, dtype=dtype_of(config.param_dtype)))
        EMBEDDING_INITS[config.embedding_init](self.weight, config.d_model, config.pad_id, generator)

    def forward(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L D"]:
        config = self.config
        rows = functional.embedding(tokens, self.weight)
        rows = EMBEDDING_PADDINGS[config.embedding_padding](rows, (tokens == config.pad_id)[..., None])
        scale = EMBEDDING_SCALES[config.embedding_scale](config.d_model)
        return (at_least_float32(rows) * scale).to(dtype_of(config.compute_dtype))


def count_all(tokens: Int[Tensor, "B L"], pad_id: int) -> Int[Tensor, "1 L"]:
    """Positions: the number of tokens before each token, padding included."""
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def count_non_padding(tokens: Int[Tensor, "B L"], pad_id: int) -> Int[Tensor, "B L"]:
    """Positions: the number of non-padding tokens before each token; -1 for padding.

    Source: fairseq `make_positions`, as in M2M100.
    """
    keep = (tokens != pad_id).to(torch.int64)
    return torch.cumsum(keep, 1) * keep - 1


POSITION_COUNTINGS: dict[str, Callable[..., Tensor]] = {"all": count_all, "non_padding": count_non_padding}


def count_positions(config: TransformerConfig, tokens: Int[Tensor, "B L"]) -> Int[Tensor, "... L"]:
    """The positions of tokens, from 0; -1 for a token without a position."""
    return POSITION_COUNTINGS[config.position_counting](tokens, config.pad_id)


class Positions(nn.Module):
    """The rows of a position table (P, D) at the given positions; zeros at -1."""

    table: Tensor

    def __init__(self, config: TransformerConfig, generator: Generator | None = None):
        super().__init__()
        self.config = config
        shape, dtype = (config.table_length, config.d_model), dtype_of(config.param_dtype)
        if config.positions in POSITION_TABLES:
            table = torch.tensor(POSITION_TABLES[config.positions](*shape), dtype=dtype)
        else:
            table = torch.empty(shape, dtype=dtype)
            EMBEDDING_INITS[config.embedding_init](table, config.d_model, None, generator)
        if config.positions == "learned":
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, positions: Int[Tensor, "... L"]) -> Float[Tensor, "... L D"]:
        config = self.config
        rows = functional.embedding((positions + config.position_offset).clamp(min=0), self.table)
        return torch.where((positions >= 0)[..., None], rows, 0).to(dtype_of(config.compute_dtype))


class RelativePositions(nn.Module):
    """A bias per head and bucket of distances, which attention adds to its scores.

    Source: Raffel et al. 2020, section 2.1; the buckets of `formulas.relative_positions`.
    """

    def __init__(
        self, config: TransformerConfig, num_heads: int, *, bidirectional: bool, generator: Generator | None = None
    ):
        super().__init__()
        self.config, self.bidirectional = config, bidirectional
        shape, dtype = (config.relative_position_buckets, num_heads), dtype_of(config.param_dtype)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))
        EMBEDDING_INITS["normal_rsqrt_d_model"](self.weight, config.d_model, None, generator)

    def forward(self, distances: Int[Tensor, "T S"]) -> Float[Tensor, "1 N T S"]:
        """The biases for `distances`, each a key's index minus its query's."""
        config = self.config
        longest = config.relative_position_max_distance
        table = relative_position_buckets(config.relative_position_buckets, longest, self.bidirectional)
        buckets = torch.tensor(table, device=distances.device)[distances.clamp(-longest, longest) + longest]
        biases = functional.embedding(buckets, self.weight).permute(2, 0, 1)[None]
        biases = at_least_float32(biases.to(dtype_of(config.compute_dtype)))
        record(self, "output", biases)
        return biases


class InputStage(nn.Module):
    """The stage between an embedding and the first layer: positions, a norm, dropout."""

    def __init__(self, config: TransformerConfig, generator: Generator | None = None):
        super().__init__()
        self.config = config
        self.positions = Positions(config, generator) if config.positions != "none" else None
        self.norm = Norm(config) if config.embedding_norm != "none" else None
        self.dropout = Dropout(config.embedding_dropout, config.dropout_generator)

    def forward(
        self, x: Float[Tensor, "B L D"], positions: Int[Tensor, "... L"], dropout_key: DropoutKey | None
    ) -> Float[Tensor, "B L D"]:
        record(self, "embedded", x)
        if self.positions is not None:
            rows = self.positions(positions)
            record(self, "positioned", rows)
            x = x + rows
        x = EMBEDDING_NORMS[self.config.embedding_norm](x, self.norm, partial(self.dropout, key=dropout_key))
        record(self, "output", x)
        return x


EMBEDDING_NORMS: dict[str, Callable[..., Tensor]] = {
    "none": lambda x, norm, dropout: dropout(x),
    "before_dropout": lambda x, norm, dropout: dropout(norm(x)),
    "after_dropout": lambda x, norm, dropout: norm(dropout(x)),
}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}


class FeedForward(nn.Module):
    """activation(x W1 + b1) W2 + b2; if gated, (activation(x Wg + bg) ⊙ (x W1 + b1)) W2 + b2.

    Source: Vaswani et al. 2017, section 3.3; Shazeer 2020, "GLU Variants Improve Transformer", section 2.
    """

    def __init__(self, config: TransformerConfig, d_ff: int, generator: Generator | None = None):
        super().__init__()
        self.config = config
        self.inner_proj = Linear(config, config.d_model, d_ff, config.ffn_bias, generator)
        self.gate_proj = Linear(config, config.d_model, d_ff, config.ffn_bias, generator) if config.ffn_gate else None
        self.outer_proj = Linear(config, d_ff, config.d_model, config.ffn_bias, generator)
        self.dropout = Dropout(config.ffn_dropout, config.dropout_generator)

    def forward(self, x: Float[Tensor, "B L D"], dropout_key: DropoutKey | None = None) -> Float[Tensor, "B L D"]:
        activation, inner = ACTIVATIONS[self.config.activation], self.inner_proj(x)
        if self.gate_proj is None:
            inner = activation(inner)
        else:
            inner = (at_least_float32(activation(self.gate_proj(x))) * at_least_float32(inner)).to(inner.dtype)
        record(self, "inner", inner)
        output = self.outer_proj(self.dropout(inner, dropout_key))
        record(self, "output", output)
        return output


# (x, sublayer, norm, dropout, add) -> the residual stream after the sublayer
NORM_PLACEMENTS: dict[str, Callable[..., Tensor]] = {
    "pre": lambda x, sublayer, norm, dropout, add: add(x, dropout(sublayer(norm(x)))),
    "post": lambda x, sublayer, norm, dropout, add: norm(add(x, dropout(sublayer(x)))),
}
RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "query_only": lambda x, y: x,  # lucky_glass's operator-precedence mistake: the decoder never sees the source
}


class Residual(nn.Module):
    """norm(x + dropout(f(x))), or x + dropout(f(norm(x))). Source: Vaswani et al. 2017, sections 3.1 and 5.4."""

    def __init__(self, config: TransformerConfig, add: str = "add"):
        super().__init__()
        self.config, self.add = config, add
        self.norm = Norm(config)
        self.dropout = Dropout(config.residual_dropout, config.dropout_generator)

    def forward(
        self, x: Float[Tensor, "B L D"], sublayer: Callable[[Tensor], Tensor], dropout_key: DropoutKey | None
    ) -> Float[Tensor, "B L D"]:
        place = NORM_PLACEMENTS[self.config.norm_placement]
        x = place(x, sublayer, self.norm, partial(self.dropout, key=dropout_key), RESIDUALS[self.add])
        record(self, "output", x)
        return x
