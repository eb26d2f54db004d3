"""The encoder-decoder Transformer. Source: Vaswani et al. 2017, "Attention Is All You Need".

Letters: B batch, S source length, T target length, D d_model, V vocabulary. Masks are boolean, True = attend.
"""

import warnings
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor, nn

from ..configs.schema import TransformerConfig
from ..configs.summary import describe_model, html_table, text_table
from .attention import CROSS_MASKS, DECODER_MASKS, ENCODER_MASKS, MultiHeadAttention
from .dropout import Cutoff, Dropout, DropoutKey, LayerDrop, Site
from .initializers import BIAS_INITS
from .inputs import check_inputs, check_memory
from .layers import Embedding, FeedForward, InputStage, Linear, Norm, RelativePositions, Residual, count_positions
from .module import at_least_float32, dtype_of, record


def encoder_relative_positions(config: TransformerConfig, generator: Generator | None) -> RelativePositions:
    """The relative positions of the encoder's self-attention, in both directions."""
    return RelativePositions(config, config.num_heads, bidirectional=True, generator=generator)


def decoder_relative_positions(config: TransformerConfig, generator: Generator | None) -> RelativePositions:
    """The relative positions of the decoder's self-attention, to earlier positions only."""
    num_heads = config.decoder_num_heads or config.num_heads
    return RelativePositions(config, num_heads, bidirectional=False, generator=generator)


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward, each in a residual connection."""

    def __init__(self, config: TransformerConfig, generator: Generator | None = None):
        super().__init__()
        self.self_attention = MultiHeadAttention(config, config.num_heads, generator)
        self.self_attention_residual = Residual(config)
        self.feed_forward = FeedForward(config, config.d_ff, generator)
        self.feed_forward_residual = Residual(config)
        self.layerdrop = LayerDrop(config.encoder_layerdrop, config.dropout_generator)
        per_layer = config.relative_positions == "per_layer"
        self.relative_positions = encoder_relative_positions(config, generator) if per_layer else None

    def forward(
        self,
        x: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "B 1 S S"],
        distances: Int[Tensor, "S S"],
        bias: Float[Tensor, "1 N S S"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Tensor, "B S D"]:
        bias = bias if self.relative_positions is None else self.relative_positions(distances)
        y = self.self_attention_residual(x, lambda y: self.self_attention(y, y, mask, dropout_key, bias), dropout_key)
        y = self.feed_forward_residual(y, lambda y: self.feed_forward(y, dropout_key), dropout_key)
        return self.layerdrop(x, y, dropout_key)


class DecoderLayer(nn.Module):
    """Self-attention, attention to the encoder's output, then feed-forward, each in a residual connection."""

    def __init__(self, config: TransformerConfig, generator: Generator | None = None):
        super().__init__()
        num_heads = config.decoder_num_heads or config.num_heads
        self.self_attention = MultiHeadAttention(config, num_heads, generator)
        self.self_attention_residual = Residual(config)
        self.cross_attention = MultiHeadAttention(config, num_heads, generator)
        self.cross_attention_residual = Residual(config, config.cross_attention_residual)
        self.feed_forward = FeedForward(config, config.decoder_d_ff or config.d_ff, generator)
        self.feed_forward_residual = Residual(config)
        self.layerdrop = LayerDrop(config.decoder_layerdrop, config.dropout_generator)
        per_layer = config.relative_positions == "per_layer"
        self.relative_positions = decoder_relative_positions(config, generator) if per_layer else None

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        self_mask: Bool[Tensor, "B 1 T T"],
        cross_mask: Bool[Tensor, "B 1 T S"],
        distances: Int[Tensor, "T T"],
        bias: Float[Tensor, "1 N T T"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Tensor, "B T D"]:
        bias = bias if self.relative_positions is None else self.relative_positions(distances)
        y = self.self_attention_residual(
            x, lambda y: self.self_attention(y, y, self_mask, dropout_key, bias), dropout_key
        )
        y = self.cross_attention_residual(
            y, lambda y: self.cross_attention(y, memory, cross_mask, dropout_key), dropout_key
        )
        y = self.feed_forward_residual(y, lambda y: self.feed_forward(y, dropout_key), dropout_key)
        return self.layerdrop(x, y, dropout_key)


def key_distances(x: Shaped[Tensor, "B L ..."]) -> Int[Tensor, "L L"]:
    """The index of every key minus that of every query, in sentences of this length."""
    indices = torch.arange(x.shape[1], device=x.device)
    return indices[None] - indices[:, None]


