"""The fake cloud's machines on this computer: a folder and a process tree each.

    $HOMING_HOME/fake/machines/<instance id>/   work/ (what its create call brought)  boot.log

A rented machine has a disk of its own, and its programs are told paths on it. Here all share one disk, so the folder
takes the place of that disk's root in what the machine is told. Each call may be repeated, also by a server that was
killed and started again: what belongs to a machine is found by a variable in its processes' environment.
"""

from __future__ import annotations

import hashlib
import queue
import signal
import threading
from pathlib import Path, PurePosixPath

from homing.cloud.providers.base import wait_until
from homing.cloud.providers.fake import ROOT_DIR
from homing.cloud.providers.process_tree import MACHINE_ENV, ProcessTree, inherited
from homing.errors import HomingError
from homing.wire import names
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
            return  # by a server before this one, which was killed before it could write that down
        self._world.mkdir(folder / "work")
        try:
            self._bring(folder, files)
            own = {**inherited(self._world), **env, MACHINE_ENV: self._tree(instance_id).value}
            here = [word.replace(ROOT_DIR, str(folder)) for word in argv]
            self._world.spawn(here, env=own, cwd=folder / "work", log=folder / "boot.log")
        except (OSError, ValueError, IndexError) as exc:
            # A machine whose first command cannot start: it bills, and its log says why.
            self._world.append(folder / "boot.log", f"{type(exc).__name__}: {exc}\n".encode())
        self._world.write(folder / "started", b"")

    def end(self, instance_id: str) -> None:
        self._to_end.put(instance_id)

    def is_running(self, instance_id: str) -> bool:
        return bool(self._tree(instance_id).processes())

    def notice(self, instance_id: str, seconds: float) -> None:
        """Nothing is sent: as on EC2, the machine reads it where its boot.json says."""

    def freeze(self, instance_id: str) -> None:
        tree = self._tree(instance_id)
        tree.send(signal.SIGSTOP)
        tree.send(signal.SIGSTOP)  # and whatever was being started while we looked

    def log(self, instance_id: str) -> str:
        path = self._root / instance_id / "boot.log"
        if not self._world.exists(path):
            return ""
        start = max(0, self._world.size(path) - _LOG_BYTES)
        return self._world.read(path, start, _LOG_BYTES).decode("utf-8", "replace")

    def wait_until_ended(self) -> bool:
        """False where something could not be ended in time; a server that starts again goes on trying."""
        return wait_until(lambda: not self._to_end.unfinished_tasks, timeout_s=_END_S, every_s=0.05, world=self._world)

    def _bring(self, folder: Path, files: dict[str, bytes]) -> None:
        for name, data in files.items():
            target = folder / "work" / _inside(name)
            self._world.mkdir(target.parent)
            # boot.json alone is text with paths in it; an archive must arrive as it was sent.
            told = data.replace(ROOT_DIR.encode(), str(folder).encode()) if name == names.BOOT else data
            self._world.write(target, told)

    def _tree(self, instance_id: str) -> ProcessTree:
        return ProcessTree(MACHINE_ENV, machine_prefix(self._root) + instance_id, self._world)

    def _end_them(self) -> None:
        """In a thread of its own: felling a tree takes a while, and the cloud has others to answer."""
        while True:
            instance_id = self._to_end.get()
            try:
                self._tree(instance_id).end()
            except HomingError:
                self._to_end.put(instance_id)
            finally:
                self._to_end.task_done()


def machine_prefix(root: Path) -> str:
    """How the variable of each process begins whose machine lies in `root`: servers number their instances alike."""
    return f"fake/{hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:12]}/"


def _inside(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise ValueError(f"{name!r} lies outside the machine's work folder")
    return path
