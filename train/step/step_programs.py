"""The compiled programs of a run's train step: gradients for each batch shape, and one update for all."""

from collections.abc import Mapping, Sequence
from functools import partial

from ..data.prepare import PreparedRun
from .partitioning import Placement, Rows
from .programs import Programs
from .step import Batch, Metrics, TrainState, abstract_state, make_train_step

_UPDATE = "update"


class StepPrograms:
    """A run's train step; the batch shapes are named by their index, and `rows` are those of their batches."""

    def __init__(self, programs: Programs, prepared: PreparedRun, placement: Placement, rows: Sequence[Rows]):
        run = prepared.run
        self._programs, self._buckets, self._rows, self._placement = programs, prepared.buckets, rows, placement
        self._step = make_train_step(run.model, run.training, placement, run.execution)
        self._state = placement.abstract(abstract_state(run.model, run.training))
        self._seconds: dict[int, float] = {}

    def __call__(self, bucket: int, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """The state after an update with a batch of this shape; the input state is donated."""
        return self._programs[_UPDATE](state, self._programs[bucket](state, batch))

    def add(self, bucket: int) -> None:
        """Add the programs of a batch shape to those that are compiled in advance."""
        src_length, tgt_length, _ = self._buckets[bucket]
        batch = Batch(*self._placement.abstract_rows(self._rows[bucket].total, src_length, tgt_length))
        self._programs.add(bucket, partial(self._step.compile_gradients, self._state, batch))
        self._programs.add(_UPDATE, partial(self._step.compile_update, self._state))

    def is_ready(self, bucket: int) -> bool:
        """Whether a batch of this shape was trained on before."""
        return bucket in self._seconds

    def compile_seconds(self, bucket: int) -> Mapping[int, float]:
        """Wait for the programs of a batch shape; the seconds that each one so far took to compile, this one last."""
        self.add(bucket)
        self._seconds[bucket] = self._programs.seconds(bucket)
        self._programs.seconds(_UPDATE)
        return self._seconds
