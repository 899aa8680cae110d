"""A folder on a full or read-only disk, also for a process that is root: whatever would write below it fails."""

from __future__ import annotations

import builtins
import errno
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

__all__ = ["fill", "make_read_only"]

_WRITES = ("INSERT", "UPDATE", "CREATE", "ALTER", "DELETE", "REPLACE")


def fill(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """No byte can be written there. Existing files can be read and removed."""
    _break(patch, folder, errno.ENOSPC, "database or disk is full", is_readable=True)


def make_read_only(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """A disk that was mounted read-only: SQLite in WAL mode cannot even read there, for want of the files it shares."""
    _break(patch, folder, errno.EROFS, "unable to open database file", is_readable=False)


def _break(patch: pytest.MonkeyPatch, folder: Path, number: int, said: str, *, is_readable: bool) -> None:
    real_open, real_connect = os.open, sqlite3.connect
    below = str(folder)

    def is_below(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and _inside(os.fspath(path), below)

    def refuse(path: Any) -> OSError:
        return OSError(number, os.strerror(number), str(path))

    def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            for path in args[:2]:
                if is_below(path):
                    raise refuse(path)
            return real(*args, **settings)

        return call

    def opened(path: Any, flags: int, *args: Any, **settings: Any) -> int:
        is_writing = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if is_below(path) and is_writing and not (is_readable and os.path.exists(path)):
            raise refuse(path)
        return real_open(path, flags, *args, **settings)

    class Broken(sqlite3.Connection):
        def execute(self, sql: str, *args: Any) -> Any:
            if not is_readable and sql.startswith(("SELECT", "WITH", "BEGIN", "PRAGMA")):
                raise sqlite3.OperationalError(said)
            if sql.startswith(_WRITES):
                raise sqlite3.OperationalError(said)
            return super().execute(sql, *args)

    def connect(database: Any, *args: Any, **settings: Any) -> sqlite3.Connection:
        path = str(database).removeprefix("file:").partition("?")[0]
        kind = Broken if is_below(path) else sqlite3.Connection
        return real_connect(database, *args, **{"factory": kind, **settings})

    real_builtin = builtins.open

    def opened_file(path: Any, mode: str = "r", *args: Any, **settings: Any) -> Any:
        if is_below(path) and set(mode) & set("wax+"):
            raise refuse(path)
        return real_builtin(path, mode, *args, **settings)

    patch.setattr(os, "open", opened)
    patch.setattr(builtins, "open", opened_file)
    for name in ("mkdir", "link", "symlink", "chmod"):
        patch.setattr(os, name, guarded(getattr(os, name)))
    for name in ("replace", "rename") if is_readable else ("replace", "rename", "unlink", "remove", "rmdir"):
        patch.setattr(os, name, guarded(getattr(os, name)))
    patch.setattr(sqlite3, "connect", connect)


def _inside(path: str, folder: str) -> bool:
    full = os.path.abspath(path)
    return full == folder or full.startswith(folder + os.sep)
