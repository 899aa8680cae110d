"""Bad days with Shadeform: its real adapter, its double behind a line that loses things, machines without a key."""

from __future__ import annotations

from decimal import Decimal

import pytest
from tests.sim.shadeform import SimShadeform
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig

from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch


def test_a_launch_that_died_before_the_hand_over_costs_one_start_and_not_the_limit() -> None:
    with pace():
        rig = Rig(provider="shadeform")
        rig.limit = Decimal("5")  # five thousand seconds
        cloud, stage = rig.cloud, rig.stage

        def verb(home: Home) -> object:
            return launch(stage.draft(home, provider="shadeform", limit=str(rig.limit)), home)

        client = stage.client("launch", verb)
        assert stage.wait(lambda: bool(cloud.cloud.live()), 600.0, every_s=0.1)
        client.proc.kill()
        stage.home.freeze()
        stage.advance(1000.0)
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert line.usd < Decimal("0.5")
        stage.close()


def test_with_home_gone_for_ever_its_date_ends_it_and_a_guard_ends_it_as_soon_as_it_is_done() -> None:
    for has_guard in (False, True):
        with pace():
            rig = Rig(provider="shadeform")
            rig.limit = Decimal("20")
            assert rig.launch().error is None
            cloud, stage = rig.cloud, rig.stage
            assert isinstance(cloud, SimShadeform)
            (rented,) = cloud.cloud.rented.values()
            allowed_s = rented.guarded_until() - rented.created_at
            assert allowed_s < 3000, "the plan bounds it, not the twenty thousand seconds of its money"
            stage.advance(120.0)
            if has_guard:
                rig.do("guard", lambda home: guard_pass(home, every_s=60.0))
            assert bool(cloud.cloud.live()) == (not has_guard), "it cannot end itself"
            stage.home.freeze()
            stage.advance(allowed_s)
            assert cloud.cloud.live() == {}
            stage.close()


@pytest.mark.acceptance(122)
def test_a_machine_that_hangs_is_ended_by_its_date_without_anybody() -> None:
    with pace():
        rig = Rig(provider="shadeform")
        rig.limit = Decimal("1.5")
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
        (rented,) = cloud.cloud.rented.values()  # type: ignore[attr-defined]
        cloud.cloud.hang(rented.id)
        stage.home.freeze()
        stage.advance(1500.0)
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert line.usd <= rig.limit
        stage.close()
