"""Dollars so far, and the worst case.

    ours      rate x time from the create call to the provider's word that it is gone
    theirs    the provider's own figure, where it has one
    the meter shows the larger, over all attempts of a run

Exact Decimal inside; rounded up only for show, so that nobody reads less than they pay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from homing.cloud.ledger import LedgerLine
from homing.units import format_usd
from homing.wire.limit import allowed_s, reserve_s

__all__ = [
    "AT_MOST_WORDS",
    "MARGIN_S",
    "MARGIN_WORDS",
    "Bill",
    "as_limit",
    "at_most",
    "compare",
    "cost",
    "is_charged",
    "line_spend",
    "moment",
    "show_spend",
    "show_usd",
    "total_spend",
    "worst_case",
]

# Their rate is made up, so that a run can be tried whole; nobody sends a bill.
FREE_PROVIDERS = frozenset({"local"})

# From the moment the agent decides to end until billing has ended: the last push, the call, its retries.
# Also by how much our figure may stand above the provider's: from the create call to what it calls created.
MARGIN_S = 180.0
MARGIN_WORDS = (
    "Ours counts from the create call, so it may stand above the provider's figure by up to"
    f" {MARGIN_S:g} s of each instance's rate. It is below only by less"
    " than the cent that a provider rounds to."
)
AT_MOST_WORDS = (
    "At most: nobody saw when it ended, or that it was made at all, and its provider does not tell. So much it"
    " can have cost, and so much counts against its limit; what was billed is on the provider's own page."
)
_CENT = Decimal("0.01")


def is_charged(line: LedgerLine) -> bool:
    """Whether somebody sends a bill for it; not for a process on this computer."""
    return line.provider not in FREE_PROVIDERS


def cost(rate_usd_per_hour: Decimal, seconds: float) -> Decimal:
    return rate_usd_per_hour * Decimal(str(max(0.0, seconds))) / 3600


def line_spend(line: LedgerLine, now: float) -> Decimal:
    """Of one instance. A closed line is a receipt; an open one runs on, whatever was last written down."""
    written = Decimal(line.spend_usd)
    if line.destroyed_at is not None or line.created_at is None:
        return written
    return max(written, cost(Decimal(line.rate_usd_per_hour), now - line.created_at))


@dataclass(frozen=True)
class Bill:
    """One instance by both counts. `ours` from the create call on, so it may stand a little above theirs."""

    mark: str
    ours_usd: Decimal
    theirs_usd: Decimal
    margin_usd: Decimal

    @property
    def difference_usd(self) -> Decimal:
        return self.ours_usd - self.theirs_usd

    @property
    def is_within_margin(self) -> bool:
        """Above theirs by no more than stated; below it only by less than the cent that a provider rounds to."""
        return -_CENT < self.difference_usd <= self.margin_usd


def compare(line: LedgerLine, bills: Mapping[str, Decimal], now: float) -> Bill | None:
    """None where the provider tells no figure of its own, or nothing was ever created."""
    if line.mark not in bills or line.created_at is None:
        return None
    rate, until = Decimal(line.rate_usd_per_hour), line.destroyed_at if line.destroyed_at is not None else now
    return Bill(line.mark, cost(rate, until - line.created_at), bills[line.mark], cost(rate, MARGIN_S))


def total_spend(lines: Iterable[LedgerLine], now: float) -> Decimal:
    return sum((line_spend(line, now) for line in lines), Decimal(0))


def moment(
    share: float,
    lines: Sequence[LedgerLine],
    limit_usd: Decimal | None,
    time_limit_s: float,
    now: float,
    storage_usd_per_hour: Decimal = Decimal(0),
) -> float:
    """Unix seconds at which the guard with this share of wire/limit.py must end what still bills; infinite for never.

    Dollars of the closed lines are spent; each open one goes on at its rate, from the larger of both figures.
    """
    running = [line for line in lines if line.destroyed_at is None and line.created_at is not None]
    rate = sum((Decimal(line.rate_usd_per_hour) for line in running), storage_usd_per_hour)
    moments = [math.inf]
    for line in running:
        others = total_spend((each for each in lines if each is not line), now)
        allowed = allowed_s(Decimal(line.rate_usd_per_hour), limit_usd, others, time_limit_s)
        kept_s = reserve_s(share, allowed) if math.isfinite(allowed) else 0.0
        if limit_usd is not None and rate > 0:
            left = limit_usd - others - line_spend(line, now)
            moments.append(now + float(left / rate * 3600) - kept_s)
        if time_limit_s > 0 and line.created_at is not None:
            moments.append(line.created_at + time_limit_s - kept_s)
    return min(moments)


def worst_case(
    rate_usd_per_hour: Decimal, spend_limit_usd: Decimal, time_limit_s: float, spent_before_usd: Decimal = Decimal(0)
) -> Decimal:
    """The most that a launch can cost while one guard lives: the agent lands inside the nearer of both limits."""
    if time_limit_s <= 0:
        return spend_limit_usd
    return min(spend_limit_usd, spent_before_usd + cost(rate_usd_per_hour, time_limit_s + MARGIN_S))


def show_usd(amount: Decimal) -> str:
    """As everywhere: below a dollar with four digits, and always up."""
    return format_usd(amount)


def at_most(*lines: LedgerLine) -> str:
    """Before the dollars of these: what nobody could count is in them as the most that it can have cost."""
    return "at most " if any(line.is_at_most for line in lines) else ""


def show_spend(amount: Decimal, limit: Decimal | None) -> str:
    """`$1.83 of $12.00`."""
    return show_usd(amount) if limit is None else f"{show_usd(amount)} of {show_usd(limit)}"


def as_limit(amount: Decimal) -> str:
    """To be typed as a limit: whole cents, up."""
    return str(amount.quantize(_CENT, rounding=ROUND_CEILING))
