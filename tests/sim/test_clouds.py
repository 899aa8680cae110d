"""What all four clouds promise on bad days, each with its real adapter and its double behind a line that loses things.

Nothing leaks, nothing is doubled, the limit holds; killed or failed at any call, a run is recovered. What only one of
them can do, or does in its own way, is tested in that cloud's own file.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal

import pytest
from tests.doubles.faults import Faults, Strike
from tests.sim.cloud import SimCloud
from tests.sim.runpod import SimRunpod
from tests.sim.schedule import play
from tests.sim.stage import CLOUDS, pace
from tests.sim.stories import LONG, Rig, strike, strikes

from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.reconcile.reconcile import refresh

_EVERY = 1201  # prime, so that the points that are taken do not fall on the same call of every loop
# A day with moto behind it costs several times as much as one with another double.
_SOME_DAYS = {
    "runpod": [range(0, 12), range(12, 24)],
    "shadeform": [range(0, 12), range(12, 24)],
    "aws": [range(2, 10)],
    "modal": [range(0, 12), range(12, 24)],
}
_MORE_DAYS = {
    "runpod": [range(1000 + part, 1160, 4) for part in range(4)],
    "shadeform": [range(1000 + part, 1160, 4) for part in range(4)],
    "aws": [range(1000 + part, 1040, 2) for part in range(2)],
    "modal": [range(1000 + part, 1160, 4) for part in range(4)],
}
every_cloud = pytest.mark.parametrize("provider", _SOME_DAYS)


def _each_part(days: dict[str, list[range]]) -> pytest.MarkDecorator:
    parts = [pytest.param(name, part, id=f"{name}-{part[0]}") for name in days for part in days[name]]
    return pytest.mark.parametrize(("provider", "seeds"), parts)


def test_no_cloud_is_left_out() -> None:
    assert set(_SOME_DAYS) == set(_MORE_DAYS) == set(_LOSE) == set(CLOUDS) - {"fake"}


@pytest.mark.acceptance(140, "X26")
@pytest.mark.slow
@_each_part(_SOME_DAYS)
def test_some_bad_days_leak_nothing_double_nothing_and_hold_the_limit(provider: str, seeds: range) -> None:
    with pace():
        verdicts = [play(seed, provider=provider) for seed in seeds]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []
    # Most days had a run in them.
    assert sum(bool(each.outcome) and each.outcome != "none" for each in verdicts) > len(seeds) // 2


@pytest.mark.slow
@_each_part(_MORE_DAYS)
def test_more_bad_days(provider: str, seeds: range) -> None:
    with pace():
        verdicts = [play(seed, provider=provider) for seed in seeds]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []


@pytest.mark.parametrize(("provider", "seed"), [("runpod", 4), ("shadeform", 4), ("aws", 9), ("modal", 4)])
def test_one_seed_is_one_day(provider: str, seed: int) -> None:
    with pace():
        first, again = play(seed, provider=provider), play(seed, provider=provider)
    assert (first.digest, first.num_calls) == (again.digest, again.num_calls)


@pytest.mark.acceptance("X20", "X26")
@pytest.mark.slow
@every_cloud
def test_killed_or_failed_here_and_there_a_run_is_recovered(provider: str) -> None:
    with pace():
        tasks = strikes(provider)
        assert len(tasks) > 5000
        struck = [strike(point, kind, provider=provider) for point, kind in tasks[::_EVERY]]
    assert [(each.point, each.kind, each.broken) for each in struck if each.broken] == []
    assert sum(each.was_hit for each in struck) > 0.9 * len(struck)


@every_cloud
def test_an_instance_ends_inside_the_limit_if_home_died_before_the_hand_over(provider: str) -> None:
    """Home dies between the create call and the hand-over, and never comes back. Modal's has all it needs by then."""
    with pace():
        rig = Rig(provider=provider)
        cloud, stage = rig.cloud, rig.stage

        def verb(home: Home) -> object:
            return launch(stage.draft(home, provider=provider, limit=str(rig.limit)), home)

        client = stage.client("launch", verb)
        assert stage.wait(lambda: bool(cloud.cloud.live()), 600.0, every_s=0.1)
        client.proc.kill()
        stage.home.freeze()
        stage.advance(2000.0)
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert line.usd <= rig.limit
        stage.close()


