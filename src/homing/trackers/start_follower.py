"""Starts a follower as a separate process, once per run and tracker; one file tells it everything it needs.

$HOMING_HOME/runs/<run id>/trackers/NAME.order   what to follow and where to send it; secrets stay in the environment
                                    NAME.json    what was sent
                                    NAME.lock    held while it runs
                                    NAME.log     errors
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
    folder: str  # folder of the run's trackers, at home
    files: str  # where a tracker keeps its own files
    run_dir: str = ""  # where the metrics are: in this folder,
    store: str = ""  # or in this store
    config: dict[str, Any] = field(default_factory=dict)

    def path(self, suffix: str) -> Path:
        return Path(self.folder) / f"{self.tracker}.{suffix}"


def start(following: Following, world: World) -> bool:
    """Start a follower; return False if one is already running."""
    if is_following(following, world):
        return False
    world.mkdir(following.folder)
    world.write(following.path("order"), json.dumps(asdict(following), indent=1).encode())
    argv = [world.python(), "-m", "homing.trackers", str(following.path("order"))]
    world.spawn(argv, world.environment(), following.folder, following.path("log"))
    return True


def is_following(following: Following, world: World) -> bool:
    return world.is_locked(following.path("lock"))
