"""Bad days with RunPod: its real adapter, its double behind a line that loses things, pods that start again."""

from __future__ import annotations

from decimal import Decimal

import pytest
from tests.sim.runpod import SimRunpod
from tests.sim.schedule import play
from tests.sim.stage import pace
from tests.sim.stories import LONG, Rig, strike, strikes

from homing.cloud.guard import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch import launch
from homing.cloud.reconcile import refresh

_EVERY = 1201  # prime, so that the points that are taken do not fall on the same call of every loop


@pytest.mark.parametrize("first", range(0, 24, 12))
def test_some_bad_days_leak_nothing_double_nothing_and_hold_the_limit(first: int) -> None:
    with pace():
        verdicts = [play(seed, provider="runpod") for seed in range(first, first + 12)]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []
    assert sum(bool(each.outcome) and each.outcome != "none" for each in verdicts) > 6  # most days had a run in them


def test_killed_or_failed_here_and_there_a_run_on_runpod_is_recovered() -> None:
    with pace():
        tasks = strikes("runpod")
        assert len(tasks) > 5000
        struck = [strike(point, kind, provider="runpod") for point, kind in tasks[::_EVERY]]
    assert [(each.point, each.kind, each.broken) for each in struck if each.broken] == []
    assert sum(each.was_hit for each in struck) > 0.9 * len(struck)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_more_bad_days_with_runpod(part: int) -> None:
    with pace():
        verdicts = [play(seed, provider="runpod") for seed in range(1000 + part, 1160, 4)]
    assert [(each.seed, each.broken) for each in verdicts if each.broken] == []


def test_a_pod_whose_first_process_died_starts_empty_and_ends_itself_inside_the_limit() -> None:
    with pace():
        rig = Rig(provider="runpod")
        rig.limit = Decimal("1.5")  # fifteen hundred seconds
        assert rig.launch(trainer=LONG).error is None
        cloud, stage = rig.cloud, rig.stage
        assert isinstance(cloud, SimRunpod)
        (host,) = cloud.machines.values()
        stage.advance(20.0)
        for proc in host.living():
            proc.kill()
        stage.advance(10.0)
        assert cloud.num_restarts == 1
        assert "/opt/homing/work/go" not in host.disk.files  # its disk was emptied, and nobody hands over again
        assert len(cloud.cloud.live()) == 1
        stage.advance(1480.0)
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert line.usd < rig.limit
        rig.do("runs", refresh)
        stage.close()


def test_a_pod_that_lost_its_host_is_deleted_and_the_guard_goes_on_with_another() -> None:
    """EXITED: its card is given back, and its disk bills until somebody deletes it."""
    with pace():
        rig = Rig(provider="runpod")
        rig.limit = Decimal("3")
        assert rig.launch(trainer={**LONG, "steps": 60.0}).error is None
        cloud, stage = rig.cloud, rig.stage
        assert isinstance(cloud, SimRunpod)
        stage.advance(160.0)
        (first,) = cloud.cloud.pods
        cloud.cloud.lose(first)
        for _ in range(6):
            rig.do("guard", lambda home: guard_pass(home, every_s=60.0))
            stage.advance(60.0)
        assert len(cloud.cloud.pods) == 2
        assert cloud.cloud._things[first].ended_at is not None
        stage.advance(600.0)
        assert rig.do("runs", lambda home: (refresh(home), home.ledger.find("moss").state)[1]).answer == "done"
        assert cloud.cloud.live() == {}
        stage.close()


def test_a_pod_that_nobody_handed_anything_over_to_ends_itself() -> None:
    """Home dies between the create call and the hand-over, and never comes back."""
    with pace():
        rig = Rig(provider="runpod")
        cloud, stage = rig.cloud, rig.stage

        def verb(home: Home) -> object:
            return launch(stage.draft(home, provider="runpod", limit=str(rig.limit)), home)

        client = stage.client("launch", verb)
        assert stage.wait(lambda: bool(cloud.cloud.live()), 600.0, every_s=0.1)
        client.proc.kill()
        stage.home.freeze()
        stage.advance(2000.0)
        assert cloud.cloud.live() == {}
        (line,) = cloud.cloud.bill()
        assert line.usd <= rig.limit
        stage.close()
