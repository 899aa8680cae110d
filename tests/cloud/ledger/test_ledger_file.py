"""The ledger's file lost, damaged, read-only or on a full disk: its content is still readable."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.broken_disk import fill, make_read_only
from tests.cloud.ledger.test_ledger import again, damage, line, row

from homing.cloud.ledger.ledger import Ledger
from homing.errors import IntegrityError
from homing.world import Database, World


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    found = Ledger(tmp_path / "home" / "ledger.sqlite", World())
    found.intend(row(), line(row()))
    found.begin_create(line(row()).mark, 1001.0)
    found.update(line(row()).mark, instance_id="i-1", state="running", billing="yes")
    return found


MARK = line(row()).mark


def test_a_lost_ledger_is_restored_from_its_backup_and_says_so(ledger: Ledger) -> None:
    before = ledger.lines()
    for path in ledger._path.parent.glob("ledger.sqlite*"):
        path.unlink()
    later, said = again(ledger)
    assert later.lines() == before
    assert "was missing. It was restored from its backup of" in said[0]
    assert again(ledger)[0].lines() == before, "the restored file stays"
    assert len(said) == 1


def test_a_process_with_the_ledger_open_restores_it_after_its_removal(ledger: Ledger) -> None:
    # A guard runs for days; removing the ledger meanwhile must not disarm it.
    before = ledger.lines()
    for path in ledger._path.parent.glob("ledger.sqlite*"):
        path.unlink()
    assert ledger.lines() == before
    ledger.set_run("moss-1", state="running")
    assert again(ledger)[0].find("moss").state == "running"


def test_an_emptied_ledger_is_restored_and_its_backup_stays(ledger: Ledger) -> None:
    before = ledger.lines()
    for path in ledger._path.parent.glob("ledger.sqlite-*"):
        path.unlink()
    ledger._path.write_bytes(b"")
    later, said = again(ledger)
    assert later.lines() == before
    assert "was empty. It was restored from its backup of" in said[0]
    ledger.file.look_again()
    ledger.set_run("moss-1", spend_limit_usd="7")
    assert again(ledger)[0].lines() == before


class Removing(World):
    """Removes the ledger just before the `at`-th statement from now."""

    at = 0

    def database(self, path: object) -> Database:
        self.at -= 1
        if self.at == 0:
            for each in Path(str(path)).parent.glob("ledger.sqlite*"):
                each.unlink()
        return super().database(path)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", range(1, 8))
def test_a_ledger_removed_between_two_statements_is_restored(ledger: Ledger, at: int) -> None:
    before, world = ledger.lines(), Removing()
    guard = Ledger(ledger._path, world)
    guard.lines()
    world.at = at
    for _ in range(3):
        guard.file.look_again()
        guard.set_run("moss-1", state="running")
        assert guard.lines() == before
    assert again(ledger)[0].lines() == before
    assert again(ledger)[0].find("moss").state == "running"


@pytest.mark.parametrize("at", range(1, 4))
def test_a_removed_ledger_without_a_backup_is_created_empty(ledger: Ledger, at: int) -> None:
    world = Removing()
    guard = Ledger(ledger._path, world)
    guard.lines()
    ledger.file.backup.unlink()
    world.at = at
    guard.file.look_again()
    guard.lines()
    assert guard.lines() == [] == guard.runs()
    guard.intend(row(), line(row()))
    assert again(ledger)[0].lines() == [line(row())]


def test_a_write_after_a_failed_restore_does_not_create_an_empty_ledger(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ledger.lines()
    for path in ledger._path.parent.glob("ledger.sqlite*"):
        path.unlink()
    later = Ledger(ledger._path, World())
    with monkeypatch.context() as patch:
        fill(patch, ledger._path.parent)
        assert later.lines() == before
        later.set_run("moss-1", state="running")
    later.set_run("moss-1", spend_limit_usd="7")  # the disk has room again
    assert later.lines() == before
    assert again(ledger)[0].lines() == before


def test_a_leftover_wal_is_not_applied_to_the_restored_ledger(ledger: Ledger) -> None:
    before = ledger.lines()
    held = sqlite3.connect(ledger._path)  # keeps the log from being removed with the last connection
    held.execute("SELECT * FROM lines").fetchall()
    ledger.update(MARK, spend_usd="1.5")
    ledger._path.unlink()
    held.close()
    assert [each.instance_id for each in again(ledger)[0].lines()] == [each.instance_id for each in before]


def test_a_damaged_ledger_is_moved_away_and_restored_from_its_backup(ledger: Ledger) -> None:
    before = ledger.lines()
    damage(ledger)
    later, said = again(ledger)
    assert later.lines() == before
    assert "was damaged" in said[0]
    assert "It was restored from its backup of" in said[0]
    assert len(list(ledger._path.parent.glob("ledger-damaged-*"))) == 1


def test_overwritten_pages_are_detected_and_the_ledger_is_restored(ledger: Ledger) -> None:
    before = ledger.lines()
    data = bytearray(ledger._path.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    ledger._path.write_bytes(bytes(data))
    later, said = again(ledger)
    assert later.lines() == before
    assert "was damaged" in said[0]


def test_a_damaged_backup_leaves_an_empty_ledger_with_a_message(ledger: Ledger) -> None:
    ledger.file.backup.write_bytes(b"no database either" * 300)
    damage(ledger)
    later, said = again(ledger)
    assert later.runs() == []
    assert "There is no backup" in said[0]


def test_the_backup_is_written_only_after_significant_changes(ledger: Ledger) -> None:
    stamp = World().stamp(ledger.file.backup)
    ledger.update(MARK, spend_usd="0.25", note="running", billing="yes", instance_id="i-1")
    ledger.set_run("moss-1", state="launching")
    assert World().stamp(ledger.file.backup) == stamp
    ledger.set_run("moss-1", spend_limit_usd="7")
    assert World().stamp(ledger.file.backup) != stamp
    assert oct(World().mode(ledger.file.backup)) == "0o600"


def test_an_update_without_a_change_writes_nothing(ledger: Ledger) -> None:
    wal = ledger._path.with_name("ledger.sqlite-wal")
    held = sqlite3.connect(ledger._path)
    held.execute("SELECT * FROM lines").fetchall()
    ledger.update(MARK, note="x")
    size = wal.stat().st_size
    ledger.update(MARK, note="x", instance_id="i-1")
    ledger.set_run("moss-1", state="launching", only_live=True)
    assert wal.stat().st_size == size
    held.close()


@pytest.mark.parametrize("broken", [fill, make_read_only])
def test_an_unwritable_ledger_is_read_and_updated_in_memory(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, broken: object
) -> None:
    before = ledger.lines()
    broken(monkeypatch, ledger._path.parent)  # type: ignore[operator]
    later, said = again(ledger)
    assert later.lines() == before
    later.update(MARK, state="unknown", billing="maybe")
    later.ask_destroy(MARK, 5.0)
    assert [each.state for each in later.lines()] == ["unknown"]
    assert [each.mark for each in later.unconfirmed()] == [MARK]
    assert "works on a copy in memory" in said[0]
    assert "move" not in said[0]
    with pytest.raises(IntegrityError, match="Cannot use the ledger") as caught:
        later.close(MARK, at=9.0, spend_usd=1, note="gone")  # type: ignore[arg-type]
    assert "move it away" not in caught.value.fix
    other = row("fern")
    with pytest.raises(IntegrityError):
        later.intend(other, line(other))
    monkeypatch.undo()
    assert ledger.lines() == before, "nothing was written"
    later.update(MARK, note="the disk has room again")
    assert [(each.state, each.note) for each in later.lines()] == [("running", "the disk has room again")]


def test_look_again_reads_the_file_instead_of_the_copy_in_memory(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill(patch, ledger._path.parent)
        later, _ = again(ledger)
        later.update(MARK, state="unknown")
        patch.undo()
        ledger.set_run("moss-1", state="running")
        later.file.look_again()
        assert later.find("moss").state == "running"


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of this computer can read, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_a_process_without_write_permission_can_read_the_ledger(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = open_folder / "home" / "ledger.sqlite"
    mine = Ledger(path, World())
    mine.intend(row(), line(row()))
    held = sqlite3.connect(path)  # keeps a WAL with content that the main file lacks
    held.execute("SELECT * FROM lines").fetchall()
    mine.update(MARK, note="only in the log")
    for each in [path.parent, *path.parent.rglob("*")]:
        each.chmod(0o555 if each.is_dir() else 0o444)
    code = (
        "import os, sys; sys.path[:0] = eval(sys.argv[2])\n"
        "from pathlib import Path; from homing.cloud.ledger.ledger import Ledger; from homing.world import World\n"
        "if os.getuid() == 0: os.setgid(65534); os.setuid(65534)\n"
        "ledger = Ledger(Path(sys.argv[1]), World()); found = ledger.lines()[0]\n"
        "ledger.update(found.mark, state='unknown')\n"
        "print(found.mark, found.note, ledger.lines()[0].state, sep='|')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(sys.path)], capture_output=True, text=True, timeout=60, cwd="/"
    )
    held.close()
    for each in [path.parent, *path.parent.rglob("*")]:
        each.chmod(0o755 if each.is_dir() else 0o644)
    assert done.stdout.strip() == f"{MARK}|only in the log|unknown", done.stderr
    assert mine.lines()[0].state == "requested"
