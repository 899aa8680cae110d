"""Instances of the simulated cloud, rented and recorded in the ledger like by a launch."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Any

from tests.cloud.fake_world import OFFERS, FakeWorld
from tests.contracts.providers import ProviderContract

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.mark import make_mark
from homing.cloud.providers.base import Instance
from homing.cloud.providers.fake.cloud_types import total_rate

RUN = "moss-20260101-000000-abcd"
RATE = total_rate(OFFERS[0])  # of what `rent` rents


def rent(home: Home, tmp_path: Path, attempt: int = 1, *, owner: str = "", run: str = RUN) -> Instance:
    """Creates an instance like a launch, without its other steps."""
    mark = make_mark(owner or home.owner, run, attempt)
    provider = home.provider("fake")
    if owner:
        provider = type(provider)(home=home.path, owner=owner, world=home.world)  # type: ignore[call-arg]
    return provider.create(ProviderContract().make_request(provider, mark, tmp_path))


def rent_twins(home: Home, world: FakeWorld, tmp_path: Path) -> list[str]:
    """Two instances under one mark: the first is not listed when the second is created."""
    first = rent(home, tmp_path)
    thing = world.cloud._things[first.id]
    thing.hidden_until = world.t + 1
    second = rent(home, tmp_path)
    world.pass_time(2)
    assert first.id != second.id
    return [first.id, second.id]


def note_twins(home: Home, world: FakeWorld, tmp_path: Path) -> tuple[LedgerLine, str, str]:
    """Two instances under one mark and the ledger line of the second, as after a retried create."""
    line = note_rented(home)
    first, second = rent_twins(home, world, tmp_path)
    home.ledger.update(line.mark, instance_id=second)
    return line, first, second


def note(home: Home, instance_id: str | None = None, attempt: int = 1, **columns: Any) -> LedgerLine:
    """The ledger line of an instance, at a fixed rate."""
    now = home.world.now()
    line = LedgerLine(make_mark(home.owner, RUN, attempt), RUN, "moss", attempt, "fake", "h100", "2.49", "12", now)
    home.ledger.intend(RunRow(RUN, "moss", "running", now, "file:/nowhere", "f" * 64, "12"), line)
    if columns.pop("is_created", True):
        home.ledger.begin_create(line.mark, now)
    if instance_id is not None:
        home.ledger.update(line.mark, instance_id=instance_id)
    return dataclasses.replace(line, **columns)


def note_rented(home: Home, instance_id: str | None = None, attempt: int = 1) -> LedgerLine:
    """The ledger line of an instance, at the rate that `rent` pays."""
    line = note(home, instance_id, attempt)
    home.ledger.update(line.mark, rate_usd_per_hour=str(RATE))
    return line_of(home, line.mark)


def line_of(home: Home, mark: str) -> LedgerLine:
    return next(line for line in home.ledger.lines() if line.mark == mark)


def billed(world: FakeWorld) -> Decimal:
    return sum((bill.usd for bill in world.cloud.bill()), Decimal(0))


def written(home: Home) -> Decimal:
    lines = home.ledger.lines()
    assert all(line.destroyed_at is not None for line in lines)
    return sum((Decimal(line.spend_usd) for line in lines), Decimal(0))
