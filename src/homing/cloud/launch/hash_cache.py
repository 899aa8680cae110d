"""Cache of sha256 hashes of large local files, so that open weights are hashed once and not at each draft.

    path, size, mtime and ctime (ns), inode  ->  $HOMING_HOME/cache/hashes.json  ->  sha256

Only a cache: a file pushed to a store is hashed again on its way, and a lost cache is rebuilt.
"""

from __future__ import annotations

import json
import os
from typing import Any

from homing.cloud.home import Home

__all__ = ["Hashes"]

_FILE = ("cache", "hashes.json")
_LEAST_BYTES = 1 << 20  # smaller files are hashed as quickly as looked up
_SETTLED_S = 2.0  # a file just written may change again within one tick of the disk's clock
_MOST = 2000  # files; the oldest are dropped first


class Hashes:
    """For one command. New hashes are saved at once, so that a kill loses no computed hash."""

    def __init__(self, home: Home) -> None:
        self._world, self._path = home.world, home.path.joinpath(*_FILE)
        self._known: dict[str, Any] | None = None

    def sha256(self, path: str) -> str:
        size, written_ns, *_ = stamp = self._world.stamp(path)
        if size < _LEAST_BYTES:
            return self._world.sha256(path)
        full = os.path.abspath(path)
        known = self._read().get(full)
        if known is not None and known["stamp"] == list(stamp):
            return str(known["sha256"])
        digest = self._world.sha256(path)
        is_settled = written_ns / 1e9 + _SETTLED_S < self._world.now()
        if is_settled and self._world.stamp(path) == stamp:
            self._keep(full, {"stamp": list(stamp), "sha256": digest})
        return digest

    def _read(self) -> dict[str, Any]:
        if self._known is None:
            self._known = {}
            try:
                files = json.loads(self._world.read(self._path))["files"]
                self._known = {name: known for name, known in files.items() if {"stamp", "sha256"} <= set(known)}
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                pass  # missing or unreadable: start a new one
        return self._known

    def _keep(self, full: str, known: dict[str, Any]) -> None:
        files = self._read()
        files.pop(full, None)
        files[full] = known  # newest last
        for name in list(files)[: max(0, len(files) - _MOST)]:
            del files[name]
        try:
            self._world.mkdir(self._path.parent)
            self._world.write(self._path, json.dumps({"schema": "homing.hashes/1", "files": files}, indent=1).encode())
        except OSError:
            return  # the disk is full or read-only: the next command hashes again
