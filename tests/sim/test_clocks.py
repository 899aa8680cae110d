"""Clocks that are set while a run is at work: at home, on the machine, far, and either way."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim.stage import Stage, pace

from homing.cloud.guard.guard_pass import guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.reconcile.reconcile import refresh

FIVE_HOURS = 18000.0
LIMIT = Decimal("1.00")  # a thousand seconds
RUN = {"steps": 100.0, "step_s": 4.0, "save_every": 5.0}
ENDLESS = {**RUN, "steps": 4000.0}


@pytest.fixture
def stage() -> Iterator[Stage]:
    with pace():
        made = Stage(7)
        made.rent(Settings(has_guard=False, boot_s=2.0), Faults(), "3.6")
        yield made
        made.close()


def begin(stage: Stage, trainer: dict[str, float]) -> Any:
    """The machine that trains."""
    stage.programs.trainer = trainer

    def verb(home: Home) -> Any:
        ready = stage.draft(home, provider="fake", limit=str(LIMIT))
        stage.truth.limits_usd[ready.run.id] = LIMIT
        return launch(ready, home)

    client = stage.finish(stage.client("launch", verb))
    assert client.error is None, client.error
    stage.advance(30.0)
    assert stage.cloud is not None
    (machine,) = stage.cloud.machines.values()
    return machine


def guard(home: Home) -> None:
    while True:
        wait_for_next(home, guard_pass(home, every_s=30.0), 30.0)


def seen(stage: Stage) -> Any:
    def verb(home: Home) -> Any:
        refresh(home)
        return home.ledger.find("moss")

    return stage.finish(stage.client("runs", verb)).answer


@pytest.mark.regression("clock-jumps")
def test_training_continues_when_the_clock_of_the_machine_is_set_forward(stage: Stage) -> None:
    machine = begin(stage, RUN)
    machine.skew_s += FIVE_HOURS
    stage.advance(500.0)
    assert seen(stage).state == "done"


@pytest.mark.parametrize("step_s", [FIVE_HOURS, -FIVE_HOURS])
def test_a_machine_ends_inside_its_limit_when_its_clock_is_set(stage: Stage, step_s: float) -> None:
    machine = begin(stage, ENDLESS)
    machine.skew_s += step_s
    stage.home.freeze()
    stage.advance(1100.0)
    assert stage.cloud is not None
    assert stage.cloud.cloud.live() == {}
    (run_id,) = stage.truth.limits_usd
    assert LIMIT / 2 < stage.truth.billed(run_id) <= LIMIT


@pytest.mark.regression("clock-jumps")
@pytest.mark.parametrize("is_one_process", [True, False])
def test_the_guard_lets_a_healthy_run_continue_when_the_clock_at_home_is_set_forward(
    stage: Stage, is_one_process: bool
) -> None:
    begin(stage, RUN)
    if is_one_process:
        stage.client("guard", guard)
        stage.advance(10.0)
    stage.home.skew_s += FIVE_HOURS
    if not is_one_process:
        stage.client("guard", guard)
    stage.advance(500.0)
    run = seen(stage)
    assert (run.state, run.exit_code) == ("done", 0), run.reason


@pytest.mark.regression("clock-jumps")
def test_the_receipt_of_a_run_does_not_count_hours_that_a_clock_was_set_by(stage: Stage) -> None:
    begin(stage, RUN)
    stage.home.skew_s += FIVE_HOURS
    stage.advance(500.0)
    seen(stage)
    (base,) = stage.home.databases.values()
    ((usd, destroyed_at),) = [tuple(r.values()) for r in base.execute("SELECT spend_usd, destroyed_at FROM lines")]
    assert destroyed_at is not None
    assert Decimal(usd) < LIMIT


@pytest.mark.parametrize("step_s", [FIVE_HOURS, -FIVE_HOURS])
def test_the_guard_ends_a_dead_machine_inside_its_limit_after_the_clock_at_home_was_set(
    stage: Stage, step_s: float
) -> None:
    machine = begin(stage, ENDLESS)
    stage.client("guard", guard)
    for proc in machine.living():
        proc.kill()
    machine.freeze()  # nothing of ours there, and nothing to start it again
    stage.home.skew_s += step_s
    stage.advance(1100.0)
    assert stage.cloud is not None
    (run_id,) = stage.truth.limits_usd
    assert stage.truth.billed(run_id) <= LIMIT
