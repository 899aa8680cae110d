"""How long an instance has billed, agreed between two machines whose clocks may not agree.

The agent counts from the beginning that boot.json names, by its own clock. Where that clock is behind home's, the time
that booting took would be missing from its count, and the limit would come too late by as much. Home has counted that
time on a clock that cannot be set, so it says so with the first heartbeat, through the same request that brings limits.
"""

from __future__ import annotations

from decimal import Decimal

from homing.cloud.home import Home
from homing.cloud.wish import ask, last_asked
from homing.store import Store
from homing.wire.boot import Boot
from homing.wire.control import Heartbeat

__all__ = ["tell_age"]

_ON_ITS_WAY_S = 2.0  # beside the pause between two heartbeats: how old one may be when it is first seen


def tell_age(home: Home, store: Store, boot: Boot, beat: Heartbeat, began: float) -> bool:
    """Whether the agent had to be told. `began` is the boot clock at the create call."""
    world, rate = home.world, Decimal(boot.rate_usd_per_hour)
    if rate <= 0:
        return False
    age_s = world.boottime() - began
    counted_s = float((Decimal(beat.spend_usd) - Decimal(boot.spent_before_usd)) / rate * 3600)
    if age_s - counted_s <= boot.heartbeat_s + _ON_ITS_WAY_S:
        return False
    # A little more than was counted: it takes a while until the agent reads it, and too early costs less than too late.
    last = last_asked(home, boot.run_id, store)
    why = (last.reason if last else "") or "The clocks here and there disagree; home has counted how long it bills"
    ask(home, boot.run_id, store, age_s=age_s + boot.heartbeat_s + _ON_ITS_WAY_S, reason=why)
    return True
