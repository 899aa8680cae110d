"""A run's files in its store, as the dashboard reads them: again and again, so that only what is new is transferred.

folder         of a growing file, only the new end is read
other stores   the run is listed once per look, and a file is read again only if its size or hash has changed
"""

from __future__ import annotations

import os

from homing.errors import StoreError
from homing.store import FileStore, NotInStore, Store
from homing.store.base import Entries, not_in_store
from homing.world import World

__all__ = ["Remembering", "remember"]

_GROWING = (".jsonl", ".log")
_SEAM_BYTES = 256  # number of bytes compared at the end of our copy; if they differ, the file was replaced


def remember(store: Store, world: World, prefix: str) -> Remembering:
    """Return the store wrapped in a cache. For a file store, the cache can also read parts of files."""
    return (
        RememberingFolder(store, world, prefix) if isinstance(store, FileStore) else Remembering(store, world, prefix)
    )


class Remembering:
    """Cached view of the files below `prefix`. After each call to `look_again`, the next read lists the store again."""

    def __init__(self, store: Store, world: World, prefix: str) -> None:
        self.url, self._store, self._world, self._prefix = store.url, store, world, prefix
        self._listed: Entries | None = None
        self._have: dict[str, bytes] = {}
        self._sha256: dict[str, str | None] = {}

    def look_again(self) -> None:
        self._listed = None

    def list(self, prefix: str) -> Entries:
        if isinstance(self._store, FileStore) or not prefix.startswith(self._prefix):
            return self._store.list(prefix)
        if self._listed is None:
            self._listed = self._store.list(self._prefix)
        return [entry for entry in self._listed if entry.key.startswith(prefix)]

    def read(self, key: str) -> bytes:
        if not key.endswith(_GROWING):
            return self._store.read(key)
        store = self._store
        try:
            data = self._from_folder(store.root, key) if isinstance(store, FileStore) else self._from_far(key)
        except NotInStore:
            self._have.pop(key, None)
            raise
        self._have[key] = data
        return data

    def _from_folder(self, root: str, key: str) -> bytes:
        have, path = self._have.get(key, b""), os.path.join(root, *key.split("/"))
        seam = have[-_SEAM_BYTES:]
        try:
            fresh = self._world.read(path, len(have) - len(seam))
        except (FileNotFoundError, NotADirectoryError):
            return self._store.read(key)  # distinguishes a missing file from a missing disk
        except OSError as exc:
            raise StoreError(f"Cannot read {key} in {self.url}.", str(exc), "homing doctor") from exc
        return have + fresh[len(seam) :] if fresh.startswith(seam) else self._store.read(key)

    def _from_far(self, key: str) -> bytes:
        entry = next((each for each in self.list(key) if each.key == key), None)
        if entry is None:
            raise not_in_store(key, self.url)
        have = self._have.get(key)
        if have is not None and len(have) == entry.num_bytes and self._sha256.get(key) == entry.sha256:
            return have
        self._sha256[key] = entry.sha256
        return self._store.read(key)


class RememberingFolder(Remembering):
    def num_bytes(self, key: str) -> int:
        assert isinstance(self._store, FileStore), self.url
        return self._store.num_bytes(key)

    def read_part(self, key: str, start: int, num_bytes: int) -> bytes:
        assert isinstance(self._store, FileStore), self.url
        return self._store.read_part(key, start, num_bytes)
