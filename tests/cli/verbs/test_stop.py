"""`homing stop`."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.api.runs import stop_run

cli = cli_with(steps=100_000)


@pytest.mark.acceptance(123)
@pytest.mark.slow
def test_it_stops_with_a_checkpoint_and_can_be_gone_on_with(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    said = cli("stop", "moss", "--json")
    assert said.code == 0, said.err
    assert said.json["state"] == "stopped"
    again = cli("stop", "moss")
    assert again.code == 2
    assert "not running" in again.err
    resumed = cli("launch", "moss", "--resume", "--spend-limit", "1", "--yes", "--json")
    assert resumed.json["attempt"] == 2
    assert "spent by earlier attempts" in resumed.err
    found = re.search(r"It resumes from pretrain step (\S+) of (\S+), of 20 steps: the newest", resumed.err)
    assert found, resumed.err
    assert found[1] != "0"
    assert found[2] == resumed.json["run"]


@pytest.mark.slow
def test_a_run_that_finished_before_the_stop_arrived_is_not_resumed(
    cli: Homing, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    waits = stop_run.wait_for_stop

    def is_done(*args: Any, **settings: Any) -> Any:
        status = waits(*args, **settings)
        return dataclasses.replace(status, run=dataclasses.replace(status.run, state="done"))

    monkeypatch.setattr(stop_run, "wait_for_stop", is_done)
    said = cli("stop", "moss").err
    assert "Fetch it: homing fetch moss" in said
    assert "--resume" not in said


@pytest.mark.slow
def test_it_can_be_asked_for_without_waiting(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    asked = cli("stop", "moss", "--no-wait", "--json").json
    assert asked == {"schema": "homing.stop/1", "run": asked["run"], "serial": 1, "is_stopped": False}
    assert cli("watch", "moss").code == 0
    assert cli("status", "moss", "--json").json["state"] == "stopped"


def test_it_never_guesses_the_run(cli: Homing) -> None:
    assert cli("stop").code == 2
    assert cli("stop", "moss", "--timeout", "soon").code == 2
