"""A lower bound on the time of a step, from its cost and what a chip can do.

Source: Williams, Waterman and Patterson 2009, "Roofline: An Insightful Visual Performance Model".
"""

from dataclasses import dataclass
from typing import Literal

from .cost import Cost
from .topology import Topology

Limit = Literal["matrix units", "HBM", "links"]


@dataclass(frozen=True)
class Bound:
    """Seconds that each part of a chip needs at its peak. Their largest is a lower bound: all overlap perfectly."""

    matrix_units: float
    hbm: float
    links: float

    @property
    def parts(self) -> dict[Limit, float]:
        """By the part of the chip."""
        return {"matrix units": self.matrix_units, "HBM": self.hbm, "links": self.links}

    @property
    def seconds(self) -> float:
        """The bound."""
        return max(self.parts.values())

    @property
    def without_overlap(self) -> float:
        """Seconds if nothing overlaps."""
        return sum(self.parts.values())

    @property
    def limit(self) -> Limit:
        """What limits the step."""
        return max(self.parts, key=lambda part: self.parts[part])

    def utilization(self, model_flops: float, peak: float) -> float:
        """An upper bound on the model FLOPs utilization; `model_flops` are those of one chip.

        Source: Chowdhery et al. 2022, "PaLM", appendix B.
        """
        return model_flops / (peak * self.seconds)


def roofline(cost: Cost, topology: Topology, compute_dtype: str) -> Bound:
    """The bound of a cost on a topology; products are computed in `compute_dtype`."""
    links = sum(topology.seconds(c.sent, c.group) for c in cost.collectives)
    return Bound(cost.flops / topology.chip.peak(compute_dtype), cost.hbm_bytes / topology.chip.hbm_bandwidth, links)
