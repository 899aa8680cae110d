"""Reads leases in the store. A lease names the homing home that owns a run and the instance that may write its files.

    runs/<id>/lease/00000001.json ...    written once by create-if-absent, never changed; the highest number wins

The user's computer and the instance both use this module, but only the user's computer acquires leases, in
cloud/ledger/run_lease.py. Each function raises if the store cannot be read, so that an outage never makes an instance
look superseded.
"""

from __future__ import annotations

from homing.errors import IntegrityError
from homing.store.base import NotInStore, Store, run_key
from homing.wire import codec, file_names
from homing.wire.run_record import Lease

__all__ = ["Fence", "lease_key", "newer", "newest", "read_lease"]


def lease_key(run_id: str, number: int) -> str:
    return run_key(run_id, file_names.LEASES, f"{number:08d}.json")


def read_lease(store: Store, run_id: str, number: int) -> Lease | None:
    """Return the lease with this number, or None if there is none. Raise IntegrityError if the lease is damaged."""
    key = lease_key(run_id, number)
    try:
        return codec.loads(Lease, store.read(key))
    except NotInStore:
        return None
    except codec.WireError as exc:
        raise IntegrityError(
            what=f"{key} in {store.url} cannot be read, so the owner of {run_id} is unknown.",
            why=str(exc),
            fix=f"Inspect it: homing store get {key} --store {store.url}",
        ) from exc


def newest(store: Store, run_id: str) -> Lease | None:
    """Return the newest lease, or None. The listing may be stale, so also try the numbers after the last one."""
    prefix = run_key(run_id, file_names.LEASES) + "/"
    listed = [entry.key.removeprefix(prefix).removesuffix(".json") for entry in store.list(prefix)]
    number = max((int(name) for name in listed if name.isdigit()), default=0)
    return newer(store, run_id, number) or (read_lease(store, run_id, number) if number else None)


def newer(store: Store, run_id: str, number: int) -> Lease | None:
    """Return the lease with the highest number above `number`, or None.

    The numbers have no gaps, because a lease is taken only after the previous one has been read.
    """
    found = None
    while True:
        following = read_lease(store, run_id, number + 1)
        if following is None:
            return found
        found, number = following, number + 1


class Fence:
    """Lets an instance check whether a newer lease names another instance."""

    def __init__(self, store: Store, run_id: str, mark: str, number: int) -> None:
        self._store, self._run_id, self._mark, self._number = store, run_id, mark, number
        self._newest: Lease | None = None

    def superseded_by(self) -> Lease | None:
        """Return the newer lease that names another instance, or None. If no lease is newer, only one key is read.

        If the run is adopted on another computer, the new lease names this same instance, so the instance continues.
        """
        found = newer(self._store, self._run_id, self._number)
        if found is not None:
            self._newest, self._number = found, found.number
        return self._newest if self._newest is not None and self._newest.mark != self._mark else None
