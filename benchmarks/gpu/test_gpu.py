"""The GPU benchmark at tiny sizes: its FLOPs, its reading of a trace, its budget, and its place in the page."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import correctness, profile, training
from benchmarks.gpu.profile import operations
from benchmarks.gpu.scale import SCALES
from benchmarks.gpu.training import utilization
from benchmarks.performance import decoding
from twinax import TransformerConfig
from twinax.configs.training import TrainingConfig
from twinax.flax_transformer import fused_attention
from twinax.flax_transformer.model import Transformer
from twinax.parity.functions import random_arrays
from twinax.planning.flops import model_flops
from twinax.train.step.losses import cross_entropy

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.newest


def product_flops(jaxpr):
    """FLOPs of the matrix products in a traced program, from their shapes; a last branch is the default platform's."""
    total = 0
    for equation in jaxpr.eqns:
        for value in (*equation.params.values(), *equation.params.get("branches", ())[-1:]):
            if isinstance(value, ClosedJaxpr):
                total += product_flops(value.jaxpr)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            summed = np.prod([equation.invars[0].aval.shape[axis] for axis in contracted])
            total += 2 * int(equation.outvars[0].aval.size * summed)
    return total


@pytest.mark.parametrize(("preset", "ffn_gate"), [("base", False), ("small", True)])
def test_flops_are_those_of_the_traced_products(preset, ffn_gate):
    sizes = {"num_encoder_layers": 2, "num_decoder_layers": 3, "src_vocab_size": 41, "tgt_vocab_size": 41}
    config = TransformerConfig.preset(preset, **sizes, d_model=16, num_heads=2, d_ff=24, ffn_gate=ffn_gate)
    src, tgt = jnp.ones((5, 7), int), jnp.ones((5, 9), int)

    def loss(arrays):
        logits = Transformer.from_arrays(config, arrays)(src, tgt)
        return cross_entropy(logits, tgt, config.pad_id, TrainingConfig())[0]

    program = jax.make_jaxpr(jax.grad(loss))(random_arrays(config, 0))
    assert product_flops(program.jaxpr) == model_flops(config, 5, 7, 9)


def test_utilization_needs_a_known_peak():
    assert utilization(98.9e12, "bfloat16", "NVIDIA H200") == "10.0%"
    assert utilization(98.9e12, "float32", "NVIDIA H200") == "20.0%"
    assert utilization(1e12, "bfloat16", "cpu") == "unknown peak"


def test_the_largest_operations_of_a_training():
    *rows, (_, _, _, everything) = operations(SCALES["small"])
    shares = [float(share.removesuffix("%")) for *_, share in rows]
    assert shares == sorted(shares, reverse=True)
    assert 50 < sum(shares) <= 100.5
    assert everything == "100%"
    assert any("dot" in name or "fusion" in name for name, *_ in rows)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """f(parts, budget, result by part) -> (names of the measured parts, the page); the parts take no time."""
    page = tmp_path / "page.md"
    page.write_text("<!-- gpu -->\n<!-- end of gpu -->\n")
    measured, results = [], {}

    class Process:
        def __init__(self, part, scale):
            measured.append(part.name)
            row = ["gpu", "NVIDIA H200", "1.2", "cuda"] if part.name == "device" else [f"figure of {part.name}"]
            self.outcome = results.get(part.name, {"rows": [row, *part.expected], "seconds": 1})

        def has_ended(self):
            return True

        def result(self):
            return self.outcome

    monkeypatch.setattr(command, "Process", Process)

    def call(*parts, budget=None, **outcomes):
        measured.clear()
        results.clear()
        results.update(outcomes)
        call.failed = command.main(Namespace(budget=budget, small=False, page=page, parts=list(parts)))
        return measured[1:], page.read_text()

    return call


def test_parts_beyond_the_budget_are_left_to_the_next_call(run):
    names = [part.name for part in command.PARTS]
    at_once = [part.name for part in command.PARTS if part.seconds <= 100]
    measured, page = run(budget=110)
    assert measured == at_once
    assert page.count("(skipped: the budget was used up)") == len(names) - len(at_once) > 0
    assert all(f"figure of {name}" in page for name in at_once)
    measured, page = run()
    assert measured == [name for name in names if name not in at_once]
    assert "Not measured" not in page
    assert all(f"figure of {name}" in page for name in names)
    assert run() == ([], page)
    assert run("base")[0] == ["base"]
    with pytest.raises(SystemExit, match=r"^the device: skipped: the budget was used up$"):
        run(budget=0)


LAST = ("base", "256", "twinax, bfloat16")
FAILED = [*LAST, training.FAILED]


@pytest.mark.parametrize("outcome", [{"problem": "failed with exit status 1"}, {"rows": [FAILED]}])
def test_a_failure_keeps_what_was_measured(run, outcome):
    _, page = run()
    assert run("base", base={**outcome, "seconds": 2}) == (["base"], page)
    assert run.failed == ["base"]


def test_a_row_that_does_not_hold_is_a_failure_and_a_part_that_is_skipped_is_none(run):
    run("ladder", "updates", ladder={"rows": [["logits", "1.0e+00", "1.00", "1.00", "NO"]], "seconds": 1})
    assert run.failed == ["ladder"]
    run("decoding", decoding={"rows": [["1", "twinax, float32"]], "seconds": 1})  # a program that failed has no row
    assert run.failed == ["decoding"]
    run(budget=110)
    assert run.failed == []


