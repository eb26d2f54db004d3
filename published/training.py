"""What a published training is, as its own code has it, with `torch.optim`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..configs.schema import TransformerConfig
from ..configs.training import TrainingConfig
from ..torch_reference.step import Batch


@dataclass(frozen=True)
class Run:
    """What a published loop works on."""

    parameters: list[nn.Parameter]
    forward: Callable[[int, Batch], Tensor]  # (update, part of its batch) -> what the module gives, (B·T, V)
    config: TransformerConfig
    training: TrainingConfig
    as_published: bool
    epoch: int  # updates


@dataclass(frozen=True, kw_only=True)
class PublishedTraining:
    """A published loop, and where its module's dropouts are."""

    loop: Callable[[Run, Sequence[Batch]], Iterator[float]]  # loss of every update, in nats per token
    # path of a dropout -> our sites, in the order in which a forward pass reaches them; a star is the number of a layer
    dropouts: Mapping[str, tuple[str, ...]]
    # (as published, updates, updates of an epoch) -> what a training that short changes
    shorten: Callable[[bool, int, int], dict[str, Any]] = lambda as_published, updates, epoch: {}
    fixed_rates: Mapping[str, float] = field(default_factory=dict)  # as published, whatever the setting
