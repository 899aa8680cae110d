"""Figures of a plan that several verbs show: a spend limit to suggest, and how old a rate is."""

from __future__ import annotations

import datetime
from decimal import Decimal

from homing.cloud.ledger import meter
from homing.cloud.plan.plan import Plan
from homing.cloud.providers.base import Offer
from homing.units import format_duration

__all__ = ["rate_age", "suggested_limit"]


def suggested_limit(plan: Plan) -> str:
    """Suggest a spend limit: 1.5 times the plan, because a probe or an assumption may be off by that much.

    If no limit is set yet, it is not below the worst case shown next to it. A free machine also needs a limit.
    """
    best = plan.best
    has_worst = plan.run.limits.spend_usd is None and best.worst_usd.is_finite()
    enough = max(best.cost_usd * 3 / 2, best.minimum_usd * 2, best.worst_usd if has_worst else Decimal(0))
    return meter.as_limit(enough or Decimal(1))


def rate_age(offer: Offer, now: float) -> str:
    """Return how old the rate is; "" if the provider reported it just now."""
    if offer.as_of is None and not offer.rate_source:
        return ""
    source = f" {offer.rate_source}" if offer.rate_source else ""
    if offer.as_of is None:
        return f"rate{source}"
    day = datetime.datetime.fromtimestamp(offer.as_of, tz=datetime.UTC).strftime("%Y-%m-%d")
    return f"rate of {day}, {format_duration(max(0.0, now - offer.as_of))} old{source}"
