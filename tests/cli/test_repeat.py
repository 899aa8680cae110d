"""A run is repeated from its record, and a schedule that is longer than the money is said at launch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing


@pytest.fixture
def cli(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Homing]:
    lay_out(tmp_path, monkeypatch, steps=12, step_s=0.02)
    yield typing(capsys, monkeypatch)
    clear(homing_home)


def test_a_run_is_repeated_from_its_record(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes", "--set", "phases.0.steps=17", "--set", "seed=5")
    cli("watch", "moss")
    (record,) = (homing_home / "runs").glob("moss-*/run.json")
    first = json.loads(record.read_text())
    Path("runs/moss.yaml").unlink()

    planned = cli("plan", str(record), "--json")
    assert planned.code == 0, planned.err
    again = cli("launch", str(record), "--spend-limit", "1", "--yes", "--json")
    assert again.code == 0, again.err
    cli("watch", again.json["run"])
    second = json.loads((homing_home / "runs" / again.json["run"] / "run.json").read_text())
    assert second["id"] != first["id"]
    assert {**second, "id": ""} == {**first, "id": ""}
    assert (second["seed"], second["phases"][0]["num_steps"]) == (5, 17)

    changed = cli("launch", str(record), "--spend-limit", "1", "--yes", "--set", "seed=6")
    assert changed.code == 2
    assert "repeated as it is" in changed.err


def test_a_record_without_its_data_is_refused(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    (record,) = (homing_home / "runs").glob("moss-*/run.json")
    Path("data/moss/manifest.json").unlink()
    said = cli("plan", str(record))
    assert said.code == 2
    assert "not in" in said.err


def test_launch_warns_when_the_schedule_is_longer_than_the_money(cli: Homing) -> None:
    said = cli("launch", "moss", "--set", "phases.0.steps=50000000", "--spend-limit", "0.05", "--dry-run")
    assert "The schedule is longer than the money" in said.err
