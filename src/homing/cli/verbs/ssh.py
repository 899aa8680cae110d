"""`homing ssh`: open a shell on a run's instance, or print the ssh command."""

from __future__ import annotations

import shlex
import subprocess
from typing import Annotated

import typer

from homing.api.lookup.find_runs import find_run, open_home
from homing.cli import output
from homing.cli.options import Json, RunName
from homing.cloud.contact.ssh_access import find_login

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
    with open_home() as home:
        row = find_run(home, run)
        login = find_login(home, row)
    argv = login.shell([shlex.join(words)] if words else [])
    output.emit("ssh/1", {"run": row.id, "instance": login.instance_id, "argv": argv})
    if output.is_json():
        return
    if print_:
        print(shlex.join(argv))
        output.say(f"Forward a port: homing forward {row.name} 6006   Logs: homing logs {row.name} -f")
        return
    raise typer.Exit(subprocess.run(argv, check=False).returncode)
