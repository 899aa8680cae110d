"""Which limit the local guard enforces: the ledger's, or that of the home that has adopted the run."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path

import pytest

from homing.cloud.guard.limits_and_destroys import Terms, terms_of
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, LedgerLine, RunRow
from homing.store import Store, open_store, run_key
from homing.wire import codec, file_names
from homing.wire.run_record import Attempt, RunRecord
from homing.world import World

RUN_ID = "moss-1"
OURS = LedgerLine(
    "homing-aaaaaa-moss-1-1", RUN_ID, "moss", 1, "fake", "o", "3.60", "1.00", 100.0, "i-1", created_at=100.0
)
ATTEMPT = Attempt(1, "fake", OURS.mark, "i-1", "3.60", 100.0)
REFERENCE = Attempt(2, "fake", "homing-bbbbbb-moss-1-2", "i-2", "3.60", 900.0)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home", World())


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(f"file:{tmp_path}/store", World())


@pytest.fixture
def given(store: Store) -> RunRow:
    return RunRow(RUN_ID, "moss", ADOPTED, 50.0, store.url, "f" * 64, spend_limit_usd="1.00")


def write(store: Store, limit: str, time_s: float = 0.0, *attempts: Attempt) -> None:
    record = RunRecord(RUN_ID, "moss", "bbbbbb", "running", limit, list(attempts or [ATTEMPT]), time_limit_s=time_s)
    store.put_bytes(run_key(RUN_ID, file_names.RECORD), codec.dumps(record).encode())


def test_the_limit_of_our_own_run_comes_from_the_ledger(home: Home, store: Store, given: RunRow) -> None:
    write(store, "9.00")  # an outdated record, or one by a home that does not own the run
    ours = dataclasses.replace(given, state="running")
    assert terms_of(home, ours, [OURS]) == Terms(Decimal("1.00"), 0.0)


def test_the_limits_of_an_adopted_run_come_from_its_new_owners_record(home: Home, store: Store, given: RunRow) -> None:
    write(store, "7.00", 3600.0)
    assert terms_of(home, given, [OURS]) == Terms(Decimal("7.00"), 3600.0)
    write(store, "0.50", 60.0)
    assert terms_of(home, given, [OURS]) == Terms(Decimal("0.50"), 60.0)


def test_attempts_of_the_new_owner_count_and_our_own_are_not_counted_twice(
    home: Home, store: Store, given: RunRow
) -> None:
    write(store, "7.00", 0.0, ATTEMPT, REFERENCE)
    (line,) = terms_of(home, given, [OURS]).elsewhere
    assert (line.mark, line.created_at, line.rate_usd_per_hour) == (REFERENCE.mark, 900.0, "3.60")


def test_an_unreadable_record_leaves_the_last_known_limits_in_force_with_a_problem(
    home: Home, store: Store, given: RunRow, tmp_path: Path
) -> None:
    write(store, "7.00", 3600.0, ATTEMPT, REFERENCE)
    before = terms_of(home, given, [OURS])
    (tmp_path / "store").rename(tmp_path / "away")
    after = terms_of(home, given, [OURS])
    assert after.problem
    assert dataclasses.replace(after, problem="") == before


@pytest.mark.parametrize("data", [None, b"{", b'{"schema": "homing.run-record/1"}'])
def test_without_a_valid_record_our_last_limit_applies_with_a_problem(
    home: Home, store: Store, given: RunRow, data: bytes | None
) -> None:
    if data is not None:
        store.put_bytes(run_key(RUN_ID, file_names.RECORD), data)
    terms = terms_of(home, given, [OURS])
    assert (terms.spend_limit_usd, terms.elsewhere) == (Decimal("1.00"), [])
    assert terms.problem


def test_the_limit_is_read_although_the_local_disk_is_full(
    home: Home, store: Store, given: RunRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, "7.00")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(home.world, "write", full)
    terms = terms_of(home, given, [OURS])
    assert terms.spend_limit_usd == Decimal("7.00")
    assert "no space left" in terms.problem
