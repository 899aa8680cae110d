"""Guards at home that run where the provider's keys are not set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim.stage import Stage, pace

from homing.cloud.guard.guard_pass import guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.cloud.launch.armed_guards import armed, guards


@pytest.fixture
def stage() -> Iterator[Stage]:
    with pace():
        made = Stage(3)
        made.rent(Settings(has_guard=False, boot_s=2.0), Faults(), "3.6")
        yield made
        made.close()


def guard(home: Home) -> None:
    while True:
        wait_for_next(home, guard_pass(home, every_s=30.0), 30.0)


def planned(stage: Stage, notify: Any) -> Any:
    return stage.finish(stage.client("plan", lambda home: notify(stage.draft(home, provider="fake"), home))).answer


@pytest.mark.regression("guard-without-keys")
def test_a_guard_without_the_keys_of_a_provider_is_not_armed_for_it(stage: Stage) -> None:
    stage.client("guard", guard, is_keyless=True)
    stage.advance(100.0)
    assert "home" not in planned(stage, armed)


def test_launch_says_that_the_guard_cannot_reach_the_provider(stage: Stage) -> None:
    stage.client("guard", guard, is_keyless=True)
    stage.advance(100.0)
    assert any("cannot list instances on fake" in said for said in planned(stage, guards))


def test_a_guard_with_keys_counts_while_it_lives_also_next_to_one_without_keys(stage: Stage) -> None:
    stage.client("guard", guard, is_keyless=True)
    able = stage.client("guard", guard)
    stage.advance(100.0)
    assert "home" in planned(stage, armed)
    able.proc.kill()
    stage.advance(150.0)
    assert "home" not in planned(stage, armed)


def test_a_guard_that_is_cut_off_from_the_provider_is_not_armed(stage: Stage) -> None:
    stage.client("guard", guard)
    stage.advance(60.0)
    stage.home.cut.add("cloud")
    stage.advance(300.0)
    stage.home.cut.clear()
    assert "home" not in planned(stage, armed)
