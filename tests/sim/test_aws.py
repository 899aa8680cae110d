"""Bad days with AWS: its real adapter and boto3, moto behind a line that loses things, instances with a timer."""

from __future__ import annotations

from decimal import Decimal

import pytest
from tests.sim.aws import SimAws
from tests.sim.schedule import play
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig, strike, strikes

from homing.cloud.guard import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch import launch
from homing.cloud.providers.fake_faults import Faults, Strike
from homing.cloud.reconcile import refresh

_EVERY = 1201  # prime, so that the points that are taken do not fall on the same call of every loop


def test_some_bad_days_leak_nothing_double_nothing_and_hold_the_limit() -> None:
    with pace():
        verdicts = [play(seed, provider="aws") for seed in range(2, 10)]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []
    assert sum(bool(each.outcome) and each.outcome != "none" for each in verdicts) > 4  # most days had a run in them


def test_one_seed_is_one_day() -> None:
    with pace():
        first, again = play(9, provider="aws"), play(9, provider="aws")
    assert (first.digest, first.num_calls) == (again.digest, again.num_calls)


def test_killed_or_failed_here_and_there_a_run_on_aws_is_recovered() -> None:
    with pace():
        tasks = strikes("aws")
        assert len(tasks) > 5000
        struck = [strike(point, kind, provider="aws") for point, kind in tasks[::_EVERY]]
    assert [(each.point, each.kind, each.broken) for each in struck if each.broken] == []
    assert sum(each.was_hit for each in struck) > 0.9 * len(struck)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_more_bad_days_with_aws(part: int) -> None:
    with pace():
        verdicts = [play(seed, provider="aws") for seed in range(1000 + part, 1040, 2)]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []


def test_with_every_program_dead_and_home_gone_the_systems_own_timer_ends_it_inside_the_limit() -> None:
    with pace():
        rig = Rig(provider="aws")
        rig.limit = Decimal("1.5")  # fifteen hundred seconds
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
        assert isinstance(cloud, SimAws)
        (host,) = cloud.machines.values()
        stage.advance(20.0)
        for proc in host.living():
            proc.kill()
        stage.home.freeze()
        stage.advance(1500.0)
        assert cloud.num_timers_fired == 1
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert Decimal(1) < line.usd <= rig.limit
        stage.close()


def test_an_instance_that_nobody_handed_anything_over_to_ends_itself() -> None:
    """Home dies between the create call and the hand-over, and never comes back."""
    with pace():
        rig = Rig(provider="aws")
        cloud, stage = rig.cloud, rig.stage

        def verb(home: Home) -> object:
            return launch(stage.draft(home, provider="aws", limit=str(rig.limit)), home)

        client = stage.client("launch", verb)
        assert stage.wait(lambda: bool(cloud.cloud.live()), 600.0, every_s=0.1)
        client.proc.kill()
        stage.home.freeze()
        stage.advance(2000.0)
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert line.usd <= rig.limit
        stage.close()


def test_an_answer_that_was_lost_is_no_second_instance_because_of_its_token() -> None:
    with pace():
        rig = Rig(provider="aws")
        strikes = (Strike("lost_after", 1, "create"), Strike("error_after", 2, "create"))
        rig.cloud.cloud.change_faults(Faults(strikes=strikes))
        assert rig.launch().error is None
        assert rig.stage.truth.most_live == 1
        assert len(rig.cloud.cloud.bill()) == 1
        rig.stage.close()


def test_a_spot_instance_that_is_taken_saves_within_its_notice_and_the_guard_goes_on_with_another() -> None:
    with pace():
        rig = Rig(provider="aws")
        rig.limit = Decimal("3")
        assert rig.launch(trainer={**LONG, "steps": 60.0}).error is None
        cloud, stage = rig.cloud, rig.stage
        stage.advance(160.0)
        (first,) = cloud.cloud._live
        cloud.cloud.preempt(first, notice_s=120.0)
        cloud.plan()
        for _ in range(6):
            rig.do("guard", lambda home: guard_pass(home, every_s=60.0))
            stage.advance(60.0)
        assert len(cloud.cloud.bill()) == 2
        stage.advance(600.0)
        assert rig.do("runs", lambda home: (refresh(home), home.ledger.find("moss").state)[1]).answer == "done"
        assert cloud.cloud.live() == {}
        stage.close()


def test_what_was_made_beside_an_instance_goes_with_it() -> None:
    with pace():
        rig = Rig(provider="aws")
        assert rig.launch().error is None
        things = lambda home: home.provider("aws").list_resources()  # noqa: E731
        assert [each.kind for each in rig.do("look", things).answer] == ["group"]
        rig.destroy()
        assert rig.do("look", things).answer == []
        rig.stage.close()
