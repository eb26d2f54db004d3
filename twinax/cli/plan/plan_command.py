"""`twinax plan`: the resources that a run needs and a bound on its speed, for accelerators that this machine lacks."""

import os
import sys
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ...configs.json_text import parse_json
from ..usage import UsageError, check_outputs, check_picture, one_line_errors, write_json

if TYPE_CHECKING:
    from ...configs.run import RunConfig
    from ...configs.sharding import ShardingConfig
    from ...planning.workload import Workload

# Vaswani et al. 2017, sections 5.1 and 5.2: tokens per side in a batch, and updates of the base model
_TOKENS, _UPDATES = 25_000, 100_000
_LENGTH = 64
_AXES = ("data", "fsdp", "tensor")


def plan(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="PRESET|RUN|CONFIG")],
    *,
    topology: str,
    mesh: str | None = None,
    tokens: int | None = None,
    length: int | None = None,
    updates: int | None = None,
    compute_dtype: str | None = None,
    sweep: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    plot: str | None = None,
    json_file: Annotated[str | None, tyro.conf.arg(name="json")] = None,
) -> int:
    """Compile a run for TPUs that this machine lacks, and print what it needs and a bound on its speed.

    For a TPU slice, XLA compiles the train step, the validation loss and beam search here, on the CPU; needs
    twinax[plan]. For GPUs it partitions them for virtual devices: FLOPs and communication are the partitioned
    program's, the rest is an estimate. Nothing is run: times are lower bounds. Exits with 1 if the run does not fit.

    Example: twinax plan base --topology v5e:4x4

    Args:
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
    if plot is not None and not sweep:
        raise UsageError(f"--plot {plot}: shows a sweep; add --sweep")
    check_picture("--plot", plot)
    check_outputs([plot, json_file], [model])
    os.environ["JAX_PLATFORMS"] = "cpu"  # a plan needs no accelerator, and must not take one from a training
    with one_line_errors():
        workload, steps = find_workload(model, tokens, length, updates, compute_dtype)
        report = import_module("twinax.cli.plan.plan_report")
        if sweep:
            if mesh is not None:
                raise UsageError(f"--mesh {mesh}: a sweep tries all meshes; omit it")
            fits, document = report.print_sweep(workload, steps, topology, plot)
        else:
            sharding = _sharding(mesh, workload.run.sharding)
            fits, document = report.print_plan(workload, steps, topology, sharding, model)
        if json_file is not None:
            write_json(json_file, document)
    return 0 if fits else 1


def find_workload(
    model: str, tokens: int | None, length: int | None, updates: int | None, compute_dtype: str | None
) -> "tuple[Workload, int]":
    """(what is planned, number of updates), from the flags. Raises: UsageError if they do not fit the model."""
    from ...planning.workload import Workload
    from ...presets.models import PRESETS

    for flag, value in (("--tokens", tokens), ("--length", length), ("--updates", updates)):
        if value is not None and value < 1:
            raise UsageError(f"{flag} {value}: must be at least 1")
    run, shape = _run(model)
    if compute_dtype is not None:
        run = replace(run, model=run.model.replace(compute_dtype=compute_dtype))
    if run.model.compute_dtype == "float64":
        raise UsageError("compute_dtype='float64': is for proofs on a CPU; pass --compute-dtype bfloat16 or float32")
    largest = run.model.max_length
    if length is not None and length > largest:
        raise UsageError(f"--length {length}: must not be above the model's max_length={largest}")
    src_length, tgt_length = shape or (min(_LENGTH, largest),) * 2
    if length is not None:
        src_length = tgt_length = length
    tokens = tokens or run.batches.tokens or _TOKENS
    rows = tokens // max(src_length, tgt_length)
    if not rows:
        raise UsageError(
            f"--tokens {tokens}: must be at least {max(src_length, tgt_length)}, the length of one sentence"
        )
    if updates is None and run.loop.updates is None and model not in PRESETS:
        print(
            f"twinax: assuming {_UPDATES:,} updates, because the corpus determines the number; set --updates",
            file=sys.stderr,
        )
    return Workload(run, rows, src_length, tgt_length), updates or run.loop.updates or _UPDATES


def _run(model: str) -> "tuple[RunConfig, tuple[int, int] | None]":
    """(the run of a name or path, the lengths of its largest batch shape if it has shapes)."""
    from ...configs.data import CorpusConfig
    from ...configs.run import RunConfig
    from ...presets.models import PRESETS
    from ...presets.runs import RUNS, run_preset

    if model in PRESETS:
        return RunConfig(corpus=CorpusConfig(src="-", tgt="-"), model=PRESETS[model]), None
    if model in RUNS:
        return _with_vocabulary(run_preset(model)), None
    path = Path(model)
    if (path / "config.json").is_file():
        from ...train.checkpointing.checkpoints import read_run
        from ...train.checkpointing.run_directory import read_data

        largest = max(read_data(path)[0], key=lambda b: b.sentences * (b.src_length + b.tgt_length))
        return read_run(path), (largest.src_length, largest.tgt_length)
    if path.is_file():
        try:
            values = parse_json(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UsageError(
                f"{model}: is not JSON ({error}); a config is what twinax train --print-config prints"
            ) from None
        return _with_vocabulary(RunConfig.from_dict(values if isinstance(values, dict) else {})), None
    names = (*PRESETS, *RUNS)
    hint = "".join(f"; did you mean {suggestion}?" for suggestion in get_close_matches(model, names, 1))
    raise UsageError(f"{model}: is neither a preset ({', '.join(PRESETS)}), nor a predefined run, nor a file{hint}")


def _with_vocabulary(run: "RunConfig") -> "RunConfig":
    """A run that has not begun, with the largest vocabulary that its tokenizer can have."""
    size = run.tokenizer.vocab_size
    if size is not None:
        return replace(run, model=run.model.replace(src_vocab_size=size, tgt_vocab_size=size))
    sizes = f"{run.model.src_vocab_size:,} and {run.model.tgt_vocab_size:,}"
    print(
        f"twinax: assuming vocabularies of {sizes} tokens, because the corpus determines them; set vocab_size of the "
        "tokenizer, or plan the run's directory once training has begun",
        file=sys.stderr,
    )
    return run


def _sharding(mesh: str | None, default: "ShardingConfig") -> "ShardingConfig":
    """The axes of `--mesh`."""
    from ...configs.sharding import ShardingConfig

    if mesh is None:
        return default
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        axis, _, size = part.partition("=")
        if axis not in _AXES or not size.removeprefix("-").isdigit() or axis in sizes:
            raise UsageError(f"--mesh {mesh}: must be sizes of {', '.join(_AXES)}, such as data=4,tensor=4")
        sizes[axis] = int(size)
    return ShardingConfig(**sizes)
