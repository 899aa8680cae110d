"""Shadeform's own guard, auto_delete: the spend and the date at which Shadeform deletes an instance.

    boot.json, rate, their clock -> Thresholds -> auto_delete {spend_threshold: "3.14", date_threshold: RFC 3339}
                                               -> alert, at a share of both: sends an e-mail, deletes nothing

auto_delete acts after all other guards, but within the limit (the PROVIDER share of wire/guard_timing.py). How late it
may act is not documented. The values are read back and compared with those sent. An instance with different values
counts as unguarded.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from homing.cloud.check_numbers import MOST_USD, read_figure, read_moment
from homing.cloud.ledger import meter
from homing.errors import UsageError
from homing.wire.boot_json import Boot
from homing.wire.guard_timing import PROVIDER, allowed_s, reserve_s

__all__ = ["Thresholds", "moment_of", "thresholds_of"]

ALERT_SHARE = Decimal("0.6")
_CENT = Decimal("0.01")
# Tolerance: fractions of a second may get lost, and we know Shadeform's clock only to within a second or two.
_SAME_S = 5.0


@dataclass(frozen=True)
class Thresholds:
    """The auto_delete thresholds of one instance, in dollars and in Unix seconds by Shadeform's clock."""

    spend_usd: Decimal
    date: float
    began: float

    def auto_delete(self) -> dict[str, str]:
        return {"spend_threshold": str(self.spend_usd), "date_threshold": _written(self.date)}

    def alert(self) -> dict[str, str]:
        spend = max(_CENT, _cents(self.spend_usd * ALERT_SHARE))
        date = self.began + float(ALERT_SHARE) * (self.date - self.began)
        return {"spend_threshold": str(spend), "date_threshold": _written(date)}

    def by(self, date: float) -> Thresholds:
        """Return a copy of these thresholds whose date is no later than `date`."""
        return dataclasses.replace(self, date=min(self.date, date))

    def why_not(self, shown: Any, *, is_earlier_fine: bool = False) -> str:
        """Return how `shown`, the thresholds that Shadeform reports, differ from these; "" if they do not."""
        shown = shown if isinstance(shown, dict) else {}
        spend, date = _dollars(shown.get("spend_threshold")), moment_of(shown.get("date_threshold"))
        if spend != self.spend_usd:
            return f"spend_threshold is {shown.get('spend_threshold')!r}, expected {str(self.spend_usd)!r}"
        is_late = date is None or date > self.date + _SAME_S
        if is_late or (not is_earlier_fine and date is not None and date < self.date - _SAME_S):
            return f"date_threshold is {shown.get('date_threshold')!r}, expected {_written(self.date)!r}"
        return ""


def thresholds_of(boot: Boot, rate_usd_per_hour: Decimal, skew_s: float) -> Thresholds:
    """Return the thresholds for a launch.

    At the given rate, both thresholds are reached at the same time, so either of them enforces the limit.
    """
    assert boot.spend_limit_usd is not None, "every rental has a spend limit"
    limit, before = Decimal(boot.spend_limit_usd), Decimal(boot.spent_before_usd)
    allowed = allowed_s(rate_usd_per_hour, limit, before, boot.time_limit_s)
    return thresholds(rate_usd_per_hour, limit - before, boot.started_at + skew_s, boot.started_at + skew_s + allowed)


def thresholds(rate_usd_per_hour: Decimal, left_usd: Decimal, began: float, until: float) -> Thresholds:
    """Return thresholds that are earlier than the limits by the share reserved for the provider's guard."""
    allowed = min(allowed_s(rate_usd_per_hour, left_usd, Decimal(0), 0.0), until - began)
    kept_s = reserve_s(PROVIDER, allowed)
    # At a low rate, an instance may take a minute to cost a cent, so rounding down would make this guard act before the
    # guards that can still save work. Round up instead, but not over the limit. The date is exact to the second.
    spend = (left_usd - meter.cost(rate_usd_per_hour, kept_s)).quantize(_CENT, rounding=ROUND_CEILING)
    spend = min(spend, _cents(left_usd))
    if spend < _CENT:
        raise UsageError(
            what=f"{meter.show_usd(left_usd)} is too small for a Shadeform spend limit.",
            why="Shadeform counts in whole cents, and the limit would be less than one cent.",
            fix="Raise --spend-limit.",
        )
    return Thresholds(spend, math.floor(began + allowed - kept_s), began)


def moment_of(text: Any) -> float | None:
    """Return an RFC 3339 time as Unix seconds, or None if `text` is not a valid time."""
    return read_moment(text) if isinstance(text, str) else None


def _written(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cents(amount: Decimal) -> Decimal:
    return amount.quantize(_CENT, rounding=ROUND_FLOOR)


def _dollars(text: Any) -> Decimal | None:
    return read_figure(text, MOST_USD) if isinstance(text, str) else None
