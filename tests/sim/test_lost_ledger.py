"""Ledgers that are lost with their backup while something depends on them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.sim.host import HOME
from tests.sim.schedule import destroy_all
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig

from homing.cloud.home import Home
from homing.cloud.watch.follow import watch
from homing.cloud.watch.run_output import follow

LEDGER, BACKUP = f"{HOME}/ledger.sqlite", f"{HOME}/backup/ledger.sqlite"


def lose_ledger(rig: Rig) -> None:
    rig.stage.home.lose_database(LEDGER)
    rig.stage.home.disk.drop(BACKUP)


def watch_all(home: Home) -> Any:
    return [report.text for report in watch(home, home.ledger.find("moss"))]


@pytest.mark.parametrize("is_cut", [False, True])
def test_watch_ends_after_the_ledger_lost_its_run_once_nothing_of_it_bills(is_cut: bool) -> None:
    """Seed 1159: no command records a run again after its instance is gone, and watch waited for it forever."""
    with pace():
        rig = Rig()
        assert rig.launch(trainer=LONG).error is None
        client = rig.stage.client("watch", watch_all)
        rig.stage.advance(30.0)
        rig.stage.home.cut |= {"cloud"} if is_cut else set()
        rig.cloud.cloud.preempt(str(rig.live_id()))
        lose_ledger(rig)
        if is_cut:
            rig.stage.advance(300.0)
            assert client.proc.is_alive, "its instance may be billing"
            rig.stage.home.cut.clear()
        rig.stage.finish(client, deadline_s=120.0)
        assert "disappeared from the ledger" in str(client.error)
        assert "homing adopt file:/store/mine moss" in str(client.error)
        assert rig.do("tidy", destroy_all).answer == []
        rig.stage.truth.check_receipts()
        rig.stage.close()


def test_so_does_following_its_log() -> None:
    with pace():
        rig = Rig()
        assert rig.launch(trainer=LONG).error is None
        client = rig.stage.client("logs", lambda home: list(follow(home, home.ledger.find("moss"))))
        rig.stage.advance(30.0)
        rig.cloud.cloud.preempt(str(rig.live_id()))
        lose_ledger(rig)
        assert rig.stage.finish(client, deadline_s=120.0).error is None
        rig.stage.close()


def test_watch_continues_while_the_provider_still_lists_the_instance() -> None:
    with pace():
        rig = Rig()
        assert rig.launch(trainer={**LONG, "steps": 40.0}).error is None
        client = rig.stage.client("watch", watch_all)
        rig.stage.advance(30.0)
        lose_ledger(rig)
        rig.stage.finish(client)
        assert client.error is None
        assert client.answer[-1].startswith("done")
        rig.stage.truth.check_receipts()
        rig.stage.close()
