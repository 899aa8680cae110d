"""`homing forward`: a port of a run's instance, here."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import find_run, open_home
from homing.cli.find_run import name_here
from homing.cli.options import Json, RunRequired
from homing.cli.ports import any_free, is_free
from homing.cloud.connect import Login, find_login
from homing.errors import UsageError

__all__ = ["command"]

_KNOCK_S = 20.0


def command(
    run: RunRequired,
    ports: Annotated[str, typer.Argument(metavar="PORT[:PORT]", help="Here:there; one number is both.")],
    print_: Annotated[bool, typer.Option("--print", help="Print the ssh command instead of running it.")] = False,
    json_: Json = False,
) -> None:
    """A port of the run's instance on this computer's loopback, until Ctrl-C; another one here if it is taken."""
    wanted, there = _parse(ports)
    with open_home() as home:
        row = find_run(home, run)
        login = find_login(home, row)
    here = wanted if is_free(wanted) else any_free()
    argv = login.forward(here, there)
    talk.emit("forward/1", {"run": row.id, "here": here, "there": there, "argv": argv})
    if talk.is_json():
        return
    if here != wanted:
        talk.say(f"Port {wanted} is taken on this computer, so it is {here}.")
    if print_:
        print(shlex.join(argv))
        return
    _explain_if_closed(login, there, name_here(row))
    talk.say(f"http://127.0.0.1:{here} is port {there} of {login.instance_id}. Ctrl-C ends it, the run goes on.")
    raise typer.Exit(subprocess.run(argv, check=False).returncode)


def _parse(ports: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", ports)
    numbers = [int(found[1]), int(found[2] or found[1])] if found else [0]
    if not all(1 <= number <= 65535 for number in numbers):
        raise UsageError(what=f"{ports!r} names no ports.", why="A port is 1 to 65535.", fix="homing forward RUN 6006")
    return numbers[0], numbers[1]


def _explain_if_closed(login: Login, there: int, run: str) -> None:
    """Asked once, over the same connection: a tunnel to a port where nobody listens opens and then shows nothing."""
    try:
        knock = login.shell([f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{there}'"])
        done = subprocess.run(knock, capture_output=True, timeout=_KNOCK_S, check=False)
    except subprocess.TimeoutExpired:
        return
    if done.returncode == 1:
        talk.say(
            f"warning: nothing listens on port {there} of {login.instance_id} yet. The tunnel is opened all the same;"
            f" start it there (homing ssh {run}), or see the curves without one: homing tensorboard {run}"
        )
