"""A store wrapper that reads but never writes, for --dry-run."""

from __future__ import annotations

import hashlib

from homing.errors import StoreError
from homing.store.base import Entries, Entry, Files, Keys, Store

__all__ = ["DryStore"]


class DryStore:
    def __init__(self, store: Store) -> None:
        self._store = store
        self.url, self.pace_s, self.batch_files = store.url, store.pace_s, store.batch_files
        self.progress = store.progress
        self.would_put: list[str] = []

    def put(self, key: str, path: str) -> Entry:
        self.would_put.append(key)
        return Entry(key, 0)

    def put_many(self, files: Files) -> Entries:
        return [self.put(key, path) for key, path in files]

    def put_bytes(self, key: str, data: bytes) -> Entry:
        self.would_put.append(key)
        return Entry(key, len(data), hashlib.sha256(data).hexdigest())

    def create_if_absent(self, key: str, data: bytes) -> bool:
        self.would_put.append(key)
        return True

    def delete(self, key: str) -> None:
        self.would_put.append(key)

    def delete_many(self, keys: Keys) -> None:
        self.would_put += keys

    def exists(self, key: str) -> bool:
        try:
            return self._store.exists(key)
        except StoreError:
            return False  # a store that does not exist yet is created by the first real push

    def get(self, key: str, path: str, sha256: str | None = None) -> None:
        self._store.get(key, path, sha256)

    def read(self, key: str) -> bytes:
        return self._store.read(key)

    def sha256(self, key: str) -> str:
        return self._store.sha256(key)

    def is_same(self, key: str, path: str) -> bool:
        return self._store.is_same(key, path)

    def list(self, prefix: str) -> Entries:
        return self._store.list(prefix)
