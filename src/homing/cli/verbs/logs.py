"""`homing logs`: print the log of the trainer, the agent or the sync process."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.runs.read_logs import read_logs
from homing.cli import output
from homing.cli.options import Json, RunName

__all__ = ["command"]


def command(
    run: RunName = None,
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="Log to show: trainer, agent or sync.")] = "trainer",
    is_following: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")] = False,
    json_: Json = False,
) -> None:
    """Print the log of the trainer, the agent or the sync process; -f follows it until the run ends."""
    for line in read_logs(run, program, is_following=is_following):
        if output.is_json():
            output.emit("log/1", {"line": line})
        else:
            print(line, flush=True)
