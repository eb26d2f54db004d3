"""The model config that both frameworks share.

Each choice is a named value of a `Literal` type below. `flax_transformer` and `torch_reference` map these names to
functions, in tables with the same keys. A new behavior is a new value, never a new branch in a shared formula.
Checkpoints store this schema and its version, so a field is never renamed.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from ..backend.errors import ConfigError
from .json_text import parse_json
from .registry import PRESETS, PUBLISHED
from .summary import Described
from .validation import check_field_types

SCHEMA_VERSION = 1

NormPlacement = Literal["pre", "post"]
Norm = Literal["layer_norm", "rms_norm", "sample_std_norm", "layer_norm_over_length"]
EmbeddingNorm = Literal["none", "before_dropout", "after_dropout"]
Positions = Literal["sinusoidal_interleaved", "sinusoidal_half", "sinusoidal_half_t2t", "learned", "stored", "none"]
PositionCounting = Literal["all", "non_padding"]
RelativePositions = Literal["none", "shared", "per_layer"]
EmbeddingScale = Literal["none", "sqrt_d_model"]
EmbeddingPadding = Literal["trained", "frozen"]
DecoderStart = Literal["token", "zero_embedding"]
OutputBias = Literal["none", "learned", "stored"]
LogitScale = Literal["none", "rsqrt_d_model"]
OutputActivation = Literal["none", "log_softmax", "softmax"]
ScoreScaling = Literal["product", "query", "none"]
EncoderMask = Literal["source", "source_and_query"]
DecoderMask = Literal["causal", "causal_and_padding", "causal_padding_and_query", "causal_in_training"]
CrossMask = Literal["source", "encoder"]
CrossAttentionResidual = Literal["add", "query_only"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
DropoutGenerator = Literal["counter", "threefry"]
LinearInit = Literal[
    "xavier_uniform",
    "xavier_uniform_torch_bias",
    "xavier_uniform_per_head",
    "lecun_normal",
    "normal_rsqrt_d_model",
    "mesh_tensorflow",
    "torch_default",
]
EmbeddingInit = Literal[
    "normal_rsqrt_d_model", "xavier_uniform", "xavier_uniform_padding_idx", "torch_default", "torch_padding_idx"
]
DType = Literal["float64", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True, repr=False)
class TransformerConfig(Described):
    """The complete definition of an encoder-decoder Transformer: models with equal configs are the same function.

    Raises:
        ConfigError: a field has an invalid value; names field, value and what is allowed.
    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3; each field's comment states what it changes.
    """

    # Sizes. Widths are numbers of features, lengths are numbers of tokens.
    src_vocab_size: int
    tgt_vocab_size: int
    d_model: int = 512
    num_heads: int = 8
    decoder_num_heads: int | None = None  # heads in the decoder; None: num_heads
    head_dim: int | None = None  # width of one query/key head; None: d_model / heads
    v_head_dim: int | None = None  # width of one value head; None: the query/key width
    d_ff: int = 2048
    decoder_d_ff: int | None = None  # inner width in the decoder; None: d_ff
    num_encoder_layers: int = 6
    num_decoder_layers: int = 6
    max_length: int = 512  # longest source or target

    # Norms.
    norm_placement: NormPlacement = "post"  # pre: x + f(norm(x)); post: norm(x + f(x))
    norm: Norm = "layer_norm"
    norm_eps: float = 1e-5
    norm_scale: bool = True  # a learned gain
    norm_bias: bool = True  # a learned shift
    final_norm: bool = False  # a final norm after the encoder's and the decoder's last layer
    embedding_norm: EmbeddingNorm = "none"

    # Embeddings and positions.
    shared_embeddings: bool = False  # one table for source and target
    embedding_scale: EmbeddingScale = "sqrt_d_model"
    embedding_padding: EmbeddingPadding = "trained"  # frozen: the pad id's embedding gets no gradient from look-ups
    positions: Positions = "sinusoidal_interleaved"  # stored: a fixed table loaded with the weights
    position_counting: PositionCounting = "all"  # tokens that advance the position; non_padding: padding does not
    position_offset: int = 0  # table row of the first token
    position_table_length: int | None = None  # number of rows; None: max_length + position_offset
    relative_positions: RelativePositions = "none"  # learned biases of self-attention; shared: one table per stack
    relative_position_buckets: int = 32  # number of biases per head
    relative_position_max_distance: int = 128  # greater distances share a bias
    decoder_start: DecoderStart = "token"  # zero_embedding: the first target token's embedding is zero

    # Output.
    tied_output: bool = False  # the output projection is the target embedding table
    output_bias: OutputBias = "learned"  # stored: a fixed bias loaded with the weights
    logit_scale: LogitScale = "none"
    output_activation: OutputActivation = "none"  # applied to the logits

    # Attention.
    q_proj_bias: bool = True
    k_proj_bias: bool = True
    v_proj_bias: bool = True
    out_proj_bias: bool = True
    score_scaling: ScoreScaling = "product"  # divide (q·k) by sqrt(head_dim), or q before the product, or neither
    mask_value: float | Literal["exact"] = "exact"  # exact: masked weights are 0; a number: the score of a masked key
    encoder_mask: EncoderMask = "source"  # source_and_query: padding queries are masked too
    decoder_mask: DecoderMask = "causal"  # causal_and_padding: padding keys too; causal_in_training: not in evaluation
    cross_mask: CrossMask = "source"  # encoder: the (S, S) mask of source_and_query; requires T = S
    cross_attention_residual: CrossAttentionResidual = "add"  # query_only: the attention's output is discarded

    # Feed-forward.
    activation: Activation = "relu"
    ffn_bias: bool = True
    ffn_gate: bool = False  # the activation of a second projection multiplies the inner one

    # Dropout rates, one per site.
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.0  # on attention weights
    ffn_dropout: float = 0.0  # inside the feed-forward network, after the activation
    residual_dropout: float = 0.1  # on the output of each sublayer
    final_dropout: float = 0.0  # on the output of each stack
    encoder_layerdrop: float = 0.0  # probability that a layer is skipped for the whole batch
    decoder_layerdrop: float = 0.0
    dropout_generator: DropoutGenerator = "counter"  # counter: shared by both frameworks; threefry: JAX's generator

    # Initialization.
    linear_init: LinearInit = "xavier_uniform"
    embedding_init: EmbeddingInit = "normal_rsqrt_d_model"

    # Special token ids.
    pad_id: int = 0
    bos_id: int | None = 1
    eos_id: int = 2
    decoder_start_id: int | None = 1  # None: decoding raises until it is set
    forced_bos_id: int | None = None  # first token that decoding emits
    forced_eos_id: int | None = None  # token that decoding emits at max_length; None: eos_id

    # Dtypes.
    param_dtype: DType = "float32"
    compute_dtype: DType = "float32"

    def __post_init__(self) -> None:
        check_field_types(self)
        _check_ranges(self)
        _check_combinations(self)

    @property
    def table_length(self) -> int:
        """The number of rows of a position table."""
        return self.position_table_length or self.max_length + self.position_offset

    def query_key_width(self, num_heads: int) -> int:
        """The width of one query or key head in an attention of `num_heads` heads."""
        return self.head_dim or self.d_model // num_heads

    def value_width(self, num_heads: int) -> int:
        """The width of one value head in an attention of `num_heads` heads."""
        return self.v_head_dim or self.query_key_width(num_heads)

    def without_dropout(self) -> "TransformerConfig":
        """A copy in which no rate of dropout or layer drop is above 0."""
        return self.replace(**dict.fromkeys(_RATES, 0.0))

    def replace(self, **changes: Any) -> "TransformerConfig":
        """A copy with some fields changed, validated again."""
        unknown = sorted(set(changes) - {f.name for f in fields(self)})
        if unknown:
            raise ConfigError(f"TransformerConfig has no field {', '.join(map(repr, unknown))}")
        return replace(self, **changes)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> "TransformerConfig":
        """One of the ready-made models `tiny`, `small`, `base`, `big`, `t5_small`, with fields changed.

        Raises:
            ConfigError: there is no such preset, or a value is invalid.
        """
        return PRESETS.find("preset", name).replace(**changes)

    @classmethod
    def published(cls, name: str, *, as_published: bool, **changes: Any) -> "TransformerConfig":
        """The model of a published system, as published or with its mistakes repaired, with fields changed.

        Raises:
            ConfigError: there is no such system, or a value is invalid.
        """
        recipe = PUBLISHED.find("published", name)
        return recipe.model.replace(**{**({} if as_published else recipe.repairs), **changes})

    def to_dict(self) -> dict[str, Any]:
        """The config as JSON-serializable values, with the schema version."""
        return {"schema_version": SCHEMA_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TransformerConfig":
        """The config of `to_dict`'s values. Absent fields have their defaults.

        Raises:
            ConfigError: the version is missing or unknown, a field is unknown or missing, or a value is wrong.
        """
        values = dict(values)
        version = values.pop("schema_version", None)
        if type(version) is not int or version != SCHEMA_VERSION:
            raise ConfigError(f"schema_version={version!r}: this twinax reads version {SCHEMA_VERSION}")
        names = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - names):
            raise ConfigError(f"unknown config fields {', '.join(unknown)}; the fields are {', '.join(sorted(names))}")
        if missing := sorted({"src_vocab_size", "tgt_vocab_size"} - set(values)):
            raise ConfigError(f"config fields {', '.join(missing)} are missing and have no default")
        return cls(**values)

    def to_json(self) -> str:
        """The config as a JSON string."""
        return json.dumps(self.to_dict(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "TransformerConfig":
        """The config of `to_json`'s string. Raises: ConfigError, as `from_dict`, or if it is not a JSON object."""
        try:
            values = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"the config is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"the config is a JSON {type(values).__name__}, not an object")
        return cls.from_dict(values)


