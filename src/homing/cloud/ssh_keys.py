"""The keys of SSH to rented machines, made at home so that both sides know each other before the machine exists.

    $HOMING_HOME/keys/login/         key  key.pub     ours, one for all machines; its public half travels
    $HOMING_HOME/keys/hosts/MARK/    key  key.pub     one instance's own; it travels whole, and is pinned from birth

Nobody ever has to accept the key that a new machine shows: it shows the one that it was given, or is not spoken to.
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
    """The same at every call for this mark: a create that is repeated must not change what is pinned."""
    folder = _make(home / _KEYS / "hosts" / mark, mark, world)
    return HostKey(_read(folder / _PRIVATE, world) + "\n", _read(folder / _PUBLIC, world))


def find_host_key(home: Path, mark: str, world: World) -> HostKey | None:
    """None where this home did not launch it: then nobody here can tell its machine from another one."""
    return host_key(home, mark, world) if world.exists(home / _KEYS / "hosts" / mark) else None


def known_hosts_line(key: HostKey, host: str, port: int = 22) -> str:
    """For Connection.known_hosts."""
    pattern = host if port == 22 else f"[{host}]:{port}"
    return f"{pattern} {' '.join(key.public_line.split()[:2])}"


def _make(folder: Path, comment: str, world: World) -> Path:
    if world.exists(folder):
        return folder
    aside = folder.with_name(f"{folder.name}.tmp-{world.random_hex(8)}")
    world.mkdir(aside)
    try:
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(aside / _PRIVATE)]
        done = world.run(argv, _MAKE_S)
        if done.code:
            raise UsageError(
                what="No key for SSH could be made.",
                why=f"ssh-keygen ended with {done.code}: {(done.err or done.out).strip()}",
                fix="Install OpenSSH's client (openssh-client), or free some disk, then repeat the command.",
            )
        for name, mode in ((_PRIVATE, 0o600), (_PUBLIC, 0o644)):  # once more, synced: a machine may outlive a crash
            world.write(aside / name, world.read(aside / name), mode=mode)
        _put(aside, folder, world)
    finally:
        world.rmtree(aside)
    return folder


def _put(aside: Path, folder: Path, world: World) -> None:
    """Both files at once or none. Of two launches that make it at the same time one is first, and both use that one."""
    try:
        world.rename(aside, folder)
    except OSError as exc:
        if not world.exists(folder / _PUBLIC):
            raise HomingError(
                what=f"A key for SSH could not be kept in {folder}.",
                why=str(exc),
                fix="Check the disk's space and permissions, then repeat the command.",
            ) from exc


def _read(path: Path, world: World) -> str:
    return world.read(path).decode().strip()
