"""What a clock at home that is set does to the ages of instances: nothing.

    anchor (time of day, boot clock, boot) in the ledger -> both clocks now -> by how much the time of day was set
                                                                           -> open lines move with it

Lines hold the time of day at which billing began. When somebody sets this computer's clock, or a network does, every
open instance would look hours older or younger, and the guard would end a healthy run or leave one past its limit. The
boot clock cannot be set; it tells the difference as long as the computer has not started again in between.
"""

from __future__ import annotations

import json

from homing.cloud.home import Home
from homing.errors import HomingError
from homing.units import format_duration

__all__ = ["MOST_DRIFT_S", "elapsed_s", "follow_clock", "stamp"]

MOST_DRIFT_S = 30.0  # between the two clocks: what a time server corrects now and then is no reason to rewrite lines


def follow_clock(home: Home) -> list[str]:
    """Moves the beginnings of open lines with a clock that was set. Returns what was found, one sentence at most."""
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
        # What was made since then has the new time already: of those that were made before, none is younger than this.
        home.ledger.set_clock(before, json.dumps(now), step_s, until=now["now"] - step_s)
    except (HomingError, OSError, ValueError, KeyError, TypeError):
        return []  # a ledger that cannot be written is told by whoever needs it; a damaged anchor is made anew
    way = "forward" if step_s > 0 else "back"
    return [
        f"This computer's clock was set {way} by {format_duration(abs(step_s))}; spend and limits count on without it."
    ]


def stamp(home: Home) -> dict[str, float | str]:
    """Now, by both clocks; what `elapsed_s` reads."""
    world = home.world
    return {"now": world.now(), "boottime": world.boottime(), "boot_id": world.boot_id()}


def elapsed_s(home: Home, since: dict[str, float | str]) -> float:
    """Seconds since a stamp: by the boot clock, or by the time of day where the computer has started again."""
    now = stamp(home)
    if now["boot_id"] and now["boot_id"] == since["boot_id"]:
        return float(now["boottime"]) - float(since["boottime"])
    return float(now["now"]) - float(since["now"])
