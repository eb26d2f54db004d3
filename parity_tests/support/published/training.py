"""A published training loop, as in its code, with `torch.optim`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from twinax.configs.schema import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.torch_reference.step import Batch


@dataclass(frozen=True)
class Run:
    """The inputs of a published loop."""

    parameters: list[nn.Parameter]
    forward: Callable[[int, Batch], Tensor]  # (update, part of its batch) -> the module's output (B·T, V)
    config: TransformerConfig
    training: TrainingConfig
    as_published: bool
    epoch: int  # updates per epoch


@dataclass(frozen=True, kw_only=True)
class PublishedTraining:
    """A published loop, and the dropout sites of its module."""

    loop: Callable[[Run, Sequence[Batch]], Iterator[float]]  # loss of every update, in nats per token
    # path of a dropout module -> dropout sites of the twins, in order of use; a star stands for a layer number
    dropouts: Mapping[str, tuple[str, ...]]
    # (as published, updates, updates per epoch) -> training fields that a short training changes
    shorten: Callable[[bool, int, int], dict[str, Any]] = lambda as_published, updates, epoch: {}
    fixed_rates: Mapping[str, float] = field(default_factory=dict)  # rates that ignore the setting, as published
