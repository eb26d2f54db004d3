"""The records of a run are read whatever the file holds."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinax.train.tracking.metrics import FILE, MetricsLog, best_update

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["update", "loss", "x"]), inner),
    max_leaves=5,
)


def test_an_update_far_ahead_costs_no_memory(tmp_path):
    lines = []
    rows = [{"update": 1, "loss": 2.0}, {"update": 10**30, "loss": 2.0}]
    (tmp_path / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    MetricsLog(tmp_path, 10**31, lines.append).close()
    assert lines == [f"{tmp_path / FILE}: has no line for update 2 and {10**31 - 3:,} others"]


@given(values=st.lists(JSON, max_size=4), data=st.data())
def test_metrics_of_any_json_are_records_or_named(values, data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    good = [{"update": 1, "loss": 2.0}, {"update": 2, "validation": {"loss": 1.0, "bleu": None}}]
    rows = data.draw(st.permutations([*good, *values]))
    (folder / FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = []
    log = MetricsLog(folder, 10**9, lines.append)
    log.write({"update": 2, "loss": 1.5})
    log.close()
    lines = [line for line in lines if "cannot be read" in line]
    assert len(lines) <= 1
    assert [record for record in log.records if record in good or record == {"update": 2, "loss": 1.5}] != []
    assert all(type(record["update"]) is int for record in log.records)
    assert len(list(folder.glob("metrics-damaged*"))) == len(lines)


@pytest.mark.parametrize(("metric", "best"), [("loss", min), ("bleu", max)])
@given(values=st.lists(st.floats(0, 100), min_size=1, max_size=6))
def test_the_best_update_has_the_lowest_loss_or_the_highest_bleu(metric, best, values):
    """The first of several; updates without the metric do not count."""
    measured = {10 * i + 10: {metric: value, "other": -value} for i, value in enumerate(values)}
    update = best_update({5: {"other": 1.0}, **measured}, metric)
    assert update == 10 * values.index(best(values)) + 10
    assert best_update({5: {"other": 1.0}}, metric) is None
