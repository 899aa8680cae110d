"""A real OpenSSH server on loopback: own host key, own port, own user key. No double of it would refuse what it does.

Needs `sshd` (openssh-server). Without it the tests that need it are skipped with a message, and fail if CI is set.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homing.wire.run_json import Ssh


class Sshd:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir(parents=True)
        self.key = _new_key(folder / "user_key")
        self.host_key = _new_key(folder / "host_key")
        (folder / "authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def public_host_key(self) -> str:
        return " ".join(self.host_key.with_suffix(".pub").read_text().split()[:2])

    def settings(self, **other: object) -> Ssh:
        known: dict[str, object] = {
            "host": "127.0.0.1",
            "user": getpass.getuser(),
            "port": self.port,
            "key_file": str(self.key),
            "host_key": self.public_host_key,
            "known_hosts": str(self.folder / "none"),
            "work_dir": str(self.folder / "there"),
        }
        return Ssh(**{**known, **other})  # type: ignore[arg-type]

    def start(self) -> None:
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # it refuses to start without
        self.write_config()
        program = shutil.which("sshd") or "/usr/sbin/sshd"
        # Absolute paths all over: the server starts itself anew for each connection.
        argv = [program, "-D", "-f", self.folder / "sshd_config", "-E", self.folder / "log"]
        self._process = subprocess.Popen(argv)
        self.wait_until_it_answers()

    def write_config(self) -> None:
        lines = {
            "ListenAddress": f"127.0.0.1:{self.port}",
            "HostKey": self.host_key,
            "AuthorizedKeysFile": self.folder / "authorized_keys",
            "PidFile": self.folder / "pid",
            "UsePAM": "no",
            "StrictModes": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "MaxStartups": "100",
        }
        (self.folder / "sshd_config").write_text("".join(f"{name} {value}\n" for name, value in lines.items()))

    def wait_until_it_answers(self) -> None:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError((self.folder / "log").read_text())

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(20)
            self._process = None

    def cut_connections(self) -> int:
        """Ends the processes that serve connections, as a network that goes away would; returns how many."""
        assert self._process is not None
        listing = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in listing.splitlines()]
        serving = [int(pid) for pid, parent, name in rows if int(parent) == self._process.pid and "sshd" in name]
        for pid in serving:
            with contextlib.suppress(ProcessLookupError):  # it had served its connection by then
                os.kill(pid, signal.SIGKILL)
        return len(serving)


def have_sshd() -> bool:
    return bool(shutil.which("sshd") or Path("/usr/sbin/sshd").exists()) and bool(shutil.which("ssh"))


def need_sshd() -> None:
    if not have_sshd():
        if os.environ.get("CI"):
            pytest.fail("sshd is not installed, and CI is set: .ci/run installs openssh-server")
        pytest.skip("sshd is not installed (openssh-server), so the ssh provider is not tried")


def running_sshd(folder: Path) -> Iterator[Sshd]:
    need_sshd()
    server = Sshd(folder)
    server.start()
    yield server
    server.stop()


def _new_key(path: Path) -> Path:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
