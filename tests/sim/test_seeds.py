"""Scripted days that once failed: each was found by a seed, and each must stay fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults, Strike
from tests.sim.host import Host
from tests.sim.schedule import destroy_all
from tests.sim.stage import Client, Stage, pace
from tests.sim.truth import Truth
from tests.sim.world import STORE

from homing.cloud.destroy import destroy_run
from homing.cloud.guard.guard_pass import guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.cloud.launch.armed_guards import guards
from homing.cloud.launch.launch import launch
from homing.cloud.reconcile.adopt import adopt, propose
from homing.cloud.reconcile.reconcile import refresh
from homing.instance.agent.folder import Folder
from homing.instance.agent.watchdog import last_beat_at
from homing.store import open_store
from homing.wire import codec
from homing.wire.boot_json import Boot
from homing.wire.control_files import Heartbeat, Request

LIMIT = Decimal("0.60")  # six hundred seconds
ENDLESS = {"steps": 1000.0, "step_s": 4.0, "save_every": 5.0}
SHORT = {"steps": 5.0, "step_s": 4.0, "save_every": 5.0}


@pytest.fixture
def stage() -> Iterator[Stage]:
    with pace():
        made = Stage(11)
        yield made
        made.close()


def rent(stage: Stage, *, boot_s: float = 5.0, strikes: tuple[Strike, ...] = (), **faults: Any) -> None:
    stage.rent(Settings(has_guard=False, boot_s=boot_s), Faults(strikes=strikes, **faults), "3.598")


def go(stage: Stage, trainer: dict[str, float]) -> Client:
    stage.programs.trainer = trainer

    def verb(home: Home) -> Any:
        ready = stage.draft(home, provider="fake", limit=str(LIMIT))
        stage.truth.limits_usd[ready.run.id] = LIMIT
        return launch(ready, home)

    client = stage.finish(stage.client("launch", verb))
    assert client.error is None, client.error
    return client


def billed(truth: Truth) -> Decimal:
    (run_id,) = truth.limits_usd
    return truth.billed(run_id)


def test_an_end_that_was_accepted_and_did_nothing_is_asked_for_again_before_the_limit(stage: Stage) -> None:
    # The dead-man took the provider's first 202 for the end and waited two minutes, over the limit.
    rent(stage, strikes=(Strike("destroy_stubborn", 1, "destroy"),), stubborn_tries=4)
    go(stage, SHORT)
    stage.advance(700)
    assert stage.cloud is not None
    assert stage.cloud.cloud.live() == {}
    assert billed(stage.truth) < LIMIT / 2


@pytest.mark.parametrize("behind_s", [30.0, 4000.0])
def test_a_machine_with_a_slow_clock_counts_its_boot_time(stage: Stage, behind_s: float) -> None:
    # It took its own first moment for the beginning of billing, and was as late as its boot was long.
    stage.home.skew_s = behind_s
    rent(stage, boot_s=60.0)
    go(stage, ENDLESS)
    stage.advance(700)
    assert stage.cloud is not None
    assert stage.cloud.cloud.live() == {}
    assert billed(stage.truth) <= LIMIT


def test_a_dead_man_with_a_clock_behind_learns_the_age_from_the_agent(stage: Stage) -> None:
    # The agent got its limits and recorded them without the age, so the second guard stayed behind.
    stage.home.skew_s = 300.0
    rent(stage, boot_s=60.0)
    go(stage, ENDLESS)
    stage.advance(30)
    assert stage.cloud is not None
    (machine,) = stage.cloud.machines.values()
    taken = codec.loads(Request, machine.disk.files["/fake-machine/work/run/limits.json"])
    assert taken.age_s is not None
    assert taken.age_s >= 60.0


def test_an_agent_that_starts_again_with_a_clock_behind_forgets_no_dollar(stage: Stage) -> None:
    # The last heartbeat lay before the beginning by the machine's own clock, and counting began anew at nothing.
    rent(stage)
    go(stage, ENDLESS)
    stage.advance(100)
    assert stage.cloud is not None
    (machine,) = stage.cloud.machines.values()
    files = machine.disk.files
    boot = codec.loads(Boot, files["/fake-machine/work/boot.json"])
    beat = codec.loads(Heartbeat, files["/fake-machine/work/run/heartbeat.json"])

    def look(behind_s: float) -> Callable[[Any], None]:
        def program(world: Any) -> None:
            machine.skew_s = -behind_s
            counted.append(last_beat_at(Folder(boot, world)) - boot.started_at)

        return program

    counted: list[float] = []
    stage.programs.begin(machine, "look", look(5000.0), {})
    stage.advance(1)
    spent_s = float(Decimal(beat.spend_usd) / Decimal(boot.rate_usd_per_hour) * 3600)
    assert counted[0] >= spent_s - 1


def take_over(stage: Stage) -> Host:
    """Another computer takes the run over; no guard runs there."""
    other = stage.add_home("home2")

    def verb(home: Home) -> Any:
        store = open_store(f"file:{STORE}/mine", home.world, create=False)
        return adopt(propose(store, "moss", home), store, home)

    assert stage.finish(stage.client("adopt", verb, other)).error is None
    return other


def guard(home: Home) -> None:
    while True:
        wait_for_next(home, guard_pass(home, every_s=15.0), 15.0)


def test_after_adopt_the_old_homes_guard_holds_the_limit_over_the_machine_that_it_launched(stage: Stage) -> None:
    story_of_a_machine_given_away(stage)


def story_of_a_machine_given_away(stage: Stage) -> None:
    """Its run is another home's now. Its machine hangs, and no guard is on duty over there: it is still its own."""
    rent(stage)
    stage.client("guard", guard)
    go(stage, ENDLESS)
    stage.advance(60)
    take_over(stage)
    assert stage.cloud is not None
    cloud = stage.cloud.cloud
    assert len(cloud.live()) == 1, "adopting ends nothing"
    (machine,) = cloud._live
    cloud.hang(machine)
    stage.advance(300)
    assert cloud._live, "it hangs, and there is money left"
    stage.advance(400)
    assert cloud.live() == {}
    assert LIMIT / 2 < billed(stage.truth) <= LIMIT


