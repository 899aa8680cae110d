"""Modal Volumes of one process, and one mounted in a sandbox: committed on `sync` and at the end, seen anew on reload.

Of a Volume the world outside sees only what was committed. A sandbox works on a copy taken at its start; a commit
brings what changed there, file by file and last writer wins; a reload brings what others committed, and fails while a
file of the mount is open. A machine that is lost takes with it what it had not committed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = 8 << 20


@dataclass
class Volume:
    id: str
    name: str
    version: int
    files: dict[str, bytes] = field(default_factory=dict)
    times: dict[str, float] = field(default_factory=dict)
    num_commits: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock)

    def write(self, path: str, data: bytes) -> None:
        with self.lock:
            self.files[path.strip("/")] = data
            self.times[path.strip("/")] = time.time()

    def under(self, path: str, *, is_recursive: bool) -> dict[str, int] | None:
        """Path -> size, -1 for a folder; of a file only itself; None where there is nothing."""
        top = path.strip("/")
        with self.lock:
            if top in self.files:
                return {top: len(self.files[top])}
            start = f"{top}/" if top else ""
            inside = {name: len(data) for name, data in self.files.items() if name.startswith(start)}
        if not inside and top:
            return None
        found: dict[str, int] = {}
        for name, size in inside.items():
            parts = name[len(start) :].split("/")
            for depth in range(1, len(parts)):
                if is_recursive or depth == 1:
                    found[start + "/".join(parts[:depth])] = -1
            if is_recursive or len(parts) == 1:
                found[name] = size
        return found


class Mount:
    """A Volume in a folder of a sandbox."""

    def __init__(self, volume: Volume, folder: Path) -> None:
        self.volume, self.folder = volume, folder
        self._base: dict[str, bytes] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._bring()

    def commit(self) -> None:
        with self.volume.lock:
            now = self._scan()
            for path, data in now.items():
                if self._base.get(path) != data:
                    self.volume.write(path, data)
            for path in set(self._base) - set(now):
                self.volume.files.pop(path, None)
            self._base = now
            self.volume.num_commits += 1

    def reload(self) -> str:
        """Why it cannot be done now, or ""."""
        if self._open_file():
            return "there are open files preventing the operation"
        self.commit()
        self._bring()
        return ""

    def _bring(self) -> None:
        with self.volume.lock:
            for path in set(self._base) - set(self.volume.files):
                (self.folder / path).unlink(missing_ok=True)
            for path, data in self.volume.files.items():
                if self._base.get(path) != data:
                    target = self.folder / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    temporary = target.with_name(f"{target.name}.reload")
                    temporary.write_bytes(data)
                    temporary.rename(target)
            self._base = dict(self.volume.files)

    def _scan(self) -> dict[str, bytes]:
        found = {}
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = Path(folder) / name
                with contextlib.suppress(FileNotFoundError):  # written to a temporary file and renamed meanwhile
                    found[str(path.relative_to(self.folder))] = path.read_bytes()
        return found

    def _open_file(self) -> str:
        inside = f"{self.folder}{os.sep}"
        for fd in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                target = os.readlink(fd)
                if target.startswith(inside):
                    return target
        return ""
