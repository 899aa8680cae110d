"""The time limit of a machine that cannot end its own billing.

Such a machine, done while nobody is at home, bills on until a limit ends it, and a spend limit is rather the most that
a person would pay than what the run needs. So launch gives it a time limit, as long as the plan may take with all its
doubts, unless a person named one. It is a limit like any other: the agent lands inside it, the provider's guard gets
it as a date, the worst case counts by it, and `homing limit RUN --time` changes it. Its origin in run.json says that it
was derived, so that the next attempt, on another machine, is given its own.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal

from homing.cloud.guards import can_end_itself
from homing.cloud.providers.base import Offer, Provider
from homing.cloud.timing import Timing
from homing.wire.control import Heartbeat
from homing.wire.limit import allowed_s
from homing.wire.run import Run

__all__ = ["waits_for_home", "with_time", "without_time"]

_KEY = "limits.time_s"
_ORIGIN = "derived: its machine cannot end its own billing"


def without_time(run: Run) -> Run:
    """The run as a person asked for it."""
    if run.origin.get(_KEY) != _ORIGIN:
        return run
    origin = {name: text for name, text in run.origin.items() if name != _KEY}
    return dataclasses.replace(run, limits=dataclasses.replace(run.limits, time_s=0.0), origin=origin)


def with_time(run: Run, offer: Offer, timing: Timing, spend_limit_usd: Decimal, spent_usd: Decimal) -> Run:
    """With the limit that this offer needs; as it is where a nearer one is set."""
    time_s = timing.enough_s(run)
    if run.limits.time_s or time_s >= allowed_s(offer.rate_usd_per_hour, spend_limit_usd, spent_usd, 0.0):
        return run
    limits = dataclasses.replace(run.limits, time_s=time_s)
    return dataclasses.replace(run, limits=limits, origin={**run.origin, _KEY: _ORIGIN})


def waits_for_home(provider: Provider, mark: str, beat: Heartbeat | None) -> bool:
    """It has said goodbye and cannot end its own billing: from here on every second is paid for nothing."""
    return not can_end_itself(provider) and beat is not None and beat.mark == mark and beat.state == "ended"
