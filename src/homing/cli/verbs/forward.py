"""`homing forward`: forward a port of a run's instance to this computer."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import Annotated

import typer

from homing.api.runs.connect import forward_port
from homing.cli import output
from homing.cli.options import Json, RunRequired
from homing.cloud.contact.ssh_access import Login
from homing.errors import UsageError

__all__ = ["command"]

_KNOCK_S = 20.0


def command(
    run: RunRequired,
    ports: Annotated[str, typer.Argument(metavar="PORT[:PORT]", help="Local port, or local:remote.")],
    print_: Annotated[bool, typer.Option("--print", help="Print the ssh command instead of running it.")] = False,
    json_: Json = False,
) -> None:
    """Forward a port of the run's instance to this computer until Ctrl-C.

    If the local port is taken, another one is used.
    """
    wanted, there = _parse(ports)
    forward = forward_port(run, here=wanted, there=there)
    output.emit("forward/1", forward.to_dict())
    if output.is_json():
        return
    here, login = forward.here, forward.login
    if here != wanted:
        output.say(f"Port {wanted} is in use; using {here}.")
    if print_:
        print(shlex.join(forward.argv))
        return
    _explain_if_closed(login, there, forward.typed)
    output.say(
        f"http://127.0.0.1:{here} forwards to port {there} on {login.instance_id}. Ctrl-C stops it; the run continues."
    )
    raise typer.Exit(subprocess.run(forward.argv, check=False).returncode)


def _parse(ports: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", ports)
    numbers = [int(found[1]), int(found[2] or found[1])] if found else [0]
    if not all(1 <= number <= 65535 for number in numbers):
        raise UsageError(
            what=f"Invalid port: {ports!r}.", why="Ports range from 1 to 65535.", fix="homing forward RUN 6006"
        )
    return numbers[0], numbers[1]


def _explain_if_closed(login: Login, there: int, run: str) -> None:
    """Warn if nothing listens on the remote port: the tunnel would open but show nothing. Checks once, over SSH."""
    try:
        knock = login.shell([f"bash -c 'exec 3<>/dev/tcp/127.0.0.1/{there}'"])
        done = subprocess.run(knock, capture_output=True, timeout=_KNOCK_S, check=False)
    except subprocess.TimeoutExpired:
        return
    if done.returncode == 1:
        output.say(
            f"warning: nothing listens on port {there} on {login.instance_id} yet. The tunnel opens anyway;"
            f" start the server there (homing ssh {run}), or view the curves without it: homing tensorboard {run}"
        )
