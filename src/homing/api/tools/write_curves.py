"""Write a run's curves for TensorBoard, from the store or a local folder. Implements `homing tensorboard`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from homing.api.lookup.find_runs import find_any, open_home
from homing.api.lookup.local_runs import Trained
from homing.api.token_and_port import any_free, is_free
from homing.api.tracking import begin, following
from homing.cloud.home import Home
from homing.errors import UsageError
from homing.trackers.follower import FolderSource, Follower, Following, Source, StoreSource, is_following
from homing.trackers.sinks import What, check_tracker

__all__ = ["Curves", "write_curves"]


@dataclass(frozen=True)
class Curves:
    run: str
    folder: Path
    port: int  # free on this computer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def argv(self) -> list[str]:
        """The command that shows the curves at `url` until the user stops it."""
        folder, port = str(self.folder), str(self.port)
        return [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--host", "127.0.0.1", "--port", port]


def write_curves(run: str | None = None, *, port: int = 6006) -> Curves:
    """Write the curves of a run: loss, speed and validation. Those of a live run are updated in the background.

    Reads the store, so it needs no tunnel. `port`: the port for TensorBoard; if it is in use, another one is chosen.
    """
    check_tracker("tensorboard", verb="tensorboard")
    with open_home() as home:
        found, is_live = _find(home, run)
        folder = Path(found.files) / "tensorboard" / found.run_id
        if not is_following(found, home.world):
            num_written = _catch_up(found, home)
            if not num_written and not is_live:
                raise UsageError(
                    what=f"{found.run_id} has no metrics.",
                    why="It has not completed a step yet.",
                    fix="homing logs " + found.run_id,
                )
            if is_live:
                begin(found, home.world)
    return Curves(found.run_id, folder, port if is_free(port) else any_free())


def _find(home: Home, name: str | None) -> tuple[Following, bool]:
    """Find a launched run in the ledger, with its store, or a run of `homing train`, with its folder."""
    row = find_any(home, name)
    if isinstance(row, Trained):
        folder = str(home.run_dir(row.run))
        return following("tensorboard", home.path, row.run, None, run_dir=folder), row.is_live
    return following("tensorboard", home.path, row.id, None, store=row.store), row.is_live


def _catch_up(each: Following, home: Home) -> int:
    source: Source = StoreSource(each.store, each.run_id, home.world)
    if each.run_dir:
        source = FolderSource(Path(each.run_dir), home.world)
    what = What(each.run_id, each.name, Path(each.files), environment=home.world.environment())
    follower = Follower("tensorboard", what, source, home.world, each.path("json"))
    if not follower.catch_up():
        raise UsageError(
            what=f"Cannot read or write the curves of {each.run_id}.",
            why=f"They are read from {each.run_dir or each.store} and written to {each.files}.",
            fix="homing doctor   or with details: homing tensorboard -v",
        )
    if follower.sink is not None:
        follower.sink.close("")
    return len(follower.sent)
