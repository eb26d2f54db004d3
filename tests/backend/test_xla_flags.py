"""XLA's flags are set before the backend starts, and those of the user take precedence."""

from importlib.metadata import version

import pytest

from twinax.backend import xla_flags
from twinax.backend.xla_flags import (
    FUSIONS,
    MISCOMPILING,
    NO_FUSED_SUMS,
    avoid_wrong_sums,
    expected_backend,
    has_tpu,
    set_xla_flags,
)

pytestmark = pytest.mark.newest

OWN = "--xla_gpu_deterministic_ops=false --xla_dump_to=/tmp"
GPU = "--xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize(
    ("environment", "flags"),
    [
        ({"JAX_PLATFORMS": "cpu"}, None),
        ({"JAX_PLATFORMS": "cpu,cuda", "XLA_FLAGS": OWN}, OWN),
        ({"JAX_PLATFORMS": "tpu"}, None),
        ({"JAX_PLATFORMS": "cuda,cpu"}, GPU),
        ({"JAX_PLATFORMS": "cuda", "XLA_FLAGS": OWN}, f"{GPU} {OWN}"),
        ({"JAX_PLATFORMS": "cuda", "XLA_FLAGS": "flags.txt"}, "flags.txt"),
    ],
)
def test_the_flags_of_the_expected_backend(environment, flags):
    set_xla_flags(environment)
    assert environment.get("XLA_FLAGS") == flags


def test_installed_packages_decide(monkeypatch, tmp_path):
    """The tests run with JAX for the CPU, perhaps with libtpu, which alone is no TPU."""
    assert expected_backend({}) == "cpu"
    monkeypatch.syspath_prepend(tmp_path)
    for package, backend in (("libtpu", "cpu"), ("jax_cuda13_plugin", "gpu")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        assert expected_backend({"XLA_FLAGS": OWN}) == backend


@pytest.mark.parametrize(
    ("vendor", "device", "expected"), [("ae0", "63", True), ("ae0", "42", False), ("0de", "63", False)]
)
def test_a_tpu_is_a_device_of_the_machine(vendor, device, expected, tmp_path, monkeypatch):
    """Google's network card has the vendor of a TPU."""
    monkeypatch.setattr(xla_flags, "find_spec", lambda name: name if name == "libtpu" else None)
    (tmp_path / "0000:00:04.0").mkdir()
    for name, number in (("vendor", f"0x1{vendor}"), ("device", f"0x00{device}")):
        (tmp_path / "0000:00:04.0" / name).write_text(f"{number}\n")
    assert has_tpu(tmp_path) is expected
    monkeypatch.setattr(xla_flags, "has_tpu", lambda: expected)
    assert expected_backend({}) == ("tpu" if expected else "cpu")


STARTED = """
import os
import jax
import twinax.train.loop.loop
from twinax.backend import xla_flags
from twinax.backend.xla_flags import set_xla_flags
set_xla_flags()
jax.config.update("jax_platforms", "cpu")
print(jax.device_count(), os.environ["XLA_FLAGS"])
"""


def test_xla_accepts_the_flags_and_the_last_of_two_holds(forks):
    """XLA itself is the oracle: it ends the process at a flag that it does not know."""
    own = f"{FUSIONS}=+reduce --xla_force_host_platform_device_count=3 --xla_force_host_platform_device_count=2"
    result = forks(STARTED, JAX_PLATFORMS="cuda", XLA_FLAGS=own)
    assert (result.returncode, result.stdout) == (0, f"2 {GPU} {own}\n"), result.stderr
    unknown = forks("import jax; jax.devices()", XLA_FLAGS="--xla_gpu_deterministic=true")
    assert "Unknown flag in XLA_FLAGS: --xla_gpu_deterministic=true" in unknown.stderr


@pytest.mark.parametrize(
    ("installed", "own", "flags"),
    [
        ("0.10.2", None, NO_FUSED_SUMS),
        ("0.11.0", "--xla_dump_to=/tmp", f"{NO_FUSED_SUMS} --xla_dump_to=/tmp"),
        ("0.10.1", None, None),
        ("0.10.2", f"{FUSIONS}=+reduce", f"{FUSIONS}=+reduce"),
        ("0.10.2", NO_FUSED_SUMS, NO_FUSED_SUMS),
        ("0.10.2", "flags.txt", "flags.txt"),
    ],
)
def test_sums_are_not_fused_by_versions_that_get_them_wrong(installed, own, flags, monkeypatch):
    monkeypatch.setattr(xla_flags, "version", {"jaxlib": installed}.__getitem__)
    environment = {} if own is None else {"XLA_FLAGS": own}
    avoid_wrong_sums(environment)
    assert environment.get("XLA_FLAGS") == flags


TESTED = """
import sys
import jax
if sys.argv[1:] == ["late"]:
    jax.devices()
import twinax
from twinax.backend import self_test
try:
    print(self_test.check_compiler())
except ValueError as error:
    print(type(error).__name__, error)
print([self_test._is_right(dtype) for dtype in self_test._ROWS])
"""
FUSED = f"note: jaxlib {version('jaxlib')} gets some fused sums wrong on CPUs, so they are not fused; there is nothing"


@pytest.mark.parametrize(
    ("arguments", "own", "message", "is_right"),
    [
        ([], "", FUSED, True),
        (["late"], "", f"RunError jaxlib {version('jaxlib')} computes wrong sums in float32 and float64", False),
        ([], f"{FUSIONS}=+reduce", "None", False),
    ],
)
def test_the_self_test_finds_wrong_sums(arguments, own, message, is_right, forks):
    """The oracle is jaxlib: a version with the defect shows it, unless the flag is set before a backend starts."""
    has_defect = version("jaxlib") in MISCOMPILING
    result = forks(TESTED, *arguments, JAX_PLATFORMS="cpu", XLA_FLAGS=own)
    first, second = result.stdout.splitlines()
    assert first.startswith(message if has_defect else "None")
    assert second == str([is_right or not has_defect] * 2), result.stderr
