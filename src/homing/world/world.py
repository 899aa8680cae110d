"""World extends Machine with what the agent does not need: private folders, databases and downloads."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.client
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from homing.world.machine import (
    HttpRequest,
    HttpResponse,
    Machine,
    NetworkError,
    PathLike,
    opener,
    sync_folder_of,
    whole,
)

__all__ = ["Database", "DatabaseDamaged", "MemoryDatabase", "World", "reads_only"]

_CHUNK = 1 << 20


class World(Machine):
    _private: str = ""  # only the user can read files below this folder; "" for none

    def keep_private(self, folder: PathLike) -> None:
        """Whenever this folder, or anything below it, is created from now on, make it readable only by its owner."""
        self._private = os.path.abspath(folder)

    def random_hex(self, num_chars: int) -> str:
        return uuid.uuid4().hex[:num_chars]

    # --- disk ---

    def write(self, path: PathLike, data: bytes, mode: int = 0o644) -> None:
        super().write(path, data, mode & 0o700 if self._is_private(path) else mode)

    def append(self, path: PathLike, data: bytes) -> None:
        self._make_private(path)
        super().append(path, data)

    def lock(self, path: PathLike) -> bool:
        self._make_private(path)
        return super().lock(path)

    def mkdir(self, path: PathLike) -> None:
        full = os.path.abspath(path)
        if not self._is_private(full):
            super().mkdir(full)
        elif not os.path.isdir(full):
            if os.path.dirname(full) != full and full != self._private:
                self.mkdir(os.path.dirname(full))
            else:
                super().mkdir(os.path.dirname(full))
            with contextlib.suppress(FileExistsError):
                os.mkdir(full, 0o700)

    def _is_private(self, path: PathLike) -> bool:
        full = os.path.abspath(path)
        return bool(self._private) and (full == self._private or full.startswith(self._private + os.sep))

    def _make_private(self, path: PathLike) -> None:
        """If the path is private and no file exists yet, create an empty one that only its owner can read."""
        if self._is_private(path) and not os.path.exists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

    def chmod(self, path: PathLike, mode: int) -> None:
        os.chmod(path, mode)

    def create(self, path: PathLike, data: bytes) -> bool:
        """Create a file; return False if it already exists. The file is complete or absent, as with `write`."""
        try:
            # Use link(2): it is the only call that fails if the name exists and never exposes an unfinished file.
            with whole(path, os.link, 0o600 if self._is_private(path) else 0o644) as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def copy(self, source: PathLike, target: PathLike) -> str:
        """Copy a file, completely or not at all; return the sha256 of the bytes that were read."""
        digest = hashlib.sha256()
        mode = 0o600 if self._is_private(target) else 0o644
        with open(source, "rb") as src, whole(target, os.replace, mode) as dst:
            for chunk in iter(lambda: src.read(_CHUNK), b""):
                digest.update(chunk)
                dst.write(chunk)
        return digest.hexdigest()

    def link(self, source: PathLike, target: PathLike) -> None:
        """Hard-link a file that is no longer written to, or copy it if the file system has no hard links."""
        try:
            os.link(source, target)
        except OSError:
            self.copy(source, target)

    def sha256(self, path: PathLike) -> str:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for chunk in iter(lambda: file.read(_CHUNK), b""):
                digest.update(chunk)
        return digest.hexdigest()

    def exists(self, path: PathLike) -> bool:
        return os.path.exists(path)

    def is_dir(self, path: PathLike) -> bool:
        return os.path.isdir(path)

    def mode(self, path: PathLike) -> int:
        """Return the permission bits, such as 0o600."""
        return os.stat(path).st_mode & 0o777

    def may_write(self, path: PathLike) -> bool:
        """Return True if the permissions allow this process to write to the file, or into the folder."""
        return os.access(path, os.W_OK)

    def modified_at(self, path: PathLike) -> float:
        return os.path.getmtime(path)

    def stamp(self, path: PathLike) -> tuple[int, int, int, int]:
        """Return a file's size, mtime and ctime in ns, and inode. If these are unchanged, so is the file.

        ctime is included because programs cannot set it.
        """
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino

    def listdir(self, path: PathLike) -> list[str]:
        """Return the sorted names in a folder. Raise OSError if the folder does not exist."""
        return sorted(os.listdir(path))

    def walk(self, path: PathLike) -> list[str]:
        """Return the relative paths of all files below a folder, sorted, with forward slashes.

        Raise OSError if a folder cannot be listed.
        """
        root = os.fspath(path)
        tree = os.walk(root, onerror=_unless_gone)
        found = [os.path.relpath(os.path.join(base, name), root) for base, _, names in tree for name in names]
        return sorted(name.replace(os.sep, "/") for name in found)

    def rename(self, source: PathLike, target: PathLike) -> None:
        os.replace(source, target)
        sync_folder_of(target)

    def rmtree(self, path: PathLike) -> None:
        if os.path.exists(path):
            shutil.rmtree(path)

    def free_bytes(self, path: PathLike) -> int:
        return shutil.disk_usage(path).free

    def database(self, path: PathLike) -> Database:
        return Database(path)

    def memory_database(self, image: bytes = b"") -> Database:
        """Return an in-memory database, either empty or loaded from the image of another one."""
        return MemoryDatabase(image)

    # --- concurrency ---

    def together(self, calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Any]:
        """Run the calls in threads, and return the result or the exception of each call, in order.

        For a call that takes too long, return a TimeoutError and abandon its thread.
        """
        answers: list[Any] = [TimeoutError(f"no answer within {timeout_s:g} s") for _ in calls]

        def make(index: int, call: Callable[[], Any]) -> None:
            try:
                answers[index] = call()
            except Exception as exc:  # return the exception as the call's result; the caller decides what it means
                answers[index] = exc

        threads = [threading.Thread(target=make, args=pair, daemon=True) for pair in enumerate(calls)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return list(answers)  # return a copy, so that late results cannot change it

    # --- network ---

    def stream(self, request: HttpRequest, seconds: float) -> HttpResponse:
        """Read a response that may never end. Stop after `seconds`, or once no data arrives for `request.timeout_s`."""
        deadline, chunks = time.monotonic() + seconds, list[bytes]()
        req = urllib.request.Request(request.url, request.body or None, request.headers, method=request.method)
        try:
            with opener.open(req, timeout=request.timeout_s) as reply:
                with contextlib.suppress(TimeoutError):  # a timeout means that all available data has arrived
                    while time.monotonic() < deadline and (chunk := reply.read1(_CHUNK)):
                        chunks.append(chunk)
                return _response(reply, b"".join(chunks))
        except urllib.error.HTTPError as exc:
            with exc:
                return _response(exc, exc.read())
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise NetworkError(f"{request.method} {request.url.split('?')[0]}: {exc}") from exc

    def download(
        self, url: str, path: PathLike, max_bytes: int, take: Callable[[bytes], None], timeout_s: float = 60.0
    ) -> HttpResponse:
        """Download `url` to a file, resuming if the file already contains its beginning; pass each chunk to `take` too.

        Redirects are followed, so the request carries no secrets, only our user agent and the range. The file is
        written only if the status is 200 for an empty file, or 206 with a range that begins exactly where the file
        ends. For any other response, the file is left unchanged and the body is not read. Up to one byte more than
        `max_bytes` is read, to detect a body that is too long. If the connection breaks, NetworkError is raised, and
        the file keeps the bytes received until then.
        """
        offset = self.size(path) if self.exists(path) else 0
        headers = {"User-Agent": "homing", **({"Range": f"bytes={offset}-"} if offset else {})}
        try:
            reply = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=timeout_s)
        except urllib.error.HTTPError as exc:
            with exc:
                return _response(exc)
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise NetworkError(f"GET {url}: {exc}") from exc
        with reply:
            answer = _response(reply)
            begins_at = answer.headers.get("content-range", "").partition("-")[0]
            if answer.status != (206 if offset else 200) or (offset and begins_at != f"bytes {offset}"):
                return answer
            with open(path, "ab") as file:
                for chunk in _chunks(reply, max_bytes - offset + 1, url):
                    file.write(chunk)
                    take(chunk)
                file.flush()
                os.fsync(file.fileno())
        return answer

    # --- this process ---

    def pid(self) -> int:
        return os.getpid()

    def host(self) -> str:
        return os.uname().nodename

    def python(self) -> str:
        return sys.executable


class DatabaseDamaged(OSError):
    """Raised if a file is not an SQLite database, or is a damaged one."""


class Database:
    """An SQLite database, with one durable transaction per call.

    The database is opened for each call, so that no handle leaks into a forked process.
    """

    def __init__(self, path: PathLike) -> None:
        self._path = os.fspath(path)

    def execute(self, *statements: tuple[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """Run the statements in one transaction; return the rows of the last statement. SQLite's errors become OSError.

        A missing database is created if any statement is a CREATE statement; otherwise, raise FileNotFoundError.
        """
        with self._errors():
            try:
                return self._execute(statements)
            except sqlite3.OperationalError as exc:
                # Errors from SQLite have `sqlite_errorname`. Python's own error for undecodable text does not.
                if not getattr(exc, "sqlite_errorname", "").startswith("SQLITE_IOERR_SHM"):
                    raise
                # The disk is too full for SQLite's shared-memory file. With exclusive locking, SQLite keeps the content
                # of that file in memory instead.
                return self._execute(statements, is_alone=True)

    def image(self) -> bytes:
        """Return the whole database as bytes, including everything that was committed.

        This writes nothing next to the database, so it also works in a read-only folder. It raises FileNotFoundError if
        the database does not exist.
        """
        if not os.path.exists(self._path):
            raise FileNotFoundError(errno.ENOENT, "no such database", self._path)
        with self._errors():
            try:
                return _image(self._path)
            except sqlite3.Error:
                # In WAL mode even a reader needs writable files, so read a copy of the database and its log.
                with tempfile.TemporaryDirectory(dir=_temporary_folder()) as folder:
                    copied = os.path.join(folder, "copy.sqlite")
                    for suffix in ("", "-wal"):
                        with contextlib.suppress(FileNotFoundError):
                            shutil.copyfile(self._path + suffix, copied + suffix)
                    return _image(copied)

    def restore(self, image: bytes, *, is_replacing: bool = False) -> None:
        """Create the database from the bytes of another one, completely or not at all.

        If the database already exists, replace it if `is_replacing` is set, else raise FileExistsError.
        """
        # Check first: the write-ahead log of an existing database contains transactions and must not be deleted.
        if not is_replacing and os.path.exists(self._path):
            raise FileExistsError(errno.EEXIST, "the database already exists", self._path)
        for suffix in ("-wal", "-shm"):  # delete files of the previous database, which SQLite would replay
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path + suffix)
        with whole(self._path, os.replace if is_replacing else os.link, 0o600) as file:
            file.write(image)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            is_damaged = (getattr(exc, "sqlite_errorcode", 0) & 0xFF) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
            raise (DatabaseDamaged if is_damaged else OSError)(f"{self._path}: {exc}") from exc

    def _execute(
        self, statements: Sequence[tuple[str, Sequence[Any]]], *, is_alone: bool = False
    ) -> list[dict[str, Any]]:
        if not os.path.exists(self._path):
            if not any(sql.startswith("CREATE") for sql, _ in statements):
                raise FileNotFoundError(errno.ENOENT, "no such database", self._path)
            # SQLite gives its other files the same permissions as the database file.
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600))
        # Closing the connection rolls back a transaction that was not committed.
        with contextlib.closing(_connect(self._path)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = _as_text
            if is_alone:
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            with contextlib.suppress(sqlite3.OperationalError):  # another process is switching the journal mode
                connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            return _transact(connection, statements)


class MemoryDatabase(Database):
    """An in-memory database, either empty or loaded from the image of another database. Thread-safe."""

    def __init__(self, image: bytes = b"") -> None:
        super().__init__("a copy in memory")
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.text_factory = _as_text
        if image:
            # Bytes 18 and 19 contain the file format version. Change 2 (WAL) to 1, because an in-memory database cannot
            # use WAL.
            self._connection.deserialize(image[:18] + b"\x01\x01" + image[20:])

    def execute(self, *statements: tuple[str, Sequence[Any]]) -> list[dict[str, Any]]:
        with self._lock, self._errors():
            try:
                return _transact(self._connection, statements)
            except sqlite3.Error:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def image(self) -> bytes:
        with self._lock, self._errors():
            return self._connection.serialize()

    def __del__(self) -> None:
        self._connection.close()


def _transact(connection: sqlite3.Connection, statements: Sequence[tuple[str, Sequence[Any]]]) -> list[dict[str, Any]]:
    # A read-only transaction must not wait for writers, because a writer may have been suspended (Ctrl-Z).
    connection.execute("BEGIN" if reads_only(statements) else "BEGIN IMMEDIATE")
    rows: list[dict[str, Any]] = []
    for sql, params in statements:
        rows = [dict(row) for row in connection.execute(sql, params)]
    connection.execute("COMMIT")
    return rows


def reads_only(statements: Sequence[tuple[str, Sequence[Any]]]) -> bool:
    return all(sql.startswith(("SELECT", "WITH")) for sql, _ in statements)


def _image(path: str) -> bytes:
    with contextlib.closing(_connect(path)) as connection:
        # Run a query, so that SQLite opens the write-ahead log too, or fails.
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()
        return connection.serialize()


def _connect(path: str) -> sqlite3.Connection:
    # With mode=rw, SQLite never creates a missing database.
    uri = f"file:{urllib.parse.quote(os.path.abspath(path))}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=30.0, isolation_level=None)


def _temporary_folder() -> str:
    """Return a folder for a temporary copy. It is /dev/shm if all other folders are full or read-only."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "/dev/shm"


def _as_text(data: bytes) -> str:
    """Decode bytes even if they are not valid UTF-8, so that one damaged row does not hide the others."""
    return data.decode("utf-8", "replace")


def _unless_gone(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError):
        # Ignore a folder that was removed during the walk, but raise any other error: ignoring it would hide files.
        raise exc


def _response(reply: Any, body: bytes = b"") -> HttpResponse:
    return HttpResponse(reply.status, {name.lower(): value for name, value in reply.headers.items()}, body)


def _chunks(reply: Any, left: int, url: str) -> Iterator[bytes]:
    """Yield at most `left` bytes of the response body, in chunks.

    Only errors while reading become NetworkError, so that the caller's disk errors do not look like network errors.
    """
    while left > 0:
        try:
            chunk = reply.read(min(_CHUNK, left))
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise NetworkError(f"GET {url}: {exc}") from exc
        if not chunk:
            return
        yield chunk
        left -= len(chunk)