_AT_LEAST_ONE = (
    "src_vocab_size",
    "tgt_vocab_size",
    "d_model",
    "num_heads",
    "decoder_num_heads",
    "head_dim",
    "v_head_dim",
    "d_ff",
    "decoder_d_ff",
    "num_encoder_layers",
    "num_decoder_layers",
    "max_length",
    "position_table_length",
    "relative_position_buckets",
    "relative_position_max_distance",
)
_IDS = ("pad_id", "bos_id", "eos_id", "decoder_start_id", "forced_bos_id", "forced_eos_id")
_RATES = (
    "embedding_dropout",
    "attention_dropout",
    "ffn_dropout",
    "residual_dropout",
    "final_dropout",
    "encoder_layerdrop",
    "decoder_layerdrop",
)
_LOWEST_FLOAT32 = -(2 - 2**-23) * 2.0**127


def _check_ranges(config: TransformerConfig) -> None:
    for minimum, names in ((1, _AT_LEAST_ONE), (0, ("position_offset", *_IDS))):
        for name in names:
            value = getattr(config, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name}={value!r}: must be at least {minimum}")
    for name in _RATES:
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value!r}: a dropout rate must be at least 0 and below 1")
    if not 0 < config.norm_eps < math.inf:
        raise ConfigError(f"norm_eps={config.norm_eps!r}: must be a finite number above 0")
    if config.mask_value != "exact" and not _LOWEST_FLOAT32 <= config.mask_value < 0:
        raise ConfigError(
            f"mask_value={config.mask_value!r}: must be 'exact' or a negative number in the range of float32"
        )


