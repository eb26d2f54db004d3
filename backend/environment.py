"""What the results of a program depend on besides its inputs: versions, platform, devices."""

import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

PACKAGES = ("twinax", "jax", "jaxlib", "flax", "torch")
_VECTORS = {"avx512f": "AVX-512", "avx2": "AVX2"}  # by the processor's flag, widest first
_PROCESSOR = Path("/proc/cpuinfo")


def environment() -> dict[str, str]:
    """Versions of the packages and of Python, the platform, the processor and the devices of JAX, by name."""
    versions = {name: installed for name in PACKAGES if (installed := _version(name)) is not None}
    return versions | {
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor(),
        "devices": _devices(),
    }


def processor() -> str:
    """The name of the processor and its widest vectors, which determine how XLA rounds."""
    lines = _PROCESSOR.read_text().splitlines() if _PROCESSOR.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    vectors = next((f" with {name}" for flag, name in _VECTORS.items() if flag in flags), "")
    return f"{names[0] if names else platform.machine()}{vectors}"


def _devices() -> str:
    """The devices of JAX, or why it finds none."""
    try:
        devices = Counter(device.device_kind for device in jax.devices())
    except (RuntimeError, AssertionError) as error:  # AssertionError: JAX_PLATFORMS names one whose plugin is missing
        return f"none: {str(error) or 'JAX finds no platform'}"
    return ", ".join(f"{count} × {kind}" for kind, count in devices.items())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
