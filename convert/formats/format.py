"""What a storage format of checkpoints is: how it is recognized, described, read and written."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...configs.schema import TransformerConfig
from ..checkpoint import Checkpoint


@dataclass(frozen=True)
class Format:
    """A storage format of checkpoints."""

    recognizes: Callable[[Path], bool]  # whether a path holds this format
    describe: Callable[[Path], str]  # a description of the checkpoint at a path
    protection: Callable[[Path], str | None]  # what its weights are compared with on reading: checksums, CRC-32, None
    read: Callable[[Path], Checkpoint]
    read_config: Callable[[Path], TransformerConfig]
    accepts: Callable[[Path, str], bool]  # whether (a new path, a layout) select this format
    write: Callable[[Checkpoint, Path, str], None]
    read_weights: Callable[[Path], Checkpoint] | None = None  # as `read`, without the training state, if that is faster
