"""Resumes a run whose machine was preempted or lost, on the next offer, from the newest checkpoint, within its limit.

    is_wanted    the run was interrupted, no instance of it is billing here, and the user has not asked to end it
    relaunch     plan -> offers, cheapest to finish first -> draft -> launch; if an offer fails, try the next one

Two guards may try at the same time. The launch lock, the entry in the ledger and the lease ensure that only one
succeeds.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.contact import action_log
from homing.cloud.contact.heartbeats import read_document
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.launch.draft import without_time
from homing.cloud.launch.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import CUT_SHORT, UNDONE, LedgerLine, RunRow
from homing.cloud.ledger.run_lease import require_owner
from homing.cloud.plan.offers import is_dear
from homing.cloud.plan.plan import make_plan
from homing.cloud.providers.base import Offer
from homing.cloud.reconcile.renting_account import check_own, is_elsewhere
from homing.errors import (
    CreateFailed,
    EndedElsewhere,
    HomingError,
    NoOffer,
    NotOwner,
    ProviderRefused,
    StartTimeout,
    StillBilling,
    UsageError,
)
from homing.store import run_key
from homing.units import format_duration
from homing.wire import codec, file_names
from homing.wire.control_files import Request
from homing.wire.guard_timing import RESERVE_FRACTION
from homing.wire.run_json import Run

__all__ = ["RELAUNCHED", "is_wanted", "load_documents", "relaunch"]

RELAUNCHED = "relaunched"  # the kind of the action log entries for relaunches
_OFFERS = 3  # how many offers to try in one pass


@dataclass(frozen=True)
class _Documents:
    run: Run
    run_file_text: str
    is_smoke: bool
    keep_on_failure_s: float
    is_one_guard_enough: bool


def is_wanted(home: Home, run: RunRow, lines: list[LedgerLine]) -> bool:
    """Return True if the guard should resume the run. A run that the user destroyed is never resumed."""
    if not lines or run.is_live or not _is_interrupted(home, run, lines[-1].mark):
        return False
    # An instance in a different account may still be billing. The next launch counts it at its maximum cost, or refuses
    # to start.
    return all(line.destroyed_at is not None or is_elsewhere(home, line) for line in lines)


def _is_interrupted(home: Home, run: RunRow, last: str) -> bool:
    if run.reason == CUT_SHORT:
        return action_log.has(home, run.id, f"relaunch-{last}")  # True if a guard made the launch that was cut short
    is_ours = action_log.has(home, run.id, f"lost-{last}") or action_log.has(home, run.id, f"unlaunched-{last}")
    return run.is_interrupted and (is_ours or not home.ledger.is_destroy_asked(last))


def relaunch(home: Home, run: RunRow, notify: Callable[[str], None]) -> str:
    """Relaunch the run and return a sentence that describes the result. Raises the last error if every offer fails."""
    require_owner(home, run)
    kept = load_documents(home, run)
    if kept.run.cloud.on_preempt != "relaunch":
        return f"Not relaunched: cloud.on_preempt is {kept.run.cloud.on_preempt}."
    if action_log.count(home, run.id, RELAUNCHED) >= kept.run.limits.relaunches:
        return f"Not relaunched: limits.relaunches is {kept.run.limits.relaunches}."
    request = read_document(home.store_of(run), run_key(run.id, file_names.REQUEST), Request)
    if request is not None and request.stop:
        return f"Not relaunched: {request.reason or 'a stop was requested.'}"
    if _has_used_its_time(home.ledger.lines(run.id)[-1], kept.run):
        return f"Not relaunched: it has used up its time limit of {format_duration(kept.run.limits.time_s)}."
    problem: HomingError | None = None
    for row in make_plan(kept.run, home).offers[:_OFFERS]:
        order = LaunchOrder(
            run=kept.run,
            run_file_text=kept.run_file_text,
            is_prepared=True,
            offer=row.offer,
            spend_limit_usd=None if run.spend_limit_usd is None else Decimal(run.spend_limit_usd),
            resume=True,
            is_smoke=kept.is_smoke,
            timing=row.timing,
            keep_on_failure_s=kept.keep_on_failure_s,
            is_one_guard_enough=kept.is_one_guard_enough,
        )
        try:
            _refuse_dear(row.offer, kept.run, home.ledger.lines(run.id))
            check_own(home, row.offer.provider, home.ledger.lines(run.id))
            # Call draft inside the try block, because what remains of the limit may be too little for this offer but
            # enough for the next one.
            return _launch(draft(order, home), home, run, notify)
        except NotOwner:
            raise  # a different offer would not help
        except (CreateFailed, NoOffer, ProviderRefused, StartTimeout, UsageError) as exc:
            problem = exc
            notify(f"{row.offer.provider} {row.offer.name}: {exc.what}")
    assert problem is not None, "a plan has offers, or raises"
    raise problem


def _refuse_dear(offer: Offer, run: Run, lines: list[LedgerLine]) -> None:
    """Refuse an expensive offer that costs more per hour than all earlier attempts, unless limits.rate is set.

    During a relaunch, no user is present to confirm the rate.
    """
    most = None if run.limits.rate_usd_per_hour is None else Decimal(run.limits.rate_usd_per_hour)
    before = max((Decimal(line.rate_usd_per_hour) for line in lines), default=Decimal(0))
    if is_dear(offer, most) and offer.rate_usd_per_hour > before:
        rate = meter.show_usd(offer.rate_usd_per_hour)
        raise UsageError(
            what=f"The offer costs {rate}/h, which you have not approved.",
            why=f"So far, {run.name} has cost at most {meter.show_usd(before)}/h, and limits.rate is not set.",
            fix=f"Launch it yourself and confirm the rate: homing launch {run.name} --resume"
            "   To approve rates in advance, set limits.rate in the run file.",
        )


def load_documents(home: Home, run: RunRow) -> _Documents:
    """Return the run as launched, read from its local folder. The ledger may contain a newer spend limit."""
    folder = home.run_dir(run.id)
    resolved = codec.loads(Run, home.world.read(folder / file_names.RUN))
    text, note = "", {}
    if home.world.exists(folder / file_names.RUN_FILE):
        text = home.world.read(folder / file_names.RUN_FILE).decode("utf-8", "replace")
    if home.world.exists(folder / LAUNCH_NOTE):
        note = json.loads(home.world.read(folder / LAUNCH_NOTE))
    return _Documents(
        run=resolved,
        run_file_text=text,
        is_smoke=bool(note.get("is_smoke", False)),
        keep_on_failure_s=float(note.get("keep_on_failure_s", 0.0)),
        is_one_guard_enough=bool(note.get("is_one_guard_enough", False)),
    )


def _has_used_its_time(line: LedgerLine, run: Run) -> bool:
    """Return True if the machine reached its time limit, in which case a guard ended it and it was not preempted."""
    if not run.limits.time_s or line.created_at is None or line.destroyed_at is None:
        return False
    return line.destroyed_at - line.created_at >= run.limits.time_s * (1 - RESERVE_FRACTION)


def _check_unchanged(home: Home, run: RunRow, ready: Draft) -> None:
    """Abort if the run was destroyed or its limits were changed while searching for offers.

    The ledger checks this again when the launch begins, but aborting here does not use up one of the run's relaunches.
    """
    now = home.ledger.run(run.id) or run
    if (now.state, now.reason) != (run.state, run.reason):
        raise EndedElsewhere(f"{run.id} was not relaunched: it is {now.state} now.", now.reason)
    # Ignore the time limit that was derived for an earlier offer that failed.
    time_s = without_time(load_documents(home, run).run).limits.time_s
    if (now.spend_limit_usd, time_s) != (run.spend_limit_usd, ready.order.run.limits.time_s):
        raise EndedElsewhere(f"{run.id} was not relaunched: its limits have changed in the meantime.")


def _launch(ready: Draft, home: Home, run: RunRow, notify: Callable[[str], None]) -> str:
    _check_unchanged(home, run, ready)
    offer = ready.order.offer
    where = f"{offer.provider} {offer.name} at {meter.show_usd(offer.rate_usd_per_hour)}/h"
    text = f"Attempt {ready.attempt} launches on {where}, from the last checkpoint."
    # Write this before the launch, so that even if the guard dies, the log shows that a guard made this attempt.
    action_log.note(home, run.id, f"relaunch-{ready.mark}", RELAUNCHED, text)
    try:
        launch(ready, home, notify=notify, last=run)
    except (EndedElsewhere, StillBilling):
        raise
    except HomingError as exc:
        # Unless another launch came first, restore the run's original reason, so that the relaunch is retried later.
        after = home.ledger.run(run.id)
        # Replace only what our own failed launch wrote, because the user may have ended the run in the meantime.
        if after is not None and not after.is_live and after.reason.startswith(UNDONE):
            action_log.note(home, run.id, f"unlaunched-{ready.mark}", "not_relaunched", exc.what)
            home.ledger.set_run(run.id, state=run.state, reason=run.reason, exit_code=run.exit_code)
        raise
    return text
