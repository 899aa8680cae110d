"""A store in a repository on the Hugging Face Hub: `hf:OWNER/NAME`, created private.

    put, put_many     make one commit for all given files; large files use LFS
    get, sha256       download in ranges, all from one commit; `get` verifies the given hash, or else the one that the
                      Hub reports
    is_same           compares a local file with the Hub's hash, without downloading
    pinned            returns the same store pinned to one commit, so that a list and later reads are consistent
    create_if_absent  makes a commit that names its parent; the Hub rejects it if another commit was made in between
    list              lists the files of the newest commit

A commit is expensive and rate-limited, so live files are pushed together once a minute (pace_s, batch_files). Reads go
through World; commits go through huggingface_hub, which opens its own connections.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from homing.errors import StoreError
from homing.store.address import parse_hub
from homing.store.base import (
    Entries,
    Entry,
    Files,
    Keys,
    Progress,
    check_key,
    is_temporary_file,
    not_in_store,
    unwatched,
    wrong_content,
)
from homing.store.hf.client import Connection, UploadFailed, code_of, connect, hub_failures, status_of
from homing.world import HttpResponse, Retries, World

__all__ = ["HubStore"]

_BRANCH = "main"
_PIECE = 16 << 20
_IN_MEMORY = 8 << 20
_GROWING = (".jsonl", ".log", ".csv", ".txt")
_RETRIES = Retries(tries=6, first_s=0.5, longest_s=8.0)
_RACES = 40  # `create_if_absent` gives up if other writers commit first this many times in a row
_CONFLICTS = (409, 412)
_ABSENT = "EntryNotFound"  # the Hub's error code for a missing key or folder; not used for a missing repository
_PASSING = (408, 429, 500, 502, 503, 504)


Operations = list[Any]  # an alias defined here because `list` is a method in the class


class HubStore:
    pace_s = 60.0
    batch_files = 100

    def __init__(self, url: str, world: World, *, create: bool = True) -> None:
        self.address = parse_hub(url)
        self.url = self.address.url
        self.progress: Progress = unwatched
        self.revision = _BRANCH  # the revision to read; writes always go to the branch
        self._world = world
        self._may_create = create

    @cached_property
    def connection(self) -> Connection:
        return connect(self.address, self._world)

    @property
    def _repo(self) -> dict[str, str]:
        return {"repo_id": self.address.repo_id, "repo_type": self.address.repo_type}

    # --- the Store interface ---

    def put(self, key: str, path: str) -> Entry:
        return self.put_many([(key, path)])[0]

    def put_many(self, files: Files) -> Entries:
        names = [self._name(key) for key, _ in files]
        temporary_files: Keys = []
        first = files[0][0] if files else ""
        try:
            with self._as_store_error("pushed", first):
                sources = [self._still(path, temporary_files) for _, path in files]
                additions = [self._addition(name, source) for name, source in zip(names, sources, strict=True)]
                more = f" and {len(files) - 1} more" if len(files) > 1 else ""
                self._commit(additions, f"homing: {first}{more}")
        finally:
            for temporary in temporary_files:
                self._world.remove(temporary)
        # The SDK hashed the bytes that it sent, so `upload_info` contains the hash of the bytes that were pushed.
        infos = [addition.upload_info for addition in additions]
        total = sum(info.size for info in infos)
        self.progress(total, total)
        return [Entry(key, info.size, info.sha256.hex()) for (key, _), info in zip(files, infos, strict=True)]

    def put_bytes(self, key: str, data: bytes) -> Entry:
        name = self._name(key)
        with self._as_store_error("written", key):
            self._commit([self._addition(name, data)], f"homing: {key}")
        return Entry(key, len(data), hashlib.sha256(data).hexdigest())

    def get(self, key: str, path: str, sha256: str | None = None) -> None:
        temporary = f"{path}.part-{self._world.random_hex(8)}"
        digest, have, expected = hashlib.sha256(), 0, None
        try:
            with self._as_store_error("fetched", key):
                self._world.write(temporary, b"")
                for piece, total, tag in self._chunks(key):
                    expected = expected or _Expected(tag, total)
                    self._world.append(temporary, piece)
                    digest.update(piece)
                    expected.update(piece)
                    have += len(piece)
                    self.progress(have, total)
            if sha256 is not None and digest.hexdigest() != sha256:
                raise wrong_content(key, self.url, digest.hexdigest(), sha256)
            if sha256 is None and expected is not None and expected.is_known and not expected.is_met:
                raise wrong_content(key, self.url, expected.found, expected.expected, kind=expected.kind)
            with self._as_store_error("fetched", key):
                self._world.rename(temporary, path)
        finally:
            self._world.remove(temporary)

    def read(self, key: str) -> bytes:
        with self._as_store_error("read", key):
            return b"".join(piece for piece, _, _ in self._chunks(key))

    def sha256(self, key: str) -> str:
        digest = hashlib.sha256()
        with self._as_store_error("read", key):
            for piece, _, _ in self._chunks(key):
                digest.update(piece)
        return digest.hexdigest()

    def is_same(self, key: str, path: str) -> bool:
        """Return True if the local file equals the file on the Hub. If the Hub reports no hash, download the file."""
        reply = self._look(key, self.revision)
        if reply is None:
            raise not_in_store(key, self.url)
        with self._as_store_error("compared", key):
            size = self._world.size(path)
            expected = _Expected(_tag(reply.headers), size)
            if not expected.is_known:
                return self.sha256(key) == self._world.sha256(path)
            for offset in range(0, size, _PIECE):
                expected.update(self._world.read(path, offset, min(_PIECE, size - offset)))
        return expected.is_met

    def exists(self, key: str, revision: str = "") -> bool:
        return self._look(key, revision or self.revision) is not None

    def _look(self, key: str, revision: str) -> HttpResponse | None:
        name = self._name(key)
        with self._as_store_error("checked", key):
            reply = self.connection.fetch(self.connection.resolve_url(name, revision), "HEAD")
        if reply.status == 200:
            return reply
        if self._is_absent(reply.status, reply.headers):
            return None
        raise self.connection.error("checked", key, reply.status, reply.headers.get("x-error-code", ""))

    def list(self, prefix: str) -> Entries:
        folder = prefix.rpartition("/")[0]
        if folder:
            check_key(folder)
        try:
            with self._as_store_error("listed", prefix):
                top = f"{self.address.prefix}{folder}".strip("/")
                at = {"path_in_repo": top or None, "revision": self.revision, **self._repo}
                found = list(self.connection.api.list_repo_tree(recursive=True, **at))
        except StoreError as exc:
            if status_of(exc.__cause__ or exc) == 404 and code_of(exc.__cause__) == _ABSENT:
                return []
            raise
        start = self.address.prefix + prefix
        entries = [
            Entry(item.path[len(self.address.prefix) :], item.size)
            for item in found
            if hasattr(item, "size") and item.path.startswith(start) and item.path != ".gitattributes"
        ]
        return sorted((entry for entry in entries if not is_temporary_file(entry.key)), key=lambda entry: entry.key)

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Keys) -> None:
        """Delete all keys in one commit, so that a checkpoint is never partly deleted."""
        from huggingface_hub import CommitOperationDelete

        names = [self._name(key) for key in keys]
        there = [name for key, name in zip(keys, names, strict=True) if self.exists(key)]
        if there:
            with self._as_store_error("deleted", keys[0]):
                self._commit([CommitOperationDelete(name) for name in there], f"homing: remove {len(there)} files")

    def create_if_absent(self, key: str, data: bytes) -> bool:
        name = self._name(key)
        # The random title distinguishes our commit from another writer's commit with the same bytes. The SDK skips a
        # commit that would change nothing, and returns the newest commit as if it were ours.
        title = f"homing {self._world.random_hex(16)}: create {key}"
        for number in range(_RACES):
            parent = self.head()
            if self.exists(key, parent):
                return False
            with self._as_store_error("written", key):
                try:
                    made = self._send([self._addition(name, data)], title, parent)
                except hub_failures() as exc:
                    if status_of(exc) in _CONFLICTS:
                        self._world.sleep(min(0.05 * 1.3**number, 2.0) * (1 + int(self._world.random_hex(2), 16) / 255))
                        continue
                    if status_of(exc):
                        raise
                    # The Hub did not respond, but it may have made the commit anyway.
                    if self._title_of(self.head()) == title:
                        return True
                    raise
            return made != parent and self._title_of(made) == title
        raise StoreError(
            what=f"{key} could not be written to {self.url}.",
            why=f"Other writers committed first, {_RACES} times in a row.",
            fix="Try again, or use one repository per run.",
        )

    # --- reading at one commit ---

    def pinned(self, revision: str = "") -> HubStore:
        store = copy.copy(self)
        with self._as_store_error("checked", ""):
            store.revision = str(self.connection.api.repo_info(revision=revision or _BRANCH, **self._repo).sha)
        return store

    # --- used by preflight ---

    def head(self) -> str:
        """Return the newest commit. If the repository is missing and `create` is set, create it first, as private."""
        # Read `_may_create` before the request, because another thread may clear it when it creates the repository.
        may_create = self._may_create
        with self._as_store_error("checked", ""):
            try:
                return str(self.connection.api.repo_info(**self._repo).sha)
            except hub_failures() as exc:
                if status_of(exc) not in (401, 404) or not may_create:
                    raise
            self._make_repository()
            return str(self.connection.api.repo_info(**self._repo).sha)

    def _make_repository(self) -> None:
        self.connection.api.create_repo(private=True, exist_ok=True, **self._repo)
        self._may_create = False

    # --- commits ---

    def _addition(self, name: str, source: str | bytes) -> Any:
        from huggingface_hub import CommitOperationAdd

        return CommitOperationAdd(path_in_repo=name, path_or_fileobj=source)

    def _still(self, path: str, temporary_files: Keys) -> str | bytes:
        """Return the file's bytes, or a path whose content cannot change while the SDK hashes and uploads it."""
        if self._world.size(path) <= _IN_MEMORY:
            return self._world.read(path)
        if not path.endswith(_GROWING):
            return path
        temporary_files.append(f"{path}.part-{self._world.random_hex(8)}")
        self._world.copy(path, temporary_files[-1])
        return temporary_files[-1]

    def _commit(self, operations: Operations, title: str) -> None:
        """Make a commit, with retries. Repeating a commit is safe, because identical bytes change nothing."""
        for number in range(1, _RETRIES.tries + 1):
            may_create = self._may_create
            try:
                self._send(operations, title)
                return
            except hub_failures() as exc:
                status = status_of(exc)
                # If the Hub did not respond at all, try only once more, because the SDK has already retried.
                tries = _RETRIES.tries if status in (*_CONFLICTS, *_PASSING) else 1 if status else 2
                if status == 404 and may_create:
                    self._make_repository()
                elif number >= tries:
                    raise
                else:
                    self._world.sleep(_RETRIES.pause_s(number))

    def _send(self, operations: Operations, title: str, parent: str | None = None) -> str:
        call = {"operations": operations, "commit_message": title, "parent_commit": parent, "revision": _BRANCH}
        try:
            made = self.connection.api.create_commit(**call, **self._repo)
        except RuntimeError as exc:
            raise UploadFailed(exc) from exc
        self._may_create = False
        return str(made.oid)

    def _title_of(self, revision: str) -> str:
        at = f"{self.connection.endpoint}/api/{self.address.repo_type}s/{self.address.repo_id}/commits/{revision}"
        reply = self.connection.fetch(at)
        if reply.status != 200:
            raise self.connection.error("checked", "", reply.status, reply.headers.get("x-error-code", ""))
        return str(json.loads(reply.body)[0]["title"])

    # --- reading ---

    def _chunks(self, key: str) -> Iterator[tuple[bytes, int, str]]:
        """Yield the file in ranges, each with the file's total size and the hash that the Hub reports.

        All ranges come from the same commit, the one named in the first response.
        """
        name, offset, total, revision = self._name(key), 0, 1, self.revision
        while offset < total:
            headers = {"Range": f"bytes={offset}-{offset + _PIECE - 1}"}
            reply = self.connection.fetch(self.connection.resolve_url(name, revision), headers=headers)
            if reply.status == 416 or (reply.status == 200 and not reply.body):
                return  # an empty file cannot be read by range
            if self._is_absent(reply.status, reply.headers):
                raise not_in_store(key, self.url)
            if reply.status not in (200, 206) or (reply.status == 200 and offset):
                raise self.connection.error("read", key, reply.status, reply.headers.get("x-error-code", ""))
            total = int(reply.headers["content-range"].rpartition("/")[2]) if reply.status == 206 else len(reply.body)
            revision = reply.headers.get("x-repo-commit", revision)
            offset += len(reply.body)
            if not reply.body:
                raise OSError("the response ended early")
            yield reply.body, total, _tag(reply.headers)

    def _is_absent(self, status: int, headers: dict[str, str]) -> bool:
        return status == 404 and headers.get("x-error-code") == _ABSENT

    def _name(self, key: str) -> str:
        return self.address.prefix + check_key(key)

    @contextlib.contextmanager
    def _as_store_error(self, done: str, key: str) -> Iterator[None]:
        connection = self.connection  # connect outside the `try` block, so that a missing extra raises its own error
        try:
            yield
        except hub_failures() as exc:
            raise connection.raised(exc, done, key) from exc


class _Expected:
    """Checks a file's bytes against the hash that the Hub reports.

    The Hub reports the sha256 of a large file and the Git blob hash of a small file.
    """

    def __init__(self, tag: str, num_bytes: int) -> None:
        self.expected = tag
        self.kind = {64: "sha256", 40: "Git hash"}.get(len(tag), "") if re.fullmatch("[0-9a-f]+", tag) else ""
        self._hash = hashlib.sha256() if self.kind == "sha256" else hashlib.sha1(b"blob %d\0" % num_bytes)

    def update(self, piece: bytes) -> None:
        self._hash.update(piece)

    @property
    def is_known(self) -> bool:
        return bool(self.kind)

    @property
    def found(self) -> str:
        return self._hash.hexdigest()

    @property
    def is_met(self) -> bool:
        return self.found == self.expected


def _tag(headers: dict[str, str]) -> str:
    """Return the file's own ETag, which is called the "linked" ETag if another host serves the bytes."""
    return headers.get("x-linked-etag", headers.get("etag", "")).removeprefix("W/").strip('"')
