"""Stores that start to refuse everything during a run, and stores that return damaged data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim.stage import Stage, pace

from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import look
from homing.wire.run_json import Limits

LIMIT = "8.00"  # eight thousand seconds: the run file's default of half an hour is long before it
ENDLESS = {"steps": 4000.0, "step_s": 4.0, "save_every": 5.0}
SHORT = {"steps": 20.0, "step_s": 4.0, "save_every": 5.0}


@pytest.fixture
def stage() -> Iterator[Stage]:
    with pace():
        made = Stage(9)
        made.rent(Settings(has_guard=False, boot_s=2.0), Faults(), "3.6")
        yield made
        made.close()


def begin(stage: Stage, trainer: dict[str, float], **limits: float) -> Any:
    """The machine that trains."""
    stage.programs.trainer = trainer

    def verb(home: Home) -> Any:
        ready = stage.draft(home, provider="fake", limit=LIMIT, limits=dataclasses.replace(Limits(), **limits))
        stage.truth.limits_usd[ready.run.id] = Decimal(LIMIT)
        return launch(ready, home)

    client = stage.finish(stage.client("launch", verb))
    assert client.error is None, client.error
    stage.advance(30.0)
    assert stage.cloud is not None
    (machine,) = stage.cloud.machines.values()
    return machine


def seen(stage: Stage) -> Any:
    def verb(home: Home) -> Any:
        refresh(home)
        return home.ledger.find("moss")

    return stage.finish(stage.client("runs", verb)).answer


def billed(stage: Stage) -> Decimal:
    (run_id,) = stage.truth.limits_usd
    return stage.truth.billed(run_id)


@pytest.mark.regression("store-lost")
def test_a_run_stops_long_before_its_limit_if_the_store_refuses_permanently(stage: Stage) -> None:
    begin(stage, ENDLESS)
    stage.store.is_refusing = True
    stage.advance(2400.0)
    assert stage.cloud is not None
    assert stage.cloud.cloud.live() == {}, "half an hour without a push, and then it is ended"
    assert billed(stage) < Decimal(LIMIT) / 3


def test_the_run_file_says_how_long_it_may_train_unsaved(stage: Stage) -> None:
    begin(stage, ENDLESS, unsaved_s=100.0)
    stage.store.is_refusing = True
    stage.advance(300.0)
    assert stage.cloud is not None
    assert stage.cloud.cloud.live() == {}


def test_without_a_limit_of_that_kind_it_trains_on(stage: Stage) -> None:
    begin(stage, ENDLESS, unsaved_s=0.0)
    stage.store.is_refusing = True
    stage.advance(2400.0)
    assert stage.cloud is not None
    assert len(stage.cloud.cloud.live()) == 1


def test_a_store_that_only_refuses_for_a_while_stops_nothing(stage: Stage) -> None:
    begin(stage, ENDLESS, unsaved_s=300.0)
    for _ in range(3):
        stage.store.is_refusing = True
        stage.advance(200.0)
        stage.store.is_refusing = False
        stage.advance(120.0)
    assert seen(stage).state == "running"


def test_status_names_the_cause_and_the_run_continues_when_the_store_is_back(stage: Stage) -> None:
    begin(stage, ENDLESS, unsaved_s=100.0)
    stage.store.is_refusing = True
    stage.advance(300.0)
    status = stage.finish(stage.client("status", lambda home: look(home, home.ledger.find("moss")))).answer
    assert "Could not read the store" in status.problem
    assert "Permission" in status.problem or "does not exist" in status.problem
    stage.store.is_refusing = False
    made = stage.finish(stage.client("guard", lambda home: guard_pass(home))).answer
    assert any("Attempt 2 launches" in text for text in made.done), made


@pytest.mark.regression("store-lost")
def test_a_run_without_a_verified_final_model_is_not_done_and_can_be_resumed(stage: Stage) -> None:
    begin(stage, {**SHORT, "exit_s": 20.0})
    stage.store.damages = "checkpoints/pretrain/step-00000020"  # what is read of the last one is not what was written
    stage.advance(200.0)
    assert seen(stage).state == "running", "trained to the end, and still pushing"
    stage.advance(9000.0)
    assert stage.cloud is not None
    assert stage.cloud.cloud.live() == {}
    run = seen(stage)
    assert run.state == "failed", run.reason
    assert run.is_interrupted, run.reason
