"""Determines who owns a run, from the lease (which has a fencing number) and the record in the run's store.

    launch    intent in the ledger -> record -> take (mark of the attempt) -> create -> check: superseded? undo
    adopt     stored_runs, newest -> take the next number, naming the instance that keeps running
    commands  require_owner: refuse to change a run that another computer owns

If several computers try to take the same lease, `create_if_absent` returns True for exactly one of them. A lease is
never rewritten or deleted; the next owner takes the next number. An unreadable lease does not supersede the previous
lease.

The record contains the run's owner, its limits, and what its attempts have spent. The owner writes it at every change
(a new attempt, an attempt's instance id, the end of an attempt, a new limit), so that another computer can find the run
and adopt it. The spend of an open attempt keeps growing after the write, so readers recompute it. A digest of the last
write is kept in the run's local folder, so that the next status check can detect and repair a missing or failed write.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shlex

from homing.cloud.contact.heartbeats import read_document
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import Adopted, LedgerLine, RunRow
from homing.errors import HomingError, IntegrityError, NotOwner, StoreError
from homing.store import Store, run_key
from homing.store.read_lease import lease_key, newer, newest, read_lease
from homing.wire import codec, file_names
from homing.wire.codec import WireError
from homing.wire.run_json import Run
from homing.wire.run_record import Attempt, Lease, RunRecord
from homing.world import World

__all__ = [
    "check",
    "describe",
    "is_recorded",
    "is_removed",
    "keep_no_record",
    "keep_record",
    "newest",
    "other_owner",
    "require_owner",
    "stored_runs",
    "take",
    "taken_elsewhere",
    "write_record",
]

# Files in the run's local folder.
_RECORDED = "recorded"
_REMOVED = "removed-from-store"


def take(store: Store, run_id: str, *, owner: str, host: str, mark: str, after: int, world: World) -> Lease:
    """Take the lease with number `after` + 1. Only one caller can take it; for any other, this raises NotOwner."""
    wanted = Lease(after + 1, run_id, owner, host, mark, world.now(), world.random_hex(16))
    try:
        if store.create_if_absent(lease_key(run_id, wanted.number), codec.dumps(wanted).encode()):
            return wanted
    except StoreError:
        # The response was lost. If the store can be read, it shows whether the write took effect.
        if read_lease(store, run_id, wanted.number) != wanted:
            raise
        return wanted
    holder = read_lease(store, run_id, wanted.number)
    if holder == wanted:  # the client may have retried although its first attempt had succeeded
        return wanted
    raise taken_elsewhere(store, holder or wanted, owner)


def check(store: Store, lease: Lease) -> Lease:
    """Return the newest lease, which may come from an adoption. Raises NotOwner if it names a different instance."""
    now = newer(store, lease.run_id, lease.number) or lease
    if now.mark != lease.mark:
        raise taken_elsewhere(store, now, lease.owner)
    return now


def other_owner(home: Home, run: RunRow) -> Lease | None:
    """Return the run's lease if another owner holds it. Return None if it is ours, is missing or cannot be read."""
    try:
        lease = newest(home.store_of(run), run.id)
    except (HomingError, WireError, OSError):
        return None
    return lease if lease is not None and lease.owner != home.owner else None


def require_owner(home: Home, run: RunRow) -> None:
    """Raise NotOwner if another owner holds the run's lease. Every command that changes a run calls this function.

    Destroying a billing instance is always allowed, so destroy does not call this function.
    """
    lease = other_owner(home, run)
    if lease is not None:
        raise taken_elsewhere(home.store_of(run), lease, home.owner)


def taken_elsewhere(store: Store, lease: Lease, owner: str) -> NotOwner:
    if lease.owner == owner:
        return NotOwner(
            what=f"{lease.run_id} was taken over in the meantime {describe(lease)}.",
            why=f"Another process with the same $HOMING_HOME now holds the run's lease (lease number {lease.number},"
            f" instance {lease.mark or 'none'}).",
            fix=f"Check it: homing status {lease.run_id}",
        )
    return NotOwner(
        what=f"{lease.run_id} was adopted {describe(lease)}.",
        why=f"The homing home directory {lease.owner} now owns the run (lease number {lease.number})."
        " With two owners, both would rent instances and write to the store.",
        fix=f"Continue there, or take it back: homing adopt {shlex.quote(store.url)} {lease.run_id}",
    )


def describe(lease: Lease) -> str:
    at = datetime.datetime.fromtimestamp(lease.t, tz=datetime.UTC)
    return f"by {lease.host or lease.owner} at {at:%Y-%m-%d %H:%M:%S}Z"


# --- the run's record ---


