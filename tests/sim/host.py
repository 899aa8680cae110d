"""A machine of the simulation: its own clock, its own disk, its own processes, its own connections.

Disk      path -> bytes; with a size, and with what a power cut takes
Clock     skew, drift and jumps for now(); monotonic never goes back and stops while the machine sleeps;
          boottime continues then, and restarts with the machine
Host      both, with processes, locks and databases, and what it can reach
"""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.sim.kernel import Sim, Task

if TYPE_CHECKING:
    from tests.sim.world import Proc

__all__ = ["EPOCH", "HOME", "Disk", "Host"]

HOME = Path("/home/me/.homing")  # on every computer of a person
EPOCH = 1_800_000_000.0  # the true time at which every schedule begins
_NAMES_PER_FOLDER = 4096


class Disk:
    def __init__(self, num_bytes: int = 1 << 40) -> None:
        self.files: dict[str, bytes] = {}
        self.times: dict[str, float] = {}
        self.folders: dict[str, set[str]] = {"/": set()}
        self.num_bytes, self.used = num_bytes, 0
        self.unsynced: dict[str, int] = {}  # appended files -> length that a power cut leaves

    def put(self, path: str, data: bytes, now: float) -> None:
        """Whole. Raises where there is no room or no folder."""
        old = self.files.get(path)
        if old is None:
            if path in self.folders:
                raise IsADirectoryError(errno.EISDIR, "is a folder", path)
            self._folder_of(path)
        grown = len(data) - (len(old) if old is not None else 0)
        if grown > 0 and self.used + grown > self.num_bytes:
            raise OSError(errno.ENOSPC, "no space left on device", path)
        self.used += grown
        self.files[path] = data
        self.times[path] = now
        if old is None:
            head, _, name = path.rpartition("/")
            self.folders[head or "/"].add(name)

    def get(self, path: str) -> bytes:
        try:
            return self.files[path]
        except KeyError:
            kind = IsADirectoryError if path in self.folders else FileNotFoundError
            raise kind(errno.ENOENT, "no such file", path) from None

    def drop(self, path: str) -> None:
        data = self.get(path)
        self.used -= len(data)
        del self.files[path], self.times[path]
        self.unsynced.pop(path, None)
        head, _, name = path.rpartition("/")
        self.folders[head or "/"].discard(name)

    def make(self, path: str) -> None:
        if path in self.folders:
            return
        if path in self.files:
            raise FileExistsError(errno.EEXIST, "is a file", path)
        head, _, name = path.rpartition("/")
        self.make(head or "/")
        self.folders[path] = set()
        self.folders[head or "/"].add(name)

    def names(self, path: str) -> list[str]:
        if path not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)
        return sorted(self.folders[path])

    def walk(self, path: str, prefix: str = "") -> list[str]:
        found: list[str] = []
        for name in self.folders.get(path, ()):
            full = f"{path}/{name}" if path != "/" else f"/{name}"
            if full in self.files:
                found.append(prefix + name)
            else:
                found += self.walk(full, f"{prefix}{name}/")
        return found

    def move(self, source: str, target: str, now: float) -> None:
        if source in self.folders:
            self._move_folder(source, target, now)
            return
        data, at = self.get(source), self.times[source]
        self.drop(source)
        self.put(target, data, now)
        self.times[target] = at

    def tree(self, path: str) -> None:
        """Removes a folder with all below it."""
        for name in self.walk(path):
            self.drop(f"{path}/{name}")
        for folder in [f for f in self.folders if f == path or f.startswith(path + "/")]:
            del self.folders[folder]
        head, _, name = path.rpartition("/")
        self.folders[head or "/"].discard(name)

    def lose_power(self) -> None:
        """What was appended and never synced is cut; what was written whole stays."""
        for path, length in self.unsynced.items():
            if path in self.files:
                self.used -= len(self.files[path]) - length
                self.files[path] = self.files[path][:length]
        self.unsynced.clear()

    def _folder_of(self, path: str) -> None:
        if (path.rpartition("/")[0] or "/") not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "no such folder", path)

    def _move_folder(self, source: str, target: str, now: float) -> None:
        if self.folders.get(target):
            raise OSError(errno.ENOTEMPTY, "folder not empty", target)
        moved = {name: (self.files[f"{source}/{name}"], self.times[f"{source}/{name}"]) for name in self.walk(source)}
        empty = [f[len(source) :] for f in self.folders if f.startswith(source + "/")]
        self.tree(source)
        self.make(target)
        for folder in empty:
            self.make(target + folder)
        for name, (data, at) in moved.items():
            self.put(f"{target}/{name}", data, now)
            self.times[f"{target}/{name}"] = at


