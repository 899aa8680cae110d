"""SSH access to a Shadeform machine: user and address, and running one command there.

The host key was made at home and sent in the startup script, so it is known before the machine exists. Addresses are
reused by other machines, so each machine has its own known_hosts file, next to its key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from homing.cloud.contact.ssh_keys import find_host_key, known_hosts_line, login_key
from homing.cloud.figures import read_port
from homing.cloud.providers.base import Connection
from homing.cloud.providers.shadeform.api import mark_of, state_of
from homing.cloud.providers.ssh.machine import ssh_argv
from homing.world import Completed, World

__all__ = ["ask_there", "connection_of"]

_ASK_S = 30.0


def connection_of(body: dict[str, Any], home: Path, world: World) -> Connection | None:
    """Return how to log in; None before it has an address, or if another home launched it and pinned its host key."""
    if not body.get("ip") or state_of(body) != "ready":
        return None
    key = find_host_key(home, mark_of(body), world)
    if key is None:
        return None
    host, port = str(body["ip"]), read_port(body.get("ssh_port")) or 22  # null in some replies, which means 22
    user = str(body.get("ssh_user") or "shadeform")
    return Connection(user, host, port, str(login_key(home, world).private_path), known_hosts_line(key, host, port))


def ask_there(connection: Connection, mark: str, command: str, home: Path, world: World) -> Completed:
    """Run a command on the machine; as root if the plain attempt fails."""
    known_hosts = home / "keys" / "hosts" / mark / "known_hosts"
    world.write(known_hosts, (connection.known_hosts + "\n").encode(), mode=0o600)
    argv = [*ssh_argv(connection, known_hosts), "-T", "-oBatchMode=yes", f"{connection.user}@{connection.host}"]
    return world.run([*argv, f"{command} 2>/dev/null || sudo -n {command}"], _ASK_S)
