"""How long a machine has said nothing new, by this computer's own clock.

A heartbeat carries the time of the machine that wrote it, and that clock may be minutes off: one that is behind would
look dead while it speaks, one that is ahead would look alive after it died. So the guard keeps, in the run's folder at
home, the last heartbeat that was new to it and when that was: $HOMING_HOME/runs/<run id>/heard.json.
"""

from __future__ import annotations

import json
from typing import Any

from homing.cloud.clock import elapsed_s, stamp
from homing.cloud.home import Home
from homing.wire.control import Heartbeat

__all__ = ["age_s", "last_word", "quiet_s"]

_FILE = "heard.json"


def quiet_s(home: Home, run_id: str, beat: Heartbeat) -> float | None:
    """Since this heartbeat was first seen here; None for one that is new. A guard that does not ask learns nothing."""
    now, word = home.world.now(), [beat.mark, beat.t]
    note = _read(home, run_id)
    if note is not None and note["word"] == word:
        seen_s = elapsed_s(home, note["seen"])
        if seen_s >= 0:  # else this clock was set back while the computer was off
            return seen_s
    note = {"schema": "homing.heard/2", "word": word, "state": beat.state, "seen": stamp(home)}
    try:
        home.world.mkdir(home.run_dir(run_id))
        home.world.write(home.run_dir(run_id) / _FILE, json.dumps(note).encode())
    except OSError:
        return max(0.0, now - beat.t)  # a full disk learns nothing; then the machine's own word is all there is
    return None


def age_s(home: Home, run_id: str, beat: Heartbeat) -> float:
    """How old it is for a person to read: by its own clock, corrected by what a guard of this home has heard."""
    now, note = home.world.now(), _read(home, run_id)
    said_s = max(0.0, now - beat.t)
    heard_s = elapsed_s(home, note["seen"]) if note is not None else 0.0
    if note is None or note["word"][0] != beat.mark or heard_s < 0:
        return said_s
    return heard_s if note["word"][1] == beat.t else min(said_s, heard_s)  # a newer one came after that


def last_word(home: Home, run_id: str, mark: str) -> tuple[str, float]:
    """State and seconds since, for a guard that cannot read the store now; ("", 0.0) where nothing was ever heard."""
    note = _read(home, run_id)
    if note is None or note["word"][0] != mark:
        return "", 0.0
    return str(note["state"]), max(0.0, elapsed_s(home, note["seen"]))


def _read(home: Home, run_id: str) -> dict[str, Any] | None:
    """None where there is none, and for one that is damaged: then what comes next is new."""
    try:
        note = json.loads(home.world.read(home.run_dir(run_id) / _FILE))
        mark, t = note["word"]
        seen = note["seen"]
        told = {"now": float(seen["now"]), "boottime": float(seen["boottime"]), "boot_id": str(seen["boot_id"])}
        return {"word": [str(mark), float(t)], "state": str(note["state"]), "seen": told}
    except (OSError, ValueError, KeyError, TypeError):
        return None