class Encoder(nn.Module):
    """A stack of encoder layers, with optional relative positions and an optional final norm."""

    def __init__(self, config: TransformerConfig, generator: Generator | None = None):
        super().__init__()
        shared = config.relative_positions == "shared"
        self.relative_positions = encoder_relative_positions(config, generator) if shared else None
        self.layers = nn.ModuleList([EncoderLayer(config, generator) for _ in range(config.num_encoder_layers)])
        self.final_norm = Norm(config) if config.final_norm else None
        self.final_dropout = Dropout(config.final_dropout, config.dropout_generator)

    def forward(
        self, x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 S S"], dropout_key: DropoutKey | None = None
    ) -> Float[Tensor, "B S D"]:
        distances = key_distances(x)
        bias = None if self.relative_positions is None else self.relative_positions(distances)
        for layer in self.layers:
            x = layer(x, mask, distances, bias, dropout_key)
        if self.final_norm is not None:
            x = self.final_norm(x)
        x = self.final_dropout(x, dropout_key)
        record(self, "output", x)
        return x


class Decoder(nn.Module):
    """A stack of decoder layers, with optional relative positions and an optional final norm."""

    def __init__(self, config: TransformerConfig, generator: Generator | None = None):
        super().__init__()
        shared = config.relative_positions == "shared"
        self.relative_positions = decoder_relative_positions(config, generator) if shared else None
        self.layers = nn.ModuleList([DecoderLayer(config, generator) for _ in range(config.num_decoder_layers)])
        self.final_norm = Norm(config) if config.final_norm else None
        self.final_dropout = Dropout(config.final_dropout, config.dropout_generator)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        memory: Float[Tensor, "B S D"],
        self_mask: Bool[Tensor, "B 1 T T"],
        cross_mask: Bool[Tensor, "B 1 T S"],
        dropout_key: DropoutKey | None = None,
    ) -> Float[Tensor, "B T D"]:
        distances = key_distances(x)
        bias = None if self.relative_positions is None else self.relative_positions(distances)
        for layer in self.layers:
            x = layer(x, memory, self_mask, cross_mask, distances, bias, dropout_key)
        if self.final_norm is not None:
            x = self.final_norm(x)
        x = self.final_dropout(x, dropout_key)
        record(self, "output", x)
        return x


LOGIT_SCALES: dict[str, Callable[[int], float]] = {
    "none": lambda d_model: 1.0,
    "rsqrt_d_model": lambda d_model: d_model**-0.5,
}
OUTPUT_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda logits: logits,
    "log_softmax": partial(torch.log_softmax, dim=-1),
    # leftover, as published: its cross entropy stays within one nat of log V
    "softmax": partial(torch.softmax, dim=-1),
}


class Output(nn.Module):
    """x W · scale + b, where W is a separate matrix or the transposed target embedding.

    Source: Vaswani et al. 2017, section 3.4; Press and Wolf 2017 for weight tying.
    """

    def __init__(self, config: TransformerConfig, generator: Generator | None = None):
        super().__init__()
        self.config = config
        vocab, dtype = config.tgt_vocab_size, dtype_of(config.param_dtype)
        self.proj = (
            None if config.tied_output else Linear(config, config.d_model, vocab, False, generator, role="logits")
        )
        bias = None
        if config.output_bias == "learned":
            bias = nn.Parameter(torch.zeros(vocab, dtype=dtype))
            if config.linear_init in BIAS_INITS:
                BIAS_INITS[config.linear_init](bias, config.d_model, generator)
        elif config.output_bias == "stored":
            bias = nn.Buffer(torch.zeros(vocab, dtype=dtype))
        self.bias = bias

    def forward(self, x: Float[Tensor, "B T D"], embedding: Float[Tensor, "V D"]) -> Float[Tensor, "B T V"]:
        logits = x @ embedding.to(x.dtype).T if self.proj is None else self.proj(x)
        logits = at_least_float32(logits) * LOGIT_SCALES[self.config.logit_scale](self.config.d_model)
        if self.bias is not None:
            logits = logits + self.bias
        return OUTPUT_ACTIVATIONS[self.config.output_activation](logits).to(x.dtype)


# (embedded target tokens (B, T, D), mask (T,) of first tokens) -> decoder inputs
DECODER_STARTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda x, first: x,
    "zero_embedding": lambda x, first: torch.where(first[:, None], 0, x),
}


