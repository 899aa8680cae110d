"""SSH access to rented machines: keys generated on this computer, and the command that logs in with them.

    $HOMING_HOME/keys/login/         key  key.pub     our login key for all machines; only the public half is sent
    $HOMING_HOME/keys/hosts/MARK/    key  key.pub     one instance's host key, pinned from the start; both are sent

    run -> its instance that still exists -> provider.connection -> argv

The keys on both sides exist before the machine does, so the user never has to accept an unknown host key. If a new
machine does not present the key it was given, we do not connect. This module only builds the ssh command; the CLI runs
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.providers.base import Connection
from homing.cloud.providers.ssh.connection import ssh_argv
from homing.errors import HomingError, UsageError
from homing.world import World

__all__ = [
    "KNOWN_HOSTS",
    "HostKey",
    "Login",
    "LoginKey",
    "find_host_key",
    "find_login",
    "host_key",
    "known_hosts_line",
    "login_key",
]

_KEYS = "keys"
_PRIVATE, _PUBLIC = "key", "key.pub"
_MAKE_S = 30.0
KNOWN_HOSTS = "known_hosts"  # file in the run's local folder with the host key line of its instance


@dataclass(frozen=True)
class LoginKey:
    private_path: Path
    public_line: str


@dataclass(frozen=True)
class HostKey:
    private_text: str = field(repr=False)
    public_line: str


def login_key(home: Path, world: World) -> LoginKey:
    folder = _make(home / _KEYS / "login", "homing", world)
    return LoginKey(folder / _PRIVATE, _read(folder / _PUBLIC, world))


def host_key(home: Path, mark: str, world: World) -> HostKey:
    """Return the instance's host key. It never changes, so that a repeated create call pins the same key."""
    folder = _make(home / _KEYS / "hosts" / mark, mark, world)
    return HostKey(_read(folder / _PRIVATE, world) + "\n", _read(folder / _PUBLIC, world))


def find_host_key(home: Path, mark: str, world: World) -> HostKey | None:
    """Return the host key, or None if it is not here because the instance was launched from elsewhere."""
    return host_key(home, mark, world) if world.exists(home / _KEYS / "hosts" / mark) else None


def known_hosts_line(key: HostKey, host: str, port: int = 22) -> str:
    """Return the known_hosts line of a host key, for use as Connection.known_hosts."""
    pattern = host if port == 22 else f"[{host}]:{port}"
    return f"{pattern} {' '.join(key.public_line.split()[:2])}"


def _make(folder: Path, comment: str, world: World) -> Path:
    if world.exists(folder):
        return folder
    temporary = folder.with_name(f"{folder.name}.tmp-{world.random_hex(8)}")
    world.mkdir(temporary)
    try:
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(temporary / _PRIVATE)]
        done = world.run(argv, _MAKE_S)
        if done.code:
            raise UsageError(
                what="Could not create an SSH key.",
                why=f"ssh-keygen exited with code {done.code}: {(done.err or done.out).strip()}",
                fix="Install the OpenSSH client (openssh-client), or free some disk space, then run the command again.",
            )
        # Rewrite the key files with fsync: if this computer crashes, the machine may keep running and need the keys.
        for name, mode in ((_PRIVATE, 0o600), (_PUBLIC, 0o644)):
            world.write(temporary / name, world.read(temporary / name), mode=mode)
        _put(temporary, folder, world)
    finally:
        world.rmtree(temporary)
    return folder


def _put(temporary: Path, folder: Path, world: World) -> None:
    """Move both key files into place atomically. If two launches race, the first wins and both use its key."""
    try:
        world.rename(temporary, folder)
    except OSError as exc:
        if not world.exists(folder / _PUBLIC):
            raise HomingError(
                what=f"Could not save an SSH key in {folder}.",
                why=str(exc),
                fix="Check disk space and permissions, then run the command again.",
            ) from exc


def _read(path: Path, world: World) -> str:
    return world.read(path).decode().strip()


# --- the ssh command ---


@dataclass(frozen=True)
class Login:
    instance_id: str
    connection: Connection
    known_hosts: Path

    @property
    def _to(self) -> str:
        return f"{self.connection.user}@{self.connection.host}"

    def shell(self, command: Sequence[str] = ()) -> list[str]:
        """Return the ssh command that opens a shell on the machine or, with `command`, passes it to that shell."""
        argv = ssh_argv(self.connection, self.known_hosts)
        return [*argv, self._to, *command] if command else [*argv, "-t", self._to]

    def forward(self, port_here: int, port_there: int) -> list[str]:
        """Return the ssh command for a tunnel between loopback addresses, so that only local processes can use it."""
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
            why=provider.cannot.get("ssh", f"{line.provider} does not provide an SSH connection to it right now."),
            fix=f"Read its log: homing logs {run.name} -f",
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
            why=f"The run is {run.state} and has no running instance.",
            fix=f"Read its log: homing logs {run.name}   Fetch its model: homing fetch {run.name}",
        )
    return lines[-1]
