"""The run's place outside any one machine: push and fetch with hashes.

base   what a store promises          address      what a person writes
file   a folder that is one           s3, hf, modal  a bucket, a repository on the Hub, a Modal Volume
push   run directory -> store         sync         the program that the agent runs
preflight   can it be used? asked before anything is rented
credentials, price   what reaches it, what it costs to leave things there
"""

from __future__ import annotations

from homing.store.address import FORMS, scheme_of
from homing.store.base import Entry, NotInStore, Store, Versioned, run_key
from homing.store.file import FileStore
from homing.world import World

__all__ = ["SCHEMES", "Entry", "FileStore", "NotInStore", "Store", "Versioned", "open_store", "pace_of", "run_key"]

SCHEMES = FORMS
# Seconds between two rounds of live files. An object store counts requests; a commit, of the Hub or of a Volume, is a
# heavy thing.
_PACES = {"file": 0.0, "s3": 5.0, "hf": 60.0, "modal": 10.0}


def pace_of(url: str) -> float:
    """How often a store of this kind is written to, without opening it."""
    return _PACES[scheme_of(url)]


def open_store(url: str, world: World, *, create: bool = True) -> Store:
    """The store that `url` names. Opening touches nothing; with `create` the first write may make it."""
    scheme = scheme_of(url)
    # The SDKs are loaded only where they are used: `--help` and a `file:` store must not pay for them.
    if scheme == "s3":
        from homing.store.s3 import S3Store

        return S3Store(url, world)
    if scheme == "hf":
        from homing.store.hf import HubStore

        return HubStore(url, world, create=create)
    if scheme == "modal":
        from homing.store.modal import open_volume

        return open_volume(url, world, create=create)
    rest = url.partition(":")[2]
    # file:///path is the same folder as file:/path.
    return FileStore("/" + rest.lstrip("/") if rest.startswith("//") else rest, world, create=create)
