"""How a model is executed in training."""

from dataclasses import dataclass
from typing import Literal

from ..backend.errors import ConfigError
from .schema import TransformerConfig
from .validation import check_field_types

Remat = Literal["none", "layers", "dots"]
AttentionImplementation = Literal["exact", "fused"]


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How updates are executed: memory, time and compilation. No field changes a result, except by rounding.

    Raises:
        ConfigError: a field has an invalid value.
    """

    remat: Remat = "none"  # activations recomputed in the backward pass; dots: all but products with weights
    scan_layers: bool = False  # compile one layer per stack and run it in a loop over stacked weights
    attention: AttentionImplementation = "exact"  # fused: jax.nn.dot_product_attention, cuDNN's where it applies

    def __post_init__(self) -> None:
        check_field_types(self)

    @property
    def plain_layers(self) -> bool:
        """Whether the layers run in a Python loop, and the backward pass keeps their activations."""
        return self.remat == "none" and not self.scan_layers

    def check(self, model: TransformerConfig) -> None:
        """Raises: ConfigError if fused attention cannot compute the model's attention."""
        if self.attention == "exact":
            return
        reasons = {
            f"attention_dropout={model.attention_dropout}: cannot drop attention weights": model.attention_dropout > 0,
            f"mask_value={model.mask_value}: gives masked keys the weight 0": model.mask_value != "exact",
            "compute_dtype='float64': computes its softmax in float32": model.compute_dtype == "float64",
            f"v_head_dim={model.v_head_dim}: needs queries, keys and values of equal width": any(
                model.query_key_width(heads) != model.value_width(heads)
                for heads in (model.num_heads, model.decoder_num_heads or model.num_heads)
            ),
        }
        for reason, applies in reasons.items():
            if applies:
                setting, _, fact = reason.partition(": ")
                raise ConfigError(f"{setting}: attention='fused' {fact}; use attention='exact', or change the model")


PLAIN = ExecutionConfig()
