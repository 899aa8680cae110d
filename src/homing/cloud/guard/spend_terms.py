"""The limits that the guard at home enforces for a run, and what counts toward them.

    our own run         the limit in the ledger, the time limit in its run documents
    adopted elsewhere   what its new owner wrote to the run's record in the store, with the attempts made there

A home that gave a run away may have the only live guard, so it keeps enforcing the limit for the machines in its own
ledger. An unreadable record does not remove the limit: the last one that was read still applies, and the guard says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

from homing.cloud.ask_providers import ask_store
from homing.cloud.contact.heartbeats import read_document
from homing.cloud.guard import relaunch
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, LedgerLine, RunRow
from homing.cloud.reconcile.adopt import lines_of
from homing.errors import HomingError
from homing.store import run_key
from homing.wire import codec, file_names
from homing.wire.codec import WireError
from homing.wire.run_json import Limits
from homing.wire.stored_record import RunRecord

__all__ = ["Terms", "limits_of", "terms_of"]

_LAST_READ = "record-of-its-owner.json"  # in the run's folder at home


@dataclass(frozen=True)
class Terms:
    spend_limit_usd: Decimal | None
    time_limit_s: float
    elsewhere: list[LedgerLine] = field(default_factory=list)  # attempts that only its new owner knows
    problem: str = ""  # why these may be outdated


def terms_of(home: Home, run: RunRow, known: list[LedgerLine]) -> Terms:
    """Return the limits. `known` are the attempts in this home's ledger, which is more accurate about those."""
    limit = _dollars(run.spend_limit_usd)
    if limit is None:  # every launch has one: a damaged row has lost it, but its attempts still have it
        limit = max((Decimal(line.limit_usd) for line in known if line.limit_usd is not None), default=None)
    own = Terms(limit, limits_of(home, run).time_s)
    if run.state != ADOPTED:
        return own
    record, problem = _record(home, run)
    if record is None:
        return Terms(own.spend_limit_usd, own.time_limit_s, problem=problem)
    marks = {line.mark for line in known}
    elsewhere = [line for line in lines_of(record) if line.mark not in marks]
    return Terms(_dollars(record.spend_limit_usd), record.time_limit_s, elsewhere, problem)


def limits_of(home: Home, run: RunRow) -> Limits:
    """Return the current limits from the run's documents; defaults without them (the ledger has the spend limit)."""
    try:
        return relaunch.load_documents(home, run).run.limits
    except (OSError, ValueError):
        return Limits()


def _record(home: Home, run: RunRow) -> tuple[RunRecord | None, str]:
    """Return the owner's record, or the last copy read here, with the reason why it may be outdated."""
    kept = home.run_dir(run.id) / _LAST_READ
    try:
        name, key = f"The store of {run.id}", run_key(run.id, file_names.RECORD)
        record = ask_store(run.store, lambda: read_document(home.store_of(run), key, RunRecord), name, home.world)
    except (HomingError, WireError, OSError) as exc:
        return _last_read(home, run), (str(exc) or type(exc).__name__).splitlines()[0]
    if record is None:
        return _last_read(home, run), f"{run.store} has no record of it."
    data = codec.dumps(record, indent=1).encode()
    try:
        if not home.world.exists(kept) or home.world.read(kept) != data:
            home.world.mkdir(kept.parent)
            home.world.write(kept, data)
    except OSError as exc:  # the disk is full: it is read again in the next pass
        return record, f"Could not save it: {exc}."
    return record, ""


def _last_read(home: Home, run: RunRow) -> RunRecord | None:
    try:
        return codec.loads(RunRecord, home.world.read(home.run_dir(run.id) / _LAST_READ))
    except (OSError, WireError):
        return None


def _dollars(amount: str | None) -> Decimal | None:
    return None if amount is None else Decimal(amount)
