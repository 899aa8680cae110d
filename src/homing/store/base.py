"""One way to keep things outside a machine that will be gone: put, get, list, delete, create-if-absent.

    put / put_bytes      whole or absent, never half
    get / read           whole or absent; `get` checks the hash that the caller knows, else one that can be relied on
    is_same              whether a file here has the bytes of a key; those are read where no hash can be relied on
    sha256               of what the store itself holds, so that a push can be verified by reading it back
    list                 raises when the store cannot be looked at; it is never empty by accident
    create_if_absent     exactly one of many callers is told True: the lease
    put_many             several files in as few writes as the store has; each is whole or absent
    pace_s               how often one may write to it: a folder always, a Git repository every minute

Every failure is a StoreError, a hash that does not match an IntegrityError, a key that is not there a NotInStore.
Knows nothing of runs, and no provider.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from homing.errors import IntegrityError, StoreError, StoreRefused
from homing.wire import names

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
    "is_aside",
    "not_in_store",
    "run_key",
    "unwatched",
    "wrong_content",
]


class NotInStore(StoreError):
    """The store answered, and the key is not there. Any other StoreError leaves that open."""


@dataclass(frozen=True)
class Entry:
    key: str
    num_bytes: int
    sha256: str | None = None  # None where telling it would mean reading the whole thing


Entries = list[Entry]  # a name outside the classes below, where `list` is a method
Files = list[tuple[str, str]]  # key and path here
Keys = list[str]
Progress = Callable[[int, int], None]  # bytes done, bytes in all


def unwatched(done: int, total: int) -> None:
    """Nobody asked how far a file is."""


class Store(Protocol):
    url: str
    pace_s: float  # between two rounds of live files
    batch_files: int  # how many files one write takes: 1, or more where a write is a commit
    progress: Progress  # told how far a file is while it moves; set by who wants to know

    def put(self, key: str, path: str) -> Entry: ...  # the entry's sha256 is of the bytes that were read
    def put_many(self, files: Files) -> Entries: ...  # at most batch_files at a time
    def put_bytes(self, key: str, data: bytes) -> Entry: ...
    def get(self, key: str, path: str, sha256: str | None = None) -> None: ...  # the target's folder must exist
    def read(self, key: str) -> bytes: ...
    def sha256(self, key: str) -> str: ...
    def is_same(self, key: str, path: str) -> bool: ...
    def exists(self, key: str) -> bool: ...
    def list(self, prefix: str) -> Entries: ...  # every key that starts with prefix, sorted; "" is all
    def delete(self, key: str) -> None: ...  # absent already is success
    def delete_many(self, keys: Keys) -> None: ...  # in the given order, or all at once
    def create_if_absent(self, key: str, data: bytes) -> bool: ...


@runtime_checkable
class Resuming(Protocol):
    """Keeps the parts of a push that was cut, so that it can go on: no list shows them, and they are billed."""

    def drop_cut(self, folder: str) -> int: ...  # below this folder; how many there were


@runtime_checkable
class Ranged(Protocol):
    """Gives parts of a value, so that one which is larger than memory allows need not be read whole."""

    def num_bytes(self, key: str) -> int: ...
    def read_part(self, key: str, start: int, num_bytes: int) -> bytes: ...  # fewer at its end


@runtime_checkable
class Versioned(Protocol):
    """Keeps earlier states, so that what is listed and what is then read can be of one."""

    revision: str  # what is read: a branch as it is then, or one commit

    def pinned(self, revision: str = "") -> Store: ...  # this store at one commit: a branch's or tag's, or the newest


def not_in_store(key: str, url: str) -> NotInStore:
    return NotInStore(
        what=f"{key} is not in {url}.",
        why="The store answered and has nothing under that key.",
        fix=f"See what is there: homing store ls --store {shlex.quote(url)}",
    )


def wrong_content(key: str, url: str, found: str, expected: str, *, kind: str = "sha256") -> IntegrityError:
    return IntegrityError(
        what=f"{key} in {url} is not what it should be.",
        why=f"Its {kind} is {found}, expected {expected}.",
        fix="Push it again from where it is whole, or use an older checkpoint.",
    )


def disk_failed(exc: OSError, done: str, key: str, url: str) -> StoreError:
    kind = StoreRefused if isinstance(exc, PermissionError) or exc.errno == errno.EROFS else StoreError
    return kind(
        what=f"{key or 'The store'} could not be {done} in {url}.",
        why=f"{type(exc).__name__}: {exc}",
        fix="Check the disk's space and the folder's permissions here, then try again.",
    )


PROBES = "homing-probe"  # keys below it are tried out and cleared


# What World writes before it renames, and what a store's `get` has not yet checked.
_ASIDE = re.compile(r"\.(tmp-\d+|part)-[0-9a-f]{8}$")


_UNPLAIN = re.compile(r"[\x00-\x1f\x7f\\]")


def is_aside(name: str) -> bool:
    """A file on its way to becoming whole: never listed, never pushed."""
    return bool(_ASIDE.search(name))


def check_key(key: str) -> str:
    """A key is a relative path of plain names; anything that could leave the store is refused."""
    parts = key.split("/")
    problem = ""
    if not key:
        problem = "it is empty"
    elif any(part in ("", ".", "..") for part in parts):
        problem = "it is absolute, or has an empty, `.` or `..` part"
    elif _UNPLAIN.search(key):
        problem = "it has a backslash or a control character"
    elif any(is_aside(part) for part in parts):
        problem = "its name is one kept for unfinished files"
    if problem:
        raise StoreError(
            what=f"{key!r} cannot be a key in a store.",
            why=f"A key is names joined by `/`, and {problem}.",
            fix="Use a key such as runs/NAME/metrics.jsonl",
        )
    return key


def run_key(run_id: str, *parts: str) -> str:
    """The key of a file of a run: runs/<id>/<its path in the run directory>."""
    return "/".join((names.STORE_RUNS, run_id, *parts))
