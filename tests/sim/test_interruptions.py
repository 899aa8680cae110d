"""Machines that are taken away while the agent is still at work on the outcome."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim.stage import Stage, pace

from homing.cloud.guard.change_limit_or_stop import ask_to_stop
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.reconcile.reconcile import refresh

# After its outcome it takes long to exit, as a process with a card does: the outcome is pushed as the trainer wrote it.
LONG = {"steps": 400.0, "step_s": 1.0, "save_every": 5.0, "exit_s": 20.0}


@pytest.fixture
def stage() -> Iterator[Stage]:
    with pace():
        made = Stage(5)
        made.rent(Settings(has_guard=False, boot_s=2.0), Faults(), "3.6")
        yield made
        made.close()


def begin(stage: Stage, trainer: dict[str, float], limit: str = "1.00") -> str:
    """The id of a machine that trains."""
    stage.programs.trainer = trainer

    def verb(home: Home) -> Any:
        ready = stage.draft(home, provider="fake", limit=limit)
        stage.truth.limits_usd[ready.run.id] = Decimal(limit)
        return launch(ready, home)

    client = stage.finish(stage.client("launch", verb))
    assert client.error is None, client.error
    stage.advance(20.0)
    assert stage.cloud is not None
    (machine,) = stage.cloud.machines
    return machine


def take(stage: Stage, machine: str, notice_s: float) -> None:
    assert stage.cloud is not None
    stage.cloud.cloud.preempt(machine, notice_s=notice_s)
    stage.cloud.plan()
    stage.advance(notice_s + 20.0)


def seen(stage: Stage) -> Any:
    """The run as the ledger has it after a look."""

    def verb(home: Home) -> Any:
        refresh(home)
        return home.ledger.find("moss")

    return stage.finish(stage.client("runs", verb)).answer


@pytest.mark.regression("preempted-not-stopped")
@pytest.mark.parametrize("notice_s", [10.0, 15.0])
def test_a_machine_taken_away_before_the_agent_has_amended_the_outcome_is_an_interruption(
    stage: Stage, notice_s: float
) -> None:
    take(stage, begin(stage, LONG), notice_s)
    run = seen(stage)
    assert run.state == "stopped"
    assert run.is_interrupted, run.reason


@pytest.mark.regression("preempted-not-stopped")
def test_the_guard_launches_such_a_run_again(stage: Stage) -> None:
    take(stage, begin(stage, LONG), 10.0)
    made = stage.finish(stage.client("guard", lambda home: guard_pass(home))).answer
    assert any("Attempt 2 launches" in text for text in made.done), made


def test_a_stop_that_a_person_asked_for_stays_one_although_the_machine_went_before_the_agent_amended_it(
    stage: Stage,
) -> None:
    machine = begin(stage, LONG)
    stage.finish(stage.client("stop", lambda home: ask_to_stop(home, home.ledger.find("moss"))))
    stage.advance(12.0)  # the request is brought, the trainer has written its outcome and has not exited
    take(stage, machine, 1.0)
    run = seen(stage)
    assert run.state == "stopped"
    assert not run.is_interrupted, run.reason


@pytest.mark.regression("preempted-not-stopped")
def test_an_agent_that_starts_again_does_not_make_a_final_stop_of_an_interruption(stage: Stage) -> None:
    """Its predecessor was killed after the trainer's outcome and before it had amended it; no stop was requested."""
    machine = begin(stage, {**LONG, "steps": 60.0})
    assert stage.cloud is not None
    host = stage.cloud.machines[machine]
    trainer = next(proc for proc in host.living() if proc.role == "trainer")
    agent = next(proc for proc in host.living() if proc.role == "agent")
    trainer.signal(15)
    stage.advance(3.0)
    agent.kill()
    stage.advance(400.0)
    assert seen(stage).state == "done"
