"""World: what a machine gives, and beside it what only home and the store need. An agent does without."""

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

_PIECE = 1 << 20


class World(Machine):
    _private: str = ""  # what lies below belongs to this person alone

    def keep_private(self, folder: PathLike) -> None:
        """From now on this folder, and what is made below it, can be read by its owner only."""
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
        """An empty file that only its owner can read, where there is none yet."""
        if self._is_private(path) and not os.path.exists(path):
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

    def chmod(self, path: PathLike, mode: int) -> None:
        os.chmod(path, mode)

    def create(self, path: PathLike, data: bytes) -> bool:
        """True if this call made the file, False if it was there: the O_EXCL lease. Whole or absent, like write."""
        try:
            # link(2) is the one call that both refuses an existing name and shows only a finished file.
            with whole(path, os.link, 0o600 if self._is_private(path) else 0o644) as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def copy(self, source: PathLike, target: PathLike) -> str:
        """Copies a file whole or not at all; returns the sha256 of the bytes that were read."""
        digest = hashlib.sha256()
        mode = 0o600 if self._is_private(target) else 0o644
        with open(source, "rb") as src, whole(target, os.replace, mode) as dst:
            for piece in iter(lambda: src.read(_PIECE), b""):
                digest.update(piece)
                dst.write(piece)
        return digest.hexdigest()

    def link(self, source: PathLike, target: PathLike) -> None:
        """A second name for a file that nobody writes to any more; a copy where the disk has no such thing."""
        try:
            os.link(source, target)
        except OSError:
            self.copy(source, target)

    def sha256(self, path: PathLike) -> str:
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            for piece in iter(lambda: file.read(_PIECE), b""):
                digest.update(piece)
        return digest.hexdigest()

    def exists(self, path: PathLike) -> bool:
        return os.path.exists(path)

    def is_dir(self, path: PathLike) -> bool:
        return os.path.isdir(path)

    def mode(self, path: PathLike) -> int:
        """Its permission bits, such as 0o600."""
        return os.stat(path).st_mode & 0o777

    def may_write(self, path: PathLike) -> bool:
        """Whether this process could write it, or into it, without trying."""
        return os.access(path, os.W_OK)

    def modified_at(self, path: PathLike) -> float:
        return os.path.getmtime(path)

    def stamp(self, path: PathLike) -> tuple[int, int, int, int]:
        """Size, time of writing, time of any change (ns; that one nobody can put back) and inode: while they are the
        same, so is the file."""
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino

    def listdir(self, path: PathLike) -> list[str]:
        """Sorted names; an absent folder raises, it is not empty."""
        return sorted(os.listdir(path))

    def walk(self, path: PathLike) -> list[str]:
        """Relative paths of all files below, sorted, with forward slashes; a folder that cannot be listed raises."""
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
        """A database that only this process has; empty, or as another one's image."""
        return MemoryDatabase(image)

    # --- several things at once ---

    def together(self, calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Any]:
        """What each call returned or raised, in their order; TimeoutError for one that is late, which is left alone."""
        answers: list[Any] = [TimeoutError(f"no answer within {timeout_s:g} s") for _ in calls]

        def make(index: int, call: Callable[[], Any]) -> None:
            try:
                answers[index] = call()
            except Exception as exc:  # it is the call's answer, and the caller's to judge
                answers[index] = exc

        threads = [threading.Thread(target=make, args=pair, daemon=True) for pair in enumerate(calls)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return list(answers)  # a copy: what comes late changes nothing

    # --- network ---

    def stream(self, request: HttpRequest, seconds: float) -> HttpResponse:
        """An answer that may never end: what came until it was quiet for the request's timeout, at most `seconds`."""
        deadline, pieces = time.monotonic() + seconds, list[bytes]()
        req = urllib.request.Request(request.url, request.body or None, request.headers, method=request.method)
        try:
            with opener.open(req, timeout=request.timeout_s) as reply:
                with contextlib.suppress(TimeoutError):  # quiet: it has said all there is for now
                    while time.monotonic() < deadline and (piece := reply.read1(_PIECE)):
                        pieces.append(piece)
                return _response(reply, b"".join(pieces))
        except urllib.error.HTTPError as exc:
            with exc:
                return _response(exc, exc.read())
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise NetworkError(f"{request.method} {request.url.split('?')[0]}: {exc}") from exc

    def download(
        self, url: str, path: PathLike, max_bytes: int, take: Callable[[bytes], None], timeout_s: float = 60.0
    ) -> HttpResponse:
        """What lies at `url`, to the end of a file that may hold its beginning; each piece is shown to `take`.

        Redirects are followed, so nothing secret is sent: our name and the range. Only 200 from the start, or 206 from
        just where the file ends, is written: any other answer leaves the file alone, and its body is not read. One byte
        more than `max_bytes` may come, to show that there is more. A broken line is a NetworkError; what came is kept.
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
                for piece in _pieces(reply, max_bytes - offset + 1, url):
                    file.write(piece)
                    take(piece)
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
    """The file is not an SQLite database, or its pages contradict each other."""


class Database:
    """SQLite, one durable transaction per call. Opened per call: no handle to leak into a forked or killed process."""

    def __init__(self, path: PathLike) -> None:
        self._path = os.fspath(path)

    def execute(self, *statements: tuple[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """Runs the statements in one transaction; returns the rows of the last. What SQLite refuses is an OSError. Only
        a CREATE makes a database that is absent; for anything else that is a FileNotFoundError."""
        with self._errors():
            try:
                return self._execute(statements)
            except sqlite3.OperationalError as exc:
                # A name has what SQLite says; what Python itself says of text that it cannot read has none.
                if not getattr(exc, "sqlite_errorname", "").startswith("SQLITE_IOERR_SHM"):
                    raise
                # A disk so full that the file which processes share has no room: alone, its index is in memory.
                return self._execute(statements, is_alone=True)

    def image(self) -> bytes:
        """The whole database as bytes, with everything that was committed. Writes nothing beside it, so it also works
        in a folder that cannot be written; an absent database raises FileNotFoundError."""
        if not os.path.exists(self._path):
            raise FileNotFoundError(errno.ENOENT, "no such database", self._path)
        with self._errors():
            try:
                return _image(self._path)
            except sqlite3.Error:
                # In WAL mode also a reader needs files that it can write: read a copy, its log included.
                with tempfile.TemporaryDirectory(dir=_temporary_folder()) as folder:
                    copied = os.path.join(folder, "copy.sqlite")
                    for suffix in ("", "-wal"):
                        with contextlib.suppress(FileNotFoundError):
                            shutil.copyfile(self._path + suffix, copied + suffix)
                    return _image(copied)

    def restore(self, image: bytes, *, is_replacing: bool = False) -> None:
        """Makes the database from such bytes, whole or not at all; FileExistsError where there is one already."""
        for suffix in ("-wal", "-shm"):  # of the database that was there before: they would be played into this one
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
            os.close(os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o600))  # SQLite makes its other files like this one
        # Closing rolls back what was not committed.
        with contextlib.closing(_connect(self._path)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = _as_text
            if is_alone:
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            with contextlib.suppress(sqlite3.OperationalError):  # another process is switching it at this moment
                connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            return _transact(connection, statements)


class MemoryDatabase(Database):
    """A database in the memory of this process, made from the image of another one. Threads may share it."""

    def __init__(self, image: bytes = b"") -> None:
        super().__init__("a copy in memory")
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        self._connection.text_factory = _as_text
        if image:
            # Bytes 18 and 19 say how it was written to, and memory knows no write-ahead log.
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
    # Who only reads waits for no writer: one may have been stopped (Ctrl-Z) in the midst of its write.
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
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchall()  # opens its log too, or fails to
        return connection.serialize()


def _connect(path: str) -> sqlite3.Connection:
    # mode=rw: never make one that is not there.
    uri = f"file:{urllib.parse.quote(os.path.abspath(path))}?mode=rw"
    return sqlite3.connect(uri, uri=True, timeout=30.0, isolation_level=None)


def _temporary_folder() -> str:
    """Where a copy can be made; in memory where every disk is full or read-only."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return "/dev/shm"


def _as_text(data: bytes) -> str:
    """Also of bytes that are no text: one damaged row must not hide the others."""
    return data.decode("utf-8", "replace")


def _unless_gone(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError):  # a folder may be removed while we walk; anything else hides files
        raise exc


def _response(reply: Any, body: bytes = b"") -> HttpResponse:
    return HttpResponse(reply.status, {name.lower(): value for name, value in reply.headers.items()}, body)


def _pieces(reply: Any, left: int, url: str) -> Iterator[bytes]:
    """At most `left` bytes of its body. What the disk says of them is not a matter of the line."""
    while left > 0:
        try:
            piece = reply.read(min(_PIECE, left))
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise NetworkError(f"GET {url}: {exc}") from exc
        if not piece:
            return
        yield piece
        left -= len(piece)
