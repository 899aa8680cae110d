"""`homing tensorboard`: show a run's curves in TensorBoard on loopback, from the store or a local folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from homing.api.lookup.find_runs import find_any, open_home
from homing.api.lookup.local_runs import Trained
from homing.api.pages.local_server import any_free, is_free
from homing.api.tracking import begin, following
from homing.cli import output
from homing.cli.options import Json, RunName
from homing.cloud.home import Home
from homing.errors import UsageError
from homing.trackers.follower import FolderSource, Follower, Following, Source, StoreSource, is_following
from homing.trackers.tracker import What, check_tracker

__all__ = ["command"]


def command(
    run: RunName = None,
    port: Annotated[int, typer.Option("--port", help="Local port. If it is in use, another one is chosen.")] = 6006,
    no_serve: Annotated[
        bool, typer.Option("--no-serve", help="Write the files only; do not start TensorBoard.")
    ] = False,
    json_: Json = False,
) -> None:
    """Show a run's loss, speed and validation in TensorBoard, during the run or after it.

    Reads the store, so it needs no tunnel.
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
                    why="It has not completed a step.",
                    fix="homing logs " + found.run_id,
                )
            if is_live:
                begin(found, home.world)
    here = port if is_free(port) else any_free()
    url = f"http://127.0.0.1:{here}"
    output.emit("tensorboard/1", {"run": found.run_id, "folder": str(folder), "url": None if no_serve else url})
    if no_serve or output.is_json():
        output.say(f"Written: {folder}")
        return
    if here != port:
        output.say(f"Port {port} is in use; using {here}.")
    output.say(f"{url} shows {found.run_id}. Ctrl-C stops it; the run continues.")
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    raise typer.Exit(subprocess.run([*argv, "--port", str(here)], check=False).returncode)


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
            why=f"Read from {each.run_dir or each.store}, written to {each.files}.",
            fix="homing doctor   or with details: homing tensorboard -v",
        )
    if follower.sink is not None:
        follower.sink.close("")
    return len(follower.sent)
