"""How a run is divided over devices."""

import math
from dataclasses import dataclass

from ..backend.errors import ConfigError
from .schema import TransformerConfig
from .validation import check_field_types


@dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """The axes of the device mesh: their sizes multiply to the number of devices. Updates change by rounding only.

    -1: inferred from the number of devices.

    Raises:
        ConfigError: a size is neither positive nor -1, or more than one is -1.
    """

    data: int = -1  # divides the rows of a batch
    fsdp: int = 1  # divides the rows of a batch, and every matrix with its optimizer state along d_model
    tensor: int = 1  # divides heads, the width of feed-forward layers, and the vocabulary

    def __post_init__(self) -> None:
        check_field_types(self)
        for name, size in vars(self).items():
            if size < 1 and size != -1:
                raise ConfigError(f"{name}={size}: must be at least 1, or -1 for the devices that the other axes leave")
        if list(vars(self).values()).count(-1) > 1:
            raise ConfigError(f"data={self.data}, fsdp={self.fsdp}, tensor={self.tensor}: only one can be -1")

    def __str__(self) -> str:
        return " · ".join(f"{name}={size}" for name, size in vars(self).items())

    def sizes(self, devices: int) -> dict[str, int]:
        """The size of each axis on a number of devices. Raises: ConfigError if their product is another number."""
        axes = dict(vars(self))
        given = math.prod(size for size in axes.values() if size != -1)
        sizes = {name: devices // given if size == -1 else size for name, size in axes.items()}
        if math.prod(sizes.values()) != devices:
            raise ConfigError(f"{self}: the product must be the number of devices, {devices}")
        return sizes

    def check(self, model: TransformerConfig, devices: int) -> None:
        """Raises: ConfigError if a dimension of the model cannot be divided by its axis."""
        sizes = self.sizes(devices)
        decoder_heads = model.decoder_num_heads or model.num_heads
        dimensions = {
            "fsdp": {"d_model": model.d_model},
            "tensor": {
                "num_heads": model.num_heads,
                "decoder_num_heads": decoder_heads,
                "d_ff": model.d_ff,
                "decoder_d_ff": model.decoder_d_ff or model.d_ff,
                "src_vocab_size": model.src_vocab_size,
                "tgt_vocab_size": model.tgt_vocab_size,
            },
        }
        for axis, fields in dimensions.items():
            for name, size in fields.items():
                if size % sizes[axis]:
                    raise ConfigError(f"{axis}={sizes[axis]}: does not divide {name}={size}")
