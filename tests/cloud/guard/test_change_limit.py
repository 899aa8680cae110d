"""Changing the limit of a live run: provider, ledger and agent are updated in an order that keeps it guarded."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.cloud.rig import make_draft

from homing.cloud.contact.heartbeats import read_document
from homing.cloud.destroy import destroy_run
from homing.cloud.guard import change_limit_or_stop
from homing.cloud.guard.change_limit_or_stop import Change, change_limit, propose
from homing.cloud.guard.relaunch import load_documents
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.ledger import SILENT, Ledger, RunRow
from homing.cloud.providers.local.provider import Local
from homing.errors import UsageError
from homing.store import FileStore, run_key
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat, Request
from homing.wire.guard_timing import PROVIDER, reserve_s
from homing.wire.run_record import RunRecord
from homing.world import World


@pytest.fixture
def run(home: Home, tmp_path: Path) -> RunRow:
    return launch(make_draft(home, tmp_path, steps=100_000), home).run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The changes in the order in which they are made."""
    made: list[tuple[str, Any]] = []
    real_set, real_put = Ledger.set_run, FileStore.put_bytes

    def set_run(self: Ledger, run_id: str, **columns: Any) -> None:
        if "spend_limit_usd" in columns:
            made.append(("ledger", columns["spend_limit_usd"]))
        real_set(self, run_id, **columns)

    def put(self: FileStore, key: str, data: bytes) -> None:
        if key.endswith(file_names.REQUEST):
            made.append(("agent", codec.loads(Request, data).spend_limit_usd))
        real_put(self, key, data)

    monkeypatch.setattr(Ledger, "set_run", set_run)
    monkeypatch.setattr(FileStore, "put_bytes", put)
    monkeypatch.setattr(Local, "set_guard", lambda self, i, usd, by: made.append(("provider", (usd, by))))
    return made


@pytest.mark.acceptance(122)
def test_a_raised_limit_reaches_the_provider_first_and_the_agent_last(
    home: Home, run: RunRow, calls: list[tuple[str, Any]]
) -> None:
    change = propose(home, run, Decimal(3), None)
    assert (change.old_usd, change.new_usd, change.is_lower, change.worst_case_usd) == (1, 3, False, 3)
    assert change_limit(home, change)
    assert [who for who, _ in calls] == ["provider", "ledger", "agent"]
    spend, end_by = calls[0][1]
    line = home.ledger.lines()[-1]
    assert spend == 3
    assert line.created_at is not None
    assert end_by == pytest.approx(line.created_at + 30_000 - reserve_s(PROVIDER, 30_000), abs=5)


@pytest.mark.slow
def test_a_lowered_limit_reaches_the_provider_last_after_the_agent_confirmed(
    home: Home, run: RunRow, calls: list[tuple[str, Any]]
) -> None:
    change = propose(home, run, Decimal("0.50"), None)
    assert change.is_lower
    assert change_limit(home, change)
    assert [who for who, _ in calls] == ["ledger", "agent", "provider"]


@pytest.mark.acceptance("X21")
@pytest.mark.slow
def test_a_changed_limit_is_in_ledger_documents_record_and_heartbeat(home: Home, run: RunRow) -> None:
    assert change_limit(home, propose(home, run, Decimal("2.50"), 7200.0))
    row = home.ledger.find("moss")
    assert row.spend_limit_usd == "2.50"
    limits = load_documents(home, row).run.limits
    assert (limits.spend_usd, limits.time_s) == ("2.50", 7200.0)
    store = home.store_of(row)
    record = read_document(store, run_key(run.id, file_names.RECORD), RunRecord)
    assert record is not None
    assert record.spend_limit_usd == "2.50"
    taken = World().read(Path(home.provider("local").place(home.ledger.lines()[-1].mark).work_dir) / "run/limits.json")
    assert codec.loads(Request, taken).spend_limit_usd == "2.50", "the dead-man reads this file"
    # A second change is a new request, and asking for the same again changes nothing.
    assert change_limit(home, propose(home, row, Decimal("2.75"), None))
    assert load_documents(home, row).run.limits.time_s == 7200.0


