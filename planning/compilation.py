"""Compiles the programs of a plan in another process, whose JAX has the devices of the topology.

`python -m twinax.planning.compilation` reads a request from its input and writes one line of JSON per program.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from tempfile import TemporaryFile
from typing import Any

from packaging.requirements import Requirement

from ..backend.errors import ConfigError
from ..configs.run import RunConfig
from ..configs.sharding import ShardingConfig
from ..train.step.step import abstract_state
from .cost import Collective, Cost, Memory, cost
from .estimate import estimate, shard_bytes
from .hlo import parse
from .topology import Topology, parse_topology
from .workload import Workload

# XLA's two messages: with the sum of everything, or with the temporaries alone
_OUT_OF_MEMORY = re.compile(r"(Used|temporaries) \(?([\d.]+)([KMG])")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class CompiledProgram:
    """What XLA says about a program on one device."""

    name: str  # train step, validation loss, or beam search
    memory: Memory
    cost: Cost | None  # None: XLA refused it, because it needs more memory than there is


def check_compiler(topology: Topology) -> None:
    """Raises: ConfigError if TPU programs cannot be compiled here: libtpu is missing, or of another version."""
    if not topology.chip.is_tpu:
        return
    try:
        installed = version("libtpu")
    except PackageNotFoundError:
        raise ConfigError("libtpu, the compiler for TPUs, is not installed; run: pip install 'twinax[plan]'") from None
    needed = next((r for r in map(Requirement, requires("jax") or ()) if r.name == "libtpu"), None)
    if needed is not None and not needed.specifier.contains(installed, prereleases=True):
        raise ConfigError(
            f"libtpu {installed} does not match jax {version('jax')}, which needs libtpu{needed.specifier}; "
            "run: pip install 'twinax[plan]'"
        )


def compile_apart(
    workload: Workload, topology: Topology, sharding: ShardingConfig, *, only_step: bool = False
) -> Iterator[CompiledProgram]:
    """Compile the train step and, unless `only_step`, the validation loss and beam search; yield each when it is ready.

    For GPUs, XLA compiles for as many virtual CPU devices: its partitioner does the same there, but kernels and
    temporaries are a CPU's.

    Raises:
        ConfigError: libtpu is missing or of another version, or XLA cannot compile a program.
    """
    check_compiler(topology)
    request = {
        "run": workload.run.to_dict(),
        "shape": [workload.rows, workload.src_length, workload.tgt_length],
        "topology": str(topology),
        "sharding": asdict(sharding),
        "only_step": only_step,
    }
    command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
    with (
        TemporaryFile("w+") as log,  # libtpu writes more than a pipe holds
        subprocess.Popen(
            command, env=_environment(topology), text=True, stdin=pipe, stdout=pipe, stderr=log
        ) as process,
    ):
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            with suppress(BrokenPipeError):  # the process has failed already, and its log says why
                process.stdin.write(json.dumps(request))
                process.stdin.close()
            for line in process.stdout:
                program = _read(json.loads(line))
                yield program if topology.chip.is_tpu else _with_estimated_bytes(program, workload, sharding)
        except BaseException:
            process.kill()
            raise
        if process.wait():
            log.seek(0)
            lines = [line for line in log.read().splitlines() if line.strip()] or [f"status {process.returncode}"]
            raise ConfigError(f"{topology}: the compiler failed: {lines[-1][:300]}")


def _environment(topology: Topology) -> dict[str, str]:
    """The environment of the other process: no accelerator is looked for, and GPUs become virtual CPU devices."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if not topology.chip.is_tpu:
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={topology.chips}"
        environment["XLA_FLAGS"] = flags.strip()
    return environment


def _read(values: dict[str, Any]) -> CompiledProgram:
    memory, parts = Memory(**values["memory"]), values["cost"]
    if parts is None:
        return CompiledProgram(values["name"], memory, None)
    collectives = tuple(
        Collective(**{**c, "shapes": tuple(tuple(shape) for shape in c["shapes"])}) for c in parts["collectives"]
    )
    return CompiledProgram(values["name"], memory, Cost(parts["flops"], parts["hbm_bytes"], collectives))


def _with_estimated_bytes(program: CompiledProgram, workload: Workload, sharding: ShardingConfig) -> CompiledProgram:
    """With an estimate of the bytes that a GPU moves in its memory, because those of a CPU's program say nothing.

    Of programs other than the train step, the least: arguments are read once, and results written.
    """
    if program.cost is None:
        return program
    least = program.memory.arguments + program.memory.results
    hbm_bytes = estimate(workload, sharding)[0].hbm_bytes if program.name == "train step" else least
    return replace(program, cost=replace(program.cost, hbm_bytes=hbm_bytes))


def _compile(request: dict[str, Any]) -> Iterator[CompiledProgram]:
    import jax

    from ..train.step.partitioning import Placement
    from .programs import compile_loss, compile_search, compile_step, translates

    topology = parse_topology(request["topology"])
    workload = Workload(RunConfig.from_dict(request["run"]), *request["shape"])
    devices: Sequence[Any] = topology.devices() if topology.chip.is_tpu else jax.devices()
    placement = Placement.of(ShardingConfig(**request["sharding"]), workload.run.model, devices)
    state = abstract_state(workload.run.model, workload.run.training)
    arguments = sum(shard_bytes(state, placement.config))
    yield _measure("train step", lambda: compile_step(workload, placement), arguments)
    if not request["only_step"]:
        yield _measure("validation loss", lambda: compile_loss(workload, placement))
        if translates(workload):
            yield _measure("beam search", lambda: compile_search(workload, placement))


def _measure(name: str, compile_program: Any, arguments: int = 0) -> CompiledProgram:
    try:
        compiled = compile_program()
    except Exception as error:  # XLA's own type of error
        if (used := _OUT_OF_MEMORY.search(str(error))) is None:
            raise
        needed = int(float(used[2]) * _UNITS[used[3]])
        return CompiledProgram(name, Memory(arguments if used[1] == "temporaries" else 0, needed), None)
    stats = compiled.program.memory_analysis()
    results = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
    memory = Memory(stats.argument_size_in_bytes, stats.temp_size_in_bytes, stats.generated_code_size_in_bytes, results)
    return CompiledProgram(name, memory, cost(parse(compiled.program.as_text()), compiled.loops))


def main() -> int:
    """Compile what the request names. Exit status 1 after an error, whose last line says what happened."""
    try:
        for program in _compile(json.load(sys.stdin)):
            print(json.dumps(asdict(program)), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
