"""The guard in the background: started by a launch that would have one guard only, shown by `runs`, over by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, cli_with

from homing.cloud.contact.home_guard import is_on_duty
from homing.cloud.home import Home
from homing.cloud.providers.local.provider import Local
from homing.world import World

cli = cli_with(steps=12)


@pytest.fixture
def _cannot_end_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Shadeform: the provider has a guard, and nothing on the machine can end it."""
    monkeypatch.setattr(Local, "cannot", {**Local.cannot, "end_itself": "This machine cannot end itself."})
    monkeypatch.setattr(Local, "guard", "the provider deletes it at the limit.")


@pytest.mark.slow
@pytest.mark.machine
@pytest.mark.usefixtures("_cannot_end_itself")
@pytest.mark.regression("second-guard")
def test_a_launch_that_lacks_one_guard_starts_it_in_the_background_and_runs_shows_it(
    cli: Homing, homing_home: Path
) -> None:
    dry = cli("launch", "moss", "--spend-limit", "1", "--dry-run")
    assert "armed by this launch: a local guard, in the background" in dry.err
    assert not (homing_home / "guard.json").exists(), "a dry run starts nothing"
    said = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert said.code == 0, said.err
    assert "A guard is running in the background" in said.err
    found = cli("runs", "--json").json["guard"]
    try:
        assert found["is_background"] is True
        assert "local" in found["reaches"]
        assert f"Local guard: in the background, process {found['pid']} on" in cli("runs").err
        again = cli("launch", "moss", "--spend-limit", "1", "--yes", "--name", "moss-2")
        assert "A guard is running in the background" not in again.err, "one is enough for this home"
    finally:
        os.kill(found["pid"], signal.SIGKILL)


@pytest.mark.usefixtures("_cannot_end_itself")
def test_a_guard_that_does_not_come_up_keeps_anything_from_being_rented(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.cloud.contact.home_guard._FIRST_ROUND_S", 0.5)
    monkeypatch.setattr(World, "spawn", lambda *_: 2**22 - 1)
    said = cli("launch", "moss", "--spend-limit", "1", "--yes")
    assert said.code == 2
    assert "The background guard did not reach local" in said.err
    assert Home(homing_home, World()).ledger.num_lines() == 0


def test_it_ends_when_nothing_bills_and_no_launch_counts_on_it_from_then_on(
    cli: Homing, homing_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("homing.api.runs.guard_runs.IDLE_S", 0.0)
    said = cli("guard", "--while-billing", "--every", "1s")
    assert said.code == 0
    assert "Nothing is billing, so this guard exits." in said.err
    assert not is_on_duty(Home(homing_home, World()))
    assert cli("runs", "--json").json["guard"] is None
