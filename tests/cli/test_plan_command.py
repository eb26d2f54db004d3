"""`twinax plan`: what it refuses, prints and writes; and the recorded cost of the programs of a small model."""

import json
import re
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest

from twinax import TransformerConfig
from twinax.backend.xla_flags import fast_compilation
from twinax.cli.plan import plan_report
from twinax.cli.plan.plan_command import find_workload
from twinax.configs.data import BatchConfig, CorpusConfig, TokenizerConfig
from twinax.configs.run import LoopConfig, RunConfig
from twinax.configs.sharding import ShardingConfig
from twinax.planning import compilation
from twinax.planning.chips import CHIPS
from twinax.planning.compilation import compile_apart
from twinax.planning.estimate import estimate
from twinax.planning.flops import model_flops
from twinax.planning.topology import parse_topology
from twinax.planning.workload import Workload

pytestmark = pytest.mark.newest

MODEL = TransformerConfig(
    **{"src_vocab_size": 128, "tgt_vocab_size": 128, "d_model": 32, "num_heads": 4, "d_ff": 64, "max_length": 16},
    **{"num_encoder_layers": 1, "num_decoder_layers": 1, "norm_placement": "pre", "final_norm": True},
)
RUN = RunConfig(
    corpus=CorpusConfig(src="-", tgt="-"),
    tokenizer=TokenizerConfig(vocab_size=128),
    model=MODEL,
    batches=BatchConfig(tokens=512),
    loop=LoopConfig(updates=50),
)
FLAGS = fast_compilation()  # the same optimization in every environment, because temporaries depend on it


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    path = tmp_path / "run.json"
    path.write_text(RUN.to_json())
    return path


