"""A store keeps a run's files independently of any single machine. Every push and fetch is verified by hash.

base           the interface of a store           address        parses store addresses
file           a folder                           s3, hf, modal  a bucket, a repository on the Hub, a Modal Volume
push           run directory -> store             sync           the program that the agent runs
read_lease     which instance may write           hub_download   open weights from the Hub to the instance
preflight      before renting: checks that the store can be used, and finds the credentials for the instance
storage_price  what storage costs                 publish_to_hub publishes a model on the Hub
"""

from __future__ import annotations

from homing.store.address import FORMS, scheme_of
from homing.store.base import Entry, NotInStore, Store, Versioned, run_key
from homing.store.file import FileStore
from homing.world import World

__all__ = ["SCHEMES", "Entry", "FileStore", "NotInStore", "Store", "Versioned", "open_store", "pace_of", "run_key"]

SCHEMES = FORMS
# Seconds between two pushes of live files. Object stores charge per request, and each commit to the Hub or to a Volume
# is slow.
_PACES = {"file": 0.0, "s3": 5.0, "hf": 60.0, "modal": 10.0}


def pace_of(url: str) -> float:
    """Return the minimum number of seconds between two pushes to the store at `url`, without opening the store."""
    return _PACES[scheme_of(url)]


def open_store(url: str, world: World, *, create: bool = True) -> Store:
    """Return the store at `url` without making a request. If `create` is set, the first write may create the store."""
    scheme = scheme_of(url)
    # SDKs are imported only when they are needed, so that `--help` and a `file:` store start fast.
    if scheme == "s3":
        from homing.store.s3.store import S3Store

        return S3Store(url, world)
    if scheme == "hf":
        from homing.store.hf.store import HubStore

        return HubStore(url, world, create=create)
    if scheme == "modal":
        from homing.store.modal.store import open_volume

        return open_volume(url, world, create=create)
    rest = url.partition(":")[2]
    # file:///path names the same folder as file:/path.
    return FileStore("/" + rest.lstrip("/") if rest.startswith("//") else rest, world, create=create)
