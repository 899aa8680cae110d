"""Keeps the ledger on disk, as a database file with a backup, and can read rows even if they are damaged.

    $HOMING_HOME/ledger.sqlite          the ledger
    $HOMING_HOME/backup/ledger.sqlite   a copy, updated when the known instances, or what they may cost, change

    missing, or empty        restored from the backup
    damaged                  renamed, then restored from the backup
    read-only, disk full     reads continue; a command keeps its findings in memory, and the next
                             command collects them again. Writes that must be durable (an intent, a receipt) fail.

Every such action is reported once, through `notify`. If neither the ledger nor a backup exists, the ledger starts
empty, and lost_ledger.py searches for the missing runs.

Rows are read defensively, so that one bad row does not hide all the others. SQLite allows text, NULL or a blob in any
column, and a disk error or a manual edit may have put them there. Each column is read separately. If its value is
invalid, the column's name is reported, and a safe value is used instead: an instance that may be billing counts as
open, and an unknown cost is not counted. The mark and the instance id are kept, because they are needed to destroy the
instance.
"""

from __future__ import annotations

import datetime
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from homing.cloud.check_numbers import MOST_USD, MOST_USD_PER_HOUR, read_figure
from homing.world import Database, DatabaseDamaged, World, reads_only

__all__ = ["LedgerFile", "read_line", "read_run", "seconds_in", "usd_in"]

_FOLDER = "backup"  # the backup is in a separate folder, so that `rm ledger.sqlite*` does not remove it
_SOUND = ("SELECT * FROM pragma_quick_check(1)", ())
_TABLE = ("SELECT name FROM sqlite_master LIMIT 1", ())

Statements = Sequence[tuple[str, Sequence[Any]]]
_NO_TEXT = "\ufffd"  # replaces bytes that are not valid text
_FREE = ("note", "reason", "store")  # columns that may contain arbitrary text from providers and users


