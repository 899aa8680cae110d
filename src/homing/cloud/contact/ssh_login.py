"""The ssh command that logs in to a run's instance, ready to paste, with its host key pinned.

    run -> its instance that is still there -> provider.connection -> argv

The command line runs it; this module only builds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.providers.base import Connection
from homing.cloud.providers.ssh.machine import ssh_argv
from homing.errors import UsageError

__all__ = ["KNOWN_HOSTS", "Login", "find_login"]

KNOWN_HOSTS = "known_hosts"  # in the run's folder at home: the host key line of its instance


@dataclass(frozen=True)
class Login:
    instance_id: str
    connection: Connection
    known_hosts: Path

    @property
    def _to(self) -> str:
        return f"{self.connection.user}@{self.connection.host}"

    def shell(self, command: Sequence[str] = ()) -> list[str]:
        """Return argv for an interactive shell there, or for one command, which the remote shell parses."""
        argv = ssh_argv(self.connection, self.known_hosts)
        return [*argv, self._to, *command] if command else [*argv, "-t", self._to]

    def forward(self, port_here: int, port_there: int) -> list[str]:
        """Return argv for a tunnel with both ends on loopback, so that no one else on either network can reach it."""
        tunnel = f"127.0.0.1:{port_here}:127.0.0.1:{port_there}"
        return [
            *ssh_argv(self.connection, self.known_hosts),
            "-N",
            "-oExitOnForwardFailure=yes",
            "-L",
            tunnel,
            self._to,
        ]


def find_login(home: Home, run: RunRow) -> Login:
    line = _open_line(home, run)
    provider = home.provider_of(line)
    assert line.instance_id is not None
    connection = provider.connection(line.instance_id)
    if connection is None:
        raise UsageError(
            what=f"Cannot reach {line.instance_id} over SSH.",
            why=provider.cannot.get("ssh", f"{line.provider} provides no SSH connection to it right now."),
            fix=f"homing logs {run.name} -f",
        )
    path = home.run_dir(run.id) / KNOWN_HOSTS
    home.world.mkdir(path.parent)
    home.world.write(path, (connection.known_hosts + "\n").encode(), mode=0o600)
    return Login(line.instance_id, connection, path)


def _open_line(home: Home, run: RunRow) -> LedgerLine:
    lines = [line for line in home.ledger.lines(run.id) if line.destroyed_at is None and line.instance_id is not None]
    if not lines:
        raise UsageError(
            what=f"{run.id} has no instance to log in to.",
            why=f"It is {run.state}; it has no running instance.",
            fix=f"homing logs {run.name}   homing fetch {run.name}",
        )
    return lines[-1]
