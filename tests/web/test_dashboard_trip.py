"""A whole trip on the local provider, seen through the dashboard: it lives, it bills, it ends, nothing bills."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with
from tests.web.dashboard_rig import until

from homing.api.pages.dashboard_overview import Board

cli = cli_with(steps=40)


@pytest.mark.slow
def test_a_rented_run_is_seen_from_its_first_heartbeat_to_its_receipt(cli: Homing, homing_home: Path) -> None:
    assert cli("launch", "moss", "--spend-limit", "1", "--yes").code == 0
    board = Board(homing_home)
    board._ask()
    board._tick()
    with board.all_runs() as feed:
        (row,) = feed.whole()["runs"]
        assert row["spend_limit_usd"] == 1.0
        with board.one_run(row["run"]) as one:

            def has_ended() -> bool:
                board._ask()
                board._tick()
                whole = feed.whole()
                (row,) = whole["runs"]
                return row["state"] == "done" and whole["money"]["words"] == ["Nothing is billing."]

            until(has_ended)
            (row,) = feed.whole()["runs"]
            assert row["billing"] == "no"
            assert one.is_reported.wait(60)
        with board.one_run(row["run"]) as one:
            assert one.is_reported.wait(60)
            messages = one.whole()
    board.end()
    assert [point[1] for point in messages["points"]] == list(range(1, 41))
    assert messages["head"]["state"] == "done"
    assert f"homing fetch {row['run']}" in [each["command"] for each in messages["next"]]
    assert {each["step"] for each in messages["report"]["kept"]} >= {40}
    assert messages["report"]["attempts"][0]["billing"] == "no"
    assert messages["problems"] == []
    said = cli("runs", "--json").json["runs"][0]
    assert (said["state"], said["is_billing"]) == ("done", False)