class LedgerFile:
    """The ledger file and its backup.

    `run` executes statements on a database and creates missing tables. It creates the file only if its last argument is
    true.
    """

    def __init__(
        self, path: Path, world: World, run: Callable[[Database, Statements, bool], list[dict[str, Any]]]
    ) -> None:
        self.path, self.backup = path, path.parent / _FOLDER / path.name
        self.notify: Callable[[str], None] = lambda text: None
        self._world, self._run = world, run
        self._is_checked = False
        self._copy: Database | None = None  # a copy in memory, used while the file cannot be read or written
        self.said: list[str] = []  # one sentence for each problem or repair that was reported

    @property
    def is_there(self) -> bool:
        """Return True if a ledger or its backup exists. The first read restores a missing ledger from its backup."""
        return self._world.exists(self.path) or self._world.exists(self.backup)

    @property
    def is_copy(self) -> bool:
        """Return True if this process is using a copy in memory instead of the file."""
        return self._copy is not None

    def look_again(self) -> None:
        """Discard the copy in memory, because the file may have changed or become usable again."""
        self._copy, self._is_checked = None, False

    def execute(self, statements: Statements, *, must_last: bool, is_kept: bool) -> list[dict[str, Any]]:
        """Run the statements.

        With `must_last`, raise if they cannot be written to the file. With `is_kept`, update the backup.
        """
        is_read = reads_only(statements)
        is_new = self._check(is_read)
        if self._copy is not None and is_read:
            return self._run(self._copy, statements, True)
        try:
            rows = self._run_on_file(statements, is_new)
        except OSError as exc:
            if must_last and not is_read:
                raise
            return self._run_on_copy(statements, exc)
        if not is_read:
            self._copy = None
            if is_kept:
                self.back_up()
        return rows

    # --- the file ---

    def _check(self, is_read: bool) -> bool:
        """Restore the file if it is missing. If it exists, check its integrity, but only once.

        Return True if a new file may be created, because there is neither a file nor a usable backup.
        """
        is_there, is_new = self._world.exists(self.path), False
        if not is_there and (self._copy is None or not is_read):
            is_new = not self._world.exists(self.backup) or self._restore(f"The ledger {self.path} was missing.")
        elif is_there and not self._is_checked:
            try:
                said = [str(value) for row in self._database().execute(_SOUND) for value in row.values()]
                if said != ["ok"]:
                    raise DatabaseDamaged(f"{self.path}: {said[0] if said else 'no answer'}")
                # The process that created this file died immediately, or someone truncated the file. Do not use it,
                # because an empty ledger would then replace the backup.
                if not self._database().execute(_TABLE):
                    is_new = not self._world.exists(self.backup) or self._restore(
                        f"The ledger {self.path} was empty.", is_replacing=True
                    )
            except DatabaseDamaged as exc:
                is_new = self._repair(exc)
            except OSError:
                pass  # the read or write that follows reports the reason
        self._is_checked = True
        return is_new

    def _run_on_file(self, statements: Statements, is_new: bool) -> list[dict[str, Any]]:
        try:
            return self._run(self._database(), statements, is_new)
        except DatabaseDamaged as exc:
            is_new = self._repair(exc)
            if self._copy is not None:  # the backup could not be restored to disk
                raise
        except FileNotFoundError:  # the file was removed after the check, or it could not be restored
            is_new = self._check(is_read=False)
            if self._copy is not None:
                raise
        return self._run(self._database(), statements, is_new)

    def _database(self) -> Database:
        return self._world.database(self.path)

    # --- a copy in memory ---

    def _run_on_copy(self, statements: Statements, exc: OSError) -> list[dict[str, Any]]:
        copy = self._copy or self._read_copy(exc)
        rows = self._run(copy, statements, True)  # a statement that is itself invalid would fail here too
        self._copy = copy
        self._say(
            f"The ledger {self.path} cannot be {'read directly' if reads_only(statements) else 'written'}: {exc}."
            " This command works on a copy in memory, and its changes are not saved. Nothing can be launched until"
            " this is fixed: check disk space and permissions."
        )
        return rows

    def _read_copy(self, exc: OSError) -> Database:
        try:
            return self._world.memory_database(self._database().image())
        except FileNotFoundError:  # $HOMING_HOME is not writable, and nothing was ever written there
            if self._world.exists(self.path.parent) and not self._world.is_dir(self.path.parent):
                raise exc from None  # $HOMING_HOME is not a folder
            return self._world.memory_database()
        except OSError:
            image = self._backup_image()
            if image is None:
                raise exc from None
            self._say(f"The ledger {self.path} cannot be read: {exc}. Using its backup {self.backup} instead.")
            return self._world.memory_database(image)

    # --- the backup ---

    def back_up(self) -> None:
        if self._copy is not None:  # changes in memory are not in the file, so they must not be backed up either
            return
        try:
            self._world.mkdir(self.backup.parent)
            self._world.write(self.backup, self._database().image(), mode=0o600)
        except OSError as exc:  # not fatal, because the data is in the ledger itself
            self._say(f"Could not write the ledger's backup, {self.backup}: {exc}")

    def _backup_image(self) -> bytes | None:
        """Return the backup's bytes, or None if there is no usable backup."""
        try:
            image = self._world.read(self.backup)
            said = self._world.memory_database(image).execute(_SOUND) if image else []
        except OSError:
            return None
        return image if [str(value) for row in said for value in row.values()] == ["ok"] else None

    def _repair(self, exc: DatabaseDamaged) -> bool:
        """Rename the damaged file and restore the backup.

        Return True if there is no backup, which means that a new ledger must be created.
        """
        damaged_copy = self.path.with_name(
            f"{self.path.stem}-damaged-{self._moment(self._world.now())}{self.path.suffix}"
        )
        image = self._backup_image()
        try:
            if image is None:
                self._world.rename(self.path, damaged_copy)
                self._forget_log()
            else:
                self._world.copy(self.path, damaged_copy)
                self._database().restore(image, is_replacing=True)  # replaces the file atomically
        except OSError as why:
            self._copy = self._world.memory_database(image or b"")
            with_what = f"Using its backup {self.backup} instead" if image else "There is no backup"
            self._say(f"{exc}: the ledger is damaged. {with_what}. The repair failed: {why}")
            return False
        said = f"The ledger was damaged ({exc}); it is kept as {damaged_copy}."
        self._say(f"{said} {self._restored() if image else self._without_backup()}")
        return image is None

    def _restore(self, said: str, *, is_replacing: bool = False) -> bool:
        """Restore the backup. Return True if it is unusable, which means that a new ledger may be created."""
        image = self._backup_image()
        if image is None:
            self._say(f"{said} Its backup {self.backup} is damaged too. {self._without_backup()}")
            return True
        try:
            self._database().restore(image, is_replacing=is_replacing)
        except FileExistsError:
            return False  # another process restored it first
        except OSError as exc:
            self._copy = self._copy or self._world.memory_database(image)
            self._say(f"{said} Using its backup {self.backup}, which could not be restored: {exc}")
            return False
        self._say(f"{said} {self._restored()}")
        return False

    def _restored(self) -> str:
        at = self._moment(self._world.modified_at(self.backup))
        return f"It was restored from its backup of {at}. Compare it with your providers: homing runs"

    def _without_backup(self) -> str:
        return "There is no backup. `homing runs` finds billing instances by their mark."

    def _forget_log(self) -> None:
        """Remove the damaged file's WAL files, because SQLite would apply them to the new ledger file."""
        for suffix in ("-wal", "-shm"):
            self._world.remove(self.path.with_name(self.path.name + suffix))

    def _moment(self, at: float) -> str:
        return f"{datetime.datetime.fromtimestamp(at, tz=datetime.UTC):%Y%m%d-%H%M%S}Z"

    def _say(self, text: str) -> None:
        if text not in self.said:
            self.said.append(text)
            self.notify(text)


