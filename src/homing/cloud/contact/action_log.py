"""The action log: records what homing did to a run automatically. Each action has a small file, created only once.

    $HOMING_HOME/runs/<run id>/actions/<key>.json

The guard, `watch` and cron may all check a run at the same moment. If an action's file already exists, another
process has reported the action. The log also outlives its writer: if a guard dies halfway through an action, the next
guard continues from the log.
"""

from __future__ import annotations

import re
from pathlib import Path

from homing.cloud.home import Home
from homing.wire import codec
from homing.wire.codec import WireError
from homing.wire.event_lines import Event

__all__ = ["count", "has", "note", "read", "when"]

_FOLDER = "actions"


def note(home: Home, run_id: str, key: str, kind: str, text: str) -> bool:
    """Record an action. Return True if this call wrote it, or False if it was already there."""
    path = _path(home, run_id, key)
    home.world.mkdir(path.parent)
    event = Event(home.world.now(), "home", kind, text)
    return home.world.create(path, codec.dumps(event).encode())


def has(home: Home, run_id: str, key: str) -> bool:
    return home.world.exists(_path(home, run_id, key))


def when(home: Home, run_id: str, key: str) -> float | None:
    found = _load(home, _path(home, run_id, key)) if has(home, run_id, key) else None
    return found.t if found is not None else None


def count(home: Home, run_id: str, kind: str) -> int:
    return sum(event.kind == kind for event in read(home, run_id))


def read(home: Home, run_id: str) -> list[Event]:
    """Return all entries, oldest first."""
    folder = home.run_dir(run_id) / _FOLDER
    if not home.world.exists(folder):
        return []
    found = [_load(home, folder / name) for name in home.world.listdir(folder) if name.endswith(".json")]
    return sorted((event for event in found if event is not None), key=lambda event: event.t)


def _load(home: Home, path: Path) -> Event | None:
    try:
        return codec.loads(Event, home.world.read(path))
    except (OSError, WireError):
        return None  # the log file is damaged, but its name still shows that the action happened


def _path(home: Home, run_id: str, key: str) -> Path:
    return home.run_dir(run_id) / _FOLDER / f"{re.sub(r'[^a-zA-Z0-9.-]+', '-', key)}.json"
