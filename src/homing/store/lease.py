"""The lease as it lies in the store: who owns a run, and which instance may write into its prefix.

    runs/<id>/lease/00000001.json ...    made once by create-if-absent, never changed; the highest number counts

Reading alone is here, for home and for the instance; taking one is home's, in cloud/lease.py. A store that cannot be
read raises: nobody is superseded because of an outage.
"""

from __future__ import annotations

from homing.errors import IntegrityError
from homing.store.base import NotInStore, Store, run_key
from homing.wire import codec, names
from homing.wire.record import Lease

__all__ = ["Fence", "lease_key", "newer", "newest", "read_lease"]


def lease_key(run_id: str, number: int) -> str:
    return run_key(run_id, names.LEASES, f"{number:08d}.json")


def read_lease(store: Store, run_id: str, number: int) -> Lease | None:
    """None where nobody has taken this number; one that is there and cannot be read is damage."""
    key = lease_key(run_id, number)
    try:
        return codec.loads(Lease, store.read(key))
    except NotInStore:
        return None
    except codec.WireError as exc:
        raise IntegrityError(
            what=f"{key} in {store.url} cannot be read, so it is not known who owns {run_id}.",
            why=str(exc),
            fix=f"Look at it: homing store get {key} --store {store.url}",
        ) from exc


def newest(store: Store, run_id: str) -> Lease | None:
    """The one that counts, or None. A list may come from a store's memory, so the numbers after it are tried too."""
    prefix = run_key(run_id, names.LEASES) + "/"
    listed = [entry.key.removeprefix(prefix).removesuffix(".json") for entry in store.list(prefix)]
    number = max((int(name) for name in listed if name.isdigit()), default=0)
    return newer(store, run_id, number) or (read_lease(store, run_id, number) if number else None)


def newer(store: Store, run_id: str, number: int) -> Lease | None:
    """The highest above `number`; numbers have no gaps, because each is taken after the one before it was seen."""
    found = None
    while True:
        following = read_lease(store, run_id, number + 1)
        if following is None:
            return found
        found, number = following, number + 1


class Fence:
    """An instance's view: has a newer lease, for another instance than this one, been taken?"""

    def __init__(self, store: Store, run_id: str, mark: str, number: int) -> None:
        self._store, self._run_id, self._mark, self._number = store, run_id, mark, number
        self._newest: Lease | None = None

    def superseded_by(self) -> Lease | None:
        """One small read per look as long as nothing changed. An adoption that names this mark lets it live on."""
        found = newer(self._store, self._run_id, self._number)
        if found is not None:
            self._newest, self._number = found, found.number
        return self._newest if self._newest is not None and self._newest.mark != self._mark else None