def _check_combinations(config: TransformerConfig) -> None:
    for name in ("num_heads", "decoder_num_heads"):
        heads = getattr(config, name)
        if heads and config.head_dim is None and config.d_model % heads:
            raise ConfigError(
                f"{name}={heads}: d_model={config.d_model} is not divisible by it; choose a divisor or set head_dim"
            )
    if config.shared_embeddings and config.src_vocab_size != config.tgt_vocab_size:
        raise ConfigError(
            f"shared_embeddings=True: needs equal vocabularies, "
            f"but src_vocab_size={config.src_vocab_size} and tgt_vocab_size={config.tgt_vocab_size}"
        )
    for name in _IDS:
        value = getattr(config, name)
        if value is not None and value >= config.tgt_vocab_size:
            raise ConfigError(f"{name}={value}: must be below tgt_vocab_size={config.tgt_vocab_size}")
    if config.pad_id >= config.src_vocab_size:
        raise ConfigError(f"pad_id={config.pad_id}: must be below src_vocab_size={config.src_vocab_size}")
    minimum = config.max_length + config.position_offset
    if config.positions != "none" and config.table_length < minimum:
        raise ConfigError(
            f"position_table_length={config.position_table_length}: must be at least {minimum}, "
            "which is max_length + position_offset"
        )
    buckets, max_distance = config.relative_position_buckets, config.relative_position_max_distance
    if config.relative_positions != "none" and buckets < 4:
        raise ConfigError(f"relative_position_buckets={buckets}: must be at least 4, 2 for each side of a token")
    if config.relative_positions != "none" and max_distance <= buckets // 2:
        raise ConfigError(
            f"relative_position_max_distance={max_distance}: must be above {buckets // 2}, "
            "which is half of relative_position_buckets"
        )
    if config.positions == "sinusoidal_half_t2t" and config.d_model < 4:
        raise ConfigError(f"positions='sinusoidal_half_t2t': needs d_model of at least 4, not {config.d_model}")
    if config.norm == "sample_std_norm" and config.d_model < 2:
        raise ConfigError(f"norm='sample_std_norm': needs d_model of at least 2, not {config.d_model}")
