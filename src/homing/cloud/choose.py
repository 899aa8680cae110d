"""From the chosen offer to a started run: where it is gone by now, or never comes, the next of the plan.

    launch -> started
           -> the provider has none left, or its machine never came -> the next row that may be taken without asking, or
                                                                        that a person agrees to

Nothing is left of a launch that failed, so the same run goes on as its next attempt; its limit counts over all of them.
A machine that came and whose agent then gave up is no reason: it would give up on the next one as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from decimal import Decimal

from homing.cloud import meter
from homing.cloud.home import Home
from homing.cloud.launch import Draft, Launched, draft, launch
from homing.cloud.offers import is_dear
from homing.cloud.plan import OfferPlan
from homing.cloud.providers.base import Offer
from homing.errors import NeverCame, NoOffer, UsageError

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
    while True:
        try:
            return ready, launch(ready, home, tell=tell)
        except (NoOffer, NeverCame) as exc:
            how = "is gone" if isinstance(exc, NoOffer) else "never came, and is destroyed"
            tell(f"{name_of(ready.order.offer)} {how}: {' '.join(exc.why.split()) or exc.what}")
            found = _next(first, rest, home, tell, agree)
            if found is None:
                raise
            ready = found


def _next(
    first: Draft,
    rest: list[OfferPlan],
    home: Home,
    tell: Callable[[str], None],
    agree: Callable[[OfferPlan, Draft], bool],
) -> Draft | None:
    """Takes from `rest` until one can be launched; None when nothing is left or a person said no."""
    while rest:
        row = rest.pop(0)
        run = dataclasses.replace(first.order.run, id=first.run.id)
        order = dataclasses.replace(first.order, run=run, offer=row.offer, timing=row.timing, resume=True)
        try:
            ready = draft(order, home)
        except UsageError as exc:  # too dear for what is left of the limit, or it cannot reach the store
            tell(f"{name_of(row.offer)}: {exc.what}")
            continue
        rate = meter.show_usd(row.offer.rate_usd_per_hour)
        tell(f"Next: {name_of(row.offer)} at {rate}/h, {meter.show_usd(row.cost_usd)} to finish")
        return ready if agree(row, ready) else None
    return None


def name_of(offer: Offer) -> str:
    return " ".join(part for part in (offer.provider, offer.cloud, offer.name, offer.region) if part)