def test_what_another_home_launches_is_no_machine_of_this_homes_guard_and_that_launch_says_so(stage: Stage) -> None:
    # Adopted, destroyed and launched again over there, where no guard was on duty; then it hung.
    rent(stage)
    stage.client("guard", guard)
    go(stage, ENDLESS)
    stage.advance(60)
    other = take_over(stage)
    stage.finish(stage.client("destroy", lambda home: destroy_run(home, home.ledger.find("moss")), other))
    said: list[str] = []

    def resume(home: Home) -> Any:
        ready = stage.draft(home, provider="fake", limit=str(2 * LIMIT), resume=True)
        said.extend(guards(ready, home))
        return launch(ready, home)

    assert stage.finish(stage.client("resume", resume, other)).error is None
    assert any("the instance keeps billing" in sentence for sentence in said)
    assert stage.cloud is not None
    cloud = stage.cloud.cloud
    (machine,) = cloud._live
    cloud.hang(machine)
    stage.advance(2000)
    assert list(cloud._live) == [machine], "no guard that is responsible for it is awake"
    assert stage.finish(stage.client("tidy", destroy_all, other)).answer == []
    assert cloud.live() == {}


def test_a_store_that_vanishes_between_two_looks_is_not_an_empty_one(stage: Stage) -> None:
    rent(stage)
    go(stage, ENDLESS)
    stage.advance(20)
    before = stage.finish(stage.client("runs", lambda home: home.ledger.runs()[0].state)).answer
    stage.home.cut.add("store")
    problems = stage.finish(stage.client("runs", refresh)).answer
    assert any("Could not read the store" in problem for problem in problems)
    after = stage.finish(stage.client("runs", lambda home: home.ledger.runs()[0].state)).answer
    assert after == before
