"""How long an instance has sent no new heartbeat, by this computer's own clock.

A heartbeat carries the time of the machine that wrote it, and that clock may be minutes off: one that is behind would
look dead while it reports, one that is ahead would look alive after it died. So the guard stores, in the run's folder
at home, the last new heartbeat and when it first saw it: $HOMING_HOME/runs/<run id>/heard.json.
"""

from __future__ import annotations

import json
from typing import Any

from homing.cloud.home import Home
from homing.cloud.ledger.clock_steps import elapsed_s, stamp
from homing.wire.control_files import Heartbeat

__all__ = ["age_s", "last_word", "quiet_s"]

_FILE = "heard.json"


def quiet_s(home: Home, run_id: str, beat: Heartbeat) -> float | None:
    """Return the seconds since this heartbeat was first seen here; None if it is new. Records a new one."""
    now, word = home.world.now(), [beat.mark, beat.t]
    note = _read(home, run_id)
    if note is not None and note["word"] == word:
        seen_s = elapsed_s(home, note["seen"])
        if seen_s >= 0:  # otherwise this clock was set back while the computer was off
            return seen_s
    note = {"schema": "homing.heard/2", "word": word, "state": beat.state, "seen": stamp(home)}
    try:
        home.world.mkdir(home.run_dir(run_id))
        home.world.write(home.run_dir(run_id) / _FILE, json.dumps(note).encode())
    except OSError:
        return max(0.0, now - beat.t)  # the disk is full, so only the machine's own clock is left
    return None


def age_s(home: Home, run_id: str, beat: Heartbeat) -> float:
    """Return a heartbeat's age for display: by its own clock, corrected by what a guard of this home has seen."""
    now, note = home.world.now(), _read(home, run_id)
    said_s = max(0.0, now - beat.t)
    heartbeat_age_s = elapsed_s(home, note["seen"]) if note is not None else 0.0
    if note is None or note["word"][0] != beat.mark or heartbeat_age_s < 0:
        return said_s
    return heartbeat_age_s if note["word"][1] == beat.t else min(said_s, heartbeat_age_s)  # a newer one came after that


def last_word(home: Home, run_id: str, mark: str) -> tuple[str, float]:
    """Return the last known state and its age in seconds when the store cannot be read; ("", 0.0) if there is none."""
    note = _read(home, run_id)
    if note is None or note["word"][0] != mark:
        return "", 0.0
    return str(note["state"]), max(0.0, elapsed_s(home, note["seen"]))


def _read(home: Home, run_id: str) -> dict[str, Any] | None:
    """Return the stored note; None if missing or damaged, so that the next heartbeat counts as new."""
    try:
        note = json.loads(home.world.read(home.run_dir(run_id) / _FILE))
        mark, t = note["word"]
        seen = note["seen"]
        stamp_seen = {"now": float(seen["now"]), "boottime": float(seen["boottime"]), "boot_id": str(seen["boot_id"])}
        return {"word": [str(mark), float(t)], "state": str(note["state"]), "seen": stamp_seen}
    except (OSError, ValueError, KeyError, TypeError):
        return None
