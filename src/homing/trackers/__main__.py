"""Runs a follower with `python -m homing.trackers ORDER`, until the run has ended and everything has been sent."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

from homing.trackers.follower import EVERY_S, FolderSource, Follower, Following, Source, StoreSource
from homing.trackers.sinks import What
from homing.world import World

__all__ = ["main"]


def main(order: str, every_s: float = EVERY_S) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    world = World()
    following = Following(**json.loads(world.read(order)))
    if not world.lock(following.path("lock")):
        return 0  # another follower is already running
    source: Source = StoreSource(following.store, following.run_id, world)
    if following.run_dir:
        source = FolderSource(Path(following.run_dir), world)
    what = What(
        run_id=following.run_id,
        name=following.name,
        folder=Path(following.files),
        config=following.config,
        environment=world.environment(),
    )
    follower = Follower(following.tracker, what, source, world, following.path("json"))
    state = follower.follow(every_s)
    logging.getLogger(__name__).info("sent %s lines; the run is %s", len(follower.sent), state or "silent")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
