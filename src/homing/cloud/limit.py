"""A run's limit, changed while it lives or may go on: in the ledger, in the papers, at the provider, on the instance.

    raise    provider's guard -> ledger and papers -> request to the agent
    lower    ledger and papers -> request to the agent -> (it confirmed, or a deadline) -> provider's guard

Killed between two of these, the guards differ for a while, and each still holds one of the two limits that the person
named. The provider's guard is the hard one, which saves nothing: it goes up before anybody counts on more, and comes
down after the agent has had the time to land. The agent hands the new limit on to the dead-man.

Of a run between two machines only ledger and papers are there to be changed. Whoever launches the next one goes by
them: a guard, or a launch whose offer was gone, which looks again after it has asked about the next.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import meter, relaunch
from homing.cloud.home import Home
from homing.cloud.lease import require_owner
from homing.cloud.ledger import LedgerLine, RunRow
from homing.cloud.providers.base import wait_until
from homing.cloud.receipt import left_at_most
from homing.cloud.record import write_record
from homing.cloud.signs import read_signs
from homing.cloud.status import billing_lines
from homing.cloud.whose import check_account
from homing.cloud.wish import ask
from homing.errors import HomingError, OtherAccount, UsageError
from homing.store import Store
from homing.units import format_duration
from homing.wire import codec, names
from homing.wire.limit import PROVIDER

__all__ = ["CONFIRM_S", "Change", "change_limit", "propose"]

CONFIRM_S = 60.0  # a request reaches the agent within some of its heartbeats
_EVERY_S = 0.5


@dataclass(frozen=True)
class Change:
    """Old and new; nothing has been touched yet."""

    run: RunRow
    lines: list[LedgerLine]
    old_usd: Decimal | None
    new_usd: Decimal
    old_time_s: float
    new_time_s: float
    spend_usd: Decimal
    worst_case_usd: Decimal
    at_most: str = ""  # before spend_usd, where nobody could count all of it

    @property
    def is_lower(self) -> bool:
        is_less_time = self.new_time_s > 0 and (self.old_time_s == 0 or self.new_time_s < self.old_time_s)
        return is_less_time or (self.old_usd is not None and self.new_usd < self.old_usd)


def propose(home: Home, run: RunRow, spend_usd: Decimal | None, time_s: float | None) -> Change:
    """Every check; each refusal says what to do instead."""
    if spend_usd is None and time_s is None:
        raise UsageError(what="No new limit is named.", fix=f"homing limit {run.id} --spend 20   or --time 8h, or both")
    lines, now = home.ledger.lines(run.id), home.world.now()
    counted = left_at_most(home, lines)
    spent = meter.total_spend(counted, now)
    if not run.is_live and not home.may_go_on(run):
        more = meter.as_limit(max(spend_usd or Decimal(0), 2 * spent))
        go_on = f"Go on with more: homing launch {run.id} --resume --spend-limit {more}"
        raise UsageError(
            what=f"{run.id} has ended: it is {run.state}.",
            why=f"{meter.at_most(*counted)}{meter.show_usd(spent)} were spent. A limit is changed while a run lives.",
            fix=f"homing fetch {run.id}   brings the model home." if run.state == "done" else go_on,
        )
    require_owner(home, run)
    old = None if run.spend_limit_usd is None else Decimal(run.spend_limit_usd)
    limits = relaunch.papers(home, run).run.limits
    new = spend_usd if spend_usd is not None else old
    assert new is not None, "a launched run has a spend limit"
    _check_spend(run, new, spent, meter.at_most(*counted))
    running = billing_lines(counted)
    lived_s = max((now - line.created_at for line in running if line.created_at is not None), default=0.0)
    new_time_s = limits.time_s if time_s is None else time_s
    if 0 < new_time_s <= lived_s:
        raise UsageError(
            what=f"A time limit of {format_duration(new_time_s)} has passed already.",
            why=f"Its instance has lived for {format_duration(lived_s)}.",
            fix=f"End it with a checkpoint: homing stop {run.id}   or at once: homing destroy {run.id}",
        )
    rate = Decimal(running[-1].rate_usd_per_hour) if running else Decimal(0)
    before = meter.total_spend([line for line in counted if line not in running], now)
    # Without a machine there is no rate yet, and time alone bounds nothing.
    worst = meter.worst_case(rate, new, new_time_s, before) if running else new
    return Change(run, lines, old, new, limits.time_s, new_time_s, spent, worst, meter.at_most(*counted))


def change_limit(
    home: Home, change: Change, *, confirm_s: float = CONFIRM_S, tell: Callable[[str], None] = lambda text: None
) -> bool:
    """Whether the agent has confirmed it, in its heartbeat, before the deadline; at once False where none is at work.

    OtherAccount where one of its machines is not shown to the key here: before anything, if it is the only one and
    would get more, else after all that could be done.
    """
    guards = _Guards([], [])
    if not change.is_lower:
        guards = _set_guards(home, change)
        if guards.unset and not guards.set:
            raise guards.unset[0][1]
    store = _write_down(home, change)
    serial = _ask_agent(home, change, store)
    is_confirmed = _is_confirmed(home, change, store, serial, confirm_s, tell)
    if change.is_lower:
        guards = _set_guards(home, change)
    if guards.unset:
        raise _not_all(change, *guards.unset[0])
    return is_confirmed


def _check_spend(run: RunRow, new: Decimal, spent: Decimal, at_most: str) -> None:
    if new > spent:
        return
    raise UsageError(
        what=f"{meter.show_usd(new)} is not more than what {run.id} has spent: {at_most}{meter.show_usd(spent)}.",
        why="A limit that has passed would end it without a checkpoint.",
        fix=f"End it with one: homing stop {run.id}   or at once: homing destroy {run.id}",
    )


@dataclass(frozen=True)
class _Guards:
    set: list[LedgerLine]
    unset: list[tuple[LedgerLine, OtherAccount]]


def _set_guards(home: Home, change: Change) -> _Guards:
    """The provider's own, of every instance that bills and is shown here."""
    now, counted, made = home.world.now(), left_at_most(home, change.lines), _Guards([], [])
    end_by = meter.moment(PROVIDER, counted, change.new_usd, change.new_time_s, now)
    for line in billing_lines(change.lines):
        if line.instance_id is None:
            continue
        provider = home.provider_of(line)
        try:
            check_account(home, provider, line)  # to another account's key it is not there, and needs no guard
        except OtherAccount as exc:
            made.unset.append((line, exc))
            continue
        if line.limit_usd is not None and change.new_usd > Decimal(line.limit_usd):
            # Before it can cost more: the most that it can cost is counted by this.
            home.ledger.update(line.mark, limit_usd=str(change.new_usd))
        left = change.new_usd - meter.total_spend([each for each in counted if each.mark != line.mark], now)
        provider.set_guard(line.instance_id, left, end_by if math.isfinite(end_by) else None)
        made.set.append(line)
    return made


