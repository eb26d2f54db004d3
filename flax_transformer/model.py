"""The encoder-decoder Transformer. Source: Vaswani et al. 2017, "Attention Is All You Need".

Letters: B batch, S source length, T target length, D d_model, V vocabulary. Masks are boolean, True = attend.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..configs.execution import PLAIN, ExecutionConfig
from ..configs.schema import TransformerConfig
from ..configs.summary import describe_model, html_table, text_table
from .attention import CROSS_MASKS, DECODER_MASKS, ENCODER_MASKS, KeysValues, MultiHeadAttention
from .dropout import Cutoff, Dropout, DropoutKey, LayerDrop, Site
from .execution import Executed, run_layers
from .initializers import LINEAR_INITS, drawn
from .inputs import check_dtypes, check_inputs, check_memory
from .layers import Embedding, FeedForward, InputStage, Linear, Norm, RelativePositions, Residual, count_positions
from .module import Buffer, at_least_float32, join_path, named_arrays, record
from .quantization import Quantized, quantize_arrays
from .xla_cpu.maxima import log_softmax, softmax
from .xla_cpu.products import add_bias, product


def encoder_relative_positions(config: TransformerConfig, rngs: nnx.Rngs) -> RelativePositions:
    """The relative positions of the encoder's self-attention, in both directions."""
    return RelativePositions(config, config.num_heads, bidirectional=True, rngs=rngs)


def decoder_relative_positions(config: TransformerConfig, rngs: nnx.Rngs) -> RelativePositions:
    """The relative positions of the decoder's self-attention, to earlier positions only."""
    return RelativePositions(config, config.decoder_num_heads or config.num_heads, bidirectional=False, rngs=rngs)


class EncoderLayer(nnx.Module):
    """Self-attention, then feed-forward, each in a residual connection."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.self_attention = MultiHeadAttention(config, config.num_heads, rngs=rngs)
        self.self_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, config.d_ff, rngs=rngs)
        self.feed_forward_residual = Residual(config)
        self.layerdrop = LayerDrop(config.encoder_layerdrop, config.dropout_generator)
        per_layer = config.relative_positions == "per_layer"
        self.relative_positions = encoder_relative_positions(config, rngs) if per_layer else nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "B S D"],
        mask: Bool[Array, "B 1 S S"],
        distances: Int[Array, "S S"],
        bias: Float[Array, "1 N S S"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B S D"]:
        bias = bias if self.relative_positions is None else self.relative_positions(distances)
        y = self.self_attention_residual(x, lambda y: self.self_attention(y, y, mask, dropout_key, bias), dropout_key)
        y = self.feed_forward_residual(y, lambda y: self.feed_forward(y, dropout_key), dropout_key)
        return self.layerdrop(x, y, dropout_key)


# (number of the layer, keys and values of the new positions) -> keys and values that their self-attention attends to.
# Decoding writes them into its cache and returns the cache; otherwise they are returned unchanged.
UpdateCache = Callable[[int, KeysValues], KeysValues]


class DecoderLayer(nnx.Module):
    """Self-attention, attention to the encoder's output, then feed-forward, each in a residual connection."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        num_heads = config.decoder_num_heads or config.num_heads
        self.self_attention = MultiHeadAttention(config, num_heads, rngs=rngs)
        self.self_attention_residual = Residual(config)
        self.cross_attention = MultiHeadAttention(config, num_heads, rngs=rngs)
        self.cross_attention_residual = Residual(config, config.cross_attention_residual)
        self.feed_forward = FeedForward(config, config.decoder_d_ff or config.d_ff, rngs=rngs)
        self.feed_forward_residual = Residual(config)
        self.layerdrop = LayerDrop(config.decoder_layerdrop, config.dropout_generator)
        per_layer = config.relative_positions == "per_layer"
        self.relative_positions = decoder_relative_positions(config, rngs) if per_layer else nnx.data(None)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: KeysValues,
        self_mask: Bool[Array, "B 1 T L"],
        cross_mask: Bool[Array, "B 1 T S"],
        distances: Int[Array, "T L"],
        bias: Float[Array, "1 N T L"] | None = None,
        dropout_key: DropoutKey | None = None,
        update_cache: Callable[[KeysValues], KeysValues] = lambda new: new,
    ) -> Float[Array, "B T D"]:
        bias = bias if self.relative_positions is None else self.relative_positions(distances)

        def attend_to_self(y: Array) -> Array:
            keys_values = update_cache(self.self_attention.keys_values(y))
            return self.self_attention.attend(y, keys_values, self_mask, dropout_key, bias)

        y = self.self_attention_residual(x, attend_to_self, dropout_key)
        y = self.cross_attention_residual(
            y, lambda y: self.cross_attention.attend(y, memory, cross_mask, dropout_key), dropout_key
        )
        y = self.feed_forward_residual(y, lambda y: self.feed_forward(y, dropout_key), dropout_key)
        return self.layerdrop(x, y, dropout_key)