class Transformer(nn.Module):
    """Logits of the next target token at every target position. Source: Vaswani et al. 2017, figure 1."""

    def __init__(self, config: TransformerConfig, generator: Generator | None = None):
        super().__init__()
        self.config = config
        self.src_embedding = Embedding(config, config.src_vocab_size, generator)
        shared = config.shared_embeddings
        self.tgt_embedding = None if shared else Embedding(config, config.tgt_vocab_size, generator)
        self.src_cutoff, self.tgt_cutoff = Cutoff(config), Cutoff(config)
        self.src_input = InputStage(config, generator)
        self.tgt_input = InputStage(config, generator)
        source, target = self.src_input.positions, self.tgt_input.positions
        if config.positions == "stored" and source is not None and target is not None:
            target.table.copy_(source.table)
        self.encoder = Encoder(config, generator)
        self.decoder = Decoder(config, generator)
        self.output = Output(config, generator)
        for path, module in self.named_modules():
            if isinstance(module, Site):
                module.site = zlib.crc32(path.encode())
        self._warns = False  # whether the next forward pass without a dropout key warns

    @classmethod
    def from_state_dict(cls, config: TransformerConfig, state_dict: Mapping[str, Any]) -> "Transformer":
        """A model that shares memory with these tensors; draws no random numbers.

        `convert` checks names, shapes and dtypes first.
        """
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(state_dict, assign=True)
        return model

    def _summary(self) -> dict[str, str]:
        return describe_model(self.config, sum(parameter.numel() for parameter in self.parameters()))

    def __repr__(self) -> str:
        return text_table("torch_reference.Transformer", self._summary())

    def _repr_html_(self) -> str:
        return html_table("torch_reference.Transformer", self._summary())

    def train(self, mode: bool = True) -> "Transformer":
        """As `nn.Module.train`. Only a dropout key switches dropout on; the first forward pass without one warns."""
        self._warns = mode and any(isinstance(module, Site) and module.rate > 0 for module in self.modules())
        return super().train(mode)

    def forward(
        self,
        src_tokens: Int[Tensor, "B S"],
        tgt_tokens: Int[Tensor, "B T"],
        src_mask: Bool[Tensor, "B S"] | None = None,
        tgt_mask: Bool[Tensor, "B T"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits (B, T, V). The default source mask is `src_tokens != pad_id`; by default no target is masked.

        Raises:
            ValueError: shapes do not fit, a length is above `max_length`, or an id is outside the vocabulary.
        """
        if self._warns:
            self._warns = False
            if dropout_key is None:
                warnings.warn(
                    "dropout is off: train() does not switch it on; call the model with "
                    "dropout_key=torch_reference.DropoutKey(seed, update, rows)",
                    stacklevel=4,  # the line that calls the model, above two frames of nn.Module
                )
        memory = self.encode(src_tokens, src_mask, dropout_key)
        return self.decode(tgt_tokens, memory, self.source_mask(src_tokens, src_mask), tgt_mask, dropout_key)

    def source_mask(self, src_tokens: Int[Tensor, "B S"], src_mask: Bool[Tensor, "B S"] | None) -> Bool[Tensor, "B S"]:
        """The mask of source tokens that may be attended to: `src_mask`, by default all but padding."""
        return src_tokens != self.config.pad_id if src_mask is None else src_mask

    def encode(
        self,
        src_tokens: Int[Tensor, "B S"],
        src_mask: Bool[Tensor, "B S"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Tensor, "B S D"]:
        """The encoder's output. Raises: ValueError, as the whole model."""
        check_inputs("src", src_tokens, src_mask, self.config.src_vocab_size, self.config.max_length, dropout_key)
        mask = ENCODER_MASKS[self.config.encoder_mask](self.source_mask(src_tokens, src_mask), src_tokens.shape[1])
        record(self, "encoder_mask", mask)
        x = self.src_cutoff(self.src_embedding(src_tokens), src_tokens, dropout_key)
        x = self.src_input(x, count_positions(self.config, src_tokens), dropout_key)
        return self.encoder(x, mask, dropout_key)

    def decode(
        self,
        tgt_tokens: Int[Tensor, "B T"],
        memory: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "B S"],
        tgt_mask: Bool[Tensor, "B T"] | None = None,
        dropout_key: DropoutKey | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits (B, T, V) from the encoder's output and the source mask. Raises: ValueError, as the whole model."""
        config = self.config
        check_inputs("tgt", tgt_tokens, tgt_mask, config.tgt_vocab_size, config.max_length, dropout_key)
        check_memory(tgt_tokens, memory, src_mask)
        self_mask = DECODER_MASKS[config.decoder_mask](tgt_tokens, tgt_mask, config.pad_id, dropout_key is not None)
        cross_mask = CROSS_MASKS[config.cross_mask](src_mask, tgt_tokens.shape[1])
        record(self, "decoder_mask", self_mask)
        record(self, "cross_mask", cross_mask)
        embedding = self.src_embedding if self.tgt_embedding is None else self.tgt_embedding
        first = torch.arange(tgt_tokens.shape[1], device=tgt_tokens.device) == 0
        x = self.tgt_cutoff(embedding(tgt_tokens), tgt_tokens, dropout_key)
        x = DECODER_STARTS[config.decoder_start](x, first)
        x = self.tgt_input(x, count_positions(config, tgt_tokens), dropout_key)
        logits = self.output(self.decoder(x, memory, self_mask, cross_mask, dropout_key), embedding.weight)
        record(self, "logits", logits)
        return logits
