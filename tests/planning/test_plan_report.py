"""What a plan prints and returns, from programs and meshes whose costs are made up: nothing is compiled."""

import re
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from tests.planning.test_planning import workload
from twinax.backend.errors import ConfigError
from twinax.cli.plan import plan_report
from twinax.cli.plan.plan_plot import plot_sweep
from twinax.cli.plan.plan_report import print_plan, print_sweep
from twinax.configs.sharding import ShardingConfig
from twinax.planning.compilation import CompiledProgram
from twinax.planning.cost import Collective, Cost, Memory
from twinax.planning.flops import model_flops
from twinax.planning.roofline import roofline
from twinax.planning.sweep import Candidate
from twinax.planning.topology import parse_topology

WORK = workload(rows=64, length=32)
# On an H100: 0.4 s of float32 products, 0.1 s of HBM, 0.05 s of links.
COST = Cost(
    0.4 * 494.5e12, 335e9, (Collective("all-reduce", 2, (), 5 * 10**9, 2), Collective("all-gather", 1, (), 9, 9))
)
STEP = CompiledProgram("train step", Memory(60 * 10**9, 19 * 10**9, 5 * 10**8, 4 * 10**6), COST)
LOSS = CompiledProgram("validation loss", Memory(3 * 10**9, 700), replace(COST, collectives=()))
SEARCH = CompiledProgram("beam search", Memory(3 * 10**9, 80 * 10**9), replace(COST, flops=1.0))


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


def planned(monkeypatch, *programs, updates=7200, topology="h100:2"):
    monkeypatch.setattr(plan_report, "compile_apart", lambda *arguments, **options: iter(programs))
    return print_plan(WORK, updates, topology, ShardingConfig(), "run.json")


