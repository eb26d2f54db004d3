"""The records of a run are read whatever the file holds."""

import json
import os

from hypothesis import given
from hypothesis import strategies as st

from twinax.configs.run import LoopConfig
from twinax.train.loop.run_schedule import RunSchedule
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


def test_records_are_on_disk_before_their_checkpoint(tmp_path, monkeypatch):
    log, synced = MetricsLog(tmp_path, 0, print), []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_size, descriptor)))
    log.write({"update": 1, "loss": 2.0})
    log.flush()
    assert [size for size, _ in synced] == [(tmp_path / FILE).stat().st_size] != [0]
    log.close()


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


@given(st.dictionaries(st.integers(1, 99), st.sampled_from([0.0, 1.5, 2.0, 33.0]), min_size=1))
def test_the_best_has_the_least_loss_or_the_most_bleu(values):
    """The first of several; an update without the metric never counts."""
    updates = sorted(values)
    for metric, best in (("loss", min(values.values())), ("bleu", max(values.values()))):
        validations = {100: {"other": 0.0}} | {update: {metric: values[update]} for update in updates}
        first = next(update for update in updates if values[update] == best)
        assert best_update(validations, metric) == first
        schedule = RunSchedule(LoopConfig(updates=200, validate_every=1, metric=metric, patience=3), validations)
        assert schedule.best() == first
        assert first in schedule.checkpoints_to_keep(updates)
        later = sum(update > first for update in validations)
        assert schedule.continues(100) == (later < 3)
    assert best_update({1: {"loss": 1.0}}, "bleu") is None
