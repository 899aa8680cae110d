"""Computes the spend so far and the worst case, and keeps ages correct when this computer's clock is changed.

    our figure             rate x time, from the create call until the provider no longer lists the instance
    the provider's figure  what the provider itself reports, if anything

The spend is the larger of the two, added up over all attempts of a run. Amounts are exact Decimals, rounded up only for
display, so that the displayed figure is never less than the cost.

    anchor (time of day, boot clock, boot id) in the ledger -> compare both clocks now -> step of the time of day
                                                                                       -> shift the open lines by it

Lines contain the time of day at which billing began. If a person or a time server changed this computer's clock, every
open instance would look hours older or younger, and the guard would end a healthy run or leave one past its limit. The
boot clock cannot be set, so it reveals such a change as long as the computer has not rebooted in between.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine
from homing.errors import HomingError
from homing.units import format_duration, format_usd
from homing.wire.guard_timing import allowed_s, reserve_s

__all__ = [
    "AT_MOST_WORDS",
    "FREE_PROVIDERS",
    "MARGIN_S",
    "MARGIN_WORDS",
    "MOST_DRIFT_S",
    "Bill",
    "as_limit",
    "at_most",
    "billing_lines",
    "billing_word",
    "compare",
    "cost",
    "elapsed_s",
    "follow_clock",
    "is_charged",
    "line_spend",
    "moment",
    "show_spend",
    "show_usd",
    "stamp",
    "total_spend",
    "worst_case",
]

# These providers have a made-up rate, so that a run can be tried from start to end. No one is billed.
FREE_PROVIDERS = frozenset({"local"})

# The time from the agent's decision to end the instance until billing stops: the last push, the request and its
# retries. It is also how much longer our figure may count than the provider's, because ours starts with our create
# call, before the start time that the provider records.
MARGIN_S = 180.0
MARGIN_WORDS = (
    "Our figure counts from the create call, so it may exceed the provider's by up to"
    f" {MARGIN_S:g} s of each instance's rate. It is never lower by more"
    " than the cent to which a provider rounds."
)
AT_MOST_WORDS = (
    "At most: neither homing nor the provider knows when the instance ended, or whether it was created at all."
    " The amount is the most that the instance can have cost, and it counts against the run's limit;"
    " the provider's page shows what was billed."
)
_CENT = Decimal("0.01")
MOST_DRIFT_S = 30.0  # ignore smaller differences between the clocks, such as small corrections by NTP


def is_charged(line: LedgerLine) -> bool:
    """Return True if the instance costs real money. A process on this computer does not."""
    return line.provider not in FREE_PROVIDERS


def billing_word(line: LedgerLine) -> str:
    """Return whether the instance bills: "yes", "no" or "maybe". A process on this computer bills only with a rate."""
    return line.billing if is_charged(line) or Decimal(line.rate_usd_per_hour) else "no"


def cost(rate_usd_per_hour: Decimal, seconds: float) -> Decimal:
    return rate_usd_per_hour * Decimal(str(max(0.0, seconds))) / 3600


def line_spend(line: LedgerLine, now: float) -> Decimal:
    """Return the spend of one instance: the amount in a closed line, or what an open line has accrued until `now`."""
    written = Decimal(line.spend_usd)
    if line.destroyed_at is not None or line.created_at is None:
        return written
    return max(written, cost(Decimal(line.rate_usd_per_hour), now - line.created_at))


@dataclass(frozen=True)
class Bill:
    """The cost of one instance, by our figure and by the provider's. Ours starts earlier and may be slightly higher."""

    mark: str
    ours_usd: Decimal
    provider_usd: Decimal
    margin_usd: Decimal

    @property
    def difference_usd(self) -> Decimal:
        return self.ours_usd - self.provider_usd

    @property
    def is_within_margin(self) -> bool:
        """Return True if our figure exceeds the provider's by at most the margin, or is less than a cent below it."""
        return -_CENT < self.difference_usd <= self.margin_usd


def compare(line: LedgerLine, bills: Mapping[str, Decimal], now: float) -> Bill | None:
    """Compare our cost figure with the provider's. Return None if theirs is unknown or nothing was created."""
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
    """Return when (Unix seconds) the guard with this share (see wire/guard_timing.py) must act; infinity means never.

    A closed line counts at its final cost. An open line has cost `line_spend` so far and keeps accruing at its rate.
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
    """Return the most that a launch can cost if a guard is alive to enforce whichever limit is reached first."""
    if time_limit_s <= 0:
        return spend_limit_usd
    return min(spend_limit_usd, spent_before_usd + cost(rate_usd_per_hour, time_limit_s + MARGIN_S))


def show_usd(amount: Decimal) -> str:
    """Format dollars for display: four decimals below a dollar, always rounded up."""
    return format_usd(amount)


def at_most(*lines: LedgerLine) -> str:
    """Return the prefix for the total of these lines: "at most " if it includes an upper bound, otherwise ""."""
    return "at most " if any(line.is_at_most for line in lines) else ""


def show_spend(amount: Decimal, limit: Decimal | None) -> str:
    """Format spend and limit, as in `$1.83 of $12.00`."""
    return show_usd(amount) if limit is None else f"{show_usd(amount)} of {show_usd(limit)}"


def as_limit(amount: Decimal) -> str:
    """Format an amount as a limit that the user can type: whole cents, rounded up."""
    return str(amount.quantize(_CENT, rounding=ROUND_CEILING))


def billing_lines(lines: list[LedgerLine]) -> list[LedgerLine]:
    """Return the lines that may cost money: a create call has begun, and the instance is not confirmed gone."""
    return [line for line in lines if line.destroyed_at is None and line.created_at is not None]


# --- changes of this computer's clock ---


def follow_clock(home: Home) -> list[str]:
    """Shift the start of open lines if the clock was changed. Return a list with a sentence about it, or []."""
    now = stamp(home)
    try:
        before = home.ledger.clock()
        last = json.loads(before) if before else None
        if last is None or last["boot_id"] != now["boot_id"] or not now["boot_id"]:
            home.ledger.set_clock(before, json.dumps(now), 0.0, until=0.0)
            return []
        step_s = (now["now"] - last["now"]) - (now["boottime"] - last["boottime"])
        if abs(step_s) <= MOST_DRIFT_S:
            return []
        # Lines created since the clock change already use the new time. All earlier lines start before `until`.
        home.ledger.set_clock(before, json.dumps(now), step_s, until=now["now"] - step_s)
    except (HomingError, OSError, ValueError, KeyError, TypeError):
        return []  # callers that must write to the ledger report write errors themselves
    way = "forward" if step_s > 0 else "back"
    return [
        f"This computer's clock was set {way} by {format_duration(abs(step_s))}; spend and limits ignore that change."
    ]


def stamp(home: Home) -> dict[str, float | str]:
    """Return the current time of day and boot clock, for a later call to `elapsed_s`."""
    world = home.world
    return {"now": world.now(), "boottime": world.boottime(), "boot_id": world.boot_id()}


def elapsed_s(home: Home, since: dict[str, float | str]) -> float:
    """Return the seconds since a `stamp`, by the boot clock or, if the computer has rebooted since, the time of day."""
    now = stamp(home)
    if now["boot_id"] and now["boot_id"] == since["boot_id"]:
        return float(now["boottime"]) - float(since["boottime"])
    return float(now["now"]) - float(since["now"])
