"""The startup script of a rented machine, and the hand-over that it waits for.

    timer (ends billing if nothing takes over) -> our SSH keys -> wait for the hand-over, or fetch -> agent

The script is the first thing that the machine runs, before we have contacted it. The timer starts before anything that
can fail and runs as long as the machine does. Once the deadline has passed, the timer ends billing if no dead-man
process has held its lock for a grace period. The script itself never exits. If a finished container is started again,
the script notices that it ran before, and ends billing instead of training twice. The only secret in the script is the
machine's own host key, so the script may be in user data.

The hand-over delivers what the create call could not: files and secrets, over SSH, on stdin.

    wait for SSH -> remote python3, with `receive` and the request on stdin -> done, or "not yet": retry -> deadline

Nothing is sent before the machine has presented the host key that was generated for it. While the machine boots, it may
present a different key or refuse ours. That counts as "not yet", and the error at the deadline reports it.
"""

from __future__ import annotations

import base64
import json
import math
import os
import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from homing.cloud.contact.ssh_access import HostKey
from homing.cloud.machine_setup import receive_hand_over
from homing.cloud.providers.base import Connection, Place, Request
from homing.cloud.providers.ssh.connection import ssh_argv
from homing.errors import CreateFailed, StartTimeout, UsageError
from homing.units import format_duration
from homing.wire import codec, file_names
from homing.wire.boot_json import EndBilling
from homing.world import Completed, World

__all__ = ["CACHE_DIR", "ROOT", "WORK_DIR", "Fetch", "hand_over", "place", "startup_script"]

ROOT = "/opt/homing"
WORK_DIR = f"{ROOT}/work"
CACHE_DIR = f"{ROOT}/cache"

_LOOK_S = 5.0  # seconds between the timer's checks of the dead-man process's lock
_GRACE_S = 180.0  # how long the dead-man process may be missing before the timer acts; the agent restarts it sooner
_TRY_S = 180.0  # timeout for one call, which may send a wheel of a few megabytes over a slow connection
_PAUSE_S = 2.0
_KNOWN_HOSTS = "known_hosts"
_START = (
    "import json,sys,types\n"
    "o=json.load(sys.stdin)\n"
    "m=types.ModuleType('receive')\n"
    "exec(o['program'],m.__dict__)\n"
    "m.main(o['order'])\n"
)


@dataclass(frozen=True)
class Fetch:
    """A file that the machine downloads itself, because this computer cannot log in to deliver it.

    The URL may point to a store that others can write to, so the create call carries the hash of the file.
    """

    url: str
    path: str  # path relative to the work folder
    sha256: str  # checked before use, because one of these files is the agent, which runs as root