@pytest.fixture(scope="module")
def programs():
    """The programs of four virtual devices, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", FLAGS)
        compiled = list(compile_apart(WORKLOAD, parse_topology("a100:4"), SHARDING))
    return {program.name: program for program in compiled}


WORKLOAD, SHARDING = Workload(RUN, 32, 16, 16), ShardingConfig(data=2, tensor=2)
# Recorded: FLOPs of products, number of collectives, bytes sent, bytes of temporaries. Doubled work is no rounding.
RECORDED = {
    "train step": (21_233_664, 17, 695_876, 1_327_128),
    "validation loss": (7_077_888, 10, 232_456, 182_352),
    "beam search": (26_214_400, 176, 1_674_256, 157_992),
}


@pytest.mark.parametrize("name", RECORDED)
def test_cost_has_not_grown(name, programs):
    """FLOPs exactly, communication within 5%, temporaries within 15%: compilers differ in how they combine and reuse.

    How often step and search are compiled is counted in test_step.py and test_decoding.py.
    """
    program, (flops, number, sent, temporaries) = programs[name], RECORDED[name]
    assert program.cost.flops == flops
    assert sum(c.count for c in program.cost.collectives) == pytest.approx(number, rel=0.05)
    assert program.cost.sent == pytest.approx(sent, rel=0.05)
    assert program.memory.temporaries == pytest.approx(temporaries, rel=0.15)


def test_the_step_costs_what_the_formula_says(programs):
    """FLOPs of products, and bytes of parameters, optimizer state and batch, per device."""
    expected, memory = estimate(WORKLOAD, SHARDING)
    step = programs["train step"]
    assert step.cost.flops == pytest.approx(model_flops(MODEL, 32, 16, 16) / 4, rel=0.02)
    assert step.cost.flops == pytest.approx(expected.flops, rel=0.02)
    assert step.memory.arguments == memory.arguments
    # bytes of HBM are estimated: of an update by the formula, of the others those that they read and write at least
    assert step.cost.hbm_bytes == expected.hbm_bytes
    search = programs["beam search"]
    assert search.cost.hbm_bytes == search.memory.arguments + search.memory.results


def test_plan(config, command, tmp_path):
    status, out, err = command("plan", config, "--topology", "h100:2", "--json", tmp_path / "plan.json")
    assert status == 0, err
    assert "2 × NVIDIA H100 SXM (h100:2), data=2 · fsdp=1 · tensor=1" in out
    assert "batch of 32×(16+16) tokens, float32" in out
    assert "50 updates take at least" in out
    assert "computed, not compiled for this chip" in out
    document = json.loads((tmp_path / "plan.json").read_text())
    assert [p["name"] for p in document["programs"]] == ["train step", "validation loss", "beam search"]
    assert document["fits"]
    assert document["run"]["updates"] == 50
    assert 0 < document["run"]["utilization"] < 1


def test_a_run_directory_is_planned_with_its_largest_shape(tmp_path):
    (tmp_path / "config.json").write_text(RUN.to_json())
    (tmp_path / "data.json").write_text(json.dumps({"shapes": [[4, 6, 85], [16, 15, 32], [3, 3, 150]], "ids": "a b"}))
    workload, updates = find_workload(str(tmp_path), None, None, None, "bfloat16")
    assert (workload.shape(), updates, workload.run.model.compute_dtype) == ("32×(16+15)", 50, "bfloat16")
    workload, updates = find_workload(str(tmp_path), 1024, 8, 7, None)
    assert (workload.shape(), updates) == ("128×(8+8)", 7)


def test_what_the_corpus_determines_is_assumed(tmp_path, capsys):
    workload, updates = find_workload("multi30k_de_en", None, None, None, None)
    assert (workload.run.model.tgt_vocab_size, workload.shape(), updates) == (6000, "16×(64+64)", 100_000)
    assert capsys.readouterr().err == (
        "twinax: assuming 100,000 updates, because the corpus determines the number; set --updates\n"
    )
    find_workload("scan", None, None, None, None)
    assert "assuming vocabularies of" in capsys.readouterr().err
    path = tmp_path / "run.json"  # whose length is the default, of neither updates nor epochs
    path.write_text(replace(RUN, loop=replace(RUN.loop, updates=None)).to_json())
    assert find_workload(str(path), None, None, None, None)[1] == 100_000
    assert "assuming 100,000 updates" in capsys.readouterr().err
    find_workload("small", None, None, None, None)  # a model, without a corpus
    assert capsys.readouterr().err == ""


def test_plan_that_does_not_fit(config, programs, command, monkeypatch):
    monkeypatch.setattr(plan_report, "compile_apart", lambda *arguments: iter(programs.values()))
    monkeypatch.setitem(CHIPS, "l4", replace(CHIPS["l4"], hbm_bytes=1e6))
    status, out, _ = command("plan", config, "--topology", "l4:1")
    assert status == 1
    assert "memory, of 1 MB" in out
    assert "does not fit" in out
    assert re.search(r"too large: the train step needs \d\.\d\d times the memory; set --execution.remat layers", out)


def hide_libtpu(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(compilation, "version", version)


def test_sweep_without_compiler(config, command, tmp_path, monkeypatch):
    """It ranks what it can compute, and says why nothing is compiled."""
    hide_libtpu(monkeypatch)
    picture, document = tmp_path / "sweep.png", tmp_path / "sweep.json"
    status, out, err = command(*("plan", config, "--topology", "v5e", "--sweep", "--plot", picture, "--json", document))
    assert status == 0, err
    assert "not compiled: libtpu, the compiler for TPUs, is not installed; run: pip install 'twinax[plan]'" in out
    assert "not possible:" in out
    assert "tensor=8: does not divide num_heads=4" in out
    assert picture.read_bytes()[:4] == b"\x89PNG"
    rows = json.loads(document.read_text())["ranked"]
    assert [row["seconds_per_update"] for row in rows] == sorted(row["seconds_per_update"] for row in rows)
    assert len({row["topology"] for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bas", "--topology", "v5e:2x2"], "bas: is neither a preset (tiny, small, base, big, t5_small)"),
        (["{config}", "--topology", "v5e:2x2"], "libtpu, the compiler for TPUs, is not installed; run: pip install"),
        (["{config}", "--topology", "v5e:3x3"], "--topology v5e:3x3: TPU v5e has no such slice; its slices: 1x1, 2x2"),
        (["{config}", "--topology", "h100:8", "--mesh", "data=4"], "the product must be the number of devices, 8"),
        (["{config}", "--topology", "h100:8", "--mesh", "data=4,data=2"], "must be sizes of data, fsdp, tensor"),
        (["{config}", "--topology", "h100:8", "--mesh", "tensor=8"], "tensor=8: does not divide num_heads=4"),
        (["{config}", "--topology", "h100:64"], "64 devices divide the rows of a batch, which has 32"),
        (
            ["{config}", "--topology", "h100:8", "--tokens", "3"],
            "--tokens 3: must be at least 16, the length of one sentence",
        ),
        (["{config}", "--topology", "h100:8", "--length", "17"], "must not be above the model's max_length=16"),
        (["{config}", "--topology", "h100:8", "--updates", "0"], "--updates 0: must be at least 1"),
        (["{config}", "--topology", "h100:8", "--compute-dtype", "int8"], "compute_dtype='int8'"),
        (["{config}", "--topology", "h100:8", "--plot", "a.png"], "--plot a.png: shows a sweep; add --sweep"),
        (["{config}", "--topology", "h100", "--sweep", "--mesh", "data=4"], "a sweep tries all meshes; omit it"),
        (["{config}", "--topology", "h100", "--sweep", "--json", "no/such"], "no/such: there is no directory no"),
        (["{text}", "--topology", "h100:8"], "is not JSON"),
        (["{model}", "--topology", "h100:8"], "run_schema_version=None"),
    ],
)
def test_bad_input_is_one_line(arguments, message, config, command, tmp_path, monkeypatch):
    hide_libtpu(monkeypatch)
    (tmp_path / "text").write_text("{")
    (tmp_path / "model").write_text(json.dumps({"d_model": 3}))
    paths = {"config": config, "text": tmp_path / "text", "model": tmp_path / "model"}
    status, out, err = command("plan", *(argument.format(**paths) for argument in arguments))
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
