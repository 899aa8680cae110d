"""On the local provider, with real processes and a rate so high that the limit is a minute away."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import clear, make_draft, marked_now

from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.reconcile.reconcile import refresh
from homing.world import World


@pytest.fixture
def home(homing_home: Path) -> Iterator[Home]:
    yield Home(homing_home, World())
    clear(homing_home)


def is_spared(pid: int) -> bool:
    """The dead-man, and what he starts to end billing."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return b"--dead-man" in line or b"end_billing" in line or not line


@pytest.mark.slow
def test_whoever_kills_the_agent_again_and_again_does_not_get_past_the_limit(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOMING_LOCAL_RATE", "36")
    monkeypatch.setattr("homing.cloud.launch.draft._check_minimum", lambda *_: None)
    done = launch(make_draft(home, tmp_path, limit="0.60", steps=100_000, step_s=0.02), home)
    provider, deadline = home.provider("local"), time.monotonic() + 120
    while provider.describe(done.instance.id).billing != "no":
        assert time.monotonic() < deadline, "it bills on"
        for pid, _ in marked_now(home):
            if not is_spared(pid):
                World().signal(pid, signal.SIGKILL)
        time.sleep(0.5)
    seen = provider.describe(done.instance.id)
    assert seen.spend_usd is not None
    assert seen.spend_usd <= Decimal("0.60")
    assert seen.spend_usd > Decimal("0.50"), "not before the agent had its turn"
    refresh(home)
    assert not home.ledger.find("moss").is_live
    assert Decimal(home.ledger.lines()[-1].spend_usd) <= Decimal("0.60")
    assert not marked_now(home)
