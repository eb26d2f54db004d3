"""Measures the diagnosis: planted defects found in pairs of models, false alarms, and what other criteria let through.

`python -m benchmarks.external_pairs.measure PAGE PAIRS` writes the tables into the page; PAIRS is the folder with other
projects' models. `--seed` and `--count` choose other defects, `--words` pairs, `--only` parts; then nothing is written.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.external_pairs import converter, forward, gradients, inference, rounding, updates
from benchmarks.external_pairs.forward import Checked, false_alarms, published
from benchmarks.external_pairs.pairs import pairs, published_defects
from benchmarks.external_pairs.scores import Score, misses, table
from benchmarks.pages import write_between, write_table

SEED = 20262  # of the published samples; what is improved is improved on others
FIELDS = {"detected": "found", "is_first": "named first", "is_inside": "in the region", "is_repaired": "repair named"}
FIELDS["is_alone"] = "nothing else named"
BRIEF = ("detected", "is_first", "is_alone")  # fields where there are no regions


@dataclass(frozen=True)
class Part:
    """Defects of one kind, of which a sample of this size is drawn."""

    count: int
    measure: Callable[[Mapping[str, Checked], int, int], list[Score]]
    fields: Sequence[str]
    criteria: Sequence[str]


PARTS = {
    "forward": Part(60, forward.measure, tuple(FIELDS), forward.CRITERIA),
    "converter": Part(40, converter.measure, BRIEF, converter.CRITERIA),
    "backward": Part(40, gradients.measure, BRIEF, gradients.CRITERIA),
    "rounding": Part(12, rounding.measure, BRIEF, rounding.CRITERIA),
    "updates": Part(40, updates.measure, BRIEF, updates.CRITERIA),
}


def summary(samples: Mapping[str, Sequence[Score]], alarms: Sequence[Sequence[str]]) -> str:
    """The counts in words."""
    sentences = []
    for part, scores in samples.items():
        detected, first = (sum(getattr(score, field) for score in scores) for field in ("detected", "is_first"))
        median, longest = (f([score.seconds for score in scores]) for f in (statistics.median, max))
        sentences.append(
            f"{part}: {detected} of {len(scores)} defects are found, {first} named first; a diagnosis takes "
            f"{median:.1f} s in the median, {longest:.0f} s at most"
        )
    equal = sum(all(verdict.startswith("equal") for verdict in row[3:5]) for row in alarms)
    return "; ".join(sentences) + f". {equal} of {len(alarms)} correct pairs are called equal."


def tables(samples: Mapping[str, Sequence[Score]]) -> dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]]:
    """Name in the page -> (header, rows)."""
    result: dict[str, tuple[Sequence[str], Sequence[Sequence[str]]]] = {}
    for name, scores in samples.items():
        part = PARTS[name]
        header = ("defects", *(FIELDS[field] for field in part.fields), *part.criteria)
        rows = table(scores, lambda score: score.operator, part.fields, part.criteria)
        result[f"external-pairs-{name}"] = ("mistake", *header), rows
        if name == "forward":
            by_pair = table(scores, lambda score: score.pair, part.fields, part.criteria)
            result["external-pairs-pairs"] = ("pair", *header), by_pair
    result["external-pairs-misses"] = ("sample", "pair", "mistake", "planted at", "named first"), misses(samples)
    return result


def main() -> int:
    """Print the tables, and write them into the page unless another sample was chosen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, help="defects of each sample")
    parser.add_argument("--words", nargs="*", default=[])
    parser.add_argument("--only", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    builders = pairs(options.pairs)
    builders = {n: b for n, b in builders.items() if not options.words or any(w in n for w in options.words)}
    checked, alarms = false_alarms(builders)
    samples = {
        name: PARTS[name].measure(checked, options.seed, options.count or PARTS[name].count) for name in options.only
    }
    is_final = options.seed == SEED and not (options.count or options.words) and len(samples) == len(PARTS)
    results = tables(samples)
    results["external-pairs-alarms"] = (("pair", "operations", "places", "outputs", "gradients", "seconds"), alarms)
    if is_final:
        rows = published(published_defects(options.pairs))
        results["external-pairs-inference"] = inference.HEADER, list(inference.measure(checked))
        results["external-pairs-published"] = (("model", "line or parameter", "repair"), rows)
    for name, (header, rows) in results.items():
        if is_final:
            write_table(options.page, name, header, rows)
        else:
            print(*("; ".join(row) for row in (header, *rows)), sep="\n", end="\n\n")
    text = summary(samples, alarms)
    print(text)
    if is_final:
        write_between(options.page, "external-pairs-summary", text)
    return 0 if all(score.detected for scores in samples.values() for score in scores) else 1


if __name__ == "__main__":
    sys.exit(main())
