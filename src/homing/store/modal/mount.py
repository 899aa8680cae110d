"""A Modal Volume mounted in a sandbox: a folder, with a commit after each write. No SDK, no token.

Modal writes a sandbox's changes to the Volume when the sandbox ends, or when `sync` runs on the mount point; only
committed changes survive the loss of the sandbox. So a write is complete once `sync` has returned. In the other
direction nothing is automatic: the sandbox sees what home wrote only after home has asked Modal to reload the mount.
"""

from __future__ import annotations

import os

from homing.errors import StoreError
from homing.store.address import ModalAddress
from homing.store.base import Entries, Entry, Files, Keys, check_key
from homing.store.file.store import FileStore
from homing.world import World

__all__ = ["MountedVolume"]

_COMMIT_S = 600.0  # all blocks of a checkpoint are sent in one commit


class MountedVolume(FileStore):
    pace_s = 10.0
    batch_files = 50

    def __init__(self, address: ModalAddress, world: World) -> None:
        super().__init__(os.path.join(address.mount, address.prefix), world, create=False)
        self.url, self._mount = address.url, address.mount

    def put(self, key: str, path: str) -> Entry:
        return self.put_many([(key, path)])[0]

    def put_many(self, files: Files) -> Entries:
        entries = [super(MountedVolume, self).put(key, path) for key, path in files]
        self._commit(files[0][0] if files else "")
        return entries

    def put_bytes(self, key: str, data: bytes) -> Entry:
        entry = super().put_bytes(key, data)
        self._commit(key)
        return entry

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Keys) -> None:
        for key in keys:
            super().delete(key)
        self._commit(keys[0] if keys else "")

    def create_if_absent(self, key: str, data: bytes) -> bool:
        check_key(key)
        raise StoreError(
            what=f"{key} cannot be created exclusively from a sandbox.",
            why="Two sandboxes would each create it in their own view of the Volume.",
            fix="Only home takes leases.",
        )

    def _commit(self, key: str) -> None:
        done = self._world.run(["sync", self._mount], _COMMIT_S)
        if done.code:
            raise StoreError(
                what=f"{key} was written but not committed to {self.url}.",
                why=f"`sync {self._mount}` exited with code {done.code}: {(done.err or done.out).strip()[-300:]}",
                fix="homing retries with the next push.",
            )
