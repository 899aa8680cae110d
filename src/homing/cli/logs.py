"""`homing logs`: what trainer, agent and sync wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import find_any, open_home
from homing.cli.options import Json, RunName
from homing.cli.trained_here import Trained
from homing.cli.watch_here import log_of
from homing.cloud.home import Home
from homing.cloud.logs import boot_log, follow, read_log
from homing.wire import names

__all__ = ["command"]


def command(
    run: RunName = None,
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="trainer, agent or sync.")] = "trainer",
    is_following: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    json_: Json = False,
) -> None:
    """What trainer, agent and sync wrote; -f goes on until the run ends."""

    def warn(text: str) -> None:
        talk.say(f"warning: {text}")

    with open_home() as home:
        row = find_any(home, run)
        if isinstance(row, Trained):
            is_kept = False
            for line in log_of(home, row, program, is_following=is_following, tell=warn):
                is_kept = True
                _show(line)
            if not is_kept:
                _say_none_kept(home, row)
            return
        if is_following:
            for line in follow(home, row, program, tell=warn):
                _show(line)
            return
        lines = read_log(home, row, program)
        for line in lines:
            _show(line)
        if not lines:
            talk.say(f"The {program} of {row.id} has written nothing to the store yet.")
            early = boot_log(home, row)
            if early:
                talk.say(f"What its first command wrote on the instance:\n{early.rstrip()}")


def _say_none_kept(home: Home, run: Trained) -> None:
    folder = home.run_dir(run.run)
    talk.say(f"{run.run} has no log: its trainer has said nothing yet, or it was begun by an older homing.")
    talk.say(f"Its numbers: {folder / names.METRICS}   its events: {folder / names.EVENTS}")


def _show(line: str) -> None:
    if talk.is_json():
        talk.emit("log/1", {"line": line})
    else:
        print(line, flush=True)
