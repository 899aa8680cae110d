"""One SSH host: its pinned key, the `ssh` command line, and the interpretation of failures.

    pin     host_key in the run file, else the key pinned earlier, else known_hosts; else raises HostKeyUnknown, so
            that the user decides
    call    ssh USER@HOST python3 -c ...  with program_on_host.py and the request on stdin -> its response

The host key is always pinned and a changed key is refused, because the request contains secrets, and the response tells
us whether something is billing. The user's ssh config is not read, so that it cannot weaken this check. Every call has
a deadline.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from homing.cloud.providers.base import Connection
from homing.cloud.providers.local import end_billing
from homing.cloud.providers.ssh import program_on_host
from homing.errors import HomingError, ProviderRefused, UsageError
from homing.wire import codec
from homing.wire.run_json import Ssh
from homing.world import Completed, Retries, World

__all__ = ["Host", "HostKeyChanged", "HostKeyUnknown", "fingerprint", "ssh_argv"]

CONNECT_S = 10.0
_ALIVE_S = 10  # ssh exits after three intervals without a response
_RETRIES = Retries(tries=3, first_s=1.0)
_PREFERRED = ("ssh-ed25519", "ecdsa-", "rsa-", "ssh-rsa")
_START = (
    "import json,sys,types\n"
    "o=json.load(sys.stdin)\n"
    "for n in ('local_end','far_end'):\n"
    " m=sys.modules[n]=types.ModuleType(n)\n"
    " exec(o[n],m.__dict__)\n"
    "sys.modules['far_end'].main(o['order'])\n"
)


class HostKeyUnknown(UsageError):
    """Raised on first contact with a host. `line` is the key that the host presents, which the user must check."""

    def __init__(self, host: Host, line: str) -> None:
        self.host, self.line = host, line
        kind_and_key = " ".join(line.split()[1:3])
        super().__init__(
            what=f"The host key of {host.name} is not known yet, so nothing was sent.",
            why=f"The fingerprint of its key is {fingerprint(line)}.",
            fix=f"If this is the host's fingerprint, add the key to the run file: cloud.ssh.host_key: {kind_and_key}",
        )


class HostKeyChanged(ProviderRefused):
    """Raised if a host's key differs from the pinned key, which may mean a man-in-the-middle attack."""


