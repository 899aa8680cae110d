"""The time limit of a machine that cannot end its own billing.

If such a machine finishes while no guard runs at home, it bills until a limit ends it, and a spend limit is the most a
person would pay rather than what the run needs. So launch gives it a time limit, as long as the plan may take in the
pessimistic case, unless a person set one. It is a limit like any other: the agent lands inside it, the provider's guard
gets it as a date, the worst case uses it, and `homing limit RUN --time` changes it. Its origin in run.json says that it
was derived, so that the next attempt, on another machine, gets its own.
"""

from __future__ import annotations

import dataclasses
from decimal import Decimal

from homing.cloud.plan.timing import Timing
from homing.cloud.providers.base import Offer, Provider, can_end_itself
from homing.wire.control_files import Heartbeat
from homing.wire.guard_order import allowed_s
from homing.wire.run_json import Run

__all__ = ["waits_for_home", "with_time", "without_time"]

_KEY = "limits.time_s"
_ORIGIN = "derived: the instance cannot end its own billing"


def without_time(run: Run) -> Run:
    """Return the run without a derived time limit, as the person asked for it."""
    if run.origin.get(_KEY) != _ORIGIN:
        return run
    origin = {name: text for name, text in run.origin.items() if name != _KEY}
    return dataclasses.replace(run, limits=dataclasses.replace(run.limits, time_s=0.0), origin=origin)


def with_time(run: Run, offer: Offer, timing: Timing, spend_limit_usd: Decimal, spent_usd: Decimal) -> Run:
    """Return the run with the time limit that this offer needs; unchanged if a nearer limit is set."""
    time_s = timing.enough_s(run)
    if run.limits.time_s or time_s >= allowed_s(offer.rate_usd_per_hour, spend_limit_usd, spent_usd, 0.0):
        return run
    limits = dataclasses.replace(run.limits, time_s=time_s)
    return dataclasses.replace(run, limits=limits, origin={**run.origin, _KEY: _ORIGIN})


def waits_for_home(provider: Provider, mark: str, beat: Heartbeat | None) -> bool:
    """Return whether the agent is finished but cannot end its own billing: each second now is wasted money."""
    return not can_end_itself(provider) and beat is not None and beat.mark == mark and beat.state == "ended"
