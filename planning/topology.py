"""A slice of TPUs or a number of GPUs, by a name such as `v5e:4x4` or `h100:8`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from ..backend.errors import ConfigError
from .chips import CHIPS, Chip, count

_COUNTS = tuple(2**n for n in range(13))  # of GPUs


@dataclass(frozen=True)
class Topology:
    """Chips that are connected to each other."""

    chip: Chip
    shape: str  # of a TPU slice, such as 4x4; of GPUs, their number

    def __str__(self) -> str:
        return f"{self.chip.name}:{self.shape}"

    @property
    def chips(self) -> int:
        """Their number, which is that of JAX's devices."""
        return count(self.shape)

    @property
    def links(self) -> float:
        """Links per chip that a slice has: 2 in a dimension that is a ring, fewer at the ends of the others.

        In three dimensions a slice of whole cubes has rings, in two dimensions a side of 16.
        """
        if not self.chip.is_tpu:
            return 1
        sizes = [int(size) for size in self.shape.split("x")]
        closed = [size % self.chip.ring == 0 for size in sizes]
        if self.chip.dimensions == 3:
            closed = [all(closed)] * 3
        return sum(2 if ring else 2 * (size - 1) / size for size, ring in zip(sizes, closed, strict=True))

    def seconds(self, sent: float, group: int) -> float:
        """A lower bound on the time in which each of `group` devices sends `sent` bytes.

        All links of a chip carry data at full bandwidth. Between machines of GPUs, the GPUs of one machine share what
        their machine must send.
        """
        if not sent:
            return 0.0
        inside = sent / (self.links * self.chip.link_bandwidth)
        if self.chip.is_tpu or group <= self.chip.machine:
            return inside
        return max(inside, sent / self.chip.machine / self.chip.network_bandwidth)

    def devices(self) -> Sequence[Any]:
        """JAX's devices of a TPU slice, for which it can compile on any machine.

        Raises:
            ConfigError: libtpu is not installed, or does not know this slice.
        """
        if find_spec("libtpu") is None:
            raise ConfigError("libtpu is not installed; run: pip install 'twinax[plan]'")
        from jax.experimental import topologies

        options: dict[str, Any] = {} if self.chip.config is None else {"chip_config_name": self.chip.config}
        if self.chips == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        try:
            description = topologies.get_topology_desc(topology_name=str(self), platform="tpu", **options)
        except Exception as error:  # JAX's own types of error differ between versions
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"{self}: libtpu cannot describe it: {reason}") from None
        if len(description.devices) != self.chips:
            raise ConfigError(f"{self}: libtpu describes {len(description.devices)} devices, not {self.chips}")
        return description.devices


def parse_topology(name: str) -> Topology:
    """The topology of a name such as `v5e:4x4` or `h100:8`.

    Raises:
        ConfigError: there is no such chip, or it is not offered in this shape.
    """
    chip_name, _, shape = name.lower().partition(":")
    chip = _chip(chip_name)
    if not shape:
        example = chip.slices[1] if chip.is_tpu else "8"
        raise ConfigError(f"--topology {name}: needs a size, as {chip.name}:{example}; --sweep alone ranks all sizes")
    if chip.is_tpu and shape not in chip.slices and not _is_cubes(chip, shape):
        raise ConfigError(f"--topology {name}: {chip.title} has no such slice; its slices: {', '.join(chip.slices)}")
    if not chip.is_tpu and not (re.fullmatch(r"[1-9]\d*", shape) and int(shape) <= chip.largest):
        raise ConfigError(f"--topology {name}: must be {chip.name}:N, N from 1 to {chip.largest:,}")
    if not chip.is_tpu and int(shape) > chip.machine and int(shape) % chip.machine:
        raise ConfigError(f"--topology {name}: more than one machine needs a multiple of {chip.machine} GPUs")
    return Topology(chip, shape)


def family(name: str) -> list[Topology]:
    """All sizes of a chip, from the smallest. Raises: ConfigError if there is no such chip."""
    chip = _chip(name.lower())
    if chip.is_tpu:
        return [Topology(chip, shape) for shape in sorted(chip.slices, key=count)]
    return [Topology(chip, str(n)) for n in _COUNTS if n <= chip.largest]


def _chip(name: str) -> Chip:
    if name not in CHIPS:
        raise ConfigError(f"--topology {name}: there is no such chip; choose one of {', '.join(CHIPS)}")
    return CHIPS[name]


def _is_cubes(chip: Chip, shape: str) -> bool:
    """Whether a slice consists of whole cubes of 4 x 4 x 4 chips, in ascending order of its dimensions."""
    if chip.dimensions != 3 or not re.fullmatch(r"\d+x\d+x\d+", shape):
        return False
    sizes = [int(size) for size in shape.split("x")]
    return sizes == sorted(sizes) and all(s and s % 4 == 0 for s in sizes) and count(shape) <= chip.largest
