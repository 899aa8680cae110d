"""The unfinished work of a prep: a hidden folder inside the target folder, with a state file.

    data/NAME/.prep/state.json     what is done, with which settings and inputs
    data/NAME/.prep/*              shards and tokenizer while they grow; no one reads them from here

Work with other settings, inputs or another version is discarded, never continued. The lock is on the target folder
itself, so it leaves no file behind and ends with the process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from homing.errors import DataError

__all__ = ["STATE", "Work", "open_work", "sync_folder", "write_whole"]

WORK_FOLDER = ".prep"
STATE = "state.json"
_FORMAT = 2  # of state.json; any other format is discarded


class Work:
    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target / WORK_FOLDER
        self.state: dict[str, Any] = {}

    def begin(self, fingerprint: dict[str, Any], *, is_forced: bool) -> bool:
        """Continue existing work with the same settings and inputs, or start empty.

        Returns whether there is anything to continue.
        """
        wanted = hashlib.sha256(json.dumps([_FORMAT, fingerprint], sort_keys=True).encode()).hexdigest()
        found = self._read()
        if found.get("fingerprint") == wanted and not is_forced:
            self.state = found
            return "scan" in found or "mark" in found
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        self.state = {"fingerprint": wanted}
        self.save()
        return False

    def save(self, **values: Any) -> None:
        self.state.update(values)
        write_whole(self.folder / STATE, json.dumps(self.state).encode())

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads((self.folder / STATE).read_bytes())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


@contextmanager
def open_work(target: Path) -> Iterator[Work]:
    """Create and lock the target folder. If it was created here and stays empty, remove it again."""
    was_there = target.exists()
    with _as_data_error(target):
        target.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target, os.O_RDONLY)
        try:
            _lock(descriptor, target)
            yield Work(target)
        finally:
            os.close(descriptor)
            if not was_there:
                with suppress(OSError):
                    target.rmdir()


def _lock(descriptor: int, target: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise DataError(
            what=f"Another prep is running in {target}.",
            why="They would overwrite each other's files.",
            fix="Wait for it, or choose another folder: --out DIR",
        ) from exc


@contextmanager
def _as_data_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(target, exc.strerror or "") from exc
        named = Path(os.fsdecode(exc.filename)).absolute() if exc.filename else target
        # A path below the target, or a parent that could not be created; any other is an input of prep.
        if not named.is_relative_to(target.absolute()) and not target.absolute().is_relative_to(named):
            raise DataError(
                what=f"{os.fsdecode(exc.filename)} cannot be read.",
                why=f"{exc.strerror or exc}. It existed when prep started.",
                fix="Restore it or remove it from the list, then run the same command again.",
            ) from exc
        raise DataError(
            what=f"Cannot write to {target}.",
            why=f"{exc.strerror or exc}: {exc.filename or target}",
            fix="Fix its permissions, or choose another folder: --out DIR",
        ) from exc


def disk_full(target: Path, why: str) -> DataError:
    return DataError(
        what=f"The disk of {target} is full.",
        why=why,
        fix="Free disk space and run the same command again to resume, or choose another disk: --out DIR",
    )


def write_whole(path: Path, data: bytes) -> None:
    """Write a file atomically: to a temporary file, synced, renamed, and the rename synced too."""
    temporary = path.with_name(path.name + ".new")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
