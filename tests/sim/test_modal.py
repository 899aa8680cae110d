"""Bad days with Modal: its real adapter, the SDK's calls over a line that loses things, sandboxes with a timeout."""

from __future__ import annotations

from decimal import Decimal

import pytest
from tests.doubles.faults import Faults
from tests.sim.schedule import destroy_all
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig

from homing.cloud.guard.guard_pass import guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.reconcile.reconcile import CREATE_GRACE_S


@pytest.mark.acceptance(122)
def test_a_sandbox_that_hangs_is_ended_by_its_timeout_inside_the_limit_without_anybody() -> None:
    with pace():
        rig = Rig(provider="modal")
        rig.limit = Decimal("1.5")
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
        (sandbox,) = cloud.cloud._live
        cloud.cloud.hang(sandbox)
        stage.home.freeze()
        stage.advance(1500.0)
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert Decimal(1) < line.usd <= rig.limit
        stage.close()


def test_a_sandbox_with_a_full_disk_ends_itself_before_its_timeout() -> None:
    with pace():
        rig = Rig(provider="modal")
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
        (host,) = cloud.machines.values()
        host.disk.num_bytes = host.disk.used
        stage.advance(900.0)
        (thing,) = cloud.cloud._things.values()
        assert thing.ended_by == "itself"
        stage.close()


def test_a_sandbox_ends_when_all_its_programs_died() -> None:
    with pace():
        rig = Rig(provider="modal")
        assert rig.launch(trainer=LONG).error is None
        (host,) = rig.cloud.machines.values()
        for proc in host.living():
            proc.kill()
        rig.stage.advance(5.0)
        assert rig.cloud.cloud.live() == {}
        rig.stage.close()


def test_without_a_free_card_it_waits_in_the_queue_and_rents_nothing() -> None:
    with pace():
        rig = Rig(provider="modal")
        rig.cloud.cloud.change_faults(Faults(rates={"no_capacity": 1.0}))

        def verb(home: Home) -> object:
            return launch(rig.stage.draft(home, provider="modal", limit=str(rig.limit)), home)

        client = rig.do("launch", verb)
        assert type(client.error).__name__ == "NoOffer", client.error
        assert rig.stage.t >= 600.0, "so long as the run file lets it wait"
        assert rig.cloud.cloud.bill() == []
        rig.stage.close()


def test_the_receipt_of_an_ended_sandbox_is_complete_after_the_clock_at_home_was_set_back() -> None:
    """Modal tells neither what it billed nor when it ended: what was seen while it ran is all there is, where the
    machine cannot reach the store."""
    with pace():
        rig = Rig(provider="modal")
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
        for machine in cloud.machines.values():
            machine.cut.add("store")  # else the agent's own count would be there too
        stage.client("guard", guard)
        stage.advance(100.0)
        stage.home.skew_s -= 300.0
        stage.advance(100.0)
        cloud.cloud.preempt(next(iter(cloud.cloud._live)))
        stage.advance(60.0)
        line = rig.do("runs", lambda home: home.ledger.lines(home.ledger.find("moss").id)[0]).answer
        assert line.destroyed_at is not None
        assert Decimal(line.spend_usd) >= cloud.cloud.bill()[0].usd > Decimal("0.2")
        stage.close()


def test_a_create_that_never_came_is_given_up_in_time_also_by_a_clock_that_was_set_back() -> None:
    with pace():
        rig = Rig(provider="modal")
        cloud, stage = rig.cloud, rig.stage
        cloud.cloud.change_faults(Faults(rates={"no_capacity": 1.0}))

        def verb(home: Home) -> object:
            return launch(stage.draft(home, provider="modal", limit=str(rig.limit)), home)

        client = stage.client("launch", verb)
        stage.advance(60.0)
        client.proc.kill()
        stage.home.skew_s -= 4000.0
        first = rig.do("tidy", destroy_all)
        assert "may still appear" in str(first.error)
        stage.advance(CREATE_GRACE_S)
        assert rig.do("tidy", destroy_all).answer == []
        stage.close()


def guard(home: Home) -> None:
    while True:
        wait_for_next(home, guard_pass(home, every_s=15.0), 15.0)
