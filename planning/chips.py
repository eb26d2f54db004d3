"""What accelerators can do: the one table of their peaks, memories and links."""

from dataclasses import dataclass

_V5E_SLICES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of accelerator. Rates are per chip and second, bandwidths in bytes and in one direction."""

    name: str
    title: str
    device_kinds: tuple[str, ...]  # JAX's `device_kind`
    flops: float  # dense products of bfloat16, or of float32 as JAX's default precision computes them on a TPU
    float32_flops: float  # of float32 in JAX's default precision: bfloat16 on a TPU, TF32 on a GPU
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float  # of one link of a TPU; of all links of a GPU to the others of its machine
    slices: tuple[str, ...] = ()  # shapes of a TPU's slices; () for a GPU
    dimensions: int = 0  # of a TPU's network
    ring: int = 0  # a dimension of a slice that is a multiple of it is closed to a ring
    config: str | None = None  # libtpu's name of the mode in which JAX sees one device per chip
    machine: int = 8  # GPUs per machine
    network_bandwidth: float = 0  # of a GPU to other machines; 0: its machines are not connected in this table

    @property
    def is_tpu(self) -> bool:
        """Whether XLA can compile for it here."""
        return bool(self.slices)

    def peak(self, compute_dtype: str) -> float:
        """FLOP/s of products in a model's compute dtype."""
        return self.flops if compute_dtype in ("bfloat16", "float16") else self.float32_flops

    @property
    def largest(self) -> int:
        """Chips of the largest slice, or of the largest cluster of GPUs that is computed."""
        if self.is_tpu:
            return max(count(shape) for shape in self.slices)
        return 4096 if self.network_bandwidth else self.machine


def count(shape: str) -> int:
    """The number of chips of a shape such as `4x4`."""
    chips = 1
    for size in shape.split("x"):
        chips *= int(size)
    return chips


_GIB = 2**30
# Sources. TPUs: Google Cloud, "TPU v4", "TPU v5e", "TPU v5p", "TPU v6e"; a link's bandwidth is that of the chip divided
# by its links. GPUs: NVIDIA's data sheets of A100, H100 SXM, H200 and L4, whose figures with sparsity are halved;
# network: data sheets of DGX A100 (200 Gb/s per GPU) and DGX H100 (400 Gb/s per GPU).
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            title="TPU v4",
            device_kinds=("TPU v4",),
            flops=275e12,
            float32_flops=275e12,
            hbm_bytes=32 * _GIB,
            hbm_bandwidth=1200e9,
            link_bandwidth=50e9,
            slices=("2x2x1", "2x2x2", "2x2x4", "2x4x4", *_CUBES),
            dimensions=3,
            ring=4,
            config="megacore",
        ),
        Chip(
            name="v5e",
            title="TPU v5e",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            flops=197e12,
            float32_flops=197e12,
            hbm_bytes=16 * _GIB,
            hbm_bandwidth=819e9,
            link_bandwidth=50e9,
            slices=_V5E_SLICES,
            dimensions=2,
            ring=16,
        ),
        Chip(
            name="v5p",
            title="TPU v5p",
            device_kinds=("TPU v5", "TPU v5p"),
            flops=459e12,
            float32_flops=459e12,
            hbm_bytes=95 * _GIB,
            hbm_bandwidth=2765e9,
            link_bandwidth=100e9,
            slices=("2x2x1", "2x2x2", "2x2x4", "2x4x4", *_CUBES),
            dimensions=3,
            ring=4,
        ),
        Chip(
            name="v6e",
            title="TPU v6e",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            flops=918e12,
            float32_flops=918e12,
            hbm_bytes=32 * _GIB,
            hbm_bandwidth=1638e9,
            link_bandwidth=100e9,
            slices=_V5E_SLICES,
            dimensions=2,
            ring=16,
        ),
        Chip(
            name="a100",
            title="NVIDIA A100 80 GB SXM",
            device_kinds=("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"),
            flops=312e12,
            float32_flops=156e12,
            hbm_bytes=80e9,
            hbm_bandwidth=2039e9,
            link_bandwidth=300e9,
            network_bandwidth=25e9,
        ),
        Chip(
            name="h100",
            title="NVIDIA H100 SXM",
            device_kinds=("NVIDIA H100 80GB HBM3",),
            flops=989e12,
            float32_flops=494.5e12,
            hbm_bytes=80e9,
            hbm_bandwidth=3350e9,
            link_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        Chip(
            name="h200",
            title="NVIDIA H200 SXM",
            device_kinds=("NVIDIA H200",),
            flops=989e12,
            float32_flops=494.5e12,
            hbm_bytes=141e9,
            hbm_bandwidth=4800e9,
            link_bandwidth=450e9,
            network_bandwidth=50e9,
        ),
        Chip(
            name="l4",
            title="NVIDIA L4",
            device_kinds=("NVIDIA L4",),
            flops=121e12,
            float32_flops=60.5e12,
            hbm_bytes=24e9,
            hbm_bandwidth=300e9,
            link_bandwidth=32e9,
        ),
    )
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip of one of JAX's devices, by its `device_kind`; None if the table does not have it."""
    return next((chip for chip in CHIPS.values() if device_kind in chip.device_kinds), None)
