"""`homing stop`."""

from __future__ import annotations

import re

from tests.cli.control_rig import Homing, cli_with

cli = cli_with(steps=100_000)


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
    told = re.search(r"It goes on from pretrain step (\S+) of (\S+), of 20 steps: the newest", resumed.err)
    assert told, resumed.err
    assert told[1] != "0"
    assert told[2] == resumed.json["run"]


def test_it_can_be_asked_for_without_waiting(cli: Homing) -> None:
    cli("launch", "moss", "--spend-limit", "1", "--yes")
    asked = cli("stop", "moss", "--no-wait", "--json").json
    assert asked == {"schema": "homing.stop/1", "run": asked["run"], "serial": 1, "is_stopped": False}
    assert cli("watch", "moss").code == 0
    assert cli("status", "moss", "--json").json["state"] == "stopped"


def test_it_never_guesses_the_run(cli: Homing) -> None:
    assert cli("stop").code == 2
    assert cli("stop", "moss", "--timeout", "soon").code == 2