@pytest.mark.slow
def test_changing_a_limit_keeps_an_earlier_stop_request(home: Home, run: RunRow) -> None:
    store = home.store_of(run)
    request = Request(serial=5, stop=True, reason="Enough.", age_s=7.0)
    store.put_bytes(run_key(run.id, file_names.REQUEST), codec.dumps(request).encode())
    change_limit(home, propose(home, run, Decimal(3), None), confirm_s=0.0)
    now = read_document(store, run_key(run.id, file_names.REQUEST), Request)
    assert now is not None
    assert (now.serial, now.stop, now.spend_limit_usd, now.age_s) == (6, True, "3", 7.0)


@pytest.mark.slow
def test_a_limit_is_changed_at_home_although_the_agent_does_not_confirm(
    home: Home, run: RunRow, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = home.provider("local")
    provider.destroy(home.ledger.lines()[-1].instance_id or "")
    assert not change_limit(home, propose(home, run, Decimal(3), None), confirm_s=0.2)
    assert home.ledger.find("moss").spend_limit_usd == "3"


@pytest.mark.slow
def test_a_limit_at_or_below_the_current_spend_is_refused(home: Home, run: RunRow) -> None:
    home.ledger.update(home.ledger.lines()[-1].mark, spend_usd="0.40")
    with pytest.raises(UsageError, match="not above what") as caught:
        propose(home, run, Decimal("0.40"), None)
    assert "homing stop moss" in caught.value.fix
    with pytest.raises(UsageError, match="has already passed"):
        propose(home, run, None, 0.001)
    assert home.ledger.find("moss").spend_limit_usd == "1.00"


@pytest.mark.slow
def test_the_limit_of_an_ended_run_is_refused_with_a_resume_or_fetch_command(home: Home, run: RunRow) -> None:
    destroy_run(home, run)
    with pytest.raises(UsageError, match="has ended") as caught:
        propose(home, home.ledger.find("moss"), Decimal(20), None)
    assert f"homing launch {run.id} --resume --spend-limit 20.00" in caught.value.fix
    done = dataclasses.replace(home.ledger.find("moss"), state="done")
    with pytest.raises(UsageError, match="has ended: its state is done") as caught:
        propose(home, done, Decimal(20), None)
    assert caught.value.fix == f"homing fetch {run.id}   fetches the model.", "resuming it would be refused"


@pytest.mark.slow
def test_a_change_without_a_new_limit_is_refused(home: Home, run: RunRow) -> None:
    with pytest.raises(UsageError, match="No new limit"):
        propose(home, run, None, None)


def test_a_run_waiting_for_its_relaunch_gets_the_new_limit_without_a_confirmation(home: Home, tmp_path: Path) -> None:
    run = launch(make_draft(home, tmp_path, steps=100_000), home).run
    destroy_run(home, run)
    home.ledger.set_run(run.id, state="failed", reason=SILENT)
    change = propose(home, home.ledger.find("moss"), Decimal(3), 7200.0)
    assert change.worst_case_usd == 3, "the rate of its next machine is not known"
    assert not change_limit(home, change, confirm_s=3600.0)
    row = home.ledger.find("moss")
    limits = load_documents(home, row).run.limits
    assert (row.spend_limit_usd, limits.spend_usd, limits.time_s) == ("3", "3", 7200.0)
    assert (row.state, row.reason) == ("failed", SILENT)


@pytest.mark.parametrize("reported", ["NaN", "sNaN", "Infinity", "1e999999999", "lots"])
def test_an_agent_that_reports_an_absurd_limit_has_not_confirmed_the_new_one(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reported: str
) -> None:
    row = RunRow("moss-1", "moss", "running", 0.0, "file:/nowhere", "f" * 64, "1.00")
    monkeypatch.setattr(Ledger, "run", lambda self, run_id: row)
    beat = Heartbeat(0.0, "m", 1, "training", 0.0, "0.36", "0", spend_limit_usd=reported)
    monkeypatch.setattr(change_limit_or_stop, "read_reports", lambda *a: SimpleNamespace(heartbeat=beat))
    change = Change(row, [], Decimal(1), Decimal(3), 0.0, 0.0, Decimal(0), Decimal(3))
    store = FileStore(str(tmp_path / "store"), World())
    assert not change_limit_or_stop._is_confirmed(home, change, store, 1, 0.0, lambda text: None)
