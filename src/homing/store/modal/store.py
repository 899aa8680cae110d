"""A store in a Modal Volume (version 2): `modal:VOLUME`, created by the first write.

    outside a sandbox  uses the SDK: put, list and read are calls to Modal, which see only committed data
    in a sandbox       uses files on the mount (`?mount=/path`); `sync` on the mount point commits each write

Modal documents no exclusive write for Volumes, so create_if_absent uses a Modal Dict named after the Volume: the Dict's
`put` with skip_if_exists returns True for exactly one of many callers. Each caller first stages its data under a
temporary name, which it puts into the Dict. If the winner dies before it has finished, another caller finishes the
winner's write. A sandbox has no token, so create_if_absent raises there.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Awaitable, Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

from homing.errors import StoreError, StoreRefused
from homing.store.address import parse_modal
from homing.store.base import (
    Entries,
    Entry,
    Files,
    Keys,
    Progress,
    Store,
    check_key,
    is_temporary_file,
    not_in_store,
    unwatched,
    wrong_content,
)
from homing.store.file import MountedVolume
from homing.store.modal.client import TIMEOUT_S, Connection, Shut, connect, failures, kind_of, text_of
from homing.world import Retries, World

__all__ = ["VolumeStore", "open_volume"]

T = TypeVar("T")
# This alias is needed because `list` is a method in the class below.
Things = list[Any]
Pairs = list[tuple[str, Any]]  # (name in the Volume, content: bytes or a local path)
_RETRIES = Retries(tries=3, first_s=1.0)  # in addition to the SDK's own retries, which last about a second
_RACES = 20
_IN_MEMORY = 8 << 20
_GROWING = (".jsonl", ".log", ".csv", ".txt")
_SLOWEST_BYTES_PER_S = 250_000  # a transfer slower than this exceeds its call's deadline
_VERSION = 2  # version of the Volume; only version 2 can be committed from a running sandbox


def open_volume(url: str, world: World, *, create: bool) -> Store:
    address = parse_modal(url)
    return MountedVolume(address, world) if address.mount else VolumeStore(url, world, create=create)


class VolumeStore:
    pace_s = 10.0
    batch_files = 50

    def __init__(self, url: str, world: World, *, create: bool = True) -> None:
        self.address = parse_modal(url)
        self.url = self.address.url
        self.progress: Progress = unwatched
        self.may_create = create
        self._world = world
        self._handle: Any = None

    @cached_property
    def connection(self) -> Connection:
        try:
            return connect(self._world)
        except Shut as exc:
            fix = "Modal does not respond. Try again later."
            raise StoreError(f"{self.url} cannot be reached.", f"Modal: {exc}", fix) from exc

    # --- the Store interface ---

    def put(self, key: str, path: str) -> Entry:
        return self.put_many([(key, path)])[0]

    def put_many(self, files: Files) -> Entries:
        names = [self._name(key) for key, _ in files]
        entries: Entries = []
        sources: Things = []
        temporary_files: Keys = []
        try:
            with self._reading(files[0][0] if files else ""):
                for key, path in files:
                    source, entry = self._still(key, path, temporary_files)
                    sources.append(source)
                    entries.append(entry)
            num_bytes = sum(entry.num_bytes for entry in entries)
            if files:
                self._upload(list(zip(names, sources, strict=True)), files[0][0], num_bytes)
        finally:
            for temporary in temporary_files:
                self._world.remove(temporary)
        self.progress(num_bytes, num_bytes)
        return entries

    def put_bytes(self, key: str, data: bytes) -> Entry:
        self._upload([(self._name(key), data)], key, len(data))
        return Entry(key, len(data), hashlib.sha256(data).hexdigest())

    def get(self, key: str, path: str, sha256: str | None = None) -> None:
        temporary = f"{path}.part-{self._world.random_hex(8)}"
        try:
            digest = self._read(
                key, lambda data: self._append(temporary, data, key), lambda: self._begin(temporary, key)
            )
            if sha256 is not None and digest != sha256:
                raise wrong_content(key, self.url, digest, sha256)
            with self._reading(key):
                self._world.rename(temporary, path)
        finally:
            self._world.remove(temporary)

    def read(self, key: str) -> bytes:
        chunks: list[bytes] = []
        self._read(key, chunks.append, chunks.clear)
        return b"".join(chunks)

    def sha256(self, key: str) -> str:
        return self._read(key, lambda data: None, lambda: None)

    def is_same(self, key: str, path: str) -> bool:
        num_bytes = self._size(key)
        with self._reading(key):
            if self._world.size(path) != num_bytes:
                return False
            digest = self._world.sha256(path)
        return self.sha256(key) == digest

    def exists(self, key: str) -> bool:
        name = self._name(key)
        # For a file, the SDK's iterdir yields the file itself. For a folder, it yields the contents.
        return any(entry.path.strip("/") == name and _is_file(entry) for entry in self._entries(name, False, key))

    def list(self, prefix: str) -> Entries:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        start = self.address.prefix + prefix
        found = self._entries(f"{self.address.prefix}{folder}".strip("/") or "/", True, prefix)
        names = {entry.path.strip("/"): entry.size for entry in found if _is_file(entry)}
        kept = [name for name in sorted(names) if name.startswith(start) and not is_temporary_file(name)]
        return [Entry(name[len(self.address.prefix) :], names[name]) for name in kept]

    def delete(self, key: str) -> None:
        """Delete a key: first its claim, then its file.

        A crash in between leaves a file without a claim, which still makes create_if_absent return False.
        """
        name = self._name(key)
        self._withdraw(name, key)
        self._remove(name, key)

    def delete_many(self, keys: Keys) -> None:
        for key in keys:
            self.delete(key)

    def create_if_absent(self, key: str, data: bytes) -> bool:
        name = self._name(key)
        temporary = f"{name}.part-{self._world.random_hex(8)}"
        self._volume(is_write=True)
        if self.exists(key):
            return False
        self._upload([(temporary, data)], key, len(data))
        try:
            for _ in range(_RACES):
                if self._claim(name, temporary, key):
                    self._finish(temporary, name, key)
                    return True
                if self._is_finished(name, key):
                    return False
            raise StoreError(
                what=f"{key} could not be created in {self.url}.",
                why=f"Other writers claimed it {_RACES} times in a row.",
                fix="Try again.",
            )
        finally:
            with contextlib.suppress(StoreError):  # a leftover is harmless: `list` ignores files with such names
                self._remove(temporary, key)

    # --- used by preflight ---

    def is_there(self) -> bool:
        try:
            self._hydrate(may_create=False)
        except _Gone:
            return False
        return True

    # --- exclusive write ---

    def _claim(self, name: str, temporary: str, key: str) -> bool:
        """Return True if we claimed the key. If Modal's response is lost, the Dict's value shows who claimed it."""
        claims = self._claims
        is_ours = self._do("claimed", key, lambda: claims.put.aio(name, temporary, skip_if_exists=True))
        return bool(is_ours) or self._holder(name, key) == temporary

    def _holder(self, name: str, key: str) -> Any:
        claims = self._claims
        return self._do("checked", key, lambda: claims.get.aio(name))

    def _withdraw(self, name: str, key: str) -> None:
        claims = self._claims
        self._do("deleted", key, lambda: claims.pop.aio(name, None))

    def _is_finished(self, name: str, key: str) -> bool:
        """Return True once the claim holder's file exists. If necessary, copy the holder's staged data to it."""
        if self.exists(key):
            return True
        holder = self._holder(name, key)
        if holder is None:
            return False  # the holder's claim was withdrawn in the meantime
        try:
            self._finish(str(holder), name, key)
        except _Gone:
            if not self.exists(key):
                # The claim is void: after the file was written, a sandbox deleted it, but a sandbox cannot access the
                # Dict to delete the claim as well.
                self._withdraw(name, key)
                return False
        return True

    def _finish(self, temporary: str, name: str, key: str) -> None:
        volume = self._volume(is_write=True)
        self._do("created", key, lambda: volume.copy_files.aio([temporary], name))

    # --- calls ---

    def _upload(self, pairs: Pairs, key: str, num_bytes: int) -> None:
        volume = self._volume(is_write=True)

        async def upload() -> None:
            async with volume.batch_upload(force=True) as batch:
                for name, source in pairs:
                    batch.put_file(io.BytesIO(source) if isinstance(source, bytes) else source, f"/{name}")

        self._do("written", key, upload, TIMEOUT_S + num_bytes / _SLOWEST_BYTES_PER_S)

    def _read(self, key: str, take: Callable[[bytes], None], begin: Callable[[], None]) -> str:
        """Read a file and return its sha256. Call `begin` before each try, because each try starts over."""
        name, total, volume = self._name(key), self._size(key), self._volume()

        async def read() -> str:
            begin()
            digest, have = hashlib.sha256(), 0
            async for piece in volume.read_file.aio(name):
                take(piece)
                digest.update(piece)
                have += len(piece)
                self.progress(have, total)
            return digest.hexdigest()

        try:
            return self._do("read", key, read, TIMEOUT_S + total / _SLOWEST_BYTES_PER_S)
        except _Gone as exc:
            raise not_in_store(key, self.url) from exc

    def _size(self, key: str) -> int:
        name = self._name(key)
        found = [entry.size for entry in self._entries(name, False, key) if entry.path.strip("/") == name]
        if not found:
            raise not_in_store(key, self.url)
        return int(found[0])

    def _entries(self, path: str, recursive: bool, key: str) -> Things:
        volume = self._volume()

        async def look() -> Things:
            return [entry async for entry in volume.iterdir.aio(path, recursive=recursive)]

        try:
            return self._do("listed", key, look)
        except _Gone:
            # Raise if the whole Volume is missing. Only a missing folder means that there are no entries.
            self._hydrate(may_create=False)
            return []

    def _remove(self, name: str, key: str) -> None:
        volume = self._volume()
        try:
            self._do("deleted", key, lambda: volume.remove_file.aio(name))
        except _Gone:
            self._hydrate(may_create=False)

    # Report local disk errors as such: a full disk does not mean that Modal is down, and retries would not help.

    def _begin(self, temporary: str, key: str) -> None:
        with self._reading(key):
            self._world.write(temporary, b"")

    def _append(self, temporary: str, data: bytes, key: str) -> None:
        with self._reading(key):
            self._world.append(temporary, data)

    def _still(self, key: str, path: str, temporary_files: Keys) -> tuple[Any, Entry]:
        """Return the content in a form that cannot change during the push, together with its Entry.

        A file could otherwise change between the SDK's two reads: one to hash it, one to upload it.
        """
        if self._world.size(path) <= _IN_MEMORY:
            data = self._world.read(path)
            return data, Entry(key, len(data), hashlib.sha256(data).hexdigest())
        if path.endswith(_GROWING):
            temporary_files.append(f"{path}.part-{self._world.random_hex(8)}")
            digest = self._world.copy(path, temporary_files[-1])
            return temporary_files[-1], Entry(key, self._world.size(temporary_files[-1]), digest)
        return path, Entry(key, self._world.size(path), self._world.sha256(path))

    # Look up the Volume and the Dict before a call begins, because each lookup is itself a call.

    def _volume(self, *, is_write: bool = False) -> Any:
        """Return the Volume. Only a write creates a missing Volume, so that a dry run leaves nothing behind."""
        if self._handle is None:
            self._handle = self._hydrate(may_create=is_write and self.may_create)
        return self._handle

    @cached_property
    def _claims(self) -> Any:
        """Return the Dict of claims, after making sure that the Volume exists.

        Otherwise a Dict could be left without a Volume.
        """
        name, _ = f"{self.address.volume}.homing", self._volume(is_write=True)
        return self.connection.sdk.Dict.from_name(name, create_if_missing=True, client=self.connection.client)

    def _hydrate(self, *, may_create: bool) -> Any:
        async def find() -> Any:
            names = {"version": _VERSION, "create_if_missing": may_create, "client": self.connection.client}
            volume = self.connection.sdk.Volume.from_name(self.address.volume, **names)
            await volume.hydrate.aio()
            return volume

        found = self._do("checked", "", find)
        self.may_create = False
        return found

    def _name(self, key: str) -> str:
        return self.address.prefix + check_key(key)

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Convert local disk errors to StoreError."""
        try:
            yield
        except OSError as exc:
            raise StoreError(
                what=f"{key} could not be read or written on this computer.",
                why=f"{type(exc).__name__}: {exc}",
                fix="Check the disk space and the folder's permissions.",
            ) from exc

    def _do(self, done: str, key: str, make: Callable[[], Awaitable[T]], timeout_s: float = TIMEOUT_S) -> T:
        """Run a call, and retry it if Modal gives no clear response. All calls made this way are idempotent."""
        # Connect outside the `try` block, so that a missing extra or account raises its own error.
        connection = self.connection
        for is_last in _RETRIES.attempts(self._world):
            try:
                return connection.call(make, timeout_s)
            except failures() as exc:
                if is_last or kind_of(exc) not in ("busy", "silent"):
                    raise self._error(exc, done, key) from exc
        raise AssertionError("the last try returns or raises")

    def _error(self, exc: BaseException, done: str, key: str) -> StoreError:
        kind, what = kind_of(exc), f"{key or 'The store'} could not be {done} ({self.url})."
        if kind == "absent":
            return _Gone(
                what=what,
                why=f"The Volume does not exist in Modal, or it was deleted: {text_of(exc)}",
                fix=f"List the volumes: modal volume list   The next launch creates {self.address.volume}.",
            )
        fixes = {
            "refused": f"Check the account and the Volume: modal volume list   (using {self.connection.who})",
            "busy": "Modal is limiting requests. Try again in a minute.",
        }
        refused = StoreRefused if kind == "refused" else StoreError
        return refused(what, f"Modal: {text_of(exc)}", fixes.get(kind, "Modal does not respond. Try again later."))


class _Gone(StoreRefused):
    """Raised if Modal reports that the Volume, or the requested file in it, does not exist."""


def _is_file(entry: Any) -> bool:
    return str(getattr(entry.type, "name", entry.type)) == "FILE"
