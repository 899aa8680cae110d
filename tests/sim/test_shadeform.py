"""Bad days with Shadeform: its real adapter, its double behind a line that loses things, machines without a key."""

from __future__ import annotations

from decimal import Decimal

import pytest
from tests.sim.schedule import play
from tests.sim.shadeform import SimShadeform
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig, strike, strikes

from homing.cloud.guard import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch import launch

_EVERY = 1201  # prime, so that the points that are taken do not fall on the same call of every loop


@pytest.mark.parametrize("first", range(0, 24, 12))
def test_some_bad_days_leak_nothing_double_nothing_and_hold_the_limit(first: int) -> None:
    with pace():
        verdicts = [play(seed, provider="shadeform") for seed in range(first, first + 12)]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []
    assert sum(bool(each.outcome) and each.outcome != "none" for each in verdicts) > 6  # most days had a run in them


def test_killed_or_failed_here_and_there_a_run_on_shadeform_is_recovered() -> None:
    with pace():
        tasks = strikes("shadeform")
        assert len(tasks) > 5000
        struck = [strike(point, kind, provider="shadeform") for point, kind in tasks[::_EVERY]]
    assert [(each.point, each.kind, each.broken) for each in struck if each.broken] == []
    assert sum(each.was_hit for each in struck) > 0.9 * len(struck)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_more_bad_days_with_shadeform(part: int) -> None:
    with pace():
        verdicts = [play(seed, provider="shadeform") for seed in range(1000 + part, 1160, 4)]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []


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
