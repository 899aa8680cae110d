"""From the chosen offer to a started run: where it is gone by now, or never comes, the next of the plan.

    launch -> started
           -> the provider has none left, or its machine never came -> the next row that may be taken without asking, or
                                                                        that a person agrees to

Nothing is left of a launch that failed, so the same run goes on as its next attempt; its limit counts over all of them.
A machine that came and whose agent then gave up is no reason: it would give up on the next one as well. Between two
offers nothing of the run lives, so a lock says that it goes on: a stop, a destroy or a new limit from another terminal
counts there too. The question may stand for long, so after each answer the run is looked at again: ended, it stays so;
with another limit, that is asked about anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal

from homing.cloud import meter, relaunch
from homing.cloud.home import Home
from homing.cloud.launch import Draft, Launched, draft, hold_lock, launch
from homing.cloud.ledger import UNDONE, RunRow
from homing.cloud.offers import is_dear
from homing.cloud.plan import OfferPlan
from homing.cloud.providers.base import Offer
from homing.errors import EndedElsewhere, NeverCame, NoOffer, UsageError
from homing.units import format_duration
from homing.wire.run import Limits

__all__ = ["MAY_COST", "is_within_plan", "launch_any", "name_of"]

MAY_COST = Decimal("1.5")  # so much dearer to finish may be what stands in for a cheaper one that is gone
_TRIES = 5


def is_within_plan(row: OfferPlan, agreed: OfferPlan, limit_usd_per_hour: Decimal | None) -> bool:
    """Whether it may stand in for what was agreed to without a new answer; limits.rate is one, given before."""
    if limit_usd_per_hour is not None:
        return row.offer.rate_usd_per_hour <= limit_usd_per_hour
    return row.cost_usd <= agreed.cost_usd * MAY_COST and not is_dear(row.offer, None)


def launch_any(
    first: Draft,
    others: Sequence[OfferPlan],
    home: Home,
    *,
    tell: Callable[[str], None],
    agree: Callable[[OfferPlan, Draft], bool],
) -> tuple[Draft, Launched]:
    """`first` is agreed to already. `others` in the order they may stand in for it; `agree` is asked about each."""
    ready, rest = first, [row for row in others if row.offer != first.order.offer][: _TRIES - 1]
    last: RunRow | None = None
    with _going_on(first, home):
        while True:
            try:
                return ready, launch(ready, home, tell=tell, last=last)
            except (NoOffer, NeverCame) as exc:
                how = "is gone" if isinstance(exc, NoOffer) else "never came, and is destroyed"
                tell(f"{name_of(ready.order.offer)} {how}: {' '.join(exc.why.split()) or exc.what}")
                found = _next(first, rest, home, tell, agree)
                if found is None:
                    raise
                ready, last = found


@contextlib.contextmanager
def _going_on(first: Draft, home: Home) -> Iterator[None]:
    """Seen by `homing stop` and `homing destroy`: to them a run between two offers has not ended."""
    hold_lock(first.run.id, first.run.id, first.run.name, home)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it goes with this process at the latest
            home.world.remove(home.launch_lock(first.run.id))


def _as_undone(first: Draft, home: Home) -> RunRow:
    """The run as the launch that failed has left it. One that a person has ended meanwhile stays so."""
    run = home.ledger.run(first.run.id)
    if run is None or not run.reason.startswith(UNDONE):
        said = ("gone", "") if run is None else (run.state, run.reason)
        raise EndedElsewhere(f"{first.run.id} is not launched on the next offer: it is {said[0]} by now.", said[1])
    return run


def _next(
    first: Draft,
    rest: list[OfferPlan],
    home: Home,
    tell: Callable[[str], None],
    agree: Callable[[OfferPlan, Draft], bool],
) -> tuple[Draft, RunRow] | None:
    """Takes from `rest` until one can be launched, with the run as it was found for it; None when nothing is left or a
    person said no."""
    last = _as_undone(first, home)
    while rest:
        row = rest.pop(0)
        agreed: Draft | None = None
        while True:
            try:
                ready = _instead(first, last, row, home)
            except UsageError as exc:  # too dear for what is left of the limit, or it cannot reach the store
                tell(f"{name_of(row.offer)}: {exc.what}")
                break
            if agreed is not None:
                if _limits(ready) == _limits(agreed):
                    return ready, last
                time = f", time {format_duration(ready.run.limits.time_s)}" if ready.run.limits.time_s else ""
                tell(f"Its limits are others by now: {meter.show_usd(ready.spend_limit_usd)}{time}")
            rate = meter.show_usd(row.offer.rate_usd_per_hour)
            tell(f"Next: {name_of(row.offer)} at {rate}/h, {meter.show_usd(row.cost_usd)} to finish")
            if not agree(row, ready):
                return None
            agreed, last = ready, _as_undone(first, home)
    return None


def _instead(first: Draft, last: RunRow, row: OfferPlan, home: Home) -> Draft:
    """The same order on another offer, with the limits of now: `homing limit` may have changed them."""
    told = relaunch.papers(home, last).run
    run = dataclasses.replace(first.order.run, id=first.run.id, limits=told.limits, origin=told.origin)
    limit = None if last.spend_limit_usd is None else Decimal(last.spend_limit_usd)
    order = dataclasses.replace(
        first.order, run=run, offer=row.offer, timing=row.timing, resume=True, spend_limit_usd=limit
    )
    return draft(order, home)


def _limits(ready: Draft) -> tuple[Decimal, Limits]:
    return ready.spend_limit_usd, ready.order.run.limits


def name_of(offer: Offer) -> str:
    return " ".join(part for part in (offer.provider, offer.cloud, offer.name, offer.region) if part)