@pytest.mark.acceptance(122)
@pytest.mark.parametrize("way", ["boot_dies", "boot_never"])
@every_cloud
def test_what_never_comes_up_is_ended_inside_the_limit_by_the_launch_that_waits_for_it(provider: str, way: str) -> None:
    """No program of ours is there to end it, and most providers have no guard: a patient launch would cost more."""
    with pace():
        rig = Rig(provider=provider)
        rig.limit = Decimal("0.4")  # four hundred seconds
        rig.cloud.cloud.change_faults(Faults(rates={way: 1.0}))
        assert rig.launch().error is not None
        assert rig.cloud.cloud.live() == {}
        assert Decimal(0) < sum((line.usd for line in rig.cloud.cloud.bill()), Decimal(0)) <= rig.limit
        rig.stage.close()


@pytest.mark.parametrize("way", ["boot_dies", "boot_never"])
@every_cloud
def test_a_laptop_that_slept_while_it_waited_has_not_stopped_the_meter(provider: str, way: str) -> None:
    """No second of it passed for the launch that waits for a machine, and all of it was billed."""
    with pace():
        rig = Rig(provider=provider)
        cloud, stage, limit = rig.cloud, rig.stage, Decimal("0.6")  # six hundred seconds
        cloud.cloud.change_faults(Faults(rates={way: 1.0}))

        def verb(home: Home) -> object:
            return launch(stage.draft(home, provider=provider, limit=str(limit)), home)

        client = stage.client("launch", verb)
        assert stage.wait(lambda: bool(cloud.cloud.live()), 600.0, every_s=0.1)
        stage.advance(30.0)
        stage.home.freeze()
        stage.advance(300.0)
        stage.home.thaw()
        assert stage.finish(client).error is not None
        assert cloud.cloud.live() == {}
        assert sum((line.usd for line in cloud.cloud.bill()), Decimal(0)) <= limit
        stage.close()


@every_cloud
def test_one_that_came_up_while_the_laptop_slept_is_kept(provider: str) -> None:
    with pace():
        rig = Rig(provider=provider)
        cloud, stage = rig.cloud, rig.stage
        stage.programs.trainer = LONG

        def verb(home: Home) -> object:
            return launch(stage.draft(home, provider=provider, limit=str(rig.limit)), home)

        client = stage.client("launch", verb)
        assert stage.wait(lambda: bool(cloud.cloud.live()), 600.0, every_s=0.1)
        stage.advance(1.0)
        stage.home.freeze()
        stage.advance(200.0)
        stage.home.thaw()
        assert stage.finish(client).error is None
        assert len(cloud.cloud.live()) == 1
        stage.close()


@every_cloud
def test_an_answer_that_was_lost_is_no_second_machine(provider: str) -> None:
    """AWS knows the call again by its token, Modal the name that is taken; the others are asked what they have."""
    with pace():
        rig = Rig(provider=provider)
        strikes = (Strike("lost_after", 1, "create"), Strike("error_after", 2, "create"))
        rig.cloud.cloud.change_faults(Faults(strikes=strikes))
        assert rig.launch().error is None
        assert rig.cloud.cloud._dice.counts["create"] >= 1, "an answer was lost"
        assert rig.stage.truth.most_live == 1
        assert len(rig.cloud.cloud.bill()) == 1
        rig.stage.close()


def _exit(cloud: SimCloud, machine: str) -> None:
    """EXITED: its card is released, and its disk bills until it is deleted."""
    assert isinstance(cloud, SimRunpod)
    cloud.cloud.lose(machine)


def _take(cloud: SimCloud, machine: str) -> None:
    cloud.cloud.preempt(machine)


def _give_notice(cloud: SimCloud, machine: str) -> None:
    """It saves within its notice."""
    cloud.cloud.preempt(machine, notice_s=120.0)
    cloud.plan()


_LOSE: dict[str, Callable[[SimCloud, str], None]] = {
    "runpod": _exit,
    "shadeform": _take,
    "aws": _give_notice,
    "modal": _take,
}


@every_cloud
def test_the_guard_resumes_on_another_instance_after_one_is_lost(provider: str) -> None:
    with pace():
        rig = Rig(provider=provider)
        rig.limit = Decimal("3")
        assert rig.launch(trainer={**LONG, "steps": 60.0}).error is None
        cloud, stage = rig.cloud, rig.stage
        stage.advance(160.0)
        (first,) = cloud.cloud._live
        _LOSE[provider](cloud, first)
        for _ in range(6):
            rig.do("guard", lambda home: guard_pass(home, every_s=60.0))
            stage.advance(60.0)
        assert len(cloud.cloud.bill()) == 2
        assert [line.until is not None for line in cloud.cloud.bill() if line.id == first] == [True]
        stage.advance(600.0)
        assert rig.do("runs", lambda home: (refresh(home), home.ledger.find("moss").state)[1]).answer == "done"
        assert cloud.cloud.live() == {}
        stage.close()