def startup_script(
    *,
    mark: str,
    end_command: str,
    end_within_s: float,
    login_key: str,
    host_key: HostKey,
    is_container: bool,
    fetch: tuple[Fetch, ...] = (),
    begin_by: float | None = None,
    prepare: str = "",
) -> str:
    """Return the bash script, which is a few KB long.

    `end_command` is shell text that ends billing. It may use environment variables.

    `begin_by` is for machines that lose their disk on a restart: a script that starts later than this (Unix seconds, by
    the machine's clock) must have run before. `prepare` is provider-specific shell text that runs before SSH is opened.
    """
    settings = {
        "MARK": mark,
        "ROOT": ROOT,
        "END": end_command,
        "END_WITHIN_S": str(max(1, math.ceil(end_within_s))),
        "LOOK_S": f"{min(_LOOK_S, end_within_s / 4):g}",
        "GRACE_S": str(math.ceil(min(_GRACE_S, end_within_s))),
        "BEGIN_BY": str(math.ceil(begin_by)) if begin_by is not None else "",
        "KIND": "container" if is_container else "vm",
        "LOGIN_KEY": login_key,
        "HOST_KEY": host_key.private_text,
        "HOST_KEY_PUB": host_key.public_line,
        "DEAD_MAN_LOCK": file_names.DEAD_MAN_LOCK,
        "BOOT": file_names.BOOT,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    lines.append(
        f"FETCH=({' '.join(shlex.quote(word) for item in fetch for word in (item.url, item.path, item.sha256))})"
    )
    body = resources.files("homing.cloud.machine_setup").joinpath("startup.sh").read_text(encoding="utf-8")
    return body.replace("# SETTINGS\n", "\n".join(lines) + "\n").replace("# PREPARE\n", prepare)


def place(end: EndBilling) -> Place:
    return Place(WORK_DIR, f"{WORK_DIR}/env/bin/python", end, "python3", CACHE_DIR)


# --- the hand-over ---


def hand_over(connection: Connection, request: Request, *, world: World, timeout_s: float) -> None:
    """Send files and secrets to the machine, retrying for up to `timeout_s`. Calling this again is safe.

    Raises StartTimeout, or CreateFailed if the machine rejects the files.
    """
    known_hosts = Path(request.order.files[0].source).with_name(_KNOWN_HOSTS)
    world.write(known_hosts, (connection.known_hosts + "\n").encode(), mode=0o600)
    root = os.path.dirname(request.order.boot.work_dir)
    argv = [*ssh_argv(connection, known_hosts), "-T", "-oBatchMode=yes", f"{connection.user}@{connection.host}"]
    argv.append(_command(root))
    message = json.dumps(
        {"program": world.read(receive_hand_over.__file__).decode(), "order": _order(request, root, world)}
    )
    deadline, why = world.monotonic() + timeout_s, ""
    while (left_s := min(deadline - world.monotonic(), request.order.start_by - world.boottime())) > 0:
        done = world.run(argv, min(_TRY_S, left_s), stdin=message)
        problem = _why_not(done, request)
        if not problem:
            return
        why = why if why and done.code == 124 else problem  # if this try timed out, keep the earlier reason
        world.sleep(min(_PAUSE_S, max(0.0, deadline - world.monotonic())))
    to = f"{connection.user}@{connection.host}:{connection.port}"
    raise StartTimeout(
        what=f"Could not send files to {request.mark} over SSH within {format_duration(timeout_s)}.",
        why=f"{to}: {why or 'there was no time to try'}",
        fix=f"Try again: {request.order.words.to('launch')}",
    )


def _command(root: str) -> str:
    """Return the remote command. It runs as root (with sudo if necessary), because root owns the machine's folder."""
    python = f"python3 -I -c {shlex.quote(_START)}"
    return f"if [ -w {shlex.quote(root)} ]; then exec {python}; else exec sudo -n {python}; fi"


def _order(request: Request, root: str, world: World) -> dict[str, Any]:
    order = request.order
    return {
        "root": root,
        "work": order.boot.work_dir,
        "files": {file.path: base64.b64encode(world.read(file.source)).decode() for file in order.files},
        "boot": codec.dumps(order.boot, indent=1),
        "secrets": order.secrets,
    }


def _why_not(done: Completed, request: Request) -> str:
    """Return why the hand-over is not done yet, or "" if it is; raises for errors that waiting cannot fix."""
    lines = [line for line in done.out.splitlines() if line.startswith(receive_hand_over.SIGN)]
    answer = json.loads(lines[-1][len(receive_hand_over.SIGN) :]) if lines else {}
    if answer.get("state") == "done":
        return ""
    if answer.get("state") in ("ended", "failed"):
        raise CreateFailed(
            what=f"{request.mark} rejected the files sent to it.",
            why=f"The machine reports: {answer['why']}",
            fix=f"Try again: {request.order.words.to('launch')}",
        )
    if answer:
        return str(answer["why"])
    last = (done.err.strip().splitlines() or [f"ssh exited with code {done.code}"])[-1]
    if done.code == 127 and "ssh" in done.err and not done.out:
        raise UsageError(what="The OpenSSH client `ssh` is not installed.", why=last, fix="Install openssh-client")
    if done.code == 127:
        raise CreateFailed(
            what=f"A program that homing needs at startup is missing on {request.mark}.",
            why=last,
            fix="Use an image with bash, python3, and sudo for the login user, or build one: homing image build",
        )
    if "HOST IDENTIFICATION HAS CHANGED" in done.err or "Host key verification failed" in done.err:
        return "its host key differs from the one created for it; nothing was sent"
    return last
