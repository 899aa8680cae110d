"""Every instance ever requested, from the intent to the receipt."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from homing.cloud.ledger.ledger import Ledger, LedgerLine, RunRow
from homing.errors import EndedElsewhere, HomingError, UsageError
from homing.world import Database, World


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "home" / "ledger.sqlite", World())


def row(name: str = "moss", number: int = 1, **changes: object) -> RunRow:
    run = RunRow(f"{name}-{number}", name, "launching", 1000.0 + number, "file:/s", "ff")
    return dataclasses.replace(run, **changes)  # type: ignore[arg-type]


def line(run: RunRow, attempt: int = 1) -> LedgerLine:
    mark = f"homing-abc123-{run.id}-{attempt}"
    return LedgerLine(mark, run.id, run.name, attempt, "local", "this-computer", "0.36", "1.00", intent_at=1000.0)


@pytest.mark.acceptance("X20")
def test_the_intent_is_recorded_before_the_create_call(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    (found,) = ledger.lines()
    assert (found.state, found.billing, found.instance_id, found.created_at) == ("requested", "maybe", None, None)
    assert ledger.find("moss").state == "launching"


def test_one_live_run_per_name(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    with pytest.raises(UsageError, match="already live"):
        ledger.intend(row(number=2), line(row(number=2)))
    assert len(ledger.runs()) == 1
    assert len(ledger.lines()) == 1
    ledger.set_run("moss-1", state="done")
    ledger.intend(row(number=2), line(row(number=2)))
    assert ledger.find("moss").id == "moss-2"


def test_only_one_of_many_concurrent_launches_of_a_name_succeeds(ledger: Ledger) -> None:
    won: list[int] = []

    def race(number: int) -> None:
        mine = Ledger(ledger._path, World())
        try:
            mine.intend(row(number=number), line(row(number=number)))
            won.append(number)
        except UsageError:
            pass

    ledger.runs()
    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(ledger.lines()) == 1


def test_an_ended_run_continues_with_another_attempt(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    ledger.set_run("moss-1", state="stopped", reason="limit", exit_code=5, ended_at=1.0)
    ledger.intend(row(), line(row(), attempt=2))
    found = ledger.find("moss")
    assert (found.state, found.reason, found.exit_code, found.ended_at) == ("launching", "", None, None)
    assert [each.attempt for each in ledger.lines("moss-1")] == [1, 2]


def test_attempts_are_listed_in_order_even_after_a_clock_step_back(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    ledger.set_run("moss-1", state="failed")
    ledger.intend(row(), dataclasses.replace(line(row(), attempt=2), intent_at=400.0))
    assert [each.attempt for each in ledger.lines("moss-1")] == [1, 2]


def test_the_earliest_destroy_request_time_is_kept(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    mark = line(row()).mark
    assert ledger.destroy_asked_at(mark) is None
    for now in (2000.0, 2100.0):
        ledger.ask_destroy(mark, now)
    assert ledger.destroy_asked_at(mark) == 2000.0
    for now in (500.0, 600.0):
        ledger.ask_destroy(mark, now)
    assert ledger.destroy_asked_at(mark) == 500.0


def test_create_is_refused_after_a_destroy_request(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    mark = line(row()).mark
    ledger.update(mark, destroy_asked_at=5.0)
    with pytest.raises(HomingError, match="destroyed before"):
        ledger.begin_create(mark, 10.0)
    assert ledger.lines()[0].created_at is None


def test_a_receipt_is_not_written_twice(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    mark = line(row()).mark
    ledger.begin_create(mark, 10.0)
    ledger.close(mark, at=20.0, spend_usd=Decimal("0.5"), note="first")
    ledger.close(mark, at=30.0, spend_usd=Decimal("0.9"), note="second")
    ledger.update(mark, state="ready", billing="yes")
    (found,) = ledger.lines()
    assert (found.destroyed_at, found.spend_usd, found.note, found.billing) == (20.0, "0.5", "first", "no")


def test_rows_cannot_be_deleted(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    connection = sqlite3.connect(ledger._path)
    for table in ("lines", "runs"):
        with pytest.raises(sqlite3.DatabaseError, match="never deleted"):
            connection.execute(f"DELETE FROM {table}")
    connection.close()


def test_an_unconfirmed_destroy_is_remembered(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    mark = line(row()).mark
    assert ledger.unconfirmed() == []
    ledger.update(mark, destroy_asked_at=5.0)
    assert [each.mark for each in ledger.unconfirmed()] == [mark]
    ledger.close(mark, at=6.0, spend_usd=Decimal(0), note="")
    assert ledger.unconfirmed() == []


def test_a_name_means_its_newest_run_and_no_name_the_newest_of_all(ledger: Ledger) -> None:
    for number, name in enumerate(("moss", "fern", "moss"), start=1):
        ledger.intend(row(name, number), line(row(name, number)))
        ledger.set_run(f"{name}-{number}", state="done")
    assert ledger.find("moss").id == "moss-3"
    assert ledger.find("moss-1").id == "moss-1"
    assert ledger.find(None).id == "moss-3"
    with pytest.raises(UsageError, match="Unknown run: 'oak'") as caught:
        ledger.find("oak")
    assert "moss, fern" in caught.value.why


def test_a_ledger_of_a_newer_homing_is_not_touched(ledger: Ledger) -> None:
    ledger.runs()
    connection = sqlite3.connect(ledger._path)
    connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    connection.commit()
    connection.close()
    with pytest.raises(UsageError, match="newer version of homing"):
        Ledger(ledger._path, World()).runs()


def damage(ledger: Ledger) -> None:
    for path in ledger._path.parent.glob("ledger.sqlite*"):
        path.write_bytes(b"no database at all" * 500)


def again(ledger: Ledger) -> tuple[Ledger, list[str]]:
    """The ledger as the next process opens it, and its messages."""
    said: list[str] = []
    opened = Ledger(ledger._path, World())
    opened.file.notify = said.append
    return opened, said


def test_a_damaged_ledger_without_a_backup_is_moved_away_with_advice(ledger: Ledger) -> None:
    ledger.runs()
    damage(ledger)
    later, messages = again(ledger)
    assert later.runs() == []
    (said,) = messages
    assert "is damaged" in said or "was damaged" in said
    assert "`homing runs` finds billing instances by their mark" in said
    (temporary,) = ledger._path.parent.glob("ledger-damaged-*")
    assert temporary.read_bytes().startswith(b"no database at all")


def test_an_attempt_already_in_the_ledger_is_refused(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    ledger.set_run("moss-1", state="failed")
    with pytest.raises(UsageError, match="Another process launched"):
        ledger.intend(row(), line(row()))


def test_a_relaunch_is_refused_if_the_limit_changed_since_the_caller_read_it(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    ledger.set_run("moss-1", state="failed", reason="lost: no heartbeat")
    judged = ledger.find("moss")
    ledger.set_run("moss-1", spend_limit_usd="3")
    with pytest.raises(EndedElsewhere, match=r"was not relaunched: its limit is now \$3\.00") as caught:
        ledger.intend(row(), line(row(), attempt=2), judged)
    assert caught.value.fix == "homing launch moss-1 --resume --spend-limit 3"
    assert [each.attempt for each in ledger.lines()] == [1]
    assert ledger.find("moss").spend_limit_usd == "3"
    ledger.intend(row(), line(row(), attempt=2), ledger.find("moss"))


def test_a_run_that_ended_meanwhile_stays_ended(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    ledger.set_run("moss-1", state="stopped", reason="destroyed manually")
    ledger.set_run("moss-1", only_live=True, state="running")
    assert (ledger.find("moss").state, ledger.find("moss").reason) == ("stopped", "destroyed manually")


def test_many_processes_may_open_a_new_ledger_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, os, time; from pathlib import Path; from homing.cloud.ledger.ledger import Ledger\n"
        "from homing.world import World\n"
        f"path = Path({str(tmp_path / 'ledger.sqlite')!r})\n"
        "while not path.with_name('go').exists(): time.sleep(0.001)\n"
        "for _ in range(5): Ledger(path, World()).runs()"
    )
    clients = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) for _ in range(6)]
    time.sleep(1.0)
    (tmp_path / "go").touch()
    assert [client.communicate(timeout=60)[1] for client in clients] == [""] * 6


def test_an_unknown_line_has_no_account(ledger: Ledger) -> None:
    assert ledger.account("homing-abc123-never-1") is None


def test_the_ledger_is_readable_although_the_disk_has_no_room_for_shared_memory(ledger: Ledger) -> None:
    # Without a readable ledger neither guard nor destroy finds what bills. A file size limit simulates
    # the full disk: SQLite cannot make the 32 KB that processes share in WAL mode.
    ledger.intend(row(), line(row()))
    code = (
        "import resource, sys; from pathlib import Path; from homing.cloud.ledger.ledger import Ledger\n"
        "from homing.world import World\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))\n"
        "print(Ledger(Path(sys.argv[1]), World()).lines()[0].mark)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(ledger._path)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == line(row()).mark, done.stderr
    assert ledger.lines() == [line(row())]


def test_a_row_with_invalid_text_is_reported_as_damaged(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    Database(ledger._path).execute(("UPDATE lines SET provider = CAST(x'ff' AS TEXT)", ()))
    (found,) = ledger.lines()
    assert (found.mark, found.damaged) == (line(row()).mark, ("provider",))
    assert ["(provider)" in sentence for sentence in ledger.damage()] == [True]


@pytest.mark.parametrize("is_new", [False, True])
def test_a_process_suspended_during_a_write_does_not_block_readers(ledger: Ledger, is_new: bool) -> None:
    # Ctrl-Z in another terminal: that process holds the database until it continues; a guard must still read it.
    ledger.intend(row(), line(row()))
    reader = Ledger(ledger._path, World()) if is_new else ledger
    with contextlib.closing(sqlite3.connect(ledger._path, isolation_level=None)) as stopped:
        stopped.execute("BEGIN IMMEDIATE")
        stopped.execute("UPDATE lines SET note = 'half'")
        before = time.monotonic()
        assert [found.note for found in reader.lines()] == [""]
        assert reader.find("moss").state == "launching"
        assert time.monotonic() - before < 20, "the reader did not wait for the writer"


def test_a_ledger_that_lacks_a_table_gets_it(ledger: Ledger) -> None:
    ledger.intend(row(), line(row()))
    with contextlib.closing(sqlite3.connect(ledger._path)) as old:
        old.execute("DROP TABLE bills")
        old.commit()
    again = Ledger(ledger._path, World())
    again.note_bill("m", Decimal(1), 2.0)
    assert again.bills() == {"m": Decimal(1)}


def test_open_lines_are_read_through_their_index(ledger: Ledger, tmp_path: Path) -> None:
    asked: list[str] = []
    execute = ledger.file.execute

    def listen(statements: Any, **how: bool) -> Any:
        asked.extend(sql for sql, _ in statements)
        return execute(statements, **how)

    ledger.file.execute = listen  # type: ignore[method-assign]
    ledger.open_lines()
    ledger.billing_runs()
    ledger.unconfirmed()
    assert len(asked) == 3
    with contextlib.closing(sqlite3.connect(tmp_path / "home" / "ledger.sqlite")) as connection:
        plans = [str(connection.execute(f"EXPLAIN QUERY PLAN {sql}").fetchall()) for sql in asked]
    assert all("USING INDEX lines_open" in plan for plan in plans), plans


def test_a_line_with_an_invalid_end_time_counts_as_open(ledger: Ledger, tmp_path: Path) -> None:
    for number, end in enumerate((None, "tomorrow", b"\xff", 1e300, 2000.0)):
        run = row(f"moss{number}")
        ledger.intend(run, line(run))
        with contextlib.closing(sqlite3.connect(tmp_path / "home" / "ledger.sqlite")) as connection, connection:
            connection.execute("UPDATE lines SET destroyed_at = ? WHERE run_id = ?", [end, run.id])
    assert {each.run_name for each in ledger.open_lines()} == {"moss0", "moss1", "moss2", "moss3"}
