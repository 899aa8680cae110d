"""Shadeform's own guard: the spend and the time at which it deletes an instance by itself, in its format.

    boot.json, rate, their clock -> Thresholds -> auto_delete {spend_threshold: "3.14", date_threshold: RFC 3339}
                                               -> alert, the same at a share of both: an e-mail, nothing is deleted

It acts last of all guards, but within the limit (the PROVIDER share of wire/guard_order.py). How late it may act is not
documented. The values are read back and compared with those sent. An instance with different values counts as
unguarded.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from homing.cloud.figures import MOST_USD, read_figure, read_moment
from homing.cloud.ledger import meter
from homing.errors import UsageError
from homing.wire.boot_json import Boot
from homing.wire.guard_order import PROVIDER, allowed_s, reserve_s

__all__ = ["Thresholds", "moment_of", "thresholds_of"]

ALERT_SHARE = Decimal("0.6")
_CENT = Decimal("0.01")
_SAME_S = 5.0  # a time may come back without its fraction, and Shadeform's clock is known only to a second or two


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of one instance, in dollars and in Unix seconds by Shadeform's clock."""

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
        """Return the same thresholds with the date no later than `date`."""
        return dataclasses.replace(self, date=min(self.date, date))

    def why_not(self, shown: Any, *, is_earlier_fine: bool = False) -> str:
        """Return how the guard on the instance differs from this one, or "" if it does not."""
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

    Spend and date express the same moment in two ways, so either one enforces the limit.
    """
    assert boot.spend_limit_usd is not None, "every rental has a spend limit"
    limit, before = Decimal(boot.spend_limit_usd), Decimal(boot.spent_before_usd)
    allowed = allowed_s(rate_usd_per_hour, limit, before, boot.time_limit_s)
    return thresholds(rate_usd_per_hour, limit - before, boot.started_at + skew_s, boot.started_at + skew_s + allowed)


def thresholds(rate_usd_per_hour: Decimal, left_usd: Decimal, began: float, until: float) -> Thresholds:
    """Return thresholds below the spend and time limits by the share reserved for the provider's guard."""
    allowed = min(allowed_s(rate_usd_per_hour, left_usd, Decimal(0), 0.0), until - began)
    kept_s = reserve_s(PROVIDER, allowed)
    # At a low rate, a cent is worth a minute, so rounding down would make this guard act before those that can still
    # save work. Round up instead, but not over the limit. The date is exact to the second.
    spend = (left_usd - meter.cost(rate_usd_per_hour, kept_s)).quantize(_CENT, rounding=ROUND_CEILING)
    spend = min(spend, _cents(left_usd))
    if spend < _CENT:
        raise UsageError(
            what=f"{meter.show_usd(left_usd)} is too small for a Shadeform spend limit.",
            why="Shadeform counts in cents, and less than one cent would be left.",
            fix="Raise --spend-limit.",
        )
    return Thresholds(spend, math.floor(began + allowed - kept_s), began)


def moment_of(text: Any) -> float | None:
    """Return an RFC 3339 time as Unix seconds, or None if it is not one."""
    return read_moment(text) if isinstance(text, str) else None


def _written(moment: float) -> str:
    return datetime.datetime.fromtimestamp(moment, tz=datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cents(amount: Decimal) -> Decimal:
    return amount.quantize(_CENT, rounding=ROUND_FLOOR)


def _dollars(text: Any) -> Decimal | None:
    return read_figure(text, MOST_USD) if isinstance(text, str) else None
