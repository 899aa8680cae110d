"""SSH keys for rented machines, generated at home so that both sides can verify each other before the machine exists.

    $HOMING_HOME/keys/login/         key  key.pub     ours, one for all machines; only the public half is sent
    $HOMING_HOME/keys/hosts/MARK/    key  key.pub     one instance's host key; sent whole, and pinned from the start

No one ever has to accept an unknown host key: a new machine presents the one it was given, or we do not talk to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from homing.errors import HomingError, UsageError
from homing.world import World

__all__ = ["HostKey", "LoginKey", "find_host_key", "host_key", "known_hosts_line", "login_key"]

_KEYS = "keys"
_PRIVATE, _PUBLIC = "key", "key.pub"
_MAKE_S = 30.0


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
    """Return the instance's host key, the same on every call: a repeated create must not change what is pinned."""
    folder = _make(home / _KEYS / "hosts" / mark, mark, world)
    return HostKey(_read(folder / _PRIVATE, world) + "\n", _read(folder / _PUBLIC, world))


def find_host_key(home: Path, mark: str, world: World) -> HostKey | None:
    """Return the host key; None if this home did not launch the instance and so cannot verify it."""
    return host_key(home, mark, world) if world.exists(home / _KEYS / "hosts" / mark) else None


def known_hosts_line(key: HostKey, host: str, port: int = 22) -> str:
    """Return the line for Connection.known_hosts."""
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
                why=f"ssh-keygen ended with {done.code}: {(done.err or done.out).strip()}",
                fix="Install the OpenSSH client (openssh-client), or free some disk space, then run the command again.",
            )
        for name, mode in ((_PRIVATE, 0o600), (_PUBLIC, 0o644)):  # again with fsync: a machine may outlive a crash
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