class Host:
    def __init__(self, settings: Ssh, folder: Path, world: World) -> None:
        """Set up the host. `folder` is local and stores the settings, pinned keys and marks of SSH hosts."""
        self.settings, self._world = settings, world
        self.user = settings.user or world.environment().get("USER") or world.run(["id", "-un"], 10.0).out.strip()
        for word, value in (("host", settings.host), ("user", self.user)):
            if not re.fullmatch(r"[A-Za-z0-9_:][\w.:%-]*", value):  # ssh would parse a leading dash as an option
                raise UsageError(
                    what=f"cloud.ssh.{word} is {value!r}, which is not a valid {word}.",
                    fix=f"Change cloud.ssh.{word} in the run file.",
                )
        self.name = f"{self.user}@{settings.host}:{settings.port}"
        self.folder = folder / self.name

    @classmethod
    def known(cls, name: str, folder: Path, world: World) -> Host | None:
        """Return the host with the settings recorded at its last create call, or None if there is no record of it."""
        path = folder / name / "host.json"
        return cls(codec.loads(Ssh, world.read(path)), folder, world) if world.exists(path) else None

    def remember(self, mark: str) -> None:
        """Record a mark on disk before a create call, so that list_owned queries this host from then on."""
        self._world.mkdir(self.folder / "marks")
        self._world.write(self.folder / "host.json", codec.dumps(self.settings, indent=1).encode())
        self._world.write(self.folder / "marks" / mark, b"")

    def forget(self, mark: str) -> None:
        self._world.remove(self.folder / "marks" / mark)

    def marks(self) -> list[str]:
        path = self.folder / "marks"
        return self._world.listdir(path) if self._world.exists(path) else []

    # --- host key ---

    @property
    def pattern(self) -> str:
        return self.settings.host if self.settings.port == 22 else f"[{self.settings.host}]:{self.settings.port}"

    def pin(self) -> str:
        """Return the pinned known_hosts line of the host, or raise HostKeyUnknown on first contact."""
        path = self.folder / "known_hosts"
        if self.settings.host_key:
            line = f"{self.pattern} {' '.join(self.settings.host_key.split()[:2])}"
            fingerprint(line)
            if not self._world.exists(path) or self._world.read(path).decode() != line + "\n":
                self.trust(line)
            return line
        if self._world.exists(path):
            return self._world.read(path).decode().strip()
        line = self._known_line()
        if not line:
            raise HostKeyUnknown(self, self._scan())
        self.trust(line)
        return line

    def trust(self, line: str) -> None:
        self._world.mkdir(self.folder)
        self._world.write(self.folder / "known_hosts", (line + "\n").encode(), mode=0o600)

    def _known_line(self) -> str:
        path = os.path.expanduser(self.settings.known_hosts)
        if not self._world.exists(path):
            return ""
        found = self._world.run(["ssh-keygen", "-F", self.pattern, "-f", path], CONNECT_S)
        return self._best([line for line in found.out.splitlines() if not line.startswith(("#", "@"))])

    def _scan(self) -> str:
        argv = ["ssh-keyscan", "-T", f"{CONNECT_S:g}", "-p", str(self.settings.port), self.settings.host]
        found = self._world.run(argv, 3 * CONNECT_S)
        line = self._best([line for line in found.out.splitlines() if not line.startswith("#")])
        return line or self._raise(Completed(255, "", found.err or "it returned no host key"))

    def _best(self, lines: list[str]) -> str:
        """Return a known_hosts line for this host, with its key of the strongest type.

        The host name in `lines` may be hashed, so it is replaced.
        """
        keys = [" ".join(line.split()[1:3]) for line in lines if len(line.split()) >= 3]
        ranked = sorted(keys, key=lambda key: next((n for n, kind in enumerate(_PREFERRED) if key.startswith(kind)), 9))
        return f"{self.pattern} {ranked[0]}" if ranked else ""

    # --- calls ---

    def connection(self) -> Connection:
        key = os.path.expanduser(self.settings.key_file) if self.settings.key_file else ""
        return Connection(self.user, self.settings.host, self.settings.port, key, self.pin())

    def call(self, verb: str, timeout_s: float = 60.0, **order: Any) -> dict[str, Any]:
        """Run a verb on the host and return its response. Verbs are idempotent, so retry after a broken connection."""
        connection = self.connection()
        if connection.key_path and not self._world.exists(connection.key_path):
            raise UsageError(
                what="The SSH private key does not exist.",
                why=f"{connection.key_path} is missing.",
                fix="Set cloud.ssh.key_file to an existing private key.",
            )
        command = f"{_shell_path(self.settings.python or 'python3')} -I -c {shlex.quote(_START)}"
        argv = [*ssh_argv(connection, self.folder / "known_hosts"), "-T", "-oBatchMode=yes", self._to, command]
        message = {
            "local_end": self._world.read(end_billing.__file__).decode(),
            "far_end": self._world.read(program_on_host.__file__).decode(),
            "order": {"verb": verb, "work_dir": self.settings.work_dir, **order},
        }
        for _ in _RETRIES.attempts(self._world):
            done = self._world.run(argv, timeout_s, stdin=json.dumps(message))
            if done.code != 255 or _is_lasting(done.err):
                break
        return self._read(done, verb)

    @property
    def _to(self) -> str:
        return f"{self.user}@{self.settings.host}"

    def _read(self, done: Completed, verb: str) -> dict[str, Any]:
        lines = [line for line in done.out.splitlines() if line.startswith(program_on_host.SIGN)]
        if not lines:
            self._raise(done)
        answer = json.loads(lines[-1][len(program_on_host.SIGN) :])
        assert isinstance(answer, dict), answer
        if "error" in answer:
            raise ProviderRefused(
                what=f"The {verb} call failed on {self.name}.",
                why=str(answer["error"]),
                fix=f"Log in: {shlex.join([*ssh_argv(self.connection(), self.folder / 'known_hosts'), self._to])}",
            )
        return answer

    def _raise(self, done: Completed) -> str:
        raise _explain(self, done)


