"""The interface of a store: put, get, list, delete, create-if-absent.

    put / put_bytes      complete or absent, never partial
    get / read           complete or absent; `get` verifies the hash that the caller passes, or else the store's own
                         hash if that can be trusted
    is_same              whether a local file equals the stored value; reads the value if no hash can be trusted
    sha256               hash of the bytes in the store, so that a push can be verified by reading them back
    list                 raises if the store cannot be listed, instead of returning an empty list
    create_if_absent     returns True for exactly one of several concurrent callers; used for the lease
    put_many             several files in as few writes as the store allows; each is complete or absent
    pace_s               minimum time between writes: none for a folder, a minute for a Git repository

Every failure is a StoreError. A hash mismatch is an IntegrityError, and a missing key is a NotInStore. This module
does not depend on runs or providers.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from homing.errors import IntegrityError, StoreError, StoreRefused
from homing.wire import file_names

__all__ = [
    "PROBES",
    "Entries",
    "Entry",
    "Files",
    "Keys",
    "NotInStore",
    "Progress",
    "Ranged",
    "Resuming",
    "Store",
    "Versioned",
    "check_key",
    "disk_failed",
    "is_temporary_file",
    "not_in_store",
    "run_key",
    "unwatched",
    "wrong_content",
]


class NotInStore(StoreError):
    """Raised if the store reports a missing key. After any other StoreError, the key may or may not exist."""


@dataclass(frozen=True)
class Entry:
    key: str
    num_bytes: int
    sha256: str | None = None  # None if computing the hash would require reading the whole object


Entries = list[Entry]  # aliases defined here because `list` is a method in the classes below
Files = list[tuple[str, str]]  # key and local path
Keys = list[str]
Progress = Callable[[int, int], None]  # called with the number of bytes transferred and the total number of bytes


def unwatched(done: int, total: int) -> None:
    """Ignore a transfer's progress. This is the default progress callback."""


class Store(Protocol):
    url: str
    pace_s: float  # seconds between two pushes of live files
    batch_files: int  # maximum number of files per put_many call; more than 1 if each call makes one commit
    progress: Progress  # called during transfers to report progress; set by the caller

    # the returned entry contains the sha256 of the bytes that were read from `path`
    def put(self, key: str, path: str) -> Entry: ...
    def put_many(self, files: Files) -> Entries: ...  # at most `batch_files` files per call
    def put_bytes(self, key: str, data: bytes) -> Entry: ...
    # the folder that contains the local `path` must exist
    def get(self, key: str, path: str, sha256: str | None = None) -> None: ...
    def read(self, key: str) -> bytes: ...
    def sha256(self, key: str) -> str: ...
    def is_same(self, key: str, path: str) -> bool: ...
    def exists(self, key: str) -> bool: ...
    # returns every key that starts with the prefix, sorted; "" lists all keys
    def list(self, prefix: str) -> Entries: ...
    def delete(self, key: str) -> None: ...  # also succeeds if the key does not exist
    def delete_many(self, keys: Keys) -> None: ...  # deletes the keys, either in the given order or in one operation
    def create_if_absent(self, key: str, data: bytes) -> bool: ...


@runtime_checkable
class Resuming(Protocol):
    """A store that can resume an interrupted push. Uploaded parts are kept and billed, although `list` omits them."""

    # deletes interrupted uploads below this folder and returns their number
    def drop_cut(self, folder: str) -> int: ...


@runtime_checkable
class Ranged(Protocol):
    """A store that can read part of a value, so that a value larger than memory can be processed."""

    def num_bytes(self, key: str) -> int: ...
    # returns fewer than `num_bytes` bytes if the value ends earlier
    def read_part(self, key: str, start: int, num_bytes: int) -> bytes: ...


@runtime_checkable
class Versioned(Protocol):
    """A store that keeps earlier versions, so that a listing and later reads can use the same version."""

    revision: str  # the version to read: a branch or one commit

    # returns this store pinned to one commit: the one named by `revision` (a branch or tag), or the newest one
    def pinned(self, revision: str = "") -> Store: ...


def not_in_store(key: str, url: str) -> NotInStore:
    return NotInStore(
        what=f"{key} is not in {url}.",
        why="The store has no such key.",
        fix=f"List the keys in the store: homing store ls --store {shlex.quote(url)}",
    )


def wrong_content(key: str, url: str, found: str, expected: str, *, kind: str = "sha256") -> IntegrityError:
    return IntegrityError(
        what=f"{key} in {url} is corrupt.",
        why=f"Its {kind} is {found}, but {expected} was expected.",
        fix="Push an intact copy again, or use an older checkpoint.",
    )


def disk_failed(exc: OSError, done: str, key: str, url: str) -> StoreError:
    kind = StoreRefused if isinstance(exc, PermissionError) or exc.errno == errno.EROFS else StoreError
    return kind(
        what=f"{key or 'The store'} could not be {done} ({url}).",
        why=f"{type(exc).__name__}: {exc}",
        fix="Check the disk space and the folder's permissions on this computer, then try again.",
    )


PROBES = "homing-probe"  # prefix of the temporary keys that preflight writes and deletes


# Matches the names of temporary files. World renames them once they are complete; `get`, once they are verified.
_TEMPORARY_NAME = re.compile(r"\.(tmp-\d+|part)-[0-9a-f]{8}$")


_UNPLAIN = re.compile(r"[\x00-\x1f\x7f\\]")


def is_temporary_file(name: str) -> bool:
    """Return True for the name of an unfinished file, which is never listed and never pushed."""
    return bool(_TEMPORARY_NAME.search(name))


def check_key(key: str) -> str:
    """Return the key unchanged. Raise StoreError unless it is a relative path made of plain names."""
    parts = key.split("/")
    problem = ""
    if not key:
        problem = "this key is empty"
    elif any(part in ("", ".", "..") for part in parts):
        problem = "this key is absolute, or has an empty, `.` or `..` part"
    elif _UNPLAIN.search(key):
        problem = "this key has a backslash or a control character"
    elif any(is_temporary_file(part) for part in parts):
        problem = "this name is reserved for unfinished files"
    if problem:
        raise StoreError(
            what=f"{key!r} is not a valid store key.",
            why=f"A key consists of names joined by `/`, but {problem}.",
            fix="Use a key such as runs/NAME/metrics.jsonl",
        )
    return key


def run_key(run_id: str, *parts: str) -> str:
    """Return the store key of one of a run's files: runs/<id>/<path in the run directory>."""
    return "/".join((file_names.STORE_RUNS, run_id, *parts))