def rows_of(out):
    """The cells of a printed table, by the first one of each row."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    return {cells[0]: cells[1:] for cells in rows}


def test_a_plan(monkeypatch, capsys):
    fits, document = planned(monkeypatch, STEP, LOSS, SEARCH)
    out = capsys.readouterr().out
    assert rows_of(out) == {
        "arguments": ["60 GB", "3 GB", "3 GB"],
        "temporaries": ["19 GB", "700 B", "80 GB"],
        "results": ["4 MB", "0 B", "0 B"],
        "code": ["500 MB", "0 B", "0 B"],
        "memory, of 80 GB": ["79.5 GB: fits", "3 GB: fits", "83 GB: does not fit by 3 GB"],
        "FLOPs of products": ["1.98e+14", "1.98e+14", "1"],
        "bytes of HBM, estimated": ["335 GB"] * 3,
        "all-reduce: number, sent": ["2, 10 GB", "", "2, 10 GB"],
        "time, at least": ["400 ms", "400 ms", "100 ms"],
        "limited by": ["matrix units", "matrix units", "HBM"],
    }
    assert (fits, document["fits"]) == (False, False)
    assert "an update takes at least 400 ms, limited by matrix units (matrix units 400 ms, HBM 100 ms, links" in out
    assert "7,200 updates take at least 48 minutes: 1.6 chip-hours" in out
    figures = document["run"]
    assert (figures["hours"], figures["chip_hours"]) == (pytest.approx(0.8), pytest.approx(1.6))
    assert figures["tokens_per_second"] == pytest.approx(64 * 32 / 0.4)
    assert figures["utilization"] == pytest.approx(model_flops(WORK.run.model, 64, 32, 32) / 2 / (0.4 * 494.5e12))
    assert planned(monkeypatch, STEP, LOSS)[0]


def test_a_step_that_the_compiler_refuses(monkeypatch, capsys):
    monkeypatch.setattr(plan_report, "pathologies", lambda *arguments: [])  # whose advice takes seconds
    refused = replace(STEP, memory=Memory(60 * 10**9, 10**9), cost=None)  # of what it needs, only a part is known
    fits, document = planned(monkeypatch, refused)
    out = capsys.readouterr().out
    assert not fits
    assert "run" not in document
    assert rows_of(out)["memory, of 80 GB"] == ["61 GB: does not fit"]
    assert "updates take" not in out


@pytest.mark.parametrize(
    ("updates", "text"), [(90_000, "10 hours"), (9_000, "1 hours"), (150, "1 minutes"), (3, "1.2 s")]
)
def test_times_have_the_unit_that_suits_them(updates, text, monkeypatch, capsys):
    planned(monkeypatch, STEP, updates=updates)
    assert f"updates take at least {text}" in capsys.readouterr().out


def candidate(topology, milliseconds, obstacle=None, **axes):
    topology = parse_topology(topology)
    cost = Cost(milliseconds / 1e3 * topology.chip.float32_flops, 0.0)
    sharding = ShardingConfig(**{"data": topology.chips} | axes)
    return Candidate(topology, sharding, obstacle, cost, Memory(10**9, 0), roofline(cost, topology, "float32"))


MESHES = [
    candidate("h100:8", 10),
    candidate("h100:4", 15),
    candidate("h100:8", 16, data=4, fsdp=2),
    candidate("h100:2", 25),
    candidate("h100:1", 60),
    candidate("h100:8", 1e9, "tensor=8: does not divide num_heads=4; see there"),
    candidate("h100:16", 1e9, "tensor=8: does not divide num_heads=4; see here"),
]


def swept(monkeypatch, meshes, name="h100", seconds=0.05, memory=10**9):
    """The result of a sweep, and what it compiled."""
    compiled = []

    def compile_apart(work, topology, sharding, only_step):
        compiled.append((str(topology), sharding))
        cost = None if seconds is None else Cost(seconds * topology.chip.float32_flops, 0.0)
        yield CompiledProgram("train step", Memory(memory, 0), cost)

    monkeypatch.setattr(plan_report, "compile_apart", compile_apart)
    monkeypatch.setattr(plan_report, "rank", lambda work, topologies: meshes)
    return *print_sweep(WORK, 72_000, name, None), compiled


def test_a_sweep_over_sizes(monkeypatch, capsys):
    """The fastest mesh of each size; compiled are the fastest of all, and the one that needs the fewest chip-hours."""
    fits, document, compiled = swept(monkeypatch, MESHES)
    rows = document["ranked"]
    assert fits
    assert [row["topology"] for row in rows] == ["h100:8", "h100:4", "h100:2", "h100:1"]
    assert rows[0]["mesh"] == {"data": 8, "fsdp": 1, "tensor": 1}
    assert [name for name, _ in compiled] == ["h100:8", "h100:2"]
    assert [row["how"] for row in rows] == ["compiled", "computed", "compiled", "computed"]
    assert [row["seconds_per_update"] for row in rows] == pytest.approx([0.05, 0.015, 0.05, 0.06])
    assert [row.get("estimated_seconds") for row in rows] == [pytest.approx(0.01), None, pytest.approx(0.025), None]
    assert [row["chip_hours"] for row in rows] == pytest.approx([8.0, 1.2, 2.0, 1.2])
    out = capsys.readouterr().out
    assert rows_of(out)["h100:8"] == ["8", "8", "1", "1", "50", "matrix units", "0%", "1.00", "8", "compiled"]
    assert "not possible: 2 meshes: tensor=8: does not divide num_heads=4\n" in out
    assert [row["topology"] for row in document["impossible"]] == ["h100:8", "h100:16"]


def test_a_sweep_over_the_meshes_of_one_size(monkeypatch, capsys):
    meshes = [candidate("h100:8", 10 + i, data=4, fsdp=2) for i in range(15)]
    _, document, compiled = swept(monkeypatch, meshes, "h100:8", memory=81 * 10**9)
    assert len(compiled) == 2
    out = capsys.readouterr().out
    assert "and 3 slower ones" in out
    assert len([line for line in out.splitlines() if "h100:8" in line]) == 12
    row = document["ranked"][0]
    assert (row["how"], row["memory"], row["seconds_per_update"]) == ("compiled: does not fit", 81 * 10**9, 0.01)
    assert not swept(monkeypatch, MESHES[5:])[0]  # none is possible
    monkeypatch.setattr(plan_report, "rank", lambda work, topologies: MESHES)

    def fails(*arguments, **options):
        raise ConfigError("no compiler")

    monkeypatch.setattr(plan_report, "compile_apart", fails)
    print_sweep(WORK, 1, "h100", None)
    assert "not compiled: no compiler" in capsys.readouterr().out


def test_the_picture_of_a_sweep(monkeypatch, tmp_path):
    """The fastest mesh of each size, and the line on which twice the chips need half the time of the smallest size."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.append((figure, path)))
    rows = [
        {"topology": f"{chip}:{shape}", "chips": chips, "seconds_per_update": seconds, "how": how}
        for chip, shape, chips, seconds, how in [
            ("v5e", "4x4", 16, 0.010, "compiled"),
            ("v5e", "4x4", 16, 0.030, "computed"),
            ("v5e", "2x4", 8, 0.016, "computed"),
            ("v5e", "2x2", 4, 0.028, "compiled: does not fit"),
        ]
    ]
    plot_sweep(rows, str(tmp_path / "sweep.png"))
    ((figure, _),) = figures
    perfect, times, compiled, *_ = figure.axes[0].lines
    assert list(perfect.get_xdata()) == list(times.get_xdata()) == [4, 8, 16]
    assert list(perfect.get_ydata()) == pytest.approx([28, 14, 7])
    assert list(times.get_ydata()) == pytest.approx([28, 16, 10])
    assert (list(compiled.get_xdata()), list(compiled.get_ydata())) == ([16], [10])
    assert [re.sub(r"\s", "", text.get_text()) for text in figure.axes[0].texts] == ["2x2", "2x4", "4x4"]
