"""`homing guard` as cron and a person call it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from tests.cli.control_rig import Homing, clear, lay_out, typing
from tests.cloud.rig import forget, marked_now

from homing.cloud.home import Home
from homing.world import World


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], homing_home: Path
) -> Homing:
    lay_out(tmp_path, monkeypatch, steps=100_000, step_s=0.02)
    request = typing(capsys, monkeypatch)
    return request


def test_with_nothing_to_do_one_round_exits_0(say: Homing) -> None:
    said = say("guard", "--once", "--json")
    assert said.code == 0
    assert said.json["schema"] == "homing.guard/1"
    assert (said.json["done"], said.json["may_bill"]) == ([], [])


@pytest.mark.parametrize("every", ["0", "nonsense", "5h"])
def test_a_bad_interval_is_refused(say: Homing, every: str) -> None:
    assert say("guard", "--once", "--every", every).code == 2


def test_a_launch_counts_on_a_guard_that_made_its_rounds(say: Homing) -> None:
    for _ in range(2):  # one round alone is no promise
        assert "armed: the local guard" not in say("launch", "moss", "--spend-limit", "1", "--dry-run").err
        say("guard", "--once")
    assert "armed: the local guard" in say("launch", "moss", "--spend-limit", "1", "--dry-run").err


def test_a_run_at_its_limit_is_ended_and_what_no_run_knows_exits_6(say: Homing, homing_home: Path) -> None:
    try:
        assert say("launch", "moss", "--spend-limit", "1", "--yes").code == 0
        home = Home(homing_home, World())
        home.ledger.update(home.ledger.lines()[-1].mark, spend_usd="0.9999")
        said = say("guard", "--once")
        assert said.code == 0
        assert "ended the run at its limit" in said.out
        assert say("status", "moss", "--json").json["state"] == "stopped"
        assert say("launch", "moss", "--spend-limit", "1", "--yes").code == 0
        forget(homing_home)
        said = say("guard", "--once")
        assert said.code == 6
        assert "belongs to no known run" in said.out
    finally:
        for pid, _ in marked_now(Home(homing_home, World())):
            World().signal(pid, signal.SIGKILL)
        clear(homing_home)
