"""A Shadeform machine: its startup script, how it ends its billing, and SSH access to it.

    create call  -> startup script, with the host key but no API key
    hand-over    -> the request that ends billing, once the instance's id is known
    SSH          -> user and address, and how to run a command on the machine

The host key is generated on this computer and sent in the startup script, so it is known before the machine exists.
Because other machines may later get the same IP address, each machine has its own known_hosts file, next to its host
key.
"""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

from homing.cloud.check_numbers import read_port
from homing.cloud.contact.ssh_access import find_host_key, host_key, known_hosts_line, login_key
from homing.cloud.machine_setup import startup_script
from homing.cloud.providers.base import Connection, Place, Request
from homing.cloud.providers.shadeform.api import mark_of, state_of
from homing.cloud.providers.ssh.connection import ssh_argv
from homing.wire.boot_json import EndBilling
from homing.world import Completed, World

__all__ = ["KEY_ENV", "KEY_HEADER", "ask_there", "connection_of", "launch_configuration", "place_of", "with_id"]

KEY_ENV = "SHADEFORM_API_KEY"
KEY_HEADER = "X-API-KEY"
_ID = "{id}"  # placeholder for the instance id in the request that ends billing, until the create call returns the id
_NO_KEY_THERE = "This instance has no key to end its billing: home or Shadeform's auto_delete ends it."
_ASK_S = 30.0


def place_of(url: str, *, is_self_deleting: bool) -> Place:
    """Return the machine's folders and the request that ends its billing.

    The request is authenticated with the account's key. A machine without the key cannot end its own billing.
    """
    if not is_self_deleting:
        return startup_script.place(EndBilling(kind="command", argv=["echo", _NO_KEY_THERE]))
    delete = f"{url}/instances/{_ID}/delete"
    return startup_script.place(EndBilling(kind="request", method="POST", url=delete, header_env={KEY_HEADER: KEY_ENV}))


def with_id(request: Request, instance_id: str) -> Request:
    """Return the create request with the instance's id filled into the call that ends its billing."""
    end = request.order.boot.end_billing
    end = dataclasses.replace(end, url=end.url.replace(_ID, instance_id))
    boot = dataclasses.replace(request.order.boot, end_billing=end)
    return dataclasses.replace(request, order=dataclasses.replace(request.order, boot=boot))


def launch_configuration(mark: str, end_within_s: float, home: Path, world: World) -> dict[str, Any]:
    """Return the startup script in the format of the create call.

    The script's timer cannot end billing, because the machine has no API key before the hand-over. Until then, the
    early date of Shadeform's guard applies.
    """
    script = startup_script.startup_script(
        mark=mark,
        end_command=f"echo '{_NO_KEY_THERE}'; exit 1",
        end_within_s=end_within_s,
        login_key=login_key(home, world).public_line,
        host_key=host_key(home, mark, world),
        is_container=False,
    )
    packed = base64.b64encode(script.encode()).decode()
    return {"type": "script", "script_configuration": {"base64_script": packed}}


def connection_of(body: dict[str, Any], home: Path, world: World) -> Connection | None:
    """Return the SSH connection, or None if the machine has no address yet or its host key is missing here."""
    if not body.get("ip") or state_of(body) != "ready":
        return None
    key = find_host_key(home, mark_of(body), world)
    if key is None:
        return None
    host, port = str(body["ip"]), read_port(body.get("ssh_port")) or 22  # a null port means 22
    user = str(body.get("ssh_user") or "shadeform")
    return Connection(user, host, port, str(login_key(home, world).private_path), known_hosts_line(key, host, port))


def ask_there(connection: Connection, mark: str, command: str, home: Path, world: World) -> Completed:
    """Run a command on the machine. If it fails, run it again as root."""
    known_hosts = home / "keys" / "hosts" / mark / "known_hosts"
    world.write(known_hosts, (connection.known_hosts + "\n").encode(), mode=0o600)
    argv = [*ssh_argv(connection, known_hosts), "-T", "-oBatchMode=yes", f"{connection.user}@{connection.host}"]
    return world.run([*argv, f"{command} 2>/dev/null || sudo -n {command}"], _ASK_S)
