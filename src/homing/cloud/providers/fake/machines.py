"""The fake cloud's machines on this computer: each is a folder and a process tree.

    $HOMING_HOME/fake/machines/<instance id>/   work/ (files from the create call)  boot.log

A rented machine has its own disk, and its programs use paths on that disk. Here all machines share one disk, so in a
machine's arguments and boot.json, the path of the machine's folder replaces the root of its disk. Each call may be
repeated, even by a server that was killed and restarted, because a machine's processes are found by a variable in their
environment.
"""

from __future__ import annotations

import hashlib
import queue
import signal
import threading
from pathlib import Path, PurePosixPath

from homing.cloud.providers.base import wait_until
from homing.cloud.providers.fake.provider import ROOT_DIR
from homing.cloud.providers.simulated_machine import MACHINE_ENV, ProcessTree, inherited
from homing.errors import HomingError
from homing.wire import file_names
from homing.world import World

__all__ = ["HostMachines", "machine_prefix"]

_LOG_BYTES = 4000
_END_S = 60.0


class HostMachines:
    def __init__(self, root: Path, world: World) -> None:
        self._root, self._world = root, world
        self._to_end: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._end_them, daemon=True).start()

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None:
        folder = self._root / instance_id
        if self._world.exists(folder / "started") or self._tree(instance_id).processes():
            return  # an earlier server process started the machine and was killed before recording that
        self._world.mkdir(folder / "work")
        try:
            self._bring(folder, files)
            own = {**inherited(self._world), **env, MACHINE_ENV: self._tree(instance_id).value}
            here = [word.replace(ROOT_DIR, str(folder)) for word in argv]
            self._world.spawn(here, env=own, cwd=folder / "work", log=folder / "boot.log")
        except (OSError, ValueError, IndexError) as exc:
            # If the first command cannot start, the machine still bills, and its log contains the reason.
            self._world.append(folder / "boot.log", f"{type(exc).__name__}: {exc}\n".encode())
        self._world.write(folder / "started", b"")

    def end(self, instance_id: str) -> None:
        self._to_end.put(instance_id)

    def is_running(self, instance_id: str) -> bool:
        return bool(self._tree(instance_id).processes())

    def notice(self, instance_id: str, seconds: float) -> None:
        """Do nothing, because the machine polls a URL from its boot.json for notices, as on EC2."""

    def freeze(self, instance_id: str) -> None:
        tree = self._tree(instance_id)
        tree.send(signal.SIGSTOP)
        tree.send(signal.SIGSTOP)  # again, for processes that were starting during the first scan

    def log(self, instance_id: str) -> str:
        path = self._root / instance_id / "boot.log"
        if not self._world.exists(path):
            return ""
        start = max(0, self._world.size(path) - _LOG_BYTES)
        return self._world.read(path, start, _LOG_BYTES).decode("utf-8", "replace")

    def wait_until_ended(self) -> bool:
        """Wait for the machines to end; return False if one of them is still running after the timeout.

        In that case, the server tries again to end it when it is next started.
        """
        return wait_until(lambda: not self._to_end.unfinished_tasks, timeout_s=_END_S, every_s=0.05, world=self._world)

    def _bring(self, folder: Path, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            target = folder / "work" / _inside(name)
            self._world.mkdir(target.parent)
            # Only boot.json contains machine paths. The other files, such as archives, must not be changed.
            content = data.replace(ROOT_DIR.encode(), str(folder).encode()) if name == file_names.BOOT else data
            self._world.write(target, content)

    def _tree(self, instance_id: str) -> ProcessTree:
        return ProcessTree(MACHINE_ENV, machine_prefix(self._root) + instance_id, self._world)

    def _end_them(self) -> None:
        """End machines in a separate thread.

        Killing a process tree takes a while, and the cloud has other requests to answer.
        """
        while True:
            instance_id = self._to_end.get()
            try:
                self._tree(instance_id).end()
            except HomingError:
                self._to_end.put(instance_id)
            finally:
                self._to_end.task_done()


def machine_prefix(root: Path) -> str:
    """Return a prefix for process marks that is unique to `root`, because all fake clouds use the same instance ids."""
    return f"fake/{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]}/"


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} is outside the instance's work folder")
    return path