# --- rows ---


def read_line(row: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the fields of LedgerLine, with the columns that could not be read in `damaged`."""
    bad: list[str] = []
    intent_at = _moment(row, "intent_at", bad)
    # If the creation time cannot be read, assume that the instance was created when it was requested, because it may be
    # billing.
    created_at = _moment(row, "created_at", bad, otherwise=intent_at if intent_at is not None else now)
    return {
        "mark": _text(row, "mark", bad),
        "run_id": _text(row, "run_id", bad),
        "run_name": _text(row, "run_name", bad),
        "attempt": _number(row, "attempt", bad, 1),
        "provider": _text(row, "provider", bad),
        "offer": _text(row, "offer", bad),
        "rate_usd_per_hour": _usd(row, "rate_usd_per_hour", bad, int(MOST_USD_PER_HOUR)) or "0",
        "limit_usd": _usd(row, "limit_usd", bad) if row["limit_usd"] is not None else None,
        "intent_at": intent_at if intent_at is not None else now,
        "instance_id": _text(row, "instance_id", bad) if row["instance_id"] is not None else None,
        "created_at": created_at,
        "destroyed_at": _moment(row, "destroyed_at", bad),  # if unreadable, the line counts as open
        "state": _text(row, "state", bad),
        "billing": _text(row, "billing", bad),
        "spend_usd": _usd(row, "spend_usd", bad) or "0",
        "note": _text(row, "note", bad),
        "account": _text(row, "account", bad) if row["account"] is not None else None,
        "damaged": tuple(bad),
    }


def read_run(row: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the fields of RunRow, with the columns that could not be read in `damaged`."""
    bad: list[str] = []
    created_at, ended_at = _moment(row, "created_at", bad), _moment(row, "ended_at", bad)
    state = _text(row, "state", bad)
    if "state" in bad:
        # Without an end time, the run counts as live, so that it is guarded until its state is read from its store.
        state = "running" if ended_at is None else "failed"
    return {
        "id": _text(row, "id", bad),
        "name": _text(row, "name", bad),
        "state": state,
        "created_at": created_at if created_at is not None else now,
        "store": _text(row, "store", bad),
        "run_file_sha256": _text(row, "run_file_sha256", bad),
        "spend_limit_usd": _usd(row, "spend_limit_usd", bad) if row["spend_limit_usd"] is not None else None,
        "reason": _text(row, "reason", bad),
        "exit_code": _number(row, "exit_code", bad, None),
        "ended_at": ended_at,
        "fetched_step": _number(row, "fetched_step", bad, None),
        "damaged": tuple(bad),
    }


def seconds_in(value: object, otherwise: float) -> float | None:
    """Return a stored time, None if no time is stored, or `otherwise` if the value is not a time."""
    if value is None:
        return None
    is_time = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_time and abs(float(value)) < 1e12 else otherwise  # type: ignore[arg-type]


def usd_in(value: object, most: int = int(MOST_USD) * 1000) -> str | None:
    """Return a stored dollar amount as text, or None if the value is not a valid amount.

    Only text is valid, because the ledger writes no floats.
    """
    return value if isinstance(value, str) and _is_usd(value, most) else None


@functools.lru_cache(maxsize=4096)  # the same few rates and limits appear in many rows
def _is_usd(text: str, most: int) -> bool:
    return read_figure(text, most) is not None


def _text(row: Mapping[str, Any], name: str, bad: list[str]) -> str:
    value = row[name]
    if isinstance(value, str) and (_NO_TEXT not in value or name in _FREE):
        return value
    bad.append(name)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else "" if value is None else str(value)


def _usd(row: Mapping[str, Any], name: str, bad: list[str], most: int = int(MOST_USD) * 1000) -> str | None:
    found = usd_in(row[name], most)
    if found is None:
        bad.append(name)
    return found


def _moment(row: Mapping[str, Any], name: str, bad: list[str], otherwise: float | None = None) -> float | None:
    found = seconds_in(row[name], math.nan)
    if found is None or not math.isnan(found):
        return found
    bad.append(name)
    return otherwise


def _number(row: Mapping[str, Any], name: str, bad: list[str], otherwise: int | None) -> int | None:
    value = row[name]
    if isinstance(value, int) or (value is None and otherwise is None):
        return value
    bad.append(name)
    return otherwise
