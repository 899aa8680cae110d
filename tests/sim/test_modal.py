"""Bad days with Modal: its real adapter, the SDK's calls over a line that loses things, sandboxes with a timeout."""

from __future__ import annotations

from decimal import Decimal

import pytest
from tests.sim.schedule import destroy_all, play
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig, strike, strikes

from homing.cloud.guard import guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.cloud.launch import launch
from homing.cloud.providers.fake_faults import Faults, Strike
from homing.cloud.reconcile import CREATE_GRACE_S, refresh

_EVERY = 1201  # prime, so that the points that are taken do not fall on the same call of every loop


@pytest.mark.parametrize("first", range(0, 24, 12))
def test_some_bad_days_leak_nothing_double_nothing_and_hold_the_limit(first: int) -> None:
    with pace():
        verdicts = [play(seed, provider="modal") for seed in range(first, first + 12)]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []
    assert sum(bool(each.outcome) and each.outcome != "none" for each in verdicts) > 6  # most days had a run in them


def test_one_seed_is_one_day() -> None:
    with pace():
        first, again = play(4, provider="modal"), play(4, provider="modal")
    assert (first.digest, first.num_calls) == (again.digest, again.num_calls)


def test_killed_or_failed_here_and_there_a_run_on_modal_is_recovered() -> None:
    with pace():
        tasks = strikes("modal")
        assert len(tasks) > 5000
        struck = [strike(point, kind, provider="modal") for point, kind in tasks[::_EVERY]]
    assert [(each.point, each.kind, each.broken) for each in struck if each.broken] == []
    assert sum(each.was_hit for each in struck) > 0.9 * len(struck)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_more_bad_days_with_modal(part: int) -> None:
    with pace():
        verdicts = [play(seed, provider="modal") for seed in range(1000 + part, 1160, 4)]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []


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


def test_a_sandbox_whose_disk_is_full_ends_by_its_own_word_and_not_by_its_timeout() -> None:
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


def test_a_sandbox_whose_every_program_died_is_over() -> None:
    with pace():
        rig = Rig(provider="modal")
        assert rig.launch(trainer=LONG).error is None
        (host,) = rig.cloud.machines.values()
        for proc in host.living():
            proc.kill()
        rig.stage.advance(5.0)
        assert rig.cloud.cloud.live() == {}
        rig.stage.close()


def test_an_answer_that_was_lost_is_no_second_sandbox_because_its_name_is_taken() -> None:
    with pace():
        rig = Rig(provider="modal")
        rig.cloud.cloud.change_faults(Faults(strikes=(Strike("lost_after", 1, "create"),)))
        assert rig.launch().error is None
        assert rig.stage.truth.most_live == 1
        assert len(rig.cloud.cloud.bill()) == 1
        rig.stage.close()


def test_a_sandbox_that_was_lost_is_followed_by_another_that_goes_on() -> None:
    with pace():
        rig = Rig(provider="modal")
        rig.limit = Decimal("3")
        assert rig.launch(trainer={**LONG, "steps": 60.0}).error is None
        cloud, stage = rig.cloud, rig.stage
        stage.advance(160.0)
        (first,) = cloud.cloud._live
        cloud.cloud.preempt(first)
        for _ in range(6):
            rig.do("guard", lambda home: guard_pass(home, every_s=60.0))
            stage.advance(60.0)
        assert len(cloud.cloud.bill()) == 2
        stage.advance(600.0)
        assert rig.do("runs", lambda home: (refresh(home), home.ledger.find("moss").state)[1]).answer == "done"
        assert cloud.cloud.live() == {}
        stage.close()


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


def test_a_home_whose_clock_is_set_back_forgets_no_dollar_of_a_sandbox_that_has_ended() -> None:
    """Modal tells neither what it billed nor when it ended: what was seen while it ran is all there is."""
    with pace():
        rig = Rig(provider="modal")
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
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
