"""A stop request, from home to a checkpoint in the store."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cloud.rig import make_draft

from homing.cloud.guard.change_limit_or_stop import ask_to_stop, wait_for_stop
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.errors import HomingError, UsageError


def test_a_stop_request_ends_the_run_as_stopped(home: Home, tmp_path: Path) -> None:
    launched = launch(make_draft(home, tmp_path, steps=100_000), home)
    serial = ask_to_stop(home, launched.run)
    assert ask_to_stop(home, launched.run) == serial
    status = wait_for_stop(home, launched.run, timeout_s=60)
    assert status.run.state == "stopped"
    assert status.run.reason == "A stop was requested."
    with pytest.raises(UsageError, match="not running"):
        ask_to_stop(home, home.ledger.find("moss"))


@pytest.mark.slow
def test_an_unanswered_stop_request_has_a_deadline(home: Home, tmp_path: Path) -> None:
    launched = launch(make_draft(home, tmp_path, steps=100_000), home)
    store = tmp_path / "store"
    with pytest.raises(HomingError, match="did not stop within"):
        wait_for_stop(home, launched.run, timeout_s=0.0)
    assert store.exists()


def test_the_wait_for_a_stop_names_no_step_before_one_is_reported(home: Home, tmp_path: Path) -> None:
    """The first step takes minutes, so the agent has not reported any step yet."""
    launched = launch(make_draft(home, tmp_path, steps=3, step_s=600.0), home)
    messages: list[str] = []
    with pytest.raises(HomingError) as caught:
        wait_for_stop(home, launched.run, timeout_s=0.0, notify=messages.append)
    assert messages
    assert "step" not in f"{messages} {caught.value.why}"
