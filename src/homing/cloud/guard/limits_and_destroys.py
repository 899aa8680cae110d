"""Contains the parts of one guard pass: which limits it enforces, which instances it destroys, and what it reports.

    destroys -> in parallel over all providers, one try each -> gone: the run is stopped
                                                            -> unconfirmed, or out of time: may be billing

A provider may take minutes to time out, but no call blocks beyond the time when the next run reaches its limit.

For a run that this computer owns, the spend limit comes from the ledger and the time limit from the run documents. If
another computer has adopted the run, both limits come from the run's record in the store, which the new owner writes,
and the new owner's attempts count too. The previous owner may have the only live guard, so it keeps enforcing the limit
for the machines in its own ledger. If the record cannot be read, the last limit that was read still applies, and the
guard reports the problem.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from homing.cloud.ask_providers import ask_all, ask_store, patience_s
from homing.cloud.contact.heartbeats import read_document
from homing.cloud.destroy import Problem, end_each, still_billing
from homing.cloud.guard import relaunch
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, LedgerLine, RunRow
from homing.cloud.providers.base import Instance, Resource
from homing.cloud.reconcile.adopt import lines_of
from homing.errors import HomingError
from homing.store import run_key
from homing.wire import codec, file_names
from homing.wire.codec import WireError
from homing.wire.run_json import Limits
from homing.wire.run_record import RunRecord

__all__ = ["TROUBLE", "End", "Pass", "Terms", "end_all", "end_line", "first_line", "limits_of", "terms_of", "things_of"]

DESTROY_S = 60.0

# Exceptions that a pass catches for each run, so that the other runs are still guarded. They cover expected errors,
# malformed responses from providers (lists, offers, logs), and bugs in homing.
TROUBLE = (HomingError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_LAST_READ = "record-of-its-owner.json"  # a file in the run's local folder: the last copy of its new owner's record


@dataclass
class Pass:
    """What one guard pass found and did, as sentences. The next pass must begin by `next_at`."""

    done: list[str] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    may_bill: list[str] = field(default_factory=list)
    next_at: float = math.inf
    due: dict[str, float] = field(default_factory=dict)  # run id -> when a guard must enforce that run's limit
    by: float = math.inf  # deadline of this pass: when, according to the ledger, a run reaches a limit
    ends: list[End] = field(default_factory=list)  # runs at their limit; their instances are destroyed in parallel
    silent: set[str] = field(default_factory=set)  # marks of instances at providers that did not answer in this pass
    reached: set[str] = field(default_factory=set)  # names of the providers that listed our instances
    things: dict[str, list[Resource] | HomingError | OSError] = field(default_factory=dict)  # volumes, by provider
    # Our instances, by provider name. Adopted instances are listed separately, by their mark.
    owned: dict[str, list[Instance]] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """A decision to destroy a run's instances. `lines` are the instances that the current key can destroy."""

    run: RunRow
    lines: list[LedgerLine]
    text: str
    columns: dict[str, Any]  # columns to set in the run's ledger row


def end_all(home: Home, made: Pass) -> None:
    """Destroy the instances of all runs at their limit. All calls run in parallel, so that none delays the others."""
    ends, made.ends = made.ends, []
    if not ends:
        return
    problems: Mapping[str, Problem] = {}
    try:
        problems = _end_each(home, [line for end in ends for line in end.lines], made)
    except TROUBLE as exc:
        made.problems.append(first_line(exc))
    for end in ends:
        try:
            _conclude(home, end, made, problems)
        except TROUBLE as exc:
            made.problems.append(f"{end.run.id}: {first_line(exc)}")


def end_line(home: Home, line: LedgerLine, made: Pass) -> None:
    problems = _end_each(home, [line], made)
    if problems:
        raise still_billing(home, [line], problems)


def things_of(home: Home, line: LedgerLine, made: Pass) -> list[Resource]:
    """Return the resources at the line's provider. Each provider is queried only once per guard pass, for all runs."""
    key = line.provider if home.is_ours(line.mark) else line.mark
    if key not in made.things:
        provider, patience = home.provider_of(line), patience_s(home.world, made.by)
        made.things[key] = ask_all({provider.name: provider.list_resources}, home.world, patience)[provider.name]
    answer = made.things[key]
    if isinstance(answer, (HomingError, OSError)):
        raise answer
    return answer


def owned_by(home: Home, line: LedgerLine, made: Pass) -> list[Instance]:
    """Return our instances at the line's provider. Each provider is queried only once per guard pass, for all runs."""
    key = line.provider if home.is_ours(line.mark) else line.mark
    if key not in made.owned:
        made.owned[key] = home.provider_of(line).list_owned()
    return made.owned[key]


def _end_each(home: Home, lines: list[LedgerLine], made: Pass) -> dict[str, Problem]:
    """Destroy the lines' instances, but return in time to enforce the next limit, because a provider may hang."""
    return end_each(home, lines, deadline_s=DESTROY_S, by=made.next_at)


def _conclude(home: Home, end: End, made: Pass, problems: Mapping[str, Problem]) -> None:
    """Mark the run as stopped, and report any instances that still exist. Every later pass tries to destroy them.

    The run is marked even if instances still exist. Otherwise, once they are gone, it would look as if the run had
    ended without the guard.
    """
    marks, left = [line.mark for line in end.lines], end.lines
    with contextlib.suppress(HomingError):  # if the ledger cannot be read, assume that all of them still exist
        left = [line for line in home.ledger.lines(end.run.id) if line.mark in marks and line.destroyed_at is None]
    if left:
        made.may_bill.append(f"{end.run.id}: {still_billing(home, left, problems).why}")
    home.ledger.set_run(end.run.id, only_live=True, state="stopped", reason=end.text, **end.columns)
    if not left:
        made.done.append(f"{end.run.id}: {end.text}")


def first_line(exc: Exception) -> str:
    is_ours = isinstance(exc, (HomingError, WireError, OSError))
    return ((str(exc) if is_ours else f"{type(exc).__name__}: {exc}") or type(exc).__name__).splitlines()[0]


# --- the limits of a run, and what counts toward them ---


@dataclass(frozen=True)
class Terms:
    spend_limit_usd: Decimal | None
    time_limit_s: float
    elsewhere: list[LedgerLine] = field(default_factory=list)  # attempts recorded only by the run's new owner
    problem: str = ""  # why these limits may be outdated


def terms_of(home: Home, run: RunRow, known: list[LedgerLine]) -> Terms:
    """Return a run's limits. `known` are its attempts in the local ledger, which is more accurate than the record."""
    limit = _dollars(run.spend_limit_usd)
    if limit is None:  # every launch sets a limit, so this row is damaged; the attempts contain the limit, too
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
    """Return the limits from the run's documents, or the defaults if the documents cannot be read."""
    try:
        return relaunch.load_documents(home, run).run.limits
    except (OSError, ValueError):
        return Limits()


def _record(home: Home, run: RunRow) -> tuple[RunRecord | None, str]:
    """Return the new owner's record or, if it cannot be read, our last copy and the reason why it may be outdated."""
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
    except OSError as exc:  # for example, the disk is full; the record itself is still valid
        return record, f"Could not save it: {exc}."
    return record, ""


def _last_read(home: Home, run: RunRow) -> RunRecord | None:
    try:
        return codec.loads(RunRecord, home.world.read(home.run_dir(run.id) / _LAST_READ))
    except (OSError, WireError):
        return None


def _dollars(amount: str | None) -> Decimal | None:
    return None if amount is None else Decimal(amount)
