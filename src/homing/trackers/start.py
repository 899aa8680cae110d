"""Starts a follower as a process of its own, once per run and tracker, and tells it all it needs in one file.

$HOMING_HOME/runs/<run id>/trackers/NAME.order   what to follow, whom to tell; secrets stay in the environment
                                    NAME.json    what was told
                                    NAME.lock    held while it lives
                                    NAME.log     what went wrong
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from homing.world import World

__all__ = ["Following", "is_following", "start"]


@dataclass(frozen=True)
class Following:
    tracker: str
    run_id: str
    name: str  # as the tracker shows it
    folder: str  # of the run's trackers, at home
    files: str  # where a tracker keeps files of its own
    run_dir: str = ""  # the metrics lie here,
    store: str = ""  # or there
    config: dict[str, Any] = field(default_factory=dict)

    def path(self, suffix: str) -> Path:
        return Path(self.folder) / f"{self.tracker}.{suffix}"


def start(following: Following, world: World) -> bool:
    """True if it was started, False if one is at work already."""
    if is_following(following, world):
        return False
    world.mkdir(following.folder)
    world.write(following.path("order"), json.dumps(asdict(following), indent=1).encode())
    argv = [world.python(), "-m", "homing.trackers", str(following.path("order"))]
    world.spawn(argv, world.environment(), following.folder, following.path("log"))
    return True


def is_following(following: Following, world: World) -> bool:
    return world.is_locked(following.path("lock"))
