"""`homing tensorboard`: a run's curves in TensorBoard, from the store or a folder here, on loopback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import find_any, open_home
from homing.cli.options import Json, RunName
from homing.cli.ports import any_free, is_free
from homing.cli.tracking import begin, following
from homing.cli.trained_here import Trained
from homing.cloud.home import Home
from homing.errors import UsageError
from homing.trackers.base import What, check_tracker
from homing.trackers.follow import FolderSource, Follower, Source, StoreSource
from homing.trackers.start import Following, is_following

__all__ = ["command"]


def command(
    run: RunName = None,
    port: Annotated[int, typer.Option("--port", help="Here; another one if it is taken.")] = 6006,
    no_serve: Annotated[bool, typer.Option("--no-serve", help="Only write the files.")] = False,
    json_: Json = False,
) -> None:
    """Loss, speed and validation as TensorBoard shows them, live or after the end. Reads the store; needs no tunnel."""
    check_tracker("tensorboard", verb="tensorboard")
    with open_home() as home:
        found, is_live = _find(home, run)
        folder = Path(found.files) / "tensorboard" / found.run_id
        if not is_following(found, home.world):
            num_told = _catch_up(found, home)
            if not num_told and not is_live:
                raise UsageError(
                    what=f"{found.run_id} has no metrics.",
                    why="It never took a step.",
                    fix="homing logs " + found.run_id,
                )
            if is_live:
                begin(found, home.world)
    here = port if is_free(port) else any_free()
    url = f"http://127.0.0.1:{here}"
    talk.emit("tensorboard/1", {"run": found.run_id, "folder": str(folder), "url": None if no_serve else url})
    if no_serve or talk.is_json():
        talk.say(f"Written: {folder}")
        return
    if here != port:
        talk.say(f"Port {port} is taken on this computer, so it is {here}.")
    talk.say(f"{url} shows {found.run_id}. Ctrl-C ends it, the run goes on.")
    argv = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    raise typer.Exit(subprocess.run([*argv, "--port", str(here)], check=False).returncode)


def _find(home: Home, name: str | None) -> tuple[Following, bool]:
    """A launched run by the ledger, with its store; one that `homing train` made by its folder here."""
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
            what=f"The curves of {each.run_id} cannot be read or written now.",
            why=f"Read from {each.run_dir or each.store}, written below {each.files}.",
            fix="homing doctor   or with more words: homing tensorboard -v",
        )
    if follower.sink is not None:
        follower.sink.close("")
    return len(follower.told)