def ssh_argv(connection: Connection, known_hosts: Path) -> list[str]:
    """Return the `ssh` command without its destination and what follows it.

    The file `known_hosts` must contain only the host's pinned key.
    """
    argv = ["ssh", "-F", "none", "-p", str(connection.port)]
    if connection.key_path:
        argv += ["-i", connection.key_path, "-o", "IdentitiesOnly=yes"]
    options = {
        "StrictHostKeyChecking": "yes",
        "UserKnownHostsFile": str(known_hosts),
        "GlobalKnownHostsFile": "none",
        "UpdateHostKeys": "no",
        "ConnectTimeout": f"{CONNECT_S:g}",
        "ServerAliveInterval": str(_ALIVE_S),
    }
    return argv + [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def fingerprint(line: str) -> str:
    """Return the fingerprint of a known_hosts line, in the SHA256:... format of ssh-keygen -l."""
    try:
        blob = base64.b64decode(line.split()[2], validate=True)
    except (IndexError, binascii.Error) as exc:
        raise UsageError(
            what="cloud.ssh.host_key is not a public key.",
            why=f"Expected a key type and a base64 key, got: {' '.join(line.split()[1:])!r}",
            fix="On the host, print its public key: cat /etc/ssh/ssh_host_ed25519_key.pub",
        ) from exc
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def _shell_path(path: str) -> str:
    return "~/" + shlex.quote(path[2:]) if path.startswith("~/") else shlex.quote(path)


def _is_key_changed(err: str) -> bool:
    return "HOST IDENTIFICATION HAS CHANGED" in err or "Host key verification failed" in err


def _is_lasting(err: str) -> bool:
    """Return True if retrying cannot help."""
    return _is_key_changed(err) or "Permission denied" in err or "UNPROTECTED" in err or "resolve hostname" in err


def _explain(host: Host, done: Completed) -> HomingError:
    """Return our error for a failed ssh command, based on its exit code and message.

    After any failure, the state of the instances is unknown.
    """
    err = done.err.strip()
    last = err.splitlines()[-1] if err else f"exit code {done.code}"
    if _is_key_changed(err):
        return HostKeyChanged(
            what=f"THE HOST KEY OF {host.name} DIFFERS FROM THE PINNED ONE. Nothing was sent.",
            why=f"Pinned: {fingerprint(host.pin())}. The host was reinstalled, or the connection is being intercepted.",
            fix=f"Only if you know why it changed: rm '{host.folder / 'known_hosts'}'   or change cloud.ssh.host_key",
        )
    if "UNPROTECTED PRIVATE KEY" in err:
        path = os.path.expanduser(host.settings.key_file)
        return UsageError(
            what="ssh refuses to use a private key that other users can read.",
            why=f"{path}: {last}",
            fix=f"Run: chmod 600 {path}",
        )
    if done.code == 127 and not done.out and "ssh" in err:
        return UsageError(what="OpenSSH's `ssh` is not installed.", why=last, fix="Install the package openssh-client.")
    if done.code == 127:
        return ProviderRefused(
            what=f"{host.name} has no interpreter {host.settings.python or 'python3'}.",
            why=last,
            fix="Set cloud.ssh.python to a Python interpreter on the host.",
        )
    if "Permission denied" in err:
        return ProviderRefused(
            what=f"{host.name} rejected the login.", why=last, fix="Check cloud.ssh.user and cloud.ssh.key_file."
        )
    if done.code not in (124, 255):  # ssh succeeded, but our program on the host failed
        return ProviderRefused(
            what=f"{host.name} returned an unreadable response, so homing cannot tell what is running there.",
            why=last,
            fix=f"On the host, check that Python is 3.8 or newer: {host.settings.python or 'python3'} --version",
        )
    return ProviderRefused(
        what=f"{host.name} is unreachable, so homing cannot tell what is running there.",
        why=last,
        fix=f"Check cloud.ssh.host and cloud.ssh.port ({host.settings.port}), then repeat the command.",
    )
