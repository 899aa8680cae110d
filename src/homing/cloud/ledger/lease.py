"""One owner per run across machines: a lease with a fencing number in the run's store.

    launch    intent in the ledger -> record -> take (mark of the attempt) -> create -> check: superseded? undo
    adopt     newest -> take the next number, naming the instance that lives on
    commands  require_owner: another home's run is not touched from here

The store decides races: `create_if_absent` returns True to exactly one caller. A lease is never rewritten or returned;
the next owner takes the next number. An unreadable lease supersedes no one.
"""

from __future__ import annotations

import datetime
import shlex

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.errors import HomingError, NotOwner, StoreError
from homing.store import Store
from homing.store.lease_file import lease_key, newer, newest, read_lease
from homing.wire import codec
from homing.wire.codec import WireError
from homing.wire.stored_record import Lease
from homing.world import World

__all__ = ["check", "describe", "newest", "other_owner", "require_owner", "take", "taken_elsewhere"]


def take(store: Store, run_id: str, *, owner: str, host: str, mark: str, after: int, world: World) -> Lease:
    """Take lease number after + 1. Raises NotOwner if another caller got it: exactly one can."""
    wanted = Lease(after + 1, run_id, owner, host, mark, world.now(), world.random_hex(16))
    try:
        if store.create_if_absent(lease_key(run_id, wanted.number), codec.dumps(wanted).encode()):
            return wanted
    except StoreError:
        # The answer was lost; the store knows whether it took effect, if it can be read at all.
        if read_lease(store, run_id, wanted.number) != wanted:
            raise
        return wanted
    holder = read_lease(store, run_id, wanted.number)
    if holder == wanted:  # a store that retries internally may be refused by its own first try
        return wanted
    raise taken_elsewhere(store, holder or wanted, owner)


def check(store: Store, lease: Lease) -> Lease:
    """Return the current lease. Raises NotOwner if it names another instance; an adoption may keep this one."""
    now = newer(store, lease.run_id, lease.number) or lease
    if now.mark != lease.mark:
        raise taken_elsewhere(store, now, lease.owner)
    return now


def other_owner(home: Home, run: RunRow) -> Lease | None:
    """Return another home's lease on this run, or None: it is ours, there is none, or the store cannot be read."""
    try:
        lease = newest(home.store_of(run), run.id)
    except (HomingError, WireError, OSError):
        return None
    return lease if lease is not None and lease.owner != home.owner else None


def require_owner(home: Home, run: RunRow) -> None:
    """Raise NotOwner if another home owns the run. Called by every command that changes a run.

    Ending what bills is never refused: destroy does not call this.
    """
    lease = other_owner(home, run)
    if lease is not None:
        raise taken_elsewhere(home.store_of(run), lease, home.owner)


def taken_elsewhere(store: Store, lease: Lease, owner: str) -> NotOwner:
    if lease.owner == owner:
        return NotOwner(
            what=f"{lease.run_id} was taken over in the meantime: {describe(lease)}.",
            why=f"Another process of this home holds its lease {lease.number}, for {lease.mark or 'no instance'}.",
            fix=f"homing status {lease.run_id}",
        )
    return NotOwner(
        what=f"{lease.run_id} was adopted {describe(lease)}.",
        why=f"The home {lease.owner} holds its lease {lease.number}; two owners would both rent and write.",
        fix=f"Continue there, or take it back: homing adopt {shlex.quote(store.url)} {lease.run_id}",
    )


def describe(lease: Lease) -> str:
    at = datetime.datetime.fromtimestamp(lease.t, tz=datetime.UTC)
    return f"by {lease.host or lease.owner} at {at:%Y-%m-%d %H:%M:%S}Z"