def key_distances(x: Shaped[Array, "B L ..."]) -> Int[Array, "L L"]:
    """The index of every key minus that of every query, in sentences of this length."""
    indices = jnp.arange(x.shape[1], dtype=jnp.int32)
    return indices[None] - indices[:, None]


class Encoder(Executed):
    """A stack of encoder layers, with optional relative positions and an optional final norm."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        shared = config.relative_positions == "shared"
        self.relative_positions = encoder_relative_positions(config, rngs) if shared else nnx.data(None)
        self.layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(config.num_encoder_layers)])
        self.final_norm = Norm(config) if config.final_norm else nnx.data(None)
        self.final_dropout = Dropout(config.final_dropout, config.dropout_generator)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B 1 S S"], dropout_key: DropoutKey | None = None
    ) -> Float[Array, "B S D"]:
        distances = key_distances(x)
        bias = None if self.relative_positions is None else self.relative_positions(distances)

        def run_layer(layer: EncoderLayer, x: Array) -> Array:
            return layer(x, mask, distances, bias, dropout_key)

        x = run_layers(self.layers, run_layer, x, self.current_execution)
        if self.final_norm is not None:
            x = self.final_norm(x)
        x = self.final_dropout(x, dropout_key)
        record(self, "output", x)
        return x


class Decoder(Executed):
    """A stack of decoder layers, with optional relative positions and an optional final norm."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        shared = config.relative_positions == "shared"
        self.relative_positions = decoder_relative_positions(config, rngs) if shared else nnx.data(None)
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_decoder_layers)])
        self.final_norm = Norm(config) if config.final_norm else nnx.data(None)
        self.final_dropout = Dropout(config.final_dropout, config.dropout_generator)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        memory: Sequence[KeysValues] | Float[Array, "B S D"],
        self_mask: Bool[Array, "B 1 T L"],
        cross_mask: Bool[Array, "B 1 T S"],
        dropout_key: DropoutKey | None = None,
        update_cache: UpdateCache = lambda layer, new: new,
        distances: Int[Array, "T L"] | None = None,
    ) -> Float[Array, "B T D"]:
        distances = key_distances(x) if distances is None else distances
        bias = None if self.relative_positions is None else self.relative_positions(distances)
        if isinstance(memory, Sequence):
            for i, layer in enumerate(self.layers):
                x = layer(x, memory[i], self_mask, cross_mask, distances, bias, dropout_key, partial(update_cache, i))
        else:

            def run_layer(layer: DecoderLayer, x: Array) -> Array:
                keys_values = layer.cross_attention.keys_values(memory)
                return layer(x, keys_values, self_mask, cross_mask, distances, bias, dropout_key)

            x = run_layers(self.layers, run_layer, x, self.current_execution)
        if self.final_norm is not None:
            x = self.final_norm(x)
        x = self.final_dropout(x, dropout_key)
        record(self, "output", x)
        return x

    def keys_values(self, memory: Float[Array, "B S D"]) -> list[KeysValues]:
        """The cross-attention keys and values of each layer, shared by all target positions."""
        return [layer.cross_attention.keys_values(memory) for layer in self.layers]


LOGIT_SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda d_model: 1.0,
    "rsqrt_d_model": lambda d_model: d_model**-0.5,
}
OUTPUT_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "none": lambda logits: logits,
    "log_softmax": log_softmax,
    "softmax": softmax,  # leftover, as published: its cross entropy stays within one nat of log V
}