def test_a_part_that_lacks_rows_is_measured_again(run):
    (base,) = (part for part in command.PARTS if part.name == "base")
    assert base.expected[-1] == LAST
    *rows, last = ([*cells, "24.62"] for cells in base.expected)
    for outcome, lack in (
        ({"rows": [*rows, FAILED], "seconds": 1}, "base · 256 · twinax, bfloat16"),
        ({"rows": [*rows, last]}, "the part's duration"),
    ):
        _, page = run(base=outcome)
        assert page.count("\n- ") == 1
        assert f"\n- base ({lack})\n" in page
    assert run()[0] == ["base"]
    assert run()[0] == []


def test_the_results_of_another_call_stay(run, tmp_path, monkeypatch):
    path, original = tmp_path / "page.json", command.results

    def results(*arguments):
        """Begin to measure, after another call has written."""
        path.write_text(json.dumps({"another device": {"base": {"rows": [["other figure"]], "seconds": 1}}}))
        return original(*arguments)

    monkeypatch.setattr(command, "results", results)
    _, page = run("big")
    assert "other figure" in page
    assert "figure of big" in page
    assert len(list(tmp_path.iterdir())) == 2  # no temporary file is left


def test_a_part_ends_when_its_rows_are_written(monkeypatch):
    """Its process may hang at its end. Its caches are its own, and deleted."""
    popen = subprocess.Popen
    monkeypatch.setenv(command.CACHES[0], "/warm")
    code = f"rows = [[os.environ[name] for name in {command.CACHES}]]; path = sys.argv[1]\n"
    code += "open(path + '+', 'w').write(json.dumps(rows)); os.rename(path + '+', path); time.sleep(90)"
    program = [sys.executable, "-c", f"import json, os, sys, time; {code}"]
    monkeypatch.setattr(subprocess, "Popen", lambda arguments, **options: popen([*program, arguments[-1]], **options))
    process = command.Process(command.DEVICE, "small")
    wait_for(process.has_ended)
    result = process.result()
    (caches,) = result["rows"]
    (folder,) = {Path(cache).parent for cache in caches}
    assert len(set(caches)) == len(command.CACHES)
    assert not folder.exists()
    assert result["seconds"] < 60


def test_sigterm_ends_the_parts():
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.gpu", "--small"], cwd=ROOT)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_for(lambda: children.read_text().split())
    (child,) = map(int, children.read_text().split())
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert not Path(f"/proc/{child}").exists()


def wait_for(condition):
    """Wait until a condition holds, for at most a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_memory_of_a_pickled_program_is_jax_s(monkeypatch):
    device = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 7}, device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    kinds = pickle.loads(pickle.dumps(training.KINDS))
    memories = {name: training.used_memory(kind.make_step) for name, kind in kinds.items()}
    assert {name for name, memory in memories.items() if memory == (7, "NVIDIA H200")} == {
        name for name in kinds if name.startswith("twinax")
    }


def test_attention_is_measured_without_deterministic_operations(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    monkeypatch.setattr(fused_attention, "get_backend", lambda: SimpleNamespace(platform_version="cuda"))
    flags = []
    monkeypatch.setattr("twinax.parity.functions.random_arrays", lambda *_: flags.append(os.environ["XLA_FLAGS"]))
    with pytest.raises(AttributeError):  # there are no arrays
        correctness.attention(SCALES["small"])
    q = jnp.zeros((1, 6, 2, 8), jnp.bfloat16)
    assert len(flags) == 1
    assert fused_attention.uses_cudnn(q, q)


def test_the_plan_of_an_unknown_device_has_no_bound():
    known, unknown = (SimpleNamespace(platform="gpu", device_kind=f"NVIDIA {kind}") for kind in ("L4", "X9"))
    assert profile.chip_to_plan(known).name == "l4"
    assert profile.chip_to_plan(unknown) is None
    assert profile.chip_to_plan(SimpleNamespace(platform="cpu", device_kind="cpu")).name == "h200"


def test_decoding_without_one_of_the_two_references(monkeypatch):
    def compare(*_, **options):
        assert options == {"together": True}
        name = decoding.TRANSFORMERS
        return [
            decoding.Row(1, {name: [0.1]}, {name: 32}, {name: "gpu"}),
            decoding.Row(4, {decoding.TWINAX: [0.1]}, {}, {decoding.TWINAX: "gpu"}),
        ]

    monkeypatch.setattr(decoding, "compare", compare)
    assert command.decoding(SCALES["small"]) == [
        ["1", "transformers, float32", "100", "", "32 of 32", "gpu"],
        ["4", "twinax, float32", "100", "1.00 (1.00 to 1.00)", "", "gpu"],
    ]


def test_the_driver_is_no_error_message(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for status, driver in ((0, "580.1"), (9, "")):
        program.write_text(f"#!/bin/sh\necho 580.1\nexit {status}\n")
        program.chmod(0o755)
        assert command.device(SCALES["small"])[0][2] == driver


def test_a_cpu_does_not_reach_the_page(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    monkeypatch.setattr(command, "results", lambda *_: [(None, {"rows": [["cpu", "cpu", "", ""]]})])
    with pytest.raises(SystemExit, match=r"^JAX sees no GPU or TPU here; `python -m benchmarks.gpu --small`"):
        command.main(Namespace(budget=None, small=False, page=page, parts=[]))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_every_part_is_printed_at_tiny_sizes():
    program = [sys.executable, "-m", "benchmarks.gpu", "--small", "--budget", "600"]
    output = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert all(part.title in output for part in command.PARTS)
    assert "Not measured" not in output
    assert "NO" not in output.split()
