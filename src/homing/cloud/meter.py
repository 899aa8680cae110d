"""Dollars so far, and the worst case.

    ours      rate x time from the create call to the provider's word that it is gone
    theirs    the provider's own figure, where it has one
    the meter shows the larger, over all attempts of a run

Exact Decimal inside; rounded up to the cent only for show, so that nobody reads less than they pay.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import ROUND_CEILING, Decimal

from homing.cloud.ledger import LedgerLine

__all__ = ["MARGIN_S", "cost", "line_spend", "minimum_spend", "show_usd", "total_spend", "worst_case"]

# From the moment the agent decides to end until billing has ended: the last push, the call, its retries.
# Also by how much our figure may stand above the provider's: from the create call to what it calls created.
MARGIN_S = 180.0
_CENT = Decimal("0.01")


def cost(rate_usd_per_hour: Decimal, seconds: float) -> Decimal:
    return rate_usd_per_hour * Decimal(str(max(0.0, seconds))) / 3600


def line_spend(line: LedgerLine, now: float) -> Decimal:
    """Of one instance. A closed line is a receipt; an open one runs on, whatever was last written down."""
    written = Decimal(line.spend_usd)
    if line.destroyed_at is not None or line.created_at is None:
        return written
    return max(written, cost(Decimal(line.rate_usd_per_hour), now - line.created_at))


def total_spend(lines: Iterable[LedgerLine], now: float) -> Decimal:
    return sum((line_spend(line, now) for line in lines), Decimal(0))


def worst_case(
    rate_usd_per_hour: Decimal, spend_limit_usd: Decimal, time_limit_s: float, spent_before_usd: Decimal = Decimal(0)
) -> Decimal:
    """The most that a launch can cost while one guard lives: the agent lands inside the nearer of both limits."""
    if time_limit_s <= 0:
        return spend_limit_usd
    return min(spend_limit_usd, spent_before_usd + cost(rate_usd_per_hour, time_limit_s + MARGIN_S))


def minimum_spend(rate_usd_per_hour: Decimal, boot_s: float) -> Decimal:
    """Below this a launch could only boot and come home again: nothing would be trained."""
    return cost(rate_usd_per_hour, boot_s + MARGIN_S)


def show_usd(amount: Decimal) -> str:
    """Up to the cent; below one cent the figure itself, because $0.01 for nothing would be a lie too."""
    if 0 < amount < _CENT:
        return f"${amount:.4f}"
    return f"${amount.quantize(_CENT, rounding=ROUND_CEILING):,}"