def write_record(home: Home, run_id: str, store: Store, lease: Lease | None = None) -> None:
    """Write the run's record, unless another computer owns the run or the user removed its files from the store.

    If a removed run is launched again, it gets a record again. `lease` is the newest lease, if the caller has just
    read it.
    """
    if is_removed(home, run_id):
        return
    lease = lease or newest(store, run_id)
    if lease is not None and lease.owner != home.owner:
        return
    run = home.ledger.run(run_id)
    if run is None:
        raise IntegrityError(what=f"{run_id} is no longer in the ledger.", fix="List the runs: homing runs")
    lines = home.ledger.lines(run_id)
    record = _record(home, run, lines)
    store.put_bytes(run_key(run_id, file_names.RECORD), codec.dumps(record, indent=1).encode())
    home.world.mkdir(home.run_dir(run_id))
    home.world.write(home.run_dir(run_id) / _RECORDED, _digest(home, run, lines))


def stored_runs(store: Store) -> list[RunRecord]:
    """Return the records of all runs in the store, newest first."""
    found = []
    for entry in store.list(file_names.STORE_RUNS + "/"):
        parts = entry.key.split("/")
        if len(parts) == 3 and parts[2] == file_names.RECORD:
            record = read_document(store, entry.key, RunRecord)
            found += [record] if record is not None else []
    return sorted(found, key=lambda record: (record.created_at, record.run_id), reverse=True)


def keep_no_record(home: Home, run_id: str) -> None:
    """Remember that the user removed the run's files from the store, so that no command writes its record again."""
    home.world.mkdir(home.run_dir(run_id))
    home.world.write(home.run_dir(run_id) / _REMOVED, b"")


def is_removed(home: Home, run_id: str) -> bool:
    return home.world.exists(home.run_dir(run_id) / _REMOVED)


def keep_record(home: Home, run_id: str) -> None:
    """Allow the record to be written again, because the run is being launched again and uses its store."""
    home.world.remove(home.run_dir(run_id) / _REMOVED)


def is_recorded(home: Home, run: RunRow, lines: list[LedgerLine]) -> bool:
    """Return True if the record in the store matches the ledger, or if the store should not contain a record."""
    path = home.run_dir(run.id) / _RECORDED
    if not home.world.exists(path) or is_removed(home, run.id):
        return True
    return home.world.read(path) == _digest(home, run, lines)


def _digest(home: Home, run: RunRow, lines: list[LedgerLine]) -> bytes:
    """Return a digest of the record's content, except for the values that change as time passes."""
    of_run = [run.state, run.reason, run.spend_limit_usd, run.exit_code, run.ended_at, _time_limit_s(home, run.id)]
    of_lines = [
        (line.mark, line.instance_id, line.created_at, line.destroyed_at, line.limit_usd, line.account)
        for line in lines
    ]
    return hashlib.sha256(json.dumps([of_run, of_lines]).encode()).hexdigest().encode()


def _record(home: Home, run: RunRow, lines: list[LedgerLine]) -> RunRecord:
    now, adopted = home.world.now(), home.ledger.adopted()
    return RunRecord(
        run_id=run.id,
        run_name=run.name,
        owner=home.owner,
        state=run.state,
        spend_limit_usd=run.spend_limit_usd,
        attempts=[_attempt(home, line, now, adopted.get(line.mark)) for line in lines],
        updated_at=now,
        store=run.store,
        created_at=run.created_at,
        time_limit_s=_time_limit_s(home, run.id),
        run_file_sha256=run.run_file_sha256,
        reason=run.reason,
        exit_code=run.exit_code,
        ended_at=run.ended_at,
        host=home.world.host(),
    )


def _attempt(home: Home, line: LedgerLine, now: float, adopted: Adopted | None) -> Attempt:
    return Attempt(
        number=line.attempt,
        provider=line.provider,
        mark=line.mark,
        instance_id=line.instance_id,
        rate_usd_per_hour=line.rate_usd_per_hour,
        requested_at=line.created_at or line.intent_at,
        ended_at=line.destroyed_at,
        spend_usd=str(meter.line_spend(line, now)),
        offer=line.offer,
        limit_usd=line.limit_usd,
        state=line.state,
        guard=_guard(home, line),
        note=line.note,
        host=adopted.host if adopted else home.world.host(),
        home=adopted.home if adopted else str(home.path),
        account=line.account,
    )


def _guard(home: Home, line: LedgerLine) -> str:
    try:
        return home.provider_of(line).guard
    except (HomingError, OSError):
        # write the record even if the provider cannot be opened here, for example because its key is missing
        return ""


def _time_limit_s(home: Home, run_id: str) -> float:
    path = home.run_dir(run_id) / file_names.RUN
    try:
        return codec.loads(Run, home.world.read(path)).limits.time_s
    except (OSError, codec.WireError):
        return 0.0
