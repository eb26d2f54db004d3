"""What is planned: a run and one of its batch shapes."""

from dataclasses import dataclass, replace

from ..backend.errors import ConfigError
from ..configs.run import RunConfig
from ..configs.sharding import ShardingConfig


@dataclass(frozen=True)
class Workload:
    """A run's config, and the batch shape of one update."""

    run: RunConfig
    rows: int  # sentence pairs
    src_length: int
    tgt_length: int

    @property
    def tokens(self) -> int:
        """Target tokens per update, padding included."""
        return self.rows * self.tgt_length

    @property
    def rows_of_passes(self) -> int:
        """Rows that the model computes: consistency training makes two passes of each."""
        return self.rows * self.run.training.passes

    def shape(self) -> str:
        """The batch shape as `twinax train` prints it."""
        return f"{self.rows}×({self.src_length}+{self.tgt_length})"

    def padded(self, sharding: ShardingConfig) -> "Workload":
        """With the rows of padding that make the batch divisible, as training adds them."""
        parts = sharding.data * sharding.fsdp * self.run.training.accumulation
        return replace(self, rows=self.rows + -self.rows % parts)

    def check(self, sharding: ShardingConfig, devices: int) -> None:
        """Raises: ConfigError if the axes do not fit the devices, the model or the rows of a batch."""
        sharding.check(self.run.model, devices)
        shares = sharding.data * sharding.fsdp
        if self.rows < shares:
            raise ConfigError(
                f"{shares} devices divide the rows of a batch, which has {self.rows}; use larger --tokens"
            )
