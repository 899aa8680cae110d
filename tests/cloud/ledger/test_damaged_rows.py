"""A damaged ledger row is reported, its instance is still destroyed, and no other row is hidden."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest
from tests.cloud.fake_rig import RUN, note_rented, rent
from tests.cloud.fake_world import FakeWorld

from homing.cloud.destroy import destroy_lines, open_lines
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import Home
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import look

BAD = ["'NaN'", "'abc'", "x'ff00'", "CAST(x'ff00' AS TEXT)", "'1e308'"]
OTHER = "fern-20260101-000000-abcd"


@pytest.fixture
def world() -> FakeWorld:
    return FakeWorld()


def damage(home: Home, table: str, column: str, value: str) -> None:
    with contextlib.closing(sqlite3.connect(home.path / "ledger.sqlite")) as base:
        assert base.execute(f"UPDATE {table} SET {column} = {value} WHERE rowid = 1").rowcount == 1
        base.commit()


@pytest.mark.regression("bad-ledger-row")
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("column", ["rate_usd_per_hour", "spend_usd", "created_at"])
def test_a_damaged_row_is_reported_and_destroyed_and_hides_no_other(
    home: Home, world: FakeWorld, tmp_path: Path, column: str, value: str
) -> None:
    line = note_rented(home, rent(home, tmp_path).id)
    second = rent(home, tmp_path, run=OTHER)
    damage(home, "lines", column, value)
    assert column in " ".join(refresh(home)), "the damaged column is reported"
    assert {each.mark for each in open_lines(home, None)} == {line.mark, second.mark}
    assert guard_pass(home).may_bill, "the instance without a run is still reported"
    destroy_lines(home, open_lines(home, None))
    assert world.machines.running == []


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    "column",
    ["run_name", "attempt", "offer", "limit_usd", "intent_at", "destroyed_at", "state", "billing", "note", "account"],
)
def test_an_instance_is_destroyed_whichever_column_is_damaged(
    home: Home, world: FakeWorld, tmp_path: Path, column: str, value: str
) -> None:
    note_rented(home, rent(home, tmp_path).id)
    damage(home, "lines", column, value)
    assert len(home.ledger.open_lines()) == 1, "a line without a readable end may bill"
    refresh(home)
    guard_pass(home)
    with contextlib.suppress(Exception):  # an unknown account cannot be confirmed, but the request is sent
        destroy_lines(home, open_lines(home, None), deadline_s=1)
    assert world.machines.running == []


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("column", ["name", "created_at", "run_file_sha256", "spend_limit_usd", "reason", "ended_at"])
def test_the_limit_of_a_damaged_run_is_enforced_and_its_status_is_readable(
    home: Home, world: FakeWorld, tmp_path: Path, column: str, value: str
) -> None:
    instance = rent(home, tmp_path)
    note_rented(home, instance.id)
    world.cloud._things[instance.id].guard_usd = None  # the provider's own guard does not act
    damage(home, "runs", column, value)
    refresh(home)
    assert look(home, home.ledger.runs()[0]).run.id == RUN
    world.pass_time(40 * 3600)  # past the limit
    guard_pass(home)
    assert world.machines.running == []
