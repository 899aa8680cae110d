"""A store in a bucket: `s3://bucket/prefix` on AWS, R2, MinIO and other services with the S3 API.

    put               makes one PUT, or a multipart upload that can be resumed (s3.transfer); the service checks hashes
    get               downloads to a temporary file, verifies it, then renames it; after an interruption, even a later
                      process can resume
    sha256, is_same   read the bytes back, because some services return whatever checksum they were given
    create_if_absent  writes with If-None-Match: *; raises if the service accepts two such writes to one key

Disk access goes through World, but boto3 does its own network I/O, so the simulator uses the folder store instead.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from homing.errors import StoreError
from homing.store.address import parse_s3
from homing.store.base import (
    PROBES,
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
from homing.store.s3 import transfer
from homing.store.s3.client import Connection, code_of, connect, is_absent, s3_failures
from homing.world import World

__all__ = ["S3Store"]

_MAKER = "homing-maker"  # metadata that identifies an object's writer, needed if the response to the write is lost


class S3Store:
    pace_s = 5.0
    batch_files = 1

    def __init__(self, url: str, world: World, *, part_bytes: int = transfer.PART_BYTES) -> None:
        self.address = parse_s3(url)
        self.url = self.address.url
        self.progress: Progress = unwatched
        self.world = world
        self._part_bytes = part_bytes
        self._is_swept = False
        self._is_exclusive: bool | None = None  # whether the service honours If-None-Match; None if not tested yet

    @cached_property
    def connection(self) -> Connection:
        return connect(self.address)

    # --- the Store interface ---

    def put(self, key: str, path: str) -> Entry:
        name = self._name(key)
        with self._as_store_error("pushed", key):
            if not self._is_swept and self.world.size(path) > self._part_bytes:
                transfer.sweep(self.connection, self.world)
                self._is_swept = True
            sent = transfer.send(self.connection, name, path, self.world, self._part_bytes, self.progress)
        return Entry(key, sent.num_bytes, sent.sha256)

    def put_many(self, files: Files) -> Entries:
        return [self.put(key, path) for key, path in files]

    def put_bytes(self, key: str, data: bytes) -> Entry:
        name = self._name(key)
        with self._as_store_error("written", key):
            sent = transfer.send_small(self.connection, name, data)
        return Entry(key, sent.num_bytes, sent.sha256)

    def get(self, key: str, path: str, sha256: str | None = None) -> None:
        head = self._head(key)
        temporary = self._temporary_path(path, key, head)
        # Without a hash, a damaged partial file left by a killed process would go unnoticed, so start over.
        if sha256 is None:
            self.world.remove(temporary)
        is_begun = self._size(temporary) > 0
        digest = self._fetch(key, temporary, head)
        if is_begun and digest != sha256:  # the earlier partial file may be damaged, so download everything once more
            self.world.remove(temporary)
            digest = self._fetch(key, temporary, head)
        if sha256 is not None and digest != sha256:
            self.world.remove(temporary)
            raise wrong_content(key, self.url, digest, sha256)
        with self._as_store_error("fetched", key):
            self.world.rename(temporary, path)

    def _fetch(self, key: str, temporary: str, head: Any) -> str:
        """Download the rest of the file and return the hash of the whole file."""
        with self._as_store_error("fetched", key):
            digest, have = self._begun(temporary, head["ContentLength"])
            for piece in transfer.stream(self.connection, self._name(key), self.world, have, head["ETag"]):
                if self._size(temporary) != have:
                    raise OSError(f"{temporary} is being written by another program")
                self.world.append(temporary, piece)
                digest.update(piece)
                have += len(piece)
                self.progress(have, head["ContentLength"])
            if not have:
                self.world.write(temporary, b"")
        return str(digest.hexdigest())

    def read(self, key: str) -> bytes:
        name = self._name(key)
        with self._as_store_error("read", key):
            return b"".join(transfer.stream(self.connection, name, self.world))

    def sha256(self, key: str) -> str:
        name, digest = self._name(key), hashlib.sha256()
        with self._as_store_error("read", key):
            for piece in transfer.stream(self.connection, name, self.world):
                digest.update(piece)
        return digest.hexdigest()

    def is_same(self, key: str, path: str) -> bool:
        head = self._head(key)
        with self._as_store_error("compared", key):
            if self.world.size(path) != head["ContentLength"]:
                return False
            digest = self.world.sha256(path)
        return self.sha256(key) == digest

    def exists(self, key: str) -> bool:
        return self._look(key) is not None

    def list(self, prefix: str) -> Entries:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        found: Entries = []
        with self._as_store_error("listed", prefix):
            pages = self.connection.client.get_paginator("list_objects_v2").paginate(
                Bucket=self.address.bucket, Prefix=self.address.prefix + prefix
            )
            for page in pages:
                for item in page.get("Contents", []):
                    key = item["Key"][len(self.address.prefix) :]
                    # Skip keys that end in a slash, which are folder placeholders created by other programs.
                    if not key.endswith("/") and not is_temporary_file(key):
                        found.append(Entry(key, int(item["Size"])))
        return sorted(found, key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        name = self._name(key)
        with self._as_store_error("deleted", key):
            try:
                self.connection.client.delete_object(Bucket=self.address.bucket, Key=name)
            except s3_failures() as exc:
                if not is_absent(exc):
                    raise

    def delete_many(self, keys: Keys) -> None:
        for key in keys:
            self.delete(key)

    def drop_cut(self, folder: str) -> int:
        with self._as_store_error("deleted", folder):
            # With a limit of -inf, sweep aborts every upload, even one dated in the future because clocks differ.
            return transfer.sweep(self.connection, self.world, f"{folder}/", untouched_s=-math.inf)

    def create_if_absent(self, key: str, data: bytes) -> bool:
        name = self._name(key)
        with self._as_store_error("written", key):
            if not self.is_exclusive():
                raise StoreError(
                    what=f"{self.url} cannot prevent two computers from owning one run.",
                    why=f"{self.connection.where} accepts a write with If-None-Match: * even if the key exists.",
                    fix="Use a service that honours this header (AWS S3, R2, MinIO), or another store: hf:OWNER/NAME",
                )
            return self._create(name, data)

    def put_url(self, key: str, valid_s: float) -> str:
        """Return a presigned URL for one PUT to this key, for a machine on which nothing is installed yet."""
        params = {"Bucket": self.address.bucket, "Key": self._name(key)}
        with self._as_store_error("written", key):
            return str(self.connection.client.generate_presigned_url("put_object", params, ExpiresIn=int(valid_s)))

    def get_url(self, key: str, valid_s: float) -> str:
        """Return a presigned URL for reading one key, for a machine that has neither keys nor an SDK yet."""
        params = {"Bucket": self.address.bucket, "Key": self._name(key)}
        with self._as_store_error("read", key):
            return str(self.connection.client.generate_presigned_url("get_object", params, ExpiresIn=int(valid_s)))

    # --- used by preflight ---

    def is_exclusive(self) -> bool:
        """Return True if the service rejects the second of two If-None-Match writes to a new key; cache the result."""
        if self._is_exclusive is None:
            name = f"{self.address.prefix}{PROBES}/{self.world.random_hex(16)}"
            try:
                self._is_exclusive = self._create(name, b"1") and not self._create(name, b"2")
            finally:
                self.connection.client.delete_object(Bucket=self.address.bucket, Key=name)
        return self._is_exclusive

    def _create(self, name: str, data: bytes) -> bool:
        maker = self.world.random_hex(32)
        for _ in range(4):
            try:
                transfer.send_small(self.connection, name, data, IfNoneMatch="*", Metadata={_MAKER: maker})
            except s3_failures() as exc:
                if code_of(exc) in ("PreconditionFailed", "412"):
                    # If the response to our first try was lost, the retry fails although we wrote the object.
                    return self._maker_of(name) == maker
                if code_of(exc) not in ("ConditionalRequestConflict", "409"):
                    raise
                self.world.sleep(0.2)  # another write to the key was in progress; retry to see which one succeeded
            else:
                return True
        return self._maker_of(name) == maker

    def _maker_of(self, name: str) -> str:
        head = self.connection.client.head_object(Bucket=self.address.bucket, Key=name)
        return str({key.lower(): value for key, value in head["Metadata"].items()}.get(_MAKER, ""))

    # --- helpers ---

    def _name(self, key: str) -> str:
        return self.address.prefix + check_key(key)

    def _look(self, key: str) -> Any:
        """Return the object's metadata, or None. Check the bucket too, because a missing bucket gives the same 404."""
        name = self._name(key)
        with self._as_store_error("checked", key):
            try:
                return self.connection.client.head_object(Bucket=self.address.bucket, Key=name)
            except s3_failures() as exc:
                if not is_absent(exc):
                    raise
        with self._as_store_error("checked", ""):
            self.connection.client.head_bucket(Bucket=self.address.bucket)
        return None

    def _head(self, key: str) -> Any:
        head = self._look(key)
        if head is None:
            raise not_in_store(key, self.url)
        return head

    def _temporary_path(self, path: str, key: str, head: Any) -> str:
        """Return a temporary path specific to the object's version, so that a later process can resume the download."""
        version = f"{self.url} {key} {head['ETag']} {head['ContentLength']}"
        return f"{path}.part-{hashlib.sha256(version.encode()).hexdigest()[:8]}"

    def _begun(self, temporary: str, total: int) -> tuple[Any, int]:
        digest, have = hashlib.sha256(), self._size(temporary)
        if have > total:
            self.world.remove(temporary)
            have = 0
        for offset in range(0, have, 1 << 20):
            digest.update(self.world.read(temporary, offset, min(1 << 20, have - offset)))
        return digest, have

    def _size(self, path: str) -> int:
        return self.world.size(path) if self.world.exists(path) else 0

    @contextlib.contextmanager
    def _as_store_error(self, done: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise disk_failed(exc, done, key, self.url) from exc
        except s3_failures() as exc:
            if key and code_of(exc) == "NoSuchKey":
                raise not_in_store(key, self.url) from exc
            raise self.connection.error(exc, done, key) from exc
