"""`homing ssh`: open a shell on a run's instance, or print the ssh command."""

from __future__ import annotations

import shlex
import subprocess
from typing import Annotated

import typer

from homing.api.runs.connect import open_shell
from homing.cli import output
from homing.cli.options import Json, RunName

__all__ = ["command"]


def command(
    run: RunName = None,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND", help="Run this command on the instance and exit.")
    ] = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the ssh command instead of running it.")] = False,
    json_: Json = False,
) -> None:
    """Open a shell on the run's instance. Its host key is pinned; a connection with any other key is refused."""
    shell = open_shell(run, command=words or ())
    output.emit("ssh/1", shell.to_dict())
    if output.is_json():
        return
    if print_:
        print(shlex.join(shell.argv))
        output.say(f"Forward a port: homing forward {shell.run.name} 6006   Logs: homing logs {shell.run.name} -f")
        return
    raise typer.Exit(subprocess.run(shell.argv, check=False).returncode)
