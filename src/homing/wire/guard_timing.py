"""Computes when each guard ends an instance before a limit. Shared by the agent, the dead-man and the user's computer.

0 --------------- LAND ------ KILL ------ END -------- DEAD_MAN ------- GUARD ------ PROVIDER --- limit
  train           | stop,save | push      | agent ends | dead-man ends  | guard ends | its own timer
                  |<------------------------------- reserve ------------------------------------->|

At a given rate, the spend limit corresponds to a number of seconds, so money and time share one axis, and the limit
that comes first applies. Each guard waits for the one before it, which has more information and can save more data."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Optional

# The fraction of the reserve that remains when each guard acts.
LAND, KILL, END, DEAD_MAN, GUARD, PROVIDER = 1.0, 0.5, 0.3, 0.2, 0.12, 0.05
STOP_GRACE_S = 120.0
PUSH_RESERVE_S = 120.0
# the reserve is at most this fraction of the total time, so that a run with a small limit still trains
RESERVE_FRACTION = 0.1
# For END and later guards, a reserve below this many seconds is raised toward it, because checking, killing and
# starting the command that ends billing take time.
SMALL_RESERVE_S = 40.0


def allowed_s(rate: Decimal, spend_limit: Optional[Decimal], spent_before: Decimal, time_limit_s: float) -> float:
    """Return the seconds from the start of billing to the limit that comes first, or infinity if there is none."""
    by_time = time_limit_s or math.inf
    if spend_limit is None or rate <= 0:
        return by_time
    return min(by_time, float(max(Decimal(0), spend_limit - spent_before) / rate * 3600))


def reserve_s(share: float, allowed: float, stop_grace_s: float = STOP_GRACE_S) -> float:
    """Return how many seconds before the limit a guard acts. `share` is the guard's fraction of the reserve."""
    whole = min(stop_grace_s + PUSH_RESERVE_S, allowed * RESERVE_FRACTION)
    # If the reserve is small, keep a quarter of the time between KILL and the limit for the push.
    return share * (whole if share > END else max(whole, min(SMALL_RESERVE_S, 0.75 * whole * KILL / END)))
