"""What the trackers' own readers read back is what metrics.jsonl holds."""

from __future__ import annotations

import dataclasses
import importlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trackers.conftest import end, metric, write

from homing.cloud.providers.base import wait_until
from homing.trackers.follower import Follower
from homing.world import World

METRICS = [metric(step, val_loss=6.0 / step if step % 2 else None) for step in range(1, 9)]
LOSSES = [(each.step, pytest.approx(each.loss)) for each in METRICS]
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # their packages warn of each other

Make = Callable[[str], Follower]


def notify(follower: Follower, run_dir: Path) -> None:
    """In two parts, with a fall back between: steps 5 and 6 are reported twice, and the second report counts."""
    earlier = [dataclasses.replace(metric(step, loss=99.0), t=METRICS[0].t + step / 2) for step in (5, 6)]
    before = [*METRICS[:4], *earlier]
    write(run_dir, *before)
    assert follower.catch_up()
    write(run_dir, *METRICS)
    end(run_dir)
    assert follower.follow(every_s=0.01) == "done"


@pytest.mark.acceptance(115)
def test_tensorboard(follower: Make, run_dir: Path, tmp_path: Path) -> None:
    notify(follower("tensorboard"), run_dir)
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = reader.EventAccumulator(str(tmp_path / "files/tensorboard/moss-1/pretrain"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("loss")] == LOSSES
    assert [event.step for event in read.Scalars("val_loss")] == [1, 3, 5, 7]
    assert read.Scalars("loss")[0].wall_time == METRICS[0].t


@pytest.mark.acceptance(116)
def test_mlflow(follower: Make, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    notify(follower("mlflow"), run_dir)
    client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=f"file://{tmp_path}/files/mlruns")
    experiment = client.get_experiment_by_name("homing")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "moss under glass"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"width": "64"}
    messages = {point.step: point.value for point in client.get_metric_history(run.info.run_id, "pretrain/loss")}
    assert list(messages.items()) == LOSSES
    # A restarted follower continues the same run.
    (tmp_path / "mlflow.json").unlink()
    assert follower("mlflow").catch_up()
    assert len(client.search_runs([experiment.experiment_id])) == 1


@pytest.mark.acceptance(114)
def test_wandb_offline(follower: Make, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    notify(follower("wandb"), run_dir)
    (file,) = (tmp_path / "files/wandb").glob("wandb/offline-run-*/run-moss-1.wandb")
    messages: dict[float, float] = {}

    def is_written() -> bool:  # by its own process, which may take a moment longer than ours
        messages.update({row["pretrain/step"]: row["pretrain/loss"] for row in wandb_history(file)})
        return len(messages) == len(METRICS)

    assert wait_until(is_written, timeout_s=60, every_s=0.2, world=World())
    assert list(messages.items()) == LOSSES


def test_trackio(follower: Make, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage: Any = importlib.import_module("trackio.sqlite_storage")
    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    notify(follower("trackio"), run_dir)
    rows = storage.SQLiteStorage.get_logs("homing", "moss under glass")
    messages = {row["step"]: row["pretrain/loss"] for row in rows}
    assert sorted(messages.items()) == LOSSES


def wandb_history(path: Path) -> Iterator[dict[str, float]]:
    """Rows of a .wandb file: records in blocks of 32 KiB, each a message of the shipped protocol."""
    import json

    protocol: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    for data in _records(path.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = 7, b""  # after the file's own header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block is padding
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield parts
            parts = b""