class Output(nnx.Module):
    """x W · scale + b, where W is a separate matrix or the transposed target embedding.

    Source: Vaswani et al. 2017, section 3.4; Press and Wolf 2017 for weight tying.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        vocab, dtype = config.tgt_vocab_size, jnp.dtype(config.param_dtype)
        self.proj = (
            nnx.data(None) if config.tied_output else Linear(config, config.d_model, vocab, False, rngs, role="logits")
        )
        self.bias = nnx.data(None)
        if config.output_bias == "learned":
            _, bias_init = LINEAR_INITS[config.linear_init](config.d_model, config.d_model, 1, "logits")
            self.bias = nnx.Param(drawn(bias_init, rngs, (vocab,), dtype))
        elif config.output_bias == "stored":
            self.bias = Buffer(jnp.zeros(vocab, dtype))

    def __call__(self, x: Float[Array, "B T D"], embedding: Float[Array, "V D"] | Quantized) -> Float[Array, "B T V"]:
        logits = product("BTD,VD->BTV", x, embedding) if self.proj is None else self.proj(x)
        logits = at_least_float32(logits) * LOGIT_SCALES[self.config.logit_scale](self.config.d_model)
        if self.bias is not None:
            logits = add_bias(logits, self.bias[...])
        return OUTPUT_ACTIVATIONS[self.config.output_activation](logits).astype(x.dtype)


# (embedded target tokens (B, T, D), mask (T,) of first tokens) -> decoder inputs
DECODER_STARTS: dict[str, Callable[[Array, Array], Array]] = {
    "token": lambda x, first: x,
    "zero_embedding": lambda x, first: jnp.where(first[:, None], 0, x),
}


class Transformer(nnx.Module):
    """Logits of the next target token at every target position.

    Raises:
        ConfigError: the config selects float64, which is disabled in JAX.
    Source: Vaswani et al. 2017, figure 1.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs, execution: ExecutionConfig = PLAIN):
        check_dtypes(config)
        self.config = config
        self.src_embedding = Embedding(config, config.src_vocab_size, rngs=rngs)
        shared = config.shared_embeddings
        self.tgt_embedding = nnx.data(None) if shared else Embedding(config, config.tgt_vocab_size, rngs=rngs)
        self.src_cutoff, self.tgt_cutoff = Cutoff(config), Cutoff(config)
        self.src_input = InputStage(config, rngs=rngs)
        self.tgt_input = InputStage(config, rngs=rngs)
        source, target = self.src_input.positions, self.tgt_input.positions
        if config.positions == "stored" and source is not None and target is not None:
            table = source.table.get_value()
            if isinstance(table, jax.Array):  # a copy, because a buffer can be donated only once
                target.table[...] = jnp.copy(table)
        self.encoder = Encoder(config, rngs=rngs)
        self.decoder = Decoder(config, rngs=rngs)
        self.output = Output(config, rngs=rngs)
        for path, module in nnx.iter_modules(self):
            if isinstance(module, Site):
                module.site = zlib.crc32(join_path(path).encode())
            if isinstance(module, Executed):
                module.execution = execution

    @classmethod
    def from_arrays(
        cls, config: TransformerConfig, arrays: Mapping[str, Any], execution: ExecutionConfig = PLAIN
    ) -> "Transformer":
        """A model with these parameters and buffers by name, as returned by `named_arrays`; draws no random numbers.

        Raises:
            ValueError: names are missing or unknown. `convert` checks shapes and dtypes.
        """
        check_dtypes(config)
        graphdef, variables = _structure(config, execution)
        if mismatch := sorted(set(variables) ^ set(arrays)):
            raise ValueError(f"arrays: {len(mismatch)} names are missing or not the model's: {', '.join(mismatch)}")
        flat = [(path, variable.replace(arrays[name])) for name, (path, variable) in variables.items()]
        return nnx.merge(graphdef, nnx.from_flat_state(flat))

    @classmethod
    def abstract(cls, config: TransformerConfig) -> "Transformer":
        """A model whose arrays are shapes and dtypes (`jax.ShapeDtypeStruct`). Raises: ValueError, as the model."""
        check_dtypes(config)
        graphdef, variables = _structure(config, PLAIN)
        return nnx.merge(graphdef, nnx.from_flat_state(variables.values()))

    def _summary(self) -> dict[str, str]:
        arrays = named_arrays(self, nnx.Param).values()
        shapes = [(array.values if isinstance(array, Quantized) else array).shape for array in arrays]
        return describe_model(self.config, sum(map(math.prod, shapes)))

    def __repr__(self) -> str:
        return text_table("flax_transformer.Transformer", self._summary())

    __str__ = __repr__  # instead of nnx's listing of every array

    def _repr_html_(self) -> str:
        return html_table("flax_transformer.Transformer", self._summary())

    def quantized(self) -> "Transformer":
        """The same model with products of 8-bit integers, for `generate` and `score`; it cannot be trained or saved.

        Weights have one scale per output, and activations one per position.
        """
        embedding = "src_embedding" if self.config.shared_embeddings else "tgt_embedding"
        tied = f"{embedding}.embedding" if self.config.tied_output else None
        return Transformer.from_arrays(self.config, quantize_arrays(named_arrays(self), tied))

    def __call__(
        self,
        src_tokens: Int[Array, "B S"],
        tgt_tokens: Int[Array, "B T"],
        src_mask: Bool[Array, "B S"] | None = None,
        tgt_mask: Bool[Array, "B T"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits (B, T, V). The default source mask is `src_tokens != pad_id`; by default no target is masked.

        Raises:
            ValueError: shapes do not fit, a length is above `max_length`, or an id is outside the vocabulary. Ids
                cannot be checked inside `jax.jit`, where an id outside the vocabulary makes its sentence NaN.
        """
        memory = self.encode(src_tokens, src_mask, dropout_key)
        return self.decode(tgt_tokens, memory, self.source_mask(src_tokens, src_mask), tgt_mask, dropout_key)

    def source_mask(self, src_tokens: Int[Array, "B S"], src_mask: Bool[Array, "B S"] | None) -> Bool[Array, "B S"]:
        """The mask of source tokens that may be attended to: `src_mask`, by default all but padding."""
        return src_tokens != self.config.pad_id if src_mask is None else src_mask

    def encode(
        self,
        src_tokens: Int[Array, "B S"],
        src_mask: Bool[Array, "B S"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B S D"]:
        """The encoder's output. Raises: ValueError, as the whole model."""
        check_inputs("src", src_tokens, src_mask, self.config.src_vocab_size, self.config.max_length, dropout_key)
        mask = ENCODER_MASKS[self.config.encoder_mask](self.source_mask(src_tokens, src_mask), src_tokens.shape[1])
        record(self, "encoder_mask", mask)
        x = self.src_cutoff(self.src_embedding(src_tokens), src_tokens, dropout_key)
        x = self.src_input(x, count_positions(self.config, src_tokens), dropout_key)
        return self.encoder(x, mask, dropout_key)

    def decode(
        self,
        tgt_tokens: Int[Array, "B T"],
        memory: Float[Array, "B S D"],
        src_mask: Bool[Array, "B S"],
        tgt_mask: Bool[Array, "B T"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits (B, T, V) from the encoder's output and the source mask. Raises: ValueError, as the whole model."""
        config = self.config
        check_inputs("tgt", tgt_tokens, tgt_mask, config.tgt_vocab_size, config.max_length, dropout_key)
        check_memory(tgt_tokens, memory, src_mask)
        self_mask = DECODER_MASKS[config.decoder_mask](tgt_tokens, tgt_mask, config.pad_id, dropout_key is not None)
        cross_mask = CROSS_MASKS[config.cross_mask](src_mask, tgt_tokens.shape[1])
        record(self, "decoder_mask", self_mask)
        record(self, "cross_mask", cross_mask)
        positions, first = count_positions(config, tgt_tokens), jnp.arange(tgt_tokens.shape[1]) == 0
        # Unless the layers are plain, each computes its keys and values itself, so that remat and scan include them.
        plain = self.decoder.current_execution.plain_layers
        keys_values = self.decoder.keys_values(memory) if plain else memory
        return self.next_logits(tgt_tokens, positions, first, keys_values, self_mask, cross_mask, dropout_key)

    def next_logits(
        self,
        tgt_tokens: Int[Array, "B T"],
        positions: Int[Array, "... T"],
        first: Bool[Array, " T"],
        memory: Sequence[KeysValues] | Float[Array, "B S D"],
        self_mask: Bool[Array, "B 1 T L"],
        cross_mask: Bool[Array, "B 1 T S"],
        dropout_key: DropoutKey | None = None,
        update_cache: UpdateCache = lambda layer, new: new,
        distances: Int[Array, "T L"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Logits of tokens at these positions, without input checks; `first` marks tokens that start a sentence.

        `memory`: the keys and values of each layer, or the encoder's output.
        `distances` are the indices of the self-attention's keys minus those of the tokens, if a cache adds keys.
        """
        embedding = self.src_embedding if self.tgt_embedding is None else self.tgt_embedding
        x = self.tgt_cutoff(embedding(tgt_tokens), tgt_tokens, dropout_key)
        x = DECODER_STARTS[self.config.decoder_start](x, first)
        x = self.tgt_input(x, positions, dropout_key)
        x = self.decoder(x, memory, self_mask, cross_mask, dropout_key, update_cache, distances)
        logits = self.output(x, embedding.embedding.get_value())
        record(self, "logits", logits)
        return logits


@lru_cache(maxsize=32)
def _structure(
    config: TransformerConfig, execution: ExecutionConfig
) -> tuple[Any, dict[str, tuple[tuple[Any, ...], nnx.Variable]]]:
    """The graph definition of a model, and by name the path and the abstract value of each of its variables."""

    rngs: Any = nnx.Rngs(0)
    rngs.params = lambda: None  # nothing is drawn
    graphdef, state = nnx.split(Transformer(config, rngs=rngs, execution=execution))
    state = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), state)
    return graphdef, {join_path(path): (path, variable) for path, variable in nnx.to_flat_state(state)}
