"""A run whose machine was taken away or lost goes on: the next offer, the newest whole checkpoint, the same limit.

    is_wanted    the ledger says interrupted, nothing of it bills here, nobody at home asked for that end
    relaunch     plan -> offers, cheapest to finish first -> draft -> launch; an offer that fails gives way to the next

Two guards may try at once: the launch's own lock, the ledger's intent and the lease let exactly one through.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud import diary, meter
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.lease import require_owner
from homing.cloud.ledger import CUT_SHORT, UNDONE, LedgerLine, RunRow
from homing.cloud.offers import is_dear
from homing.cloud.plan import make_plan
from homing.cloud.providers.base import Offer
from homing.cloud.signs import read_document
from homing.cloud.unattended import without_time
from homing.cloud.whose import check_own, is_elsewhere
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
from homing.wire import codec, names
from homing.wire.control import Request
from homing.wire.limit import RESERVE_FRACTION
from homing.wire.run import Run

__all__ = ["RELAUNCHED", "is_wanted", "papers", "relaunch"]

RELAUNCHED = "relaunched"  # kind in the diary
_OFFERS = 3  # at most so many are tried in one pass


@dataclass(frozen=True)
class _Papers:
    run: Run
    run_file_text: str
    is_smoke: bool
    keep_on_failure_s: float
    is_one_guard_enough: bool


def is_wanted(home: Home, run: RunRow, lines: list[LedgerLine]) -> bool:
    """Whether the guard may go on with it. What a person destroyed stays destroyed."""
    if not lines or run.is_live or not _is_interrupted(home, run, lines[-1].mark):
        return False
    # What is left open in another account is counted at its most by the next launch, or refused by it aloud.
    return all(line.destroyed_at is not None or is_elsewhere(home, line) for line in lines)


def _is_interrupted(home: Home, run: RunRow, last: str) -> bool:
    if run.reason == CUT_SHORT:
        return diary.has(home, run.id, f"relaunch-{last}")  # a guard died while it launched
    is_ours = diary.has(home, run.id, f"lost-{last}") or diary.has(home, run.id, f"unlaunched-{last}")
    return run.is_interrupted and (is_ours or not home.ledger.is_destroy_asked(last))


def relaunch(home: Home, run: RunRow, tell: Callable[[str], None]) -> str:
    """What was done, in a sentence; raises what stands in the way."""
    require_owner(home, run)
    kept = papers(home, run)
    if kept.run.cloud.on_preempt != "relaunch":
        return f"It is not launched again: cloud.on_preempt is {kept.run.cloud.on_preempt}."
    if diary.count(home, run.id, RELAUNCHED) >= kept.run.limits.relaunches:
        return f"It is not launched again: limits.relaunches is {kept.run.limits.relaunches}."
    wish = read_document(home.store_of(run), run_key(run.id, names.REQUEST), Request)
    if wish is not None and wish.stop:
        return f"It is not launched again: {wish.reason or 'a stop was asked for from home.'}"
    if _has_used_its_time(home.ledger.lines(run.id)[-1], kept.run):
        return f"It is not launched again: its time limit of {format_duration(kept.run.limits.time_s)} is used up."
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
            # In the try: what is left of the limit may be too little for this offer and enough for the next.
            return _launch(draft(order, home), home, run, tell)
        except NotOwner:
            raise  # no offer will change that
        except (CreateFailed, NoOffer, ProviderRefused, StartTimeout, UsageError) as exc:
            problem = exc
            tell(f"{row.offer.provider} {row.offer.name}: {exc.what}")
    assert problem is not None, "a plan has offers, or raises"
    raise problem


def _refuse_dear(offer: Offer, run: Run, lines: list[LedgerLine]) -> None:
    """Nobody is there to be asked: an hour far dearer than those before is taken only where limits.rate allows it."""
    most = None if run.limits.rate_usd_per_hour is None else Decimal(run.limits.rate_usd_per_hour)
    before = max((Decimal(line.rate_usd_per_hour) for line in lines), default=Decimal(0))
    if is_dear(offer, most) and offer.rate_usd_per_hour > before:
        rate = meter.show_usd(offer.rate_usd_per_hour)
        raise UsageError(
            what=f"It costs {rate} an hour, and nobody has said that it may.",
            why=f"{run.name} ran at {meter.show_usd(before)} an hour at most.",
            fix=f"homing launch {run.name} --resume   and answer, or set limits.rate in the run file beforehand",
        )


def papers(home: Home, run: RunRow) -> _Papers:
    """The run as it was launched, from its folder at home. Its limit is the ledger's: `homing limit` changes it."""
    folder = home.run_dir(run.id)
    resolved = codec.loads(Run, home.world.read(folder / names.RUN))
    text, note = "", {}
    if home.world.exists(folder / names.RUN_FILE):
        text = home.world.read(folder / names.RUN_FILE).decode("utf-8", "replace")
    if home.world.exists(folder / LAUNCH_NOTE):
        note = json.loads(home.world.read(folder / LAUNCH_NOTE))
    return _Papers(
        run=resolved,
        run_file_text=text,
        is_smoke=bool(note.get("is_smoke", False)),
        keep_on_failure_s=float(note.get("keep_on_failure_s", 0.0)),
        is_one_guard_enough=bool(note.get("is_one_guard_enough", False)),
    )


def _has_used_its_time(line: LedgerLine, run: Run) -> bool:
    """A machine that went at its time limit was not taken away: one of its guards ended it."""
    if not run.limits.time_s or line.created_at is None or line.destroyed_at is None:
        return False
    return line.destroyed_at - line.created_at >= run.limits.time_s * (1 - RESERVE_FRACTION)


def _check_unchanged(home: Home, run: RunRow, ready: Draft) -> None:
    """To look for offers takes a while, in which a person may have destroyed what is left of it, or given it another
    limit, which the next look goes by. The intent looks again; here it costs none of its relaunches."""
    now = home.ledger.run(run.id) or run
    if (now.state, now.reason) != (run.state, run.reason):
        raise EndedElsewhere(f"{run.id} is not launched again: it is {now.state} by now.", now.reason)
    # Without what an offer before this one, which failed, needed of its own.
    time_s = without_time(papers(home, run).run).limits.time_s
    if (now.spend_limit_usd, time_s) != (run.spend_limit_usd, ready.order.run.limits.time_s):
        raise EndedElsewhere(f"{run.id} is not launched on what was found: its limits are others by now.")


def _launch(ready: Draft, home: Home, run: RunRow, tell: Callable[[str], None]) -> str:
    _check_unchanged(home, run, ready)
    offer = ready.order.offer
    where = f"{offer.provider} {offer.name} at {meter.show_usd(offer.rate_usd_per_hour)}/h"
    text = f"Attempt {ready.attempt} is launched on {where}, from the last checkpoint."
    # Before the launch: a guard that dies in the midst of it has said that this attempt is a guard's.
    diary.note(home, run.id, f"relaunch-{ready.mark}", RELAUNCHED, text)
    try:
        launch(ready, home, tell=tell, last=run)
    except (EndedElsewhere, StillBilling):
        raise
    except HomingError as exc:
        # Ours to try again, under the reason it was interrupted for; not so if another launch was first.
        after = home.ledger.run(run.id)
        # Only over what its own undo has written: a person may have ended the run in the meantime.
        if after is not None and not after.is_live and after.reason.startswith(UNDONE):
            diary.note(home, run.id, f"unlaunched-{ready.mark}", "not_relaunched", exc.what)
            home.ledger.set_run(run.id, state=run.state, reason=run.reason, exit_code=run.exit_code)
        raise
    return text
