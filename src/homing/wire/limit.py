"""Who ends an instance, and when: the guards in their order before a limit. Agent, dead-man and home share this page.

0 --------------- LAND ------ KILL ------ END -------- DEAD_MAN ------- GUARD ------ PROVIDER --- limit
  train           | stop,save | push      | agent ends | dead-man ends  | home ends  | its own timer
                  |<------------------------------- reserve ------------------------------------->|

The spend limit at a rate is a number of seconds, so money and time are one line, and the nearer limit counts. Each
guard waits until the one before it, which knows more and saves more, has had its turn.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Optional

# Shares of the reserve that are left when each acts.
LAND, KILL, END, DEAD_MAN, GUARD, PROVIDER = 1.0, 0.5, 0.3, 0.2, 0.12, 0.05
STOP_GRACE_S = 120.0
PUSH_RESERVE_S = 120.0
RESERVE_FRACTION = 0.1  # never more than this of the whole, so that a small limit still trains
SMALL_RESERVE_S = 40.0  # below it the ends come earlier: to look, to kill and to start what ends billing takes seconds


def allowed_s(rate: Decimal, spend_limit: Optional[Decimal], spent_before: Decimal, time_limit_s: float) -> float:
    """Seconds from the beginning of billing to the nearer limit; infinite where there is none."""
    by_time = time_limit_s or math.inf
    if spend_limit is None or rate <= 0:
        return by_time
    return min(by_time, float(max(Decimal(0), spend_limit - spent_before) / rate * 3600))


def reserve_s(share: float, allowed: float, stop_grace_s: float = STOP_GRACE_S) -> float:
    """How long before the limit the guard with this share acts."""
    whole = min(stop_grace_s + PUSH_RESERVE_S, allowed * RESERVE_FRACTION)
    # Of a small reserve a quarter of what lies between KILL and the limit stays for the push.
    return share * (whole if share > END else max(whole, min(SMALL_RESERVE_S, 0.75 * whole * KILL / END)))
