"""The startup script of a rented machine: the first shell script it runs, before anything of ours has contacted it.

    timer (ends billing if nothing takes over) -> our SSH keys -> wait for the hand-over, or fetch -> agent

The timer starts before anything that can fail and runs as long as the machine. Once its deadline has passed, it ends
billing if no dead-man of the agent holds its lock for a grace period. The script never exits by itself. If a finished
container is started again, it notices that it ran before, and ends billing instead of training twice.

It contains no secret but the machine's own host key, so it may be in user data; secrets are delivered by `hand_over`.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from importlib import resources

from homing.cloud.contact.ssh_keys import HostKey
from homing.cloud.launch.hand_over import hand_over
from homing.cloud.providers.base import Place
from homing.wire import file_names
from homing.wire.boot_json import EndBilling

__all__ = ["CACHE_DIR", "ROOT", "WORK_DIR", "Fetch", "hand_over", "place", "startup_script"]

ROOT = "/opt/homing"
WORK_DIR = f"{ROOT}/work"
CACHE_DIR = f"{ROOT}/cache"

_LOOK_S = 5.0  # how often the timer checks the dead-man's lock
_GRACE_S = 180.0  # how long the dead-man may be missing; the agent restarts a dead one sooner


@dataclass(frozen=True)
class Fetch:
    """A file that the machine downloads itself, where home cannot log in to deliver it.

    The address may be a store that others can write to, so the hash is in the create call.
    """

    url: str
    path: str  # relative to the work folder
    sha256: str  # checked before use: the agent, which runs as root, is among the files


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
    """Return the bash script, a few KB.

    `end_command` is shell text that ends billing; it may use environment variables.

    `begin_by` is for machines that lose their disk on a restart: a script that starts later than this (Unix seconds, by
    the machine's clock) has run before. `prepare` is provider-specific shell text, run before SSH is opened.
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
