"""What a spend limit counts and what it leaves out: docs/guides/spend-limit.md, "What the limit counts"."""

from __future__ import annotations

import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from tests.cloud.rig import clear, make_draft

from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.mark import volume_mark
from homing.cloud.providers.aws.offers import Choice, Market, disk_usd_per_hour
from homing.cloud.providers.base import Resource
from homing.cloud.providers.local.provider import Local
from homing.world import World


class Later(World):
    """The real world with a clock that can be set forward."""

    ahead_s = 0.0

    def now(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def world() -> Later:
    return Later()


@pytest.fixture
def home(homing_home: Path, world: Later) -> Iterator[Home]:
    yield Home(homing_home, world)
    clear(homing_home)


@pytest.mark.slow
def test_a_volume_kept_on_purpose_does_not_count_towards_the_limit(
    home: Home, world: Later, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RunPod's network volumes and AWS's EBS volumes carry the mark of the run, without the number of an attempt."""
    launch(make_draft(home, tmp_path, steps=100_000), home)
    line = home.ledger.lines()[-1]
    volume = Resource("volume", "v-1", volume_mark(line.mark), "local", Decimal("36"), line.created_at, is_kept=True)
    monkeypatch.setattr(Local, "list_resources", lambda self: [volume])
    world.ahead_s = 4900.0  # the instance has cost half of its dollar; the volume, were it counted, 49
    assert guard_pass(home).done == []
    assert home.ledger.find("moss").is_live


def test_on_aws_the_rate_of_a_live_instance_includes_its_volume() -> None:
    plain, with_volume = (
        Market._disk_and_address_usd(object.__new__(Market), Choice(("us-east-1",), volume_gb=gb)) for gb in (0, 100)
    )
    assert (
        with_volume - plain == disk_usd_per_hour(Choice(()).root_gb + 100) - disk_usd_per_hour(Choice(()).root_gb) > 0
    )
