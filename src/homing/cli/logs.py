"""`homing logs`: what trainer, agent and sync wrote."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import find_run, open_home
from homing.cli.options import Json, RunName
from homing.cloud.logs import boot_log, follow, read_log

__all__ = ["command"]


def command(
    run: RunName = None,
    program: Annotated[str, typer.Argument(metavar="[PROGRAM]", help="trainer, agent or sync.")] = "trainer",
    is_following: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    json_: Json = False,
) -> None:
    """What trainer, agent and sync wrote; -f goes on until the run ends."""
    with open_home() as home:
        row = find_run(home, run)
        if is_following:
            for line in follow(home, row, program, tell=lambda text: talk.say(f"warning: {text}")):
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


def _show(line: str) -> None:
    if talk.is_json():
        talk.emit("log/1", {"line": line})
    else:
        print(line, flush=True)
