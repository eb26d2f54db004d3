"""`twinax plan`: the resources that a run needs and a bound on its speed, for accelerators that this machine lacks."""

import sys
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from ...configs.data import CorpusConfig
from ...configs.json_text import parse_json
from ...configs.run import RunConfig
from ...configs.sharding import ShardingConfig
from ...planning.workload import Workload
from ...presets.models import PRESETS
from ...presets.runs import RUNS, run_preset
from ...train.checkpointing.checkpoints import read_run
from ...train.checkpointing.run_directory import read_data
from ..flags.plan import Plan
from ..usage import UsageError, write_json
from .plan_report import print_plan, print_sweep

# Vaswani et al. 2017, sections 5.1 and 5.2: tokens per side in a batch, and updates of the base model
_TOKENS, _UPDATES = 25_000, 100_000
_LENGTH = 64
_AXES = ("data", "fsdp", "tensor")


def plan(flags: Plan) -> int:
    """Print what a run needs; return the exit status."""
    workload, steps = find_workload(flags.model, flags.tokens, flags.length, flags.updates, flags.compute_dtype)
    if flags.sweep:
        if flags.mesh is not None:
            raise UsageError(f"--mesh {flags.mesh}: a sweep tries all meshes; omit it")
        fits, document = print_sweep(workload, steps, flags.topology, flags.plot)
    else:
        sharding = _sharding(flags.mesh, workload.run.sharding)
        fits, document = print_plan(workload, steps, flags.topology, sharding, flags.model)
    if flags.json_file is not None:
        write_json(flags.json_file, document)
    return 0 if fits else 1


def find_workload(
    model: str, tokens: int | None, length: int | None, updates: int | None, compute_dtype: str | None
) -> tuple[Workload, int]:
    """(what is planned, number of updates), from the flags. Raises: UsageError if they do not fit the model."""

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


def _run(model: str) -> tuple[RunConfig, tuple[int, int] | None]:
    """(the run of a name or path, the lengths of its largest batch shape if it has shapes)."""

    if model in PRESETS:
        return RunConfig(corpus=CorpusConfig(src="-", tgt="-"), model=PRESETS[model]), None
    if model in RUNS:
        return _with_vocabulary(run_preset(model)), None
    path = Path(model)
    if (path / "config.json").is_file():
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


def _with_vocabulary(run: RunConfig) -> RunConfig:
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


def _sharding(mesh: str | None, default: ShardingConfig) -> ShardingConfig:
    """The axes of `--mesh`."""

    if mesh is None:
        return default
    sizes: dict[str, int] = {}
    for part in mesh.split(","):
        axis, _, size = part.partition("=")
        if axis not in _AXES or not size.removeprefix("-").isdigit() or axis in sizes:
            raise UsageError(f"--mesh {mesh}: must be sizes of {', '.join(_AXES)}, such as data=4,tensor=4")
        sizes[axis] = int(size)
    return ShardingConfig(**sizes)
