"""metrics.jsonl as a trainer writes it, and a follower of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from homing.trackers.follower import FolderSource, Follower
from homing.trackers.sinks import What
from homing.wire import codec, file_names
from homing.wire.event_lines import Metric, Outcome
from homing.world import World


def metric(step: int, loss: float | None = None, phase: str = "pretrain", **more: float) -> Metric:
    messages = 5.0 / step if loss is None else loss
    return Metric(
        t=1_700_000_000.0 + step, phase=phase, step=step, num_steps=20, num_tokens=step * 64, loss=messages, **more
    )


def write(run_dir: Path, *metrics: Metric, torn: str = "") -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / file_names.METRICS).write_text("".join(codec.dumps(each) + "\n" for each in metrics) + torn)


def end(run_dir: Path, state: str = "done") -> None:
    (run_dir / file_names.OUTCOME).write_text(
        codec.dumps(Outcome(state, "All steps are done.", 0, "pretrain", 20, 0.0))
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


@pytest.fixture
def follower(tmp_path: Path, run_dir: Path) -> Callable[[str], Follower]:
    def make(tracker: str) -> Follower:
        what = What("moss-1", "moss under glass", tmp_path / "files", config={"width": 64})
        return Follower(tracker, what, FolderSource(run_dir, World()), World(), tmp_path / f"{tracker}.json")

    return make
