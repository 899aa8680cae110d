"""The run's own record in the store: its owner, its limits, and what its attempts have spent.

The owner writes it at every change (the intent, the id, the end of an attempt, a new limit), so that another machine
can find the run and adopt it. The spend of an open attempt grows after it was written: readers recompute it. A digest
of the last write is kept at home, so that the next status check repairs a missing or failed write.
"""

from __future__ import annotations

import hashlib
import json

from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import Adopted, LedgerLine, RunRow
from homing.errors import HomingError, IntegrityError
from homing.store import Store, run_key
from homing.store.lease_file import newest
from homing.wire import codec, file_names
from homing.wire.run_json import Run
from homing.wire.stored_record import Attempt, Lease, RunRecord

__all__ = ["is_recorded", "is_removed", "keep_no_record", "keep_record", "write_record"]

# In the run's folder at home.
_RECORDED = "recorded"
_REMOVED = "removed-from-store"


def write_record(home: Home, run_id: str, store: Store, lease: Lease | None = None) -> None:
    """Write the record, unless another home owns the run or a person removed its files from the store.

    A removed run gets a record again when it is launched again. `lease` is the newest, if the caller has just read it.
    """
    if is_removed(home, run_id):
        return
    lease = lease or newest(store, run_id)
    if lease is not None and lease.owner != home.owner:
        return
    run = home.ledger.run(run_id)
    if run is None:
        raise IntegrityError(what=f"{run_id} is no longer in the ledger.", fix="homing runs")
    lines = home.ledger.lines(run_id)
    record = _record(home, run, lines)
    store.put_bytes(run_key(run_id, file_names.RECORD), codec.dumps(record, indent=1).encode())
    home.world.mkdir(home.run_dir(run_id))
    home.world.write(home.run_dir(run_id) / _RECORDED, _digest(home, run, lines))


def keep_no_record(home: Home, run_id: str) -> None:
    """Record that the run's files were removed for good, so that nothing writes its record back."""
    home.world.mkdir(home.run_dir(run_id))
    home.world.write(home.run_dir(run_id) / _REMOVED, b"")


def is_removed(home: Home, run_id: str) -> bool:
    return home.world.exists(home.run_dir(run_id) / _REMOVED)


def keep_record(home: Home, run_id: str) -> None:
    """Allow the record again: the run is being launched again and uses its store."""
    home.world.remove(home.run_dir(run_id) / _REMOVED)


def is_recorded(home: Home, run: RunRow, lines: list[LedgerLine]) -> bool:
    """Return whether the record in the store matches the ledger. A launch writes the first one."""
    path = home.run_dir(run.id) / _RECORDED
    if not home.world.exists(path) or is_removed(home, run.id):
        return True
    return home.world.read(path) == _digest(home, run, lines)


def _digest(home: Home, run: RunRow, lines: list[LedgerLine]) -> bytes:
    """Return a digest of everything the record must hold, except what time alone changes."""
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
        return ""  # it cannot be opened here (a missing key); still write the record


def _time_limit_s(home: Home, run_id: str) -> float:
    path = home.run_dir(run_id) / file_names.RUN
    try:
        return codec.loads(Run, home.world.read(path)).limits.time_s
    except (OSError, codec.WireError):
        return 0.0
