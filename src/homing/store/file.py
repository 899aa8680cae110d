"""A store in a folder: `file:/abs/path`, or a Modal Volume that is mounted as a folder in a sandbox.

A folder provides all guarantees listed in base.py and needs no account. A key is a path below the root folder. The
first write creates the root if the store was opened with `create`. If the root disappears later (unmounted disk,
moved folder), every call raises, because a missing disk is not an empty store.

A mounted Volume needs no SDK and no token, but each write must be followed by a commit. Modal writes a sandbox's
changes to the Volume when the sandbox ends, or when `sync` runs on the mount point; only committed changes survive the
loss of the sandbox. So a write is complete only when `sync` has returned. Conversely, the sandbox sees what the user's
computer wrote only after that computer has asked Modal to reload the mount.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator

from homing.errors import StoreError, StoreRefused
from homing.store.address import ModalAddress
from homing.store.base import (
    Entries,
    Entry,
    Files,
    Keys,
    Progress,
    check_key,
    disk_failed,
    is_temporary_file,
    not_in_store,
    unwatched,
    wrong_content,
)
from homing.world import World

__all__ = ["FileStore", "MountedVolume"]

_STALE_S = 86400.0  # seconds after which an unfinished file is considered abandoned


class FileStore:
    pace_s = 0.0  # a folder does not limit the rate of writes
    batch_files = 1

    def __init__(self, root: str, world: World, *, create: bool = True) -> None:
        self.root = os.path.abspath(os.path.expanduser(root))
        self.url = f"file:{self.root}"
        self._world = world
        # The root folder may be created only if it has never been seen. Once it has been seen, its absence is an error.
        self._may_create = create
        self.progress: Progress = unwatched
        self._swept: set[str] = set()

    def put(self, key: str, path: str) -> Entry:
        target = self._writable(key)
        with self._as_store_error("written", key):
            digest = self._world.copy(path, target)
            entry = Entry(key, self._world.size(target), digest)
        self.progress(entry.num_bytes, entry.num_bytes)
        return entry

    def put_many(self, files: Files) -> Entries:
        return [self.put(key, path) for key, path in files]

    def put_bytes(self, key: str, data: bytes) -> Entry:
        target = self._writable(key)
        with self._as_store_error("written", key):
            self._world.write(target, data)
        return Entry(key, len(data), hashlib.sha256(data).hexdigest())

    def get(self, key: str, path: str, sha256: str | None = None) -> None:
        source = self._readable(key)
        # Copy to a temporary file first: unchecked bytes must not replace a good file at `path`.
        temporary = f"{path}.part-{self._world.random_hex(8)}"
        try:
            with self._as_store_error("fetched", key):
                digest = self._world.copy(source, temporary)
            if sha256 is not None and digest != sha256:
                raise wrong_content(key, self.url, digest, sha256)
            with self._as_store_error("fetched", key):
                self._world.rename(temporary, path)
        finally:
            self._world.remove(temporary)

    def read(self, key: str) -> bytes:
        source = self._readable(key)
        with self._as_store_error("read", key):
            return self._world.read(source)

    def num_bytes(self, key: str) -> int:
        source = self._readable(key)
        with self._as_store_error("read", key):
            return self._world.size(source)

    def read_part(self, key: str, start: int, num_bytes: int) -> bytes:
        with self._as_store_error("read", key):
            return self._world.read(self._path(key), start, num_bytes)

    def sha256(self, key: str) -> str:
        source = self._readable(key)
        with self._as_store_error("read", key):
            return self._world.sha256(source)

    def is_same(self, key: str, path: str) -> bool:
        source = self._readable(key)
        with self._as_store_error("compared", key):
            is_as_long = self._world.size(source) == self._world.size(path)
            return is_as_long and self._world.sha256(source) == self._world.sha256(path)

    def exists(self, key: str) -> bool:
        path = self._path(key)
        self._check_root()
        with self._as_store_error("checked", key):
            try:
                # use `size`, because `exists` does not distinguish a missing file from an inaccessible one
                self._world.size(path)
            except (FileNotFoundError, NotADirectoryError):
                self._check_root()
                return False
            return not self._world.is_dir(path)

    def list(self, prefix: str) -> Entries:
        self._check_root()
        # Walk only the prefix's folder, up to the last slash. The rest of the prefix is the start of a file name.
        folder = prefix.rpartition("/")[0]
        base = os.path.join(self.root, *check_key(folder).split("/")) if folder else self.root
        with self._as_store_error("listed", prefix):
            names = self._world.walk(base)
            keys = [f"{folder}/{name}" if folder else name for name in names if not is_temporary_file(name)]
            found: Entries = []
            for key in keys:
                if key.startswith(prefix):
                    # Omit a file that has been deleted since the walk.
                    with contextlib.suppress(FileNotFoundError):
                        found.append(Entry(key, self._world.size(os.path.join(self.root, key))))
        self._check_root()
        return found

    def delete(self, key: str) -> None:
        path = self._path(key)
        self._check_root()
        with self._as_store_error("deleted", key):
            self._world.remove(path)

    def delete_many(self, keys: Keys) -> None:
        for key in keys:
            self.delete(key)

    def create_if_absent(self, key: str, data: bytes) -> bool:
        target = self._writable(key)
        with self._as_store_error("written", key):
            return self._world.create(target, data)

    def _path(self, key: str) -> str:
        return os.path.join(self.root, *check_key(key).split("/"))

    def _readable(self, key: str) -> str:
        path = self._path(key)
        if not self.exists(key):
            raise not_in_store(key, self.url)
        return path

    def _writable(self, key: str) -> str:
        path = self._path(key)
        with self._as_store_error("written", key):
            if self._may_create and not self._world.is_dir(self.root):
                self._world.mkdir(self.root)
        self._check_root()
        with self._as_store_error("written", key):
            self._world.mkdir(os.path.dirname(path))
            self._sweep(os.path.dirname(path))
        return path

    def _sweep(self, folder: str) -> None:
        """Delete the unfinished files that killed processes left in a folder. Later calls for a folder do nothing."""
        if folder in self._swept:
            return
        self._swept.add(folder)
        for name in self._world.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(FileNotFoundError):
                if is_temporary_file(name) and self._world.now() - self._world.modified_at(path) > _STALE_S:
                    self._world.remove(path)

    def _check_root(self) -> None:
        if self._world.is_dir(self.root):
            self._may_create = False
            return
        raise StoreRefused(
            what=f"The store {self.url} cannot be reached.",
            why=f"{self.root} does not exist or is not a folder.",
            fix="Mount the disk or move the folder back, or set another store in the run file: store: file:/path",
        )

    @contextlib.contextmanager
    def _as_store_error(self, done: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise disk_failed(exc, done, key, self.url) from exc


_COMMIT_S = 600.0  # time limit for a commit; long, because one commit sends all blocks of a checkpoint


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
            what=f"{key} cannot be created safely from inside a sandbox.",
            why="Each sandbox has its own view of the Volume, so two of them could create the same file.",
            fix="Run the command on your own computer instead.",
        )

    def _commit(self, key: str) -> None:
        done = self._world.run(["sync", self._mount], _COMMIT_S)
        if done.code:
            raise StoreError(
                what=f"{key} was written but not committed to {self.url}.",
                why=f"`sync {self._mount}` exited with code {done.code}: {(done.err or done.out).strip()[-300:]}",
                fix="Nothing to do: homing retries with the next push.",
            )
