"""`--tracker`, `--wandb`, `--run-name` and `homing tensorboard`."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing

import homing
from homing.api import tracking
from homing.cloud.home import Home
from homing.cloud.providers.base import wait_until
from homing.world import World


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    lay_out(tmp_path, monkeypatch, steps=12, step_s=0.02)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def losses(folder: Path) -> list[tuple[int, float]]:
    reader: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    read = reader.EventAccumulator(str(folder))
    read.Reload()
    return [(event.step, round(event.value, 3)) for event in read.Scalars("loss")]


@pytest.mark.acceptance(114)
@pytest.mark.slow
def test_no_tracker_is_used_by_default(cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    assert cli("watch", "moss").code == 0
    assert list(homing_home.glob("runs/*/trackers")) == []


@pytest.mark.parametrize(
    ("flags", "word"),
    [(("--tracker", "comet"), "Unknown tracker: 'comet'"), (("--tracker", "mlflow"), "only through a tunnel")],
)
def test_an_unusable_tracker_is_refused_before_renting(
    cli: Homing, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], word: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://203.0.113.42:5000")
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", *flags)
    assert said.code == 2
    assert word in said.err
    assert cli("ledger", "--json").json["lines"] == []


@pytest.mark.acceptance(114, "X4")
def test_wandb_without_a_key_is_said_to_be_offline_and_named_as_asked(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders: list[dict[str, Any]] = []
    with monkeypatch.context() as patch:
        patch.setattr("homing.api.tracking.start", lambda each, world: orders.append(vars(each)) or True)
        said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--wandb", "--run-name", "lanbot-v3")
    assert said.code == 0
    assert "logging offline" in said.err
    (order,) = orders
    assert (order["tracker"], order["name"]) == ("wandb", "lanbot-v3")
    assert order["config"]["width"] == 64


@pytest.mark.slow
@pytest.mark.parametrize("is_typed", [True, False], ids=["homing watch", "Run.watch"])
def test_a_follower_that_died_with_its_computer_goes_on_with_the_next_watch(
    is_typed: bool, cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    monkeypatch.setattr("homing.api.tracking.start", lambda each, world: begun.append(each.tracker) or True)
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    (row,) = Home(homing_home, World()).ledger.runs()
    order = tracking.following("trackio", homing_home, row.id, "moss", store=row.store)
    order.path("order").parent.mkdir(parents=True)
    order.path("order").write_text(json.dumps(vars(order)))
    if is_typed:
        assert cli("watch", "moss").code == 0
    else:
        assert list(homing.Run("moss").watch())
    assert begun == ["trackio"]


@pytest.mark.slow
def test_a_follower_that_cannot_be_started_is_a_warning_and_the_run_goes_on(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(each: Any, world: Any) -> bool:
        raise OSError("no more processes")

    monkeypatch.setattr("homing.api.tracking.start", refuse)
    said = cli("launch", "moss", "--spend-limit", "1", "--yes", "--tracker", "tensorboard")
    assert said.code == 0
    assert "warning: not logging to tensorboard: no more processes" in said.err
    assert cli("watch", "moss").code == 0


@pytest.mark.acceptance(115)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_curves_of_a_run_are_in_tensorboard_as_it_goes_and_after_its_end(cli: Homing, homing_home: Path) -> None:
    assert cli("launch", "moss", "--spend-limit", "1", "--yes", "--tracker", "tensorboard").code == 0
    assert cli("watch", "moss").code == 0
    (run_id,) = [row.id for row in Home(homing_home, World()).ledger.runs()]
    lock = homing_home / "runs" / run_id / "trackers/tensorboard.lock"
    assert wait_until(
        lambda: lock.exists() and not World().is_locked(lock), timeout_s=90, every_s=0.3, world=World()
    ), "the follower ends with the run"
    folder = homing_home / "tensorboard" / run_id / "pretrain"
    wanted = [(step, round(5.0 / step, 3)) for step in range(1, 13)]
    assert losses(folder) == wanted
    document = cli("tensorboard", "moss", "--json").json
    assert document["folder"] == str(folder.parent)
    assert losses(folder) == wanted, "what was sent is not sent again"


@pytest.mark.acceptance(104, 115)
@pytest.mark.slow
def test_after_the_end_the_files_are_written_from_the_store_alone(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    cli("watch", "moss")
    said = cli("tensorboard", "moss", "--no-serve")
    assert said.code == 0, said.err
    (folder,) = homing_home.glob("tensorboard/*/pretrain")
    assert len(losses(folder)) == 12
    assert cli("tensorboard", "fern").code == 2


@pytest.mark.acceptance(114)
@pytest.mark.slow
def test_a_tracker_that_fails_every_call_costs_no_step(cli: Homing, homing_home: Path, tmp_path: Path) -> None:
    """A file is where the tracker's folder should be: the tracker fails from the first line to the last."""
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    (row,) = Home(homing_home, World()).ledger.runs()
    (tmp_path / "blocked").write_text("")
    order = {
        "tracker": "tensorboard",
        "run_id": row.id,
        "name": row.id,
        "folder": str(tmp_path / "t"),
        "store": row.store,
    }
    (tmp_path / "order.json").write_text(json.dumps({**order, "files": str(tmp_path / "blocked")}))
    (tmp_path / "t").mkdir()
    with open(tmp_path / "log", "w") as log:
        argv = [sys.executable, "-m", "homing.trackers", str(tmp_path / "order.json")]
        follower = subprocess.Popen(argv, stderr=log)
        try:
            said = cli("watch", "moss")
            assert wait_until(
                lambda: "; retrying: " in (tmp_path / "log").read_text(), timeout_s=90, every_s=0.2, world=World()
            )
            assert follower.poll() is None, "it does not give up"
        finally:
            follower.kill()
            follower.wait(timeout=10)
    assert said.code == 0
    metrics = (tmp_path / "project").parent.glob("**/metrics.jsonl")
    assert any(len(path.read_text().splitlines()) == 12 for path in metrics)
