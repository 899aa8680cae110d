"""The file of the ledger: opened, backed up, restored, and read from a copy where it cannot be written.

    $HOMING_HOME/ledger.sqlite          the ledger
    $HOMING_HOME/backup/ledger.sqlite   a copy, written after each change of what exists and what it may cost

    missing, or empty        the backup is put in its place
    damaged                  it is kept aside, and the backup is put in its place
    read-only, disk full     reading goes on; what a verb learns stays in the memory of its process and is learned
                             again by the next one. What must outlive the process (an intent, a receipt) fails.

Whatever was done is said once, through `tell`. Without ledger and backup the ledger is empty, and lost.py looks for
what it no longer knows.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from homing.world import Database, DatabaseDamaged, World, reads_only

__all__ = ["LedgerFile"]

_FOLDER = "backup"  # outside of what `rm ledger.sqlite*` takes
_SOUND = ("SELECT * FROM pragma_quick_check(1)", ())
_TABLE = ("SELECT name FROM sqlite_master LIMIT 1", ())

Statements = Sequence[tuple[str, Sequence[Any]]]


class LedgerFile:
    """`run` runs statements on a database and makes the tables that are missing; the file itself only where its last
    argument is true."""

    def __init__(
        self, path: Path, world: World, run: Callable[[Database, Statements, bool], list[dict[str, Any]]]
    ) -> None:
        self.path, self.backup = path, path.parent / _FOLDER / path.name
        self.tell: Callable[[str], None] = lambda text: None
        self._world, self._run = world, run
        self._is_checked = False
        self._copy: Database | None = None  # what is read while the file cannot be used, or not be written
        self.said: list[str] = []  # what had to be done to read it, a sentence each

    @property
    def is_there(self) -> bool:
        """Whether anything was ever written down: it, or its backup, from which the first who reads restores it."""
        return self._world.exists(self.path) or self._world.exists(self.backup)

    @property
    def is_copy(self) -> bool:
        """Whether this process works on a copy in memory."""
        return self._copy is not None

    def look_again(self) -> None:
        """Forgets the copy: the file may have changed, or be usable again."""
        self._copy, self._is_checked = None, False

    def execute(self, statements: Statements, *, must_last: bool, is_kept: bool) -> list[dict[str, Any]]:
        """`must_last`: fails where it cannot be written to the file. `is_kept`: the backup is brought up to date."""
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
        """Restores it where it is missing, and looks whether it is sound: once, and again when somebody has removed it.
        True where a new one may be made: there is none, and no backup that could take its place."""
        is_there, is_new = self._world.exists(self.path), False
        if not is_there and (self._copy is None or not is_read):
            is_new = not self._world.exists(self.backup) or self._restore(f"The ledger {self.path} was missing.")
        elif is_there and not self._is_checked:
            try:
                said = [str(value) for row in self._database().execute(_SOUND) for value in row.values()]
                if said != ["ok"]:
                    raise DatabaseDamaged(f"{self.path}: {said[0] if said else 'no answer'}")
                # Whoever made it died at once, or somebody has emptied it: used as it is, it would replace the backup.
                if not self._database().execute(_TABLE):
                    is_new = not self._world.exists(self.backup) or self._restore(
                        f"The ledger {self.path} was empty.", is_replacing=True
                    )
            except DatabaseDamaged as exc:
                is_new = self._mend(exc)
            except OSError:
                pass  # whoever reads or writes it says why
        self._is_checked = True
        return is_new

    def _run_on_file(self, statements: Statements, is_new: bool) -> list[dict[str, Any]]:
        try:
            return self._run(self._database(), statements, is_new)
        except DatabaseDamaged as exc:
            is_new = self._mend(exc)
            if self._copy is not None:  # it could not be put in its place
                raise
        except FileNotFoundError:  # removed since it was checked, or not to be put back
            is_new = self._check(is_read=False)
            if self._copy is not None:
                raise
        return self._run(self._database(), statements, is_new)

    def _database(self) -> Database:
        return self._world.database(self.path)

    # --- a copy in memory ---

    def _run_on_copy(self, statements: Statements, exc: OSError) -> list[dict[str, Any]]:
        copy = self._copy or self._read_copy(exc)
        rows = self._run(copy, statements, True)  # what the file refused for another reason fails here too
        self._copy = copy
        self._say(
            f"The ledger {self.path} cannot be {'read directly' if reads_only(statements) else 'written'}: {exc}."
            " This command works on a copy in memory, and what it learns is not kept. Nothing can be launched until"
            " this is fixed: check the disk's space, and who may write that folder."
        )
        return rows

    def _read_copy(self, exc: OSError) -> Database:
        try:
            return self._world.memory_database(self._database().image())
        except FileNotFoundError:  # a home that cannot be written, and nothing was ever written there
            if self._world.exists(self.path.parent) and not self._world.is_dir(self.path.parent):
                raise exc from None  # no home at all
            return self._world.memory_database()
        except OSError:
            image = self._backup_image()
            if image is None:
                raise exc from None
            self._say(f"The ledger {self.path} cannot be read: {exc}. Its backup {self.backup} is read instead.")
            return self._world.memory_database(image)

    # --- the backup ---

    def back_up(self) -> None:
        if self._copy is not None:  # of what is not in the file nothing is kept
            return
        try:
            self._world.mkdir(self.backup.parent)
            self._world.write(self.backup, self._database().image(), mode=0o600)
        except OSError as exc:  # the ledger itself has what was to be kept
            self._say(f"The backup of the ledger, {self.backup}, could not be written: {exc}")

    def _backup_image(self) -> bytes | None:
        """None where there is none that can be used."""
        try:
            image = self._world.read(self.backup)
            said = self._world.memory_database(image).execute(_SOUND) if image else []
        except OSError:
            return None
        return image if [str(value) for row in said for value in row.values()] == ["ok"] else None

    def _mend(self, exc: DatabaseDamaged) -> bool:
        """Keeps what is damaged aside and goes on with the backup. True where there is none: with a new ledger."""
        aside = self.path.with_name(f"{self.path.stem}-damaged-{self._moment(self._world.now())}{self.path.suffix}")
        image = self._backup_image()
        try:
            if image is None:
                self._world.rename(self.path, aside)
                self._forget_log()
            else:
                self._world.copy(self.path, aside)
                self._database().restore(image, is_replacing=True)  # in one step: no other process finds none
        except OSError as why:
            self._copy = self._world.memory_database(image or b"")
            with_what = f"Its backup {self.backup} is read instead" if image else "There is no backup of it"
            self._say(f"{exc}: the ledger is damaged. {with_what}; nothing could be repaired: {why}")
            return False
        told = f"The ledger was damaged ({exc}); it is kept as {aside}."
        self._say(f"{told} {self._restored() if image else self._without_backup()}")
        return image is None

    def _restore(self, told: str, *, is_replacing: bool = False) -> bool:
        """True where the backup is of no use: then a new ledger may be made."""
        image = self._backup_image()
        if image is None:
            self._say(f"{told} Its backup {self.backup} is damaged too. {self._without_backup()}")
            return True
        try:
            self._database().restore(image, is_replacing=is_replacing)
        except FileExistsError:
            return False  # another process was first
        except OSError as exc:
            self._copy = self._copy or self._world.memory_database(image)
            self._say(f"{told} Its backup {self.backup} is read instead; it could not be put back: {exc}")
            return False
        self._say(f"{told} {self._restored()}")
        return False

    def _restored(self) -> str:
        at = self._moment(self._world.modified_at(self.backup))
        return f"It was restored from its backup of {at}. Compare it with what your providers show: homing runs"

    def _without_backup(self) -> str:
        return "There is no backup. `homing runs` finds by its mark whatever is billing."

    def _forget_log(self) -> None:
        """SQLite would play the log of the old file into the next one."""
        for suffix in ("-wal", "-shm"):
            self._world.remove(self.path.with_name(self.path.name + suffix))

    def _moment(self, at: float) -> str:
        return f"{datetime.datetime.fromtimestamp(at, tz=datetime.UTC):%Y%m%d-%H%M%S}Z"

    def _say(self, text: str) -> None:
        if text not in self.said:
            self.said.append(text)
            self.tell(text)
