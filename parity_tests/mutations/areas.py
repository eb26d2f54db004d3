"""All mutations by area, one TOML file each, and `plant`, which runs them in parallel, one per core."""

import os
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

from rich.console import Console

from parity_tests.mutations.planting import Mutation, MutationError, Verdict, check, copy_package, run


def _read(path: Path) -> tuple[str, tuple[Mutation, ...]]:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return content["area"], tuple(Mutation(**row | {"checks": tuple(row["checks"])}) for row in content["mutations"])


AREAS = dict(_read(path) for path in sorted(Path(__file__).parent.glob("*.toml")))
MUTATIONS: tuple[Mutation, ...] = tuple(mutation for area in AREAS.values() for mutation in area)


def plant(mutations: Sequence[Mutation], console: Console) -> list[Verdict]:
    """Verdicts in order; one mutation runs per core, each worker on its own copy of the package.

    Raises:
        MutationError: a mutation does not apply, or the checks fail on the healthy package.
    """
    workers = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        packages: Queue[Path] = Queue()
        for number in range(workers):
            packages.put(copy_package(Path(folder) / str(number)))
        for mutation in mutations:
            mutation.apply(packages.queue[0])
        tests = tuple(sorted({test for mutation in mutations for test in mutation.checks}))
        console.print(f"{len(mutations)} mistakes; first their {len(tests)} checks without any", highlight=False)
        status, output = check(tests, packages.queue[0])
        if status != 0:
            raise MutationError(f"the checks fail without any mistake: {' '.join(output.split())[-600:]}")

        def plant_one(mutation: Mutation) -> Verdict:
            package = packages.get()
            try:
                verdict = run(mutation, package)
            finally:
                packages.put(package)
            line = f"{mutation.name}: {verdict} ({verdict.seconds:.0f} s)"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            return verdict

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(plant_one, mutations))
