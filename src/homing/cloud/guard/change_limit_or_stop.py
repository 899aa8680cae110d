"""Changes the limits of a run that is live or may resume, or stops it at its next checkpoint.

    raise    provider's guard -> ledger and run documents -> request to the agent
    lower    ledger and run documents -> request to the agent -> (confirmed, or a deadline) -> provider's guard
    stop     request to the agent -> wait until training and billing have ended

If the process is killed while changing limits, the guards disagree for a while, but each still enforces either the old
or the new limit. The provider's guard terminates the machine without saving anything. So its limit is raised before
anything relies on the higher limit, and lowered only after the agent has had time to end training early. The agent
passes the new limit on to the dead-man process.

For a run between two machines, only the ledger and the run documents change. They are read by the next launch, which is
either a guard's relaunch or a launch that lost its offer and asks the user about the next one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.contact.control_request import ask, deliver
from homing.cloud.contact.heartbeats import read_document, read_reports
from homing.cloud.destroy import destroy_lines
from homing.cloud.guard import relaunch
from homing.cloud.home import Home
from homing.cloud.launch.draft import waits_for_home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.ledger.run_lease import require_owner, write_record
from homing.cloud.providers.base import wait_until
from homing.cloud.reconcile.receipt import left_at_most
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.renting_account import check_account
from homing.cloud.reconcile.run_status import Status, look, reached
from homing.errors import HomingError, OtherAccount, UsageError
from homing.store import Store, run_key
from homing.units import format_duration
from homing.wire import codec, file_names
from homing.wire.codec import MOST_LIMIT_USD, read_figure
from homing.wire.control_files import Heartbeat, Request
from homing.wire.guard_timing import PROVIDER

__all__ = ["CONFIRM_S", "Change", "ask_to_stop", "change_limit", "propose", "wait_for_stop"]

CONFIRM_S = 60.0  # how long to wait for the agent's confirmation; a request reaches it within a few heartbeats
_EVERY_S = 0.5
STOP_TIMEOUT_S = 600.0
_STOP_EVERY_S = 1.0


@dataclass(frozen=True)
class Change:
    """A proposed change of a run's limits, which has not been applied yet."""

    run: RunRow
    lines: list[LedgerLine]
    old_usd: Decimal | None
    new_usd: Decimal
    old_time_s: float
    new_time_s: float
    spend_usd: Decimal
    worst_case_usd: Decimal
    at_most: str = ""  # "at most ", to be shown before spend_usd, if that amount includes an upper bound

    @property
    def is_lower(self) -> bool:
        is_less_time = self.new_time_s > 0 and (self.old_time_s == 0 or self.new_time_s < self.old_time_s)
        return is_less_time or (self.old_usd is not None and self.new_usd < self.old_usd)


def propose(home: Home, run: RunRow, spend_usd: Decimal | None, time_s: float | None) -> Change:
    """Check the new limits and return the proposed change. Each error says what to do instead."""
    if spend_usd is None and time_s is None:
        raise UsageError(
            what="No new limit was given.", fix=f"For example: homing limit {run.id} --spend 20   or --time 8h, or both"
        )
    lines, now = home.ledger.lines(run.id), home.world.now()
    counted = left_at_most(home, lines)
    spent = meter.total_spend(counted, now)
    if not run.is_live and not home.may_go_on(run):
        more = meter.as_limit(max(spend_usd or Decimal(0), 2 * spent))
        resume = f"Resume with a higher limit: homing launch {run.id} --resume --spend-limit {more}"
        raise UsageError(
            what=f"{run.id} has ended: its state is {run.state}.",
            why=f"{meter.at_most(*counted)}{meter.show_usd(spent)} was spent. Only a live run's limit can be changed.",
            fix=f"homing fetch {run.id}   fetches the model." if run.state == "done" else resume,
        )
    require_owner(home, run)
    old = None if run.spend_limit_usd is None else Decimal(run.spend_limit_usd)
    limits = relaunch.load_documents(home, run).run.limits
    new = spend_usd if spend_usd is not None else old
    assert new is not None, "a launched run has a spend limit"
    _check_spend(run, new, spent, meter.at_most(*counted))
    running = billing_lines(counted)
    lived_s = max((now - line.created_at for line in running if line.created_at is not None), default=0.0)
    new_time_s = limits.time_s if time_s is None else time_s
    if 0 < new_time_s <= lived_s:
        raise UsageError(
            what=f"A time limit of {format_duration(new_time_s)} has already passed.",
            why=f"The instance that runs {run.id} has been up for {format_duration(lived_s)}.",
            fix=f"End the run with a checkpoint: homing stop {run.id}   or at once: homing destroy {run.id}",
        )
    rate = Decimal(running[-1].rate_usd_per_hour) if running else Decimal(0)
    before = meter.total_spend([line for line in counted if line not in running], now)
    # Without a machine there is no rate yet, so a time limit alone does not bound the spend.
    worst = meter.worst_case(rate, new, new_time_s, before) if running else new
    return Change(run, lines, old, new, limits.time_s, new_time_s, spent, worst, meter.at_most(*counted))


