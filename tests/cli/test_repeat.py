"""A run is repeated from its record, and a schedule that is longer than the money is said at launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, cli_with, lay_out, typing

cli = cli_with(steps=12)


@pytest.mark.acceptance(149)
@pytest.mark.slow
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
    assert "is the record of a run and cannot be changed" in changed.err


@pytest.mark.slow
def test_a_record_without_its_data_is_refused(cli: Homing, homing_home: Path) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    (record,) = (homing_home / "runs").glob("moss-*/run.json")
    Path("data/moss/manifest.json").unlink()
    said = cli("plan", str(record))
    assert said.code == 2
    assert "no longer in" in said.err


@pytest.mark.acceptance(84)
def test_launch_warns_when_the_schedule_is_longer_than_the_money(cli: Homing) -> None:
    said = cli("launch", "moss", "--set", "phases.0.steps=50000000", "--spend-limit", "0.05", "--dry-run")
    assert "The schedule exceeds the spend limit" in said.err


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_it_was_launched(
    tmp_path: Path, homing_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out(tmp_path, monkeypatch, steps=400, step_s=0.02)
    cli = typing(capsys, monkeypatch)
    try:
        launched = cli("launch", "moss", "--spend-limit", "1", "--yes", "--json", "--set", "seed=5")
        stopped = cli("stop", "moss", "--json")
        assert stopped.code == 0, stopped.err
        assert stopped.json["is_billing"] is False, "stop waits until billing has ended"
        changed = cli("launch", "moss", "--resume", "--yes", "--set", "seed=6")
        assert changed.code == 2
        assert "resumes exactly as it was launched" in changed.err
        # As `stop` prints it: without --set, and with the limit it was launched with.
        again = cli("launch", "moss", "--resume", "--yes", "--json")
        assert again.code == 0, again.err
        assert (again.json["run"], again.json["attempt"]) == (launched.json["run"], 2)
        record = json.loads((homing_home / "runs" / again.json["run"] / "run.json").read_text())
        assert (record["seed"], record["limits"]["spend_usd"]) == (5, "1")
    finally:
        clear(homing_home)


@pytest.mark.slow
def test_the_ledger_of_a_name_has_every_run_of_it(cli: Homing) -> None:
    for _ in range(2):
        cli("launch", "moss", "--spend-limit", "1", "--yes")
        cli("watch", "moss")
    by_name = cli("ledger", "moss", "--json").json["lines"]
    assert len({line["run_id"] for line in by_name}) == 2
    assert len(cli("ledger", by_name[0]["run_id"], "--json").json["lines"]) == 1


def test_a_run_that_was_never_launched_gets_the_launch_command(cli: Homing) -> None:
    said = cli("fetch", "moss")
    assert said.code == 2
    assert "homing plan moss" in said.err
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert "Did you mean moss?" in cli("watch", "moos").err
