"""`homing ssh`: a shell on a run's instance, or the command that opens one."""

from __future__ import annotations

import shlex
import subprocess
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import find_run, open_home
from homing.cli.options import Json, RunName
from homing.cloud.connect import find_login

__all__ = ["command"]


def command(
    run: RunName = None,
    words: Annotated[list[str] | None, typer.Argument(metavar="-- COMMAND", help="Run this there, and end.")] = None,
    print_: Annotated[bool, typer.Option("--print", help="Print the ssh command instead of running it.")] = False,
    json_: Json = False,
) -> None:
    """A shell on the run's instance; its host key is pinned, and another one is refused."""
    with open_home() as home:
        row = find_run(home, run)
        login = find_login(home, row)
    argv = login.shell([shlex.join(words)] if words else [])
    talk.emit("ssh/1", {"run": row.id, "instance": login.instance_id, "argv": argv})
    if talk.is_json():
        return
    if print_:
        print(shlex.join(argv))
        talk.say(f"A port of it: homing forward {row.name} 6006   Its logs: homing logs {row.name} -f")
        return
    raise typer.Exit(subprocess.run(argv, check=False).returncode)