def change_limit(
    home: Home, change: Change, *, confirm_s: float = CONFIRM_S, notify: Callable[[str], None] = lambda text: None
) -> bool:
    """Apply the change and return True if the agent confirmed it in a heartbeat before the deadline.

    The result is False if no agent is running. Raises OtherAccount if this key cannot see one of the run's instances.
    If the limit goes up and the key can see none of the instances, the error occurs before anything is changed.
    Otherwise, it occurs after all other changes.
    """
    guards = _Guards([], [])
    if not change.is_lower:
        guards = _set_guards(home, change)
        if guards.unset and not guards.set:
            raise guards.unset[0][1]
    store = _write_down(home, change)
    serial = _ask_agent(home, change, store)
    is_confirmed = _is_confirmed(home, change, store, serial, confirm_s, notify)
    if change.is_lower:
        guards = _set_guards(home, change)
    if guards.unset:
        raise _not_all(change, *guards.unset[0])
    return is_confirmed


def _check_spend(run: RunRow, new: Decimal, spent: Decimal, at_most: str) -> None:
    if new > spent:
        return
    raise UsageError(
        what=f"The new limit, {meter.show_usd(new)}, is not above what {run.id} has already spent:"
        f" {at_most}{meter.show_usd(spent)}.",
        why="A limit that has already been reached would end the run without a checkpoint.",
        fix=f"End the run with a checkpoint: homing stop {run.id}   or at once: homing destroy {run.id}",
    )


@dataclass(frozen=True)
class _Guards:
    set: list[LedgerLine]
    unset: list[tuple[LedgerLine, OtherAccount]]


def _set_guards(home: Home, change: Change) -> _Guards:
    """Update the limit that the provider enforces, for every billing instance that this key can see."""
    now, counted, made = home.world.now(), left_at_most(home, change.lines), _Guards([], [])
    end_by = meter.moment(PROVIDER, counted, change.new_usd, change.new_time_s, now)
    for line in billing_lines(change.lines):
        if line.instance_id is None:
            continue
        provider = home.provider_of(line)
        try:
            # With another account's key, the instance would look gone, and its limit would not be updated.
            check_account(home, provider, line)
        except OtherAccount as exc:
            made.unset.append((line, exc))
            continue
        if line.limit_usd is not None and change.new_usd > Decimal(line.limit_usd):
            # Record the higher limit first, because the instance's maximum cost is computed from the recorded limit.
            home.ledger.update(line.mark, limit_usd=str(change.new_usd))
        left = change.new_usd - meter.total_spend([each for each in counted if each.mark != line.mark], now)
        provider.set_guard(line.instance_id, left, end_by if math.isfinite(end_by) else None)
        made.set.append(line)
    return made


def _not_all(change: Change, line: LedgerLine, exc: OtherAccount) -> OtherAccount:
    limit = meter.show_usd(change.new_usd)
    return OtherAccount(
        what=f"The limit of {change.run.id} is now {limit}, but it could not be applied to the instance {line.mark}"
        f" on {line.provider}.",
        why=f"{exc.why} That instance keeps its previous limit.",
        fix=exc.fix,
    )


def _write_down(home: Home, change: Change) -> Store:
    """Write the new limits to the ledger, the run documents and the run's record, and return the store."""
    run = change.run
    # Update the ledger even if the run has ended in the meantime, because a launch may be about to try the next offer,
    # and would use the old limit for it.
    home.ledger.set_run(run.id, spend_limit_usd=str(change.new_usd))
    resolved = relaunch.load_documents(home, run).run
    limits = dataclasses.replace(resolved.limits, spend_usd=str(change.new_usd), time_s=change.new_time_s)
    origin = {**resolved.origin, "limits.time_s": "homing limit"} if limits.time_s != resolved.limits.time_s else None
    changed = dataclasses.replace(resolved, limits=limits, origin=origin or resolved.origin)
    home.world.write(home.run_dir(run.id) / file_names.RUN, codec.dumps(changed, indent=1).encode())
    store = home.store_of(run)
    write_record(home, run.id, store)
    return store


