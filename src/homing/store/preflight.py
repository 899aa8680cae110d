"""Can this store be used? Asked before anything is rented, answered by doing it.

    reachable -> it exists -> right region, right token -> a probe written, read back, created only once, deleted

Each failure is a StoreError that says what to change. What comes back are sentences for a person: what was found, and
what to know before relying on it. Without `needs_write` nothing is written, which is what --dry-run may do.
"""

from __future__ import annotations

import contextlib

from homing.errors import StoreError
from homing.store import open_store
from homing.store.base import PROBES, Store
from homing.store.hf import HubStore
from homing.store.modal import VolumeStore
from homing.store.s3 import S3Store
from homing.store.s3_client import region_of, s3_failures
from homing.store.s3_transfer import sweep
from homing.world import World

__all__ = ["preflight", "try_out"]


def preflight(url: str, world: World, *, needs_write: bool = True, create: bool = True) -> list[str]:
    """Without `create` a store that is not there stays absent: a run that goes on needs the one it began in."""
    store = open_store(url, world, create=create and needs_write)
    notes = _look(store, needs_write)
    if needs_write:
        _try_out(store, world)
    return notes


def try_out(url: str, world: World) -> None:
    """The probe alone, in a store that is there already; one that is not raises and stays absent."""
    _try_out(open_store(url, world, create=False), world)


def _look(store: Store, needs_write: bool) -> list[str]:
    """By kind: each knows best how it can be absent."""
    if isinstance(store, S3Store):
        return _look_s3(store, needs_write)
    if isinstance(store, HubStore):
        return _look_hub(store, needs_write)
    if isinstance(store, VolumeStore):
        return _look_modal(store, needs_write)
    if not needs_write:
        # A folder that is not there yet is made by the first push.
        with contextlib.suppress(StoreError):
            store.list("runs/")
    return []


def _look_s3(store: S3Store, needs_write: bool) -> list[str]:
    door, address = store.door, store.address
    try:
        lies_in = str(door.client.head_bucket(Bucket=address.bucket).get("BucketRegion") or "")
        swept = sweep(door, store.world) if needs_write else 0
    except s3_failures() as exc:
        raise door.error(exc, "used") from exc
    named = address.region or (region_of(address) if door.is_amazon else "")
    if named and lies_in and named != lies_in:
        raise StoreError(
            what=f"{store.url} is not where it was said to be.",
            why=f"The bucket {address.bucket} lies in {lies_in}, and {named} was named.",
            fix=f"Write ?region={lies_in} in the store's address, or set AWS_REGION={lies_in}",
        )
    store.list(f"{PROBES}/")
    notes = [f"{address.bucket} is reached at {door.where} with the credentials from {door.source}"]
    if door.is_temporary:
        notes.append("warning: these credentials are temporary; a run that outlives them can no longer push")
    if swept:
        notes.append(f"{swept} uploads that nobody finished in a day were aborted there")
    return notes


def _look_hub(store: HubStore, needs_write: bool) -> list[str]:
    if needs_write:
        store.head()  # makes the repository, private, where there is none
    else:
        try:
            store.list("runs/")
        except StoreError:
            if not store.door.token:
                raise
            return [f"{store.url} is not there or not ours to see; a launch would make it, private"]
    return [f"{store.url} is reached at {store.door.endpoint} with {store.door.token_source.rstrip(',')}"]


def _look_modal(store: VolumeStore, needs_write: bool) -> list[str]:
    if store.is_there():
        return [f"{store.url} is reached with {store.door.who}"]
    if needs_write and store.may_create:
        return [f"{store.url} is made now, with {store.door.who}"]
    if needs_write:
        store.list("")  # raises, in the words for a Volume that is gone
    return [f"{store.url} is not there; a launch would make it"]


def _try_out(store: Store, world: World) -> None:
    one, two = (f"{PROBES}/{world.random_hex(16)}" for _ in range(2))
    data = world.random_hex(32).encode()
    try:
        store.put_bytes(one, data)
        if store.read(one) != data:
            raise _broken(store, "What was written does not read back.")
        if store.create_if_absent(one, b"over it"):
            raise _broken(store, "It lets an exclusive write replace what is there, so two homes could own one run.")
        if not store.create_if_absent(two, data) or store.create_if_absent(two, data):
            raise _broken(store, "Of two exclusive writes not exactly the first was let through.")
        store.delete_many([one, two])
        if store.exists(one) or store.exists(two):
            raise _broken(store, "What was deleted is still there.")
    except BaseException:  # also on Ctrl-C: no probe stays behind
        with contextlib.suppress(StoreError):
            store.delete_many([one, two])
        raise


def _broken(store: Store, why: str) -> StoreError:
    return StoreError(f"{store.url} does not do what a store must.", why, "Set another `store:` in the run file.")
