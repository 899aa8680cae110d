"""The run's place outside any one machine: push and fetch with hashes.

base   what a store promises         file   a folder that is one
push   run directory -> store        sync   the program that the agent runs
"""

from __future__ import annotations

from homing.errors import UsageError
from homing.store.base import Entry, NotInStore, Store, run_key
from homing.store.file import FileStore
from homing.world import World

__all__ = ["SCHEMES", "Entry", "FileStore", "NotInStore", "Store", "open_store", "run_key"]

# Scheme -> what a person writes after it.
SCHEMES = {"file": "file:/path/to/folder"}


def open_store(url: str, world: World, *, create: bool = True) -> Store:
    """The store that `url` names. Opening touches nothing; with `create` the first write may make it."""
    scheme, colon, rest = url.partition(":")
    if not colon or scheme not in SCHEMES:
        raise UsageError(
            what=f"{url!r} is not a store that homing can open.",
            why=f"Supported: {', '.join(SCHEMES.values())}",
            fix="Set in the run file, for example: store: file:/path/to/folder",
        )
    if not rest.strip("/"):
        raise UsageError(
            what=f"{url!r} names no folder.",
            why="After `file:` comes the path of the folder that is the store.",
            fix="Set in the run file, for example: store: file:/path/to/folder",
        )
    # file:///path is the same folder as file:/path.
    return FileStore("/" + rest.lstrip("/") if rest.startswith("//") else rest, world, create=create)
