"""XLA's flags that twinax needs, by backend. They work only if they are set before JAX starts the backend."""

import os
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.version import Version

Backend = Literal["cpu", "gpu", "tpu"]

# Flags that correctness needs. None for speed has been measured.
FLAGS: Mapping[Backend, Mapping[str, str]] = {
    "cpu": {},  # bit-exact as it is, apart from `avoid_wrong_sums`
    "gpu": {
        # No additions in random order, and no kernels chosen by their time: a resumed run repeats every bit.
        "--xla_gpu_deterministic_ops": "true",
    },
    "tpu": {},  # libtpu reads LIBTPU_INIT_ARGS; in XLA_FLAGS, its flags abort the process
}
_BACKENDS: Mapping[str, Backend] = {"cuda": "gpu", "rocm": "gpu", "gpu": "gpu", "tpu": "tpu"}  # by JAX_PLATFORMS
_GOOGLE, _NETWORK = "0x1ae0", "0x0042"  # PCI ids: the vendor of TPUs, and its network card
_PACKAGES = ("jax_cuda12_plugin", "jax_cuda13_plugin")  # of JAX on NVIDIA GPUs
# On CPUs, these versions of jaxlib compile some sums after products to wrong results (jax-ml/jax#39103), and some sums
# of arrays of rank 7 and 8 to crashes (#39257). Without YNNPACK's fusions of reductions, both are right.
MISCOMPILING = ("0.10.2", "0.11.0")
_WITHOUT_OLD_EMITTERS = Version("0.11")  # from this jaxlib on, XLA has no other code generator for CPUs
FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
NO_FUSED_SUMS = f"{FUSIONS}=-reduce"


def avoid_wrong_sums(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add to XLA_FLAGS what prevents wrong sums on CPUs, if the installed jaxlib needs it and the user did not decide.

    `import twinax` calls this. XLA_FLAGS that name a file are not changed.
    """
    own = environment.get("XLA_FLAGS", "").strip()
    if FUSIONS in own or (own and not own.startswith("-")):
        return
    try:
        installed = version("jaxlib")
    except PackageNotFoundError:
        return
    if installed in MISCOMPILING:
        environment["XLA_FLAGS"] = f"{NO_FUSED_SUMS} {own}".strip()


def fast_compilation() -> str:
    """Flags of the CPU with which a program compiles in half the time and runs slower: for programs that run once."""
    flags = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    if Version(version("jaxlib")) < _WITHOUT_OLD_EMITTERS:
        flags += " --xla_cpu_use_fusion_emitters=false"
    return flags


def set_xla_flags(environment: MutableMapping[str, str] = os.environ) -> None:
    """Add the flags of the expected backend to XLA_FLAGS, before the user's own, which take precedence.

    XLA_FLAGS that name a file are not changed.
    """
    own = environment.get("XLA_FLAGS", "").strip()
    flags = " ".join(f"{name}={value}" for name, value in FLAGS[expected_backend(environment)].items())
    if flags and (not own or own.startswith("-")):
        environment["XLA_FLAGS"] = f"{flags} {own}".strip()


def expected_backend(environment: Mapping[str, str] = os.environ) -> Backend:
    """The backend that JAX will start, judged without starting it: from JAX_PLATFORMS and the installed packages.

    A machine without a GPU on which JAX's CUDA package is installed counts as a GPU; the CPU ignores its flags.
    """
    platform = environment.get("JAX_PLATFORMS", "").lower().split(",")[0].strip()
    if platform:
        return _BACKENDS.get(platform, "cpu")
    if any(find_spec(package) is not None for package in _PACKAGES):
        return "gpu"
    return "tpu" if find_spec("libtpu") is not None and has_tpu() else "cpu"


def has_tpu(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether this machine has a TPU; `twinax plan` needs libtpu on machines that have none."""
    for folder in devices.glob("*"):
        with suppress(OSError):
            vendor, device = ((folder / name).read_text().strip() for name in ("vendor", "device"))
            if vendor == _GOOGLE and device != _NETWORK:
                return True
    return False
