"""The unfinished work of one prep: a hidden folder beside the result, and a state file in it.

    data/NAME/.prep/state.json     what is done, under which settings and inputs
    data/NAME/.prep/*              shards and tokenizer as they grow; nobody reads them from here

Work of other settings, other inputs or another version is thrown away, never continued. The lock is on the
folder itself, so it leaves no file behind and ends with the process.
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
_FORMAT = 2  # of state.json; another one is not continued


class Work:
    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target / WORK_FOLDER
        self.state: dict[str, Any] = {}

    def begin(self, fingerprint: dict[str, Any], *, is_forced: bool) -> bool:
        """Continues what lies there if it is of the same settings and inputs, which is true; else starts empty."""
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
    """The target folder, made and locked. A folder that was made here and stayed empty is removed again."""
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
            what=f"Another prep is working in {target}.",
            why="Two would overwrite each other.",
            fix="Wait for it, or name another folder: --out DIR",
        ) from exc


@contextmanager
def _as_data_error(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(target, exc.strerror or "") from exc
        named = Path(os.fsdecode(exc.filename)).absolute() if exc.filename else target
        # Below the target, or a folder above it that could not be made; else it is what prep reads.
        if not named.is_relative_to(target.absolute()) and not target.absolute().is_relative_to(named):
            raise DataError(
                what=f"{os.fsdecode(exc.filename)} cannot be read.",
                why=f"{exc.strerror or exc}. It was there when prep began.",
                fix="Put it back, or leave it out, and run the same command again.",
            ) from exc
        raise DataError(
            what=f"{target} cannot be written.",
            why=f"{exc.strerror or exc}: {exc.filename or target}",
            fix="Mend its rights, or name another folder: --out DIR",
        ) from exc


def disk_full(target: Path, why: str) -> DataError:
    return DataError(
        what=f"The disk under {target} is full.",
        why=why,
        fix="Make room and run the same command again: it goes on where it was. Or name another disk: --out DIR",
    )


def write_whole(path: Path, data: bytes) -> None:
    """Whole or absent: aside, synced, renamed, and the rename synced too."""
    aside = path.with_name(path.name + ".new")
    with open(aside, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
