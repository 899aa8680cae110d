"""Keep the ages of instances correct when this computer's clock is set.

    anchor (time of day, boot clock, boot id) in the ledger -> compare both clocks now -> step of the time of day
                                                                                       -> shift the open lines by it

Lines hold the time of day at which billing began. When a person or a time server sets this computer's clock, every open
instance would look hours older or younger, and the guard would end a healthy run or leave one past its limit. The boot
clock cannot be set; it reveals the step as long as the computer has not rebooted in between.
"""

from __future__ import annotations

import json

from homing.cloud.home import Home
from homing.errors import HomingError
from homing.units import format_duration

__all__ = ["MOST_DRIFT_S", "elapsed_s", "follow_clock", "stamp"]

MOST_DRIFT_S = 30.0  # between the two clocks: small corrections by a time server are no reason to rewrite lines


def follow_clock(home: Home) -> list[str]:
    """Shift the start of open lines if the clock was set. Return a sentence that says so, or nothing."""
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
        # Lines created after the step already have the new time; lines created before it all start before this moment.
        home.ledger.set_clock(before, json.dumps(now), step_s, until=now["now"] - step_s)
    except (HomingError, OSError, ValueError, KeyError, TypeError):
        return []  # the code that needs the ledger reports if it cannot be written; a damaged anchor is replaced
    way = "forward" if step_s > 0 else "back"
    return [
        f"This computer's clock was set {way} by {format_duration(abs(step_s))}; spend and limits ignore that change."
    ]


def stamp(home: Home) -> dict[str, float | str]:
    """Return the current time by both clocks, as input for `elapsed_s`."""
    world = home.world
    return {"now": world.now(), "boottime": world.boottime(), "boot_id": world.boot_id()}


def elapsed_s(home: Home, since: dict[str, float | str]) -> float:
    """Return the seconds since a stamp: by the boot clock, or by the time of day if the computer has rebooted."""
    now = stamp(home)
    if now["boot_id"] and now["boot_id"] == since["boot_id"]:
        return float(now["boottime"]) - float(since["boottime"])
    return float(now["now"]) - float(since["now"])