def _ask_agent(home: Home, change: Change, store: Store) -> int:
    # If the instance's age was sent in an earlier request, this request repeats it, because the agent may not have read
    # the earlier one yet. The repeated age is too low by now, which is harmless.
    return ask(home, change.run.id, store, spend_limit_usd=str(change.new_usd), time_limit_s=change.new_time_s).serial


def _is_confirmed(
    home: Home, change: Change, store: Store, serial: int, confirm_s: float, notify: Callable[[str], None]
) -> bool:
    line, now = change.lines[-1] if change.lines else None, home.ledger.run(change.run.id) or change.run
    if not now.is_live:
        return False
    notify(f"Waiting up to {format_duration(confirm_s)} for the agent to confirm the new limit (request {serial})")

    def has_taken_it() -> bool:
        try:
            beat = read_reports(store, change.run.id, line).heartbeat
        except HomingError:
            return False
        if beat is None or beat.spend_limit_usd is None:
            return False
        taken = read_figure(beat.spend_limit_usd, MOST_LIMIT_USD)
        return taken == change.new_usd and beat.time_limit_s == change.new_time_s

    return wait_until(has_taken_it, timeout_s=confirm_s, every_s=_EVERY_S, world=home.world)


# --- stop ---


def ask_to_stop(home: Home, run: RunRow, reason: str = "A stop was requested.") -> int:
    """Write the stop request and return its serial number. A repeated request changes nothing."""
    require_owner(home, run)
    if not run.is_live and not home.may_go_on(run) and not _is_kept(home, run):
        raise UsageError(
            what=f"{run.id} is not running: it is {run.state}.",
            why=run.reason,
            fix=f"Fetch its model: homing fetch {run.name}",
        )
    # Read the ledger row again, because reading the store may have taken a while, and a guard may have acted.
    now = home.ledger.run(run.id) or run
    if home.may_go_on(now):  # no machine can read the request, so keep a guard or the launch from renting another
        home.ledger.set_run(run.id, state="stopped", reason=reason, exit_code=0)
    store = home.store_of(run)
    last = read_document(store, run_key(run.id, file_names.REQUEST), Request)
    if last is not None and last.stop:
        deliver(home, run.id)  # the first delivery may have failed
        return last.serial
    return ask(home, run.id, store, stop=True, reason=reason).serial


def _is_kept(home: Home, run: RunRow) -> bool:
    """Return True if the run failed and its instance is kept for inspection. `homing stop` then ends that instance."""
    lines = billing_lines(home.ledger.lines(run.id))
    beat = read_reports(home.store_of(run), run.id, lines[-1]).heartbeat if lines else None
    return beat is not None and beat.state == "kept"


def wait_for_stop(
    home: Home, run: RunRow, *, timeout_s: float = STOP_TIMEOUT_S, notify: Callable[[str], None] = lambda text: None
) -> Status:
    """Wait until training and billing have ended. A failed status check is reported and retried."""
    deadline = home.world.monotonic() + timeout_s
    said = ""
    while True:
        problems = refresh(home)
        status = look(home, home.ledger.run(run.id) or run)
        if not status.run.is_live and not status.is_billing:
            return status
        beat = status.reports.heartbeat if status.reports else None
        _end_what_waits(home, status, beat, notify)
        now = _where(status, beat) if beat else "no heartbeat yet"
        for text in [*problems, *([status.problem] if status.problem else []), f"waiting for the agent: {now}"]:
            if text != said:
                notify(text)
                said = text
        if home.world.monotonic() >= deadline:
            raise HomingError(
                what=f"{run.id} did not stop within {format_duration(timeout_s)}.",
                why=f"The agent last reported: {now}. The request stays in the store until the agent sees it.",
                fix=f"Keep watching it: homing watch {run.id}   or destroy its instance now and lose whatever has not"
                f" been pushed: homing destroy {run.id}",
            )
        home.world.sleep(_STOP_EVERY_S)


def _where(status: Status, beat: Heartbeat) -> str:
    """Describe the agent's state and, once the first metrics line has been written, its step."""
    step = reached(status, beat).step
    return f"{beat.state} at step {step:,}" if step else beat.state


def _end_what_waits(home: Home, status: Status, beat: Heartbeat | None, notify: Callable[[str], None]) -> None:
    """Destroy a machine that cannot end its own billing, once its agent has reported that it has finished."""
    for line in billing_lines(status.lines) if not status.run.is_live else []:
        if waits_for_home(home.provider_of(line), line.mark, beat):
            notify(f"{line.mark} has pushed everything and cannot end its own billing; destroying it")
            destroy_lines(home, [line])
