"""A rented machine on this computer: a startup script runs for real, in a folder that takes the place of its disk.

    Machine(folder, script, env, kind)  ->  start()  ->  hand_over to machine.connection(...)  ->  the agent trains

The script's paths are replaced by ones in the folder, as the fake cloud does it; so are those that come in by SSH, by a
command that the server there puts before each. Its sshd is real, on a loopback port. `python3` there is this
interpreter, and the environment that a launch from here asks for is made before, so that nothing is installed.

    kind "container"   the script starts its own sshd; `restart(is_wiped=True)` is what RunPod does to one that ended
    kind "vm"          an sshd with another host key runs before the script does, as on an image of a cloud
"""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.doubles.processes import Processes
from tests.doubles.sshd import free_port, need_sshd

from homing.cloud.machine_setup import code_bundle, receive_hand_over
from homing.cloud.machine_setup.startup_script import ROOT
from homing.instance import bootstrap
from homing.wire.boot_json import Boot, Bootstrap, EndBilling
from homing.world import Completed, World

_STORES = ("file:", "s3:", "hf:", "modal:")  # each brings packages of its own into the lock
_NAMES = ("LANG", "TZ", "TMPDIR", "OMP_NUM_THREADS", "SSL_CERT_FILE")  # what it has of this computer


class Machine:
    """What the folder shows: opt/homing/, bin/, etc/, home/, run/, stdout. Closed at the end, whatever became of it."""

    def __init__(
        self,
        folder: Path,
        script: str,
        *,
        env: Mapping[str, str] | None = None,
        kind: str = "container",
        has_environment: bool = True,
    ) -> None:
        need_sshd()
        self.folder, self.kind = folder.resolve(), kind
        self.root = self.folder / "opt/homing"
        self.port = free_port()
        self.user = getpass.getuser()
        # By its folder: doubles of tests that run at the same time use the same ids.
        self._processes = Processes(f"machine/{self.folder}")
        self._has_environment = has_environment
        self._env = {name: os.environ[name] for name in _NAMES if name in os.environ} | dict(env or {})
        for part in ("bin", "etc/ssh", "run", "home", "per-boot"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self._write_programs()
        (self.folder / "startup.sh").write_text(self._here(script))

    # --- its life ---

    def start(self) -> None:
        if self.kind == "vm":
            self._start_system_sshd()
        if self._has_environment:
            self._make_environment()
        self._spawn(["bash", str(self.folder / "startup.sh")], "stdout")

    @property
    def is_running(self) -> bool:
        """Whether its first process, or anything that came of it, lives."""
        return bool(self._processes.pids())

    def kill(self) -> None:
        """The host is lost: no signal that anybody could catch."""
        deadline, num_quiet = time.monotonic() + 20, 0
        while num_quiet < 3:  # during its exec a process shows no environment
            assert time.monotonic() < deadline, "processes of a machine outlive SIGKILL"
            self._processes.signal(signal.SIGKILL)
            for pid in self._servers():
                World().signal(pid, signal.SIGKILL)
            num_quiet = 0 if self._processes.pids() or self._servers() else num_quiet + 1
            time.sleep(0.05)

    def restart(self, *, is_wiped: bool = False) -> None:
        """As a provider does it to a container that ended. What was in memory is gone, its disk is as it says."""
        self.kill()
        shutil.rmtree(self.memory, ignore_errors=True)
        if is_wiped:
            shutil.rmtree(self.root, ignore_errors=True)
        self.start()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.memory, ignore_errors=True)

    def __enter__(self) -> Machine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- what can be seen of it ---

    def log(self) -> str:
        """What its provider would show: the standard output of its first command."""
        path = self.folder / "stdout"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def memory(self) -> Path:
        """Where secrets lie until the agent takes them."""
        return Path(receive_hand_over.memory_dir(str(self.root)))

    def processes(self) -> dict[int, tuple[str, dict[str, str]]]:
        """pid -> command line, environment."""
        found = {}
        for pid in self._processes.pids():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace")
                pairs = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
            except OSError:
                continue  # it ended while we looked
            env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            found[pid] = (words.replace("\0", " ").strip(), env)
        return found

    def wait_for(self, text: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.log():
            assert time.monotonic() < deadline, f"{text!r} did not come within {timeout_s:g} s:\n{self.log()}"
            time.sleep(0.1)

    # --- helpers, in the order they are called ---

    def _servers(self) -> list[int]:
        """sshd overwrites its environment with its title, so only its command line says which machine it belongs to."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().decode("utf-8", "replace").replace("\0", " ")
            except OSError:
                continue  # it ended while we looked
            if "sshd" in words and f" -f {self.folder}/" in words:
                found.append(int(path.parent.name))
        return found

    def _here(self, script: str) -> str:
        wrapper = f"ForceCommand {self.folder}/bin/as-there\nListenAddress 127.0.0.1\nPort {self.port}\n"
        replaced = {
            ROOT: str(self.root),
            "\nPort 22\n": f"\n{wrapper}",
            "mkdir -p /run/sshd": "true" if os.getuid() else "mkdir -p /run/sshd",
            "/root /home/*": f"{self.folder}/home/{self.user}",
            "/etc/ssh/": f"{self.folder}/etc/ssh/",
            "/var/lib/cloud/scripts/per-boot": f"{self.folder}/per-boot",
            "/run/sshd.pid": f"{self.folder}/run/sshd.pid",
        }
        for old, new in replaced.items():
            assert old in script, f"the startup script no longer says {old!r}"
            script = script.replace(old, new)
        return script

    def _write_programs(self) -> None:
        """`python3` is this interpreter; nothing of this computer's service manager may be reached."""
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        self._program("python3", f'exec {shlex.quote(sys.executable)} "$@"\n')
        self._program("systemctl", "exit 1\n")
        self._program(
            "as-there",
            f"export PATH={shlex.quote(path)}\n"
            f'command=$(printf %s "$SSH_ORIGINAL_COMMAND" | sed "s#{ROOT}#{self.root}#g")\n'
            f'sed "s#{ROOT}#{self.root}#g" | sh -c "$command"\n',
        )
        self._env["PATH"] = path
        self._env.setdefault("HOME", str(self.folder / "home" / self.user))
        (self.folder / "home" / self.user).mkdir(exist_ok=True)

    def _program(self, name: str, text: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{text}")
        path.chmod(0o755)

    def _start_system_sshd(self) -> None:
        key = self.folder / "etc/ssh/ssh_host_ed25519_key"
        if not key.exists():
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # it refuses to start without
        config = self.folder / "etc/ssh/sshd_config"
        lines = {
            "ListenAddress": f"127.0.0.1:{self.port}",
            "HostKey": key,
            "AuthorizedKeysFile": self.folder / "home" / self.user / ".ssh/authorized_keys",
            "PidFile": self.folder / "run/sshd.pid",
            "ForceCommand": self.folder / "bin/as-there",
            "UsePAM": "no",
            "StrictModes": "no",
            "PasswordAuthentication": "no",
        }
        config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        program = shutil.which("sshd") or "/usr/sbin/sshd"
        self._spawn([program, "-D", "-f", str(config), "-E", str(self.folder / "run/sshd.log")], "run/sshd.out")

    def _spawn(self, argv: list[str], log: str) -> None:
        env = {**self._env, **self._processes.env}
        World().spawn(argv, env, self.folder, self.folder / log)

    def _make_environment(self) -> None:
        """Create the environment that the agent's bootstrap will look for, under the name that it computes itself."""
        for print_ in fingerprints():
            env = self.root / "cache" / print_
            (env / "bin").mkdir(parents=True, exist_ok=True)
            shutil.copy(self.folder / "bin/python3", env / "bin/python")
            (env / ".whole").touch()


class _Peek(World):
    """Answers the bootstrap that every environment is there, and remembers which it asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def exists(self, path: Any) -> bool:
        self.asked.append(os.path.basename(os.path.dirname(path)))
        return True

    def run(self, argv: Any, timeout_s: float, env: Any = None, stdin: str = "") -> Completed:
        if argv[0] != "python3":
            return Completed(0, "", "")
        return super().run([sys.executable, *argv[1:]], timeout_s, env, stdin)


@cache
def fingerprints() -> frozenset[str]:
    """The names, env-..., under which a launch from here looks for its environment, for every kind of store."""
    peek = _Peek()
    for store in _STORES:
        lock = code_bundle.lock(store)
        messages = Bootstrap(
            lock=list(lock.lines),
            torch=lock.torch_version,
            torch_lock=list(lock.torch),
            torch_range=list(code_bundle.TORCH_RANGE),
            python="python3",
            env_dir="/cache/env-",
        )
        bootstrap._environment(bare_boot(bootstrap=messages), messages, peek)
    return frozenset(peek.asked)


def bare_boot(mark: str = "", work_dir: str = "", bootstrap: Bootstrap | None = None) -> Boot:
    """One that trains nothing."""
    return Boot(
        run_id="moss-1",
        run_name="moss",
        mark=mark,
        attempt=1,
        work_dir=work_dir,
        store="",
        inputs=[],
        trainer_argv=[],
        sync_argv=[],
        end_billing=EndBilling("command", ["true"]),
        started_at=0.0,
        rate_usd_per_hour="1.00",
        spent_before_usd="0",
        spend_limit_usd=None,
        time_limit_s=0.0,
        idle_limit_s=0.0,
        stall_factor=0.0,
        bootstrap=bootstrap,
    )
