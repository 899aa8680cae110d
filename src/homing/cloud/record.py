"""The run's own record in the store: who owns it, what it may spend, what its attempts spent.

Written by the owner at every change (the intent, the id, the end of an attempt, a new limit), so that another machine
can find the run and adopt it. An open attempt's dollars run on after it was written: whoever reads it counts anew.
A digest of what was last written lies at home, so that a change that nobody wrote down, or a write that failed, is made
good by the next look.
"""

from __future__ import annotations

import hashlib
import json

from homing.cloud import meter
from homing.cloud.home import Home
from homing.cloud.ledger import Adopted, LedgerLine, RunRow
from homing.errors import HomingError, IntegrityError
from homing.store import Store, run_key
from homing.store.lease import newest
from homing.wire import codec, names
from homing.wire.record import Attempt, Lease, RunRecord
from homing.wire.run import Run

__all__ = ["is_recorded", "is_removed", "keep_no_record", "keep_record", "write_record"]

# In the run's folder at home.
_RECORDED = "recorded"
_REMOVED = "removed-from-store"


def write_record(home: Home, run_id: str, store: Store, lease: Lease | None = None) -> None:
    """Nothing is written for a run that another home owns by now: the record is the owner's. Nor for one whose files
    a person had removed from the store, until it is launched again.

    `lease` is the newest, from a caller who has just looked.
    """
    if is_removed(home, run_id):
        return
    lease = lease or newest(store, run_id)
    if lease is not None and lease.owner != home.owner:
        return
    run = home.ledger.run(run_id)
    if run is None:
        raise IntegrityError(what=f"The ledger does not know {run_id} any more.", fix="homing runs")
    lines = home.ledger.lines(run_id)
    record = _record(home, run, lines)
    store.put_bytes(run_key(run_id, names.RECORD), codec.dumps(record, indent=1).encode())
    home.world.mkdir(home.run_dir(run_id))
    home.world.write(home.run_dir(run_id) / _RECORDED, _digest(home, run, lines))


def keep_no_record(home: Home, run_id: str) -> None:
    """What the run pushed was removed for good: nothing writes its record back."""
    home.world.mkdir(home.run_dir(run_id))
    home.world.write(home.run_dir(run_id) / _REMOVED, b"")


def is_removed(home: Home, run_id: str) -> bool:
    return home.world.exists(home.run_dir(run_id) / _REMOVED)


def keep_record(home: Home, run_id: str) -> None:
    """The run is launched again, so it has a store again."""
    home.world.remove(home.run_dir(run_id) / _REMOVED)


def is_recorded(home: Home, run: RunRow, lines: list[LedgerLine]) -> bool:
    """Whether the record in the store tells what the ledger does. One that was never written is a launch's to write."""
    path = home.run_dir(run.id) / _RECORDED
    if not home.world.exists(path) or is_removed(home, run.id):
        return True
    return home.world.read(path) == _digest(home, run, lines)


def _digest(home: Home, run: RunRow, lines: list[LedgerLine]) -> bytes:
    """Of all that the record must tell, but for what time alone changes."""
    told = [run.state, run.reason, run.spend_limit_usd, run.exit_code, run.ended_at, _time_limit_s(home, run.id)]
    of_lines = [
        (line.mark, line.instance_id, line.created_at, line.destroyed_at, line.limit_usd, line.account)
        for line in lines
    ]
    return hashlib.sha256(json.dumps([told, of_lines]).encode()).hexdigest().encode()


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
        return ""  # it cannot be opened here (a missing key); the record is written all the same


def _time_limit_s(home: Home, run_id: str) -> float:
    path = home.run_dir(run_id) / names.RUN
    try:
        return codec.loads(Run, home.world.read(path)).limits.time_s
    except (OSError, codec.WireError):
        return 0.0