def _not_all(change: Change, line: LedgerLine, exc: OtherAccount) -> OtherAccount:
    limit = meter.show_usd(change.new_usd)
    return OtherAccount(
        what=f"The limit of {change.run.id} is {limit} now, and {line.provider} was not told so of {line.mark}.",
        why=f"{exc.why} There it stays under the limit that it had.",
        fix=exc.fix,
    )


def _write_down(home: Home, change: Change) -> Store:
    """Ledger, papers, record: what the guard at home, a relaunch and another home go by."""
    run = change.run
    # Also where it has ended since: a launch may be on its way to the next offer, and would take the old one there.
    home.ledger.set_run(run.id, spend_limit_usd=str(change.new_usd))
    resolved = relaunch.papers(home, run).run
    limits = dataclasses.replace(resolved.limits, spend_usd=str(change.new_usd), time_s=change.new_time_s)
    origin = {**resolved.origin, "limits.time_s": "homing limit"} if limits.time_s != resolved.limits.time_s else None
    changed = dataclasses.replace(resolved, limits=limits, origin=origin or resolved.origin)
    home.world.write(home.run_dir(run.id) / names.RUN, codec.dumps(changed, indent=1).encode())
    store = home.store_of(run)
    write_record(home, run.id, store)
    return store


def _ask_agent(home: Home, change: Change, store: Store) -> int:
    # An age that was told stays: the agent may not have read it yet, and an old one says too little, not wrong.
    return ask(home, change.run.id, store, spend_limit_usd=str(change.new_usd), time_limit_s=change.new_time_s).serial


def _is_confirmed(
    home: Home, change: Change, store: Store, serial: int, confirm_s: float, tell: Callable[[str], None]
) -> bool:
    line, now = change.lines[-1] if change.lines else None, home.ledger.run(change.run.id) or change.run
    if not now.is_live:
        return False
    tell(f"Waiting for the agent to confirm it (request {serial}), at most {format_duration(confirm_s)}")

    def has_taken_it() -> bool:
        try:
            beat = read_signs(store, change.run.id, line).heartbeat
        except HomingError:
            return False
        if beat is None or beat.spend_limit_usd is None:
            return False
        return Decimal(beat.spend_limit_usd) == change.new_usd and beat.time_limit_s == change.new_time_s

    return wait_until(has_taken_it, timeout_s=confirm_s, every_s=_EVERY_S, world=home.world)