class Host:
    def __init__(self, sim: Sim, name: str, *, skew_s: float = 0.0, drift: float = 0.0, disk: Disk | None = None):
        self.sim, self.name = sim, name
        self.disk = disk if disk is not None else Disk()
        self.mounts: dict[str, Host] = {}
        self.processes: dict[int, Proc] = {}
        self.locks: dict[str, Proc] = {}
        self.databases: dict[str, sqlite3.Connection] = {}
        self.env: dict[str, str] = {"PATH": "/usr/bin", "HOME": "/home/me", "USER": "me"}
        self.skew_s, self.drift = skew_s, drift
        self.is_up = True
        self.is_frozen = False
        self.cut: set[str] = set()  # names of hosts, or "cloud", that it cannot reach
        self.is_read_only = False  # its disk was mounted so: nothing below HOME can be written
        self.damaged: set[str] = set()  # databases with overwritten pages
        self.is_refusing = False  # as a store: it refuses every read and write, permanently
        self.damages = ""  # as a store: reads of paths with this in them give other bytes
        self.ill_rate = 0.0  # as a store: the share of calls that fail
        self._frozen_at = 0.0
        self._slept_s = 0.0
        self._booted_at = 0.0
        self._held: list[Task] = []
        self._next_pid = 100

    # --- clock ---

    def now(self) -> float:
        return EPOCH + self.sim.t * (1.0 + self.drift) + self.skew_s

    def monotonic(self) -> float:
        return 1000.0 + (self.sim.t - self._slept_s) * (1.0 + self.drift)

    def boottime(self) -> float:
        return 5000.0 + (self.sim.t - self._booted_at) * (1.0 + self.drift)

    def boot_id(self) -> str:
        return f"{self.name}@{self._booted_at:g}"

    # --- power ---

    def freeze(self) -> None:
        """A closed laptop, a hung machine: nothing of it runs, all of it is there."""
        if not self.is_frozen:
            self.is_frozen, self._frozen_at = True, self.sim.t
            self.sim.say(f"{self.name} is frozen")

    def thaw(self) -> None:
        if self.is_frozen:
            self.is_frozen = False
            self._slept_s += self.sim.t - self._frozen_at
            held, self._held = self._held, []
            for task in held:
                task.entry = self.sim.at(self.sim.t, task)
            self.sim.say(f"{self.name} wakes up")

    def is_ill(self) -> bool:
        return self.ill_rate > 0 and self.sim.random.random() < self.ill_rate

    def hold(self, task: Task) -> None:
        self._held.append(task)

    def crash(self) -> None:
        """Power cut: every process is dead, and what was not synced is lost."""
        self.end()
        self.disk.lose_power()
        self.is_up, self._booted_at = True, self.sim.t

    def end(self) -> None:
        """Gone: every process is dead."""
        self.is_up = False
        self.sim.say(f"{self.name} goes down")
        for proc in list(self.processes.values()):
            proc.kill()

    # --- processes ---

    def next_pid(self) -> int:
        self._next_pid += 1
        return self._next_pid

    def living(self) -> list[Proc]:
        return [proc for proc in self.processes.values() if proc.task.code is None]

    def database(self, path: str) -> sqlite3.Connection:
        if path not in self.databases:
            connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
            connection.row_factory = _as_dict
            self.databases[path] = connection
        return self.databases[path]

    def lose_database(self, path: str) -> None:
        """`rm ledger.sqlite*`"""
        self.damaged.discard(path)
        if path in self.databases:
            self.databases.pop(path).close()

    def restore_database(self, path: str, image: bytes) -> None:
        self.lose_database(path)
        # Bytes 18 and 19 say how it was written to, and memory knows no write-ahead log.
        self.database(path).deserialize(image[:18] + b"\x01\x01" + image[20:])

    def close(self) -> None:
        for connection in self.databases.values():
            connection.close()


def _as_dict(cursor: sqlite3.Cursor, row: tuple[Any, ...]) -> dict[str, Any]:
    return {column[0]: value for column, value in zip(cursor.description, row, strict=True)}
