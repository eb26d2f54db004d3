"""Trainings on every mesh of eight virtual devices, against one device: `make scale-test`.

`python -m benchmarks.training.meshes PAGE` prints the table and writes it into the page. The environment must give the
devices: XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import sys
from pathlib import Path

import jax
from rich.progress import track

from benchmarks.pages import marks, write_table
from parity_tests.support.meshes import MODEL, TRAINING, compare_meshes, factorizations

UPDATES = 50
HEADER = ("data", "fsdp", "tensor", "losses", "parameters", "float32 gradients", "")


def main(page: Path) -> int:
    """Measures, prints the table, writes it into the page. Returns 0 if every mesh gives the same training."""
    jax.config.update("jax_enable_x64", True)
    marks(page, "meshes")
    shardings = list(factorizations(jax.device_count()))
    agreements = list(track(compare_meshes(shardings, MODEL, TRAINING, UPDATES), "meshes", total=len(shardings)))
    rows = []
    for agreement in agreements:
        axes = (str(size) for size in vars(agreement.sharding).values())
        figures = (f"{agreement.loss:.1e}", f"{agreement.params:.1e}", f"{agreement.ratio:.2f}")
        rows.append((*axes, *figures, "equal" if agreement.ok else "DIFFERENT"))
    write_table(page, "meshes", HEADER, rows)
    return 0 if all(agreement.ok for agreement in agreements) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.training.meshes PAGE")
    sys.exit(main(Path(sys.argv[1])))
