"""What a rented machine does first, as one shell script, before anybody of ours has spoken to it.

    timer (ends billing if nobody takes over) -> our SSH keys -> wait for the hand-over, or fetch -> agent

The timer comes before anything that can fail, and watches for as long as the machine lives: until the agent's dead-man
holds its lock, and again whenever it does not. The script never ends by itself. Where a finished container is started
again it finds that it was here before, and ends billing instead of training twice.

It holds no secret but the machine's own host key, so it may stand in user data; what is secret comes by `hand_over`.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from importlib import resources

from homing.cloud.hand_over import hand_over
from homing.cloud.providers.base import Place
from homing.cloud.ssh_keys import HostKey
from homing.wire import names
from homing.wire.boot import EndBilling

__all__ = ["CACHE_DIR", "ROOT", "WORK_DIR", "Fetch", "hand_over", "place", "startup_script"]

ROOT = "/opt/homing"
WORK_DIR = f"{ROOT}/work"
CACHE_DIR = f"{ROOT}/cache"

_LOOK_S = 5.0  # how often the timer looks for the dead-man
_GRACE_S = 180.0  # for a dead-man that died: the agent starts another one sooner


@dataclass(frozen=True)
class Fetch:
    """A file that the machine downloads by itself, where home cannot log in to bring it.

    The address may lead to a store that others can write to, so the hash travels in the create call.
    """

    url: str
    path: str  # relative to the work folder
    sha256: str  # checked before the file is used: the agent among them runs as root


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
    """bash, a few KB. `end_command` is shell text that ends billing and may use the machine's environment variables.

    `begin_by` is for machines whose disk a restart empties: a script that begins later than this (unix seconds, by the
    machine's clock) has been here before. `prepare` is shell text of one provider's, run before SSH is opened.
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
        "DEAD_MAN_LOCK": names.DEAD_MAN_LOCK,
        "BOOT": names.BOOT,
    }
    lines = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    lines.append(
        f"FETCH=({' '.join(shlex.quote(word) for item in fetch for word in (item.url, item.path, item.sha256))})"
    )
    body = resources.files("homing.cloud").joinpath("startup.sh").read_text(encoding="utf-8")
    return body.replace("# SETTINGS\n", "\n".join(lines) + "\n").replace("# PREPARE\n", prepare)


def place(end: EndBilling) -> Place:
    return Place(WORK_DIR, f"{WORK_DIR}/env/bin/python", end, "python3", CACHE_DIR)
