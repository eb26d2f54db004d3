"""A table that compares all variants of the published systems with the twins: `make published`."""

import sys
import tempfile
from itertools import product
from pathlib import Path

import jax
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.pages import marks, write_table
from parity_tests.support.published_decoding import search
from parity_tests.support.published_training import UPDATES, train
from twinax import convert
from twinax.parity.ladder import CRITERIA, rung_of
from twinax.parity.oracles.published import SYSTEMS, compare_published, random_model, variant_of

HEADER = (
    "system",
    "activations and logits",
    "gradients",
    "weights, round trip",
    f"{UPDATES} updates: losses, parameters",
    "decoding",
)


def main(page: Path) -> int:
    """Measures, prints the table, writes it into the page. Returns 0 if all is equal."""
    marks(page, "published")
    rows, equal = [], True
    variants = list(product(SYSTEMS, (True, False)))
    with tempfile.TemporaryDirectory() as folder, jax.enable_x64(True):
        for name, as_published in track(variants, "variants", console=Console(stderr=True), transient=True):
            cells = (
                _compare(name, as_published),
                _round_trip(name, as_published, Path(folder)),
                _compare_training(name, as_published),
                _compare_decoding(name, as_published),
            )
            equal &= all(ok for _, ok in cells)
            variant = "as published" if as_published else "repaired"
            texts = [text if ok else f"DIFFERENT: {text}" for text, ok in cells]
            rows.append((f"`{name}`, {variant}", *texts[0].split("; "), *texts[1:]))
    write_table(page, "published", HEADER, rows)
    return 0 if equal else 1


def _compare(name: str, as_published: bool) -> tuple[str, bool]:
    reports = compare_published(name, as_published).values()
    findings = [finding for report in reports for finding in report.findings]
    bound = next(criterion.bound for criterion in CRITERIA if criterion.rung == "gradients")
    gradients = [
        bound * f.error / f.tolerance for f in findings if rung_of(f.path) == "gradients"
    ]  # relative to the largest
    others = [finding.error for finding in findings if rung_of(finding.path) != "gradients"]
    return f"{max(others):.0e}; {max(gradients):.0e}", all(report.ok for report in reports)


def _round_trip(name: str, as_published: bool, folder: Path) -> tuple[str, bool]:
    """A round trip of float32 weights through a twinax file."""
    state, variant = random_model(name, as_published).float().state_dict(), variant_of(name, as_published)
    paths = [folder / f"{name}-{as_published}-{part}" for part in ("original.pt", "twinax.safetensors", "result.pt")]
    torch.save(state, paths[0])
    convert.save(convert.load(paths[0], variant), paths[1])
    checkpoint = convert.load(paths[1])
    convert.save(checkpoint, paths[2], layout=name)
    result = torch.load(paths[2], weights_only=True)["model"]
    same = result.keys() == state.keys() and all(torch.equal(result[key], tensor) for key, tensor in state.items())
    unused = f", {len(checkpoint.unused)} of them unused" if checkpoint.unused else ""
    return f"{len(state)} tensors{unused}: bit-identical", same


def _compare_training(name: str, as_published: bool) -> tuple[str, bool]:
    comparison = train(name, as_published)
    return f"{comparison.loss:.0e}, {comparison.parameters:.0e}", comparison.ok


def _compare_decoding(name: str, as_published: bool) -> tuple[str, bool]:
    comparison = search(name, as_published)
    count = f"{comparison.equal} of {len(comparison.lengths)}" + (
        f", {comparison.ties} within rounding" if comparison.ties else ""
    )
    if comparison.published == "ran":
        return f"{count}: module, Flax, PyTorch", comparison.ok
    if comparison.rejected:
        return "the original raises; the twins reject it", comparison.ok
    return (
        f"{'none published' if comparison.published == 'none' else 'the original raises'}; the twins {count}",
        comparison.ok,
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.published.published_matrix PAGE")
    sys.exit(main(Path(sys.argv[1])))
