"""Long metric files: which lines are returned, and that no important one is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from homing.cloud.contact import read_metrics
from homing.cloud.contact.read_metrics import MetricLog, newest_metrics
from homing.store import FileStore
from homing.wire import codec
from homing.wire.event_lines import Metric
from homing.world import World

KEY = "runs/a/metrics.jsonl"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    """With small bounds, so that a few thousand lines are a long file."""
    monkeypatch.setattr(read_metrics, "_ALL_BYTES", 20_000)
    monkeypatch.setattr(read_metrics, "_TAIL_BYTES", 60_000)
    monkeypatch.setattr(read_metrics, "_BLOCKS", 50)
    return FileStore(str(tmp_path), World())


def write(store: FileStore, metrics: list[Metric], end: str = "\n") -> None:
    store.put_bytes(KEY, ("\n".join(codec.dumps(metric) for metric in metrics) + end).encode())


def made(number: int, phase: str = "pretrain", first: int = 1) -> list[Metric]:
    steps = range(first, first + number)
    return [Metric(float(step), phase, step, number, step, loss=2.0 + step % 7 / 10) for step in steps]


def test_every_line_of_a_short_file_is_returned_once(store: FileStore) -> None:
    metrics = made(30)
    write(store, metrics)
    log = MetricLog(store, KEY)
    assert log.fresh() == metrics
    assert log.fresh() == []
    write(store, metrics + made(3, first=31))
    assert [metric.step for metric in log.fresh()] == [31, 32, 33]


def test_a_partly_written_line_is_returned_once_complete(store: FileStore) -> None:
    metrics = made(4)
    write(store, metrics[:3], end='\n{"schema": "homing.met')
    log = MetricLog(store, KEY)
    assert [metric.step for metric in log.fresh()] == [1, 2, 3]
    write(store, metrics)
    assert [metric.step for metric in log.fresh()] == [4]


def test_a_rewritten_metric_file_is_read_from_its_beginning(store: FileStore) -> None:
    write(store, made(30))
    log = MetricLog(store, KEY)
    log.fresh()
    changed = [dataclasses.replace(metric, loss=1.0) for metric in made(40)]
    write(store, changed)
    assert log.fresh() == changed


def test_a_missing_file_yields_no_metrics(store: FileStore) -> None:
    store.put_bytes("runs/a/other", b"")
    assert MetricLog(store, KEY).fresh() == []


def long_run() -> list[Metric]:
    """Two phases with one spike, one dip and validations."""
    metrics = made(3000) + made(2000, "sft")
    metrics[1234] = dataclasses.replace(metrics[1234], loss=99.0)
    metrics[4321] = dataclasses.replace(metrics[4321], loss=0.001)
    for at in range(499, 5000, 500):
        metrics[at] = dataclasses.replace(metrics[at], val_loss=3.0 - at / 10_000)
    return metrics


def test_a_long_file_keeps_its_ends_spikes_phase_changes_and_validations(store: FileStore) -> None:
    metrics = long_run()
    write(store, metrics)
    found = MetricLog(store, KEY).fresh()
    assert len(found) < 1000
    assert [metrics.index(metric) for metric in found] == sorted({metrics.index(metric) for metric in found})
    kept = set(map(metrics.index, found))
    assert {0, 1234, 2999, 3000, 4321, 4999} <= kept, "the ends, the spikes, and where the phase changes"
    assert set(range(499, 5000, 500)) <= kept, "every validation"
    assert set(range(4990, 5000)) <= kept, "the last lines"


def test_only_the_exact_name_val_loss_marks_a_validation(store: FileStore) -> None:
    metrics = [dataclasses.replace(metric, more={"my_val_loss": 1.0}) for metric in made(5000)]
    metrics[2345] = dataclasses.replace(metrics[2345], val_loss=-0.5)
    write(store, metrics)
    found = MetricLog(store, KEY).fresh()
    assert len(found) < 1000
    assert [metric.step for metric in found if metric.val_loss is not None] == [2346]


def test_the_best_of_many_validations_in_one_block_is_kept(store: FileStore) -> None:
    metrics = [dataclasses.replace(metric, val_loss=5.0 + metric.step % 3) for metric in made(5000)]
    metrics[2345] = dataclasses.replace(metrics[2345], val_loss=0.5)
    write(store, metrics)
    found = MetricLog(store, KEY).fresh()
    assert len(found) < 1000
    assert min(metric.val_loss or 9.0 for metric in found) == 0.5


def test_without_the_curve_the_first_lines_of_file_and_phase_and_the_tail_are_read(store: FileStore) -> None:
    metrics = made(3000) + made(2000, "sft")
    metrics[-100] = dataclasses.replace(metrics[-100], val_loss=1.5)
    write(store, metrics)
    found = MetricLog(store, KEY, is_curve=False).fresh()
    assert found[0] == metrics[0]
    assert next(metric for metric in found if metric.phase == "sft") == metrics[3000], "the first of the last phase"
    assert found[-1] == metrics[-1]
    assert [metric.val_loss for metric in found if metric.val_loss is not None] == [1.5]


@pytest.mark.slow
def test_reading_continues_at_the_end_of_a_long_file(store: FileStore) -> None:
    metrics = long_run()
    write(store, metrics)
    for log in (MetricLog(store, KEY), MetricLog(store, KEY, is_curve=False)):
        log.fresh()
        write(store, metrics + made(2, "rl"))
        assert log.fresh() == made(2, "rl")
        write(store, metrics)


def test_a_table_reads_the_last_lines_and_the_last_validation_of_a_long_file(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_metrics, "_LATEST_BYTES", 4_000)
    monkeypatch.setattr(read_metrics, "_TAIL_BYTES", 400_000)
    metrics = made(500)
    for number in (100, 300):
        metrics[number] = dataclasses.replace(metrics[number], val_loss=1.5)
    write(store, metrics, end='\n{"schema": "homing.met')
    found = newest_metrics(store, KEY)
    assert (found[0].step, found[0].val_loss) == (301, 1.5)
    assert [metric.step for metric in found[1:]] == list(range(found[1].step, 501))
    metrics[499] = dataclasses.replace(metrics[499], val_loss=1.25)
    write(store, metrics)
    assert [metric.val_loss for metric in newest_metrics(store, KEY) if metric.val_loss] == [1.25]
    write(store, made(2))
    assert newest_metrics(store, KEY) == made(2)
    assert newest_metrics(store, "runs/b/metrics.jsonl") == []
