"""Set-up of every test: float64 on, no network, no cache but the test process's own; shapes checked in the models."""

import functools
import os
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
# One thread of PyTorch in the processes that tests start, too: waiting threads spin. Before the import of torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import settings

# Container images often turn bytecode off: each process would compile the sources and rewrite the assertions again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What commands cache is the test run's own. Kept for the next run are compiled programs, by JAX's hash of each, and
# matplotlib's list of fonts, because both take long to build.
_cache = TemporaryDirectory(prefix="twinax-tests-")
_user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
os.environ.setdefault("MPLCONFIGDIR", str(Path(_user_cache, "matplotlib")))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(_user_cache, "twinax-tests")))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ["XDG_CACHE_HOME"] = _cache.name

LEAST_MEMORY = 4_000_000_000  # bytes that must be available, or test processes drop their compiled programs

# `parity_tests` and `benchmarks`, which are not installed; last, so that an installed twinax comes first.
sys.path.append(str(Path(__file__).parent))

# Runs are repeatable, and no example is too slow: the first of a shape compiles.
settings.register_profile("twinax", max_examples=30, deadline=None, derandomize=True, print_blob=True)
settings.load_profile("twinax")


_EXTENDED = Path(__file__).parent / "tests" / "extended.txt"  # cases, which `make extended-tests` lists

# Files whose tests wait for other processes, or are few and long: no test process is left with one of them at the end.
_FIRST = ("test_demo.py", "test_processes.py", "test_docs.py", "test_kills.py", "test_without_torch.py")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """One test process more than there are cores: some tests wait for processes of their own."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items):
    """Mark the extended cases; begin with the files that take longest, or with the quickest cases of a report."""
    extended = {*_EXTENDED.read_text(encoding="utf-8").splitlines()}
    for item in items:
        if item.nodeid in extended:
            item.add_marker("extended")
    if report := os.environ.get("QUICKEST_FIRST"):  # set where mistakes are planted
        seconds = import_module("benchmarks.extended_tests").times(Path(report))
        items.sort(key=lambda item: seconds.get(item.nodeid, 0))
        return
    items.sort(key=lambda item: _FIRST.index(item.path.name) if item.path.name in _FIRST else len(_FIRST))


def pytest_configure(config):
    """Set up the frameworks in the processes that run tests; the one that distributes them need not import any."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import gc

    import jax
    from jax._src.interpreters import mlir
    from jaxtyping import install_import_hook

    # Tracing allocates millions of objects that live on: looking for cycles among them takes a tenth of the time.
    gc.set_threshold(200_000, 20, 100)
    jax.config.update("jax_enable_x64", True)
    # The models alone: elsewhere wrong types are for the product itself to refuse. Before the first import of twinax.
    install_import_hook(["twinax.flax_transformer", "twinax.torch_reference"], "beartype.beartype")
    # A training keeps its process's memory in one heap, which the tests of many files would cut into pieces.
    import_module("twinax.train.loop.loop").keep_freed_memory = lambda: False
    if config.getoption("markexpr") != "slow":  # these tests run their programs more often
        flags = import_module("twinax.backend.xla_flags").fast_compilation()
        os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()
    # JAX makes a context for each program that it lowers, which takes a tenth of the suite's time; one serves all.
    mlir.make_ir_context = functools.cache(mlir.make_ir_context)
    jax.devices()  # starts JAX with them, and not in the first test that happens to need it, which may change them


def pytest_collection_finish():
    """What is imported lives on: exclude it from every search for cycles."""
    import gc

    gc.freeze()


def pytest_sessionfinish():
    """What is left goes with the process; pytest would search it for cycles five times."""
    import gc

    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def programs_of_this_file():
    """Drop compiled programs at the end of a test file if memory is short: JAX keeps them, in all gigabytes."""
    yield
    import gc

    import jax
    import psutil

    if psutil.virtual_memory().available < LEAST_MEMORY:
        jax.clear_caches()
        gc.collect()


# These tests call every function of the models; checking shapes in the other tests too would only take time.
_SHAPES_CHECKED = {
    *("test_decoding.py", "test_dropout.py", "test_initializers.py", "test_losses.py", "test_model.py"),
    *("test_optimizers.py", "test_port.py", "test_positions.py", "test_step.py", "test_torch_nn.py"),
}


def pytest_runtest_setup(item):
    """Check the annotated shapes at each call, or not; one thread of PyTorch, whatever a library has set before."""
    import torch
    from jaxtyping import config

    torch.set_num_threads(1)  # waiting threads spin, on the cores that XLA's and the other process would use
    config.update("jaxtyping_disable", item.path.name not in _SHAPES_CHECKED)
