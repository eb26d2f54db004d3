"""The flags of `twinax plan`."""

import os
from typing import Annotated

import tyro

from ..process.importing import import_without_gc
from ..usage import UsageError, check_outputs, check_picture, one_line_errors
from .shared import JsonFile, Switch, flags


@flags
class Plan:
    """Compile a run for TPUs that this machine lacks, and print what it needs and a bound on its speed.

    For a TPU slice, XLA compiles the train step, the validation loss and beam search here, on the CPU; needs
    twinax[plan]. For GPUs it partitions them for virtual devices: FLOPs and communication are the partitioned
    program's, the rest is an estimate. Nothing is run: times are lower bounds. Exits with 1 if the run does not fit.

    Example: twinax plan base --topology v5e:4x4

    Attributes:
        model: a preset of a model (tiny, small, base, big, t5_small), a predefined run, a run directory, or a config as
            `twinax train --print-config` prints it.
        topology: a slice of TPUs (v4:2x2x1, v5e:4x4, v5p:4x4x4, v6e:2x2) or a number of GPUs (a100:8, h100:8, h200:8,
            l4:1); with --sweep also a chip alone, for all its sizes.
        mesh: sizes of the axes data, fsdp and tensor, such as data=4,tensor=4; default: the run's, and data=-1 of a
            preset.
        tokens: tokens per batch and side, padding included; default: the run's; of a model's preset, 25,000.
        length: tokens per sentence, both sides; default: those of the run's largest batch shape; else 64.
        updates: length of the run; default: the run's; else 100,000.
        compute_dtype: dtype of the model's products, such as bfloat16; default: the config's.
        sweep: rank all meshes by an estimate, and compile the best two.
        plot: picture of a sweep to write (.png, .pdf, .svg): time over chips.
        json_file: JSON file to write the results to.
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PRESET|RUN|CONFIG")]
    topology: str
    mesh: str | None = None
    tokens: int | None = None
    length: int | None = None
    updates: int | None = None
    compute_dtype: str | None = None
    sweep: Switch = False
    plot: str | None = None
    json_file: JsonFile = None

    def execute(self) -> int:
        """The exit status: 0 if the run fits, else 1. Raises: UsageError."""
        if self.plot is not None and not self.sweep:
            raise UsageError(f"--plot {self.plot}: shows a sweep; add --sweep")
        check_picture("--plot", self.plot)
        check_outputs([self.plot, self.json_file], [self.model])
        os.environ["JAX_PLATFORMS"] = "cpu"  # a plan needs no accelerator, and must not take one from a training
        with one_line_errors():
            return import_without_gc("twinax.cli.plan.plan_command").plan(self)
