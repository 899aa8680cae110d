"""World: what a machine gives, and beside it what only home and the store need. An agent does without."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import sqlite3
import sys
import threading
import time
import urllib.error
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

__all__ = ["Database", "World"]

_PIECE = 1 << 20


class World(Machine):
    def random_hex(self, num_chars: int) -> str:
        return uuid.uuid4().hex[:num_chars]

    # --- disk ---

    def create(self, path: PathLike, data: bytes) -> bool:
        """True if this call made the file, False if it was there: the O_EXCL lease. Whole or absent, like write."""
        try:
            # link(2) is the one call that both refuses an existing name and shows only a finished file.
            with whole(path, os.link) as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def copy(self, source: PathLike, target: PathLike) -> str:
        """Copies a file whole or not at all; returns the sha256 of the bytes that were read."""
        digest = hashlib.sha256()
        with open(source, "rb") as src, whole(target, os.replace) as dst:
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


class Database:
    """SQLite, one durable transaction per call. Opened per call: no handle to leak into a forked or killed process."""

    def __init__(self, path: PathLike) -> None:
        self._path = os.fspath(path)

    def execute(self, *statements: tuple[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """Runs the statements in one transaction; returns the rows of the last. What SQLite refuses is an OSError."""
        try:
            try:
                return self._execute(statements)
            except sqlite3.OperationalError as exc:
                # A name has what SQLite says; what Python itself says of text that it cannot read has none.
                if not getattr(exc, "sqlite_errorname", "").startswith("SQLITE_IOERR_SHM"):
                    raise
                # A disk so full that the file which processes share has no room: alone, its index is in memory.
                return self._execute(statements, is_alone=True)
        except sqlite3.Error as exc:
            raise OSError(f"{self._path}: {exc}") from exc

    def _execute(
        self, statements: Sequence[tuple[str, Sequence[Any]]], *, is_alone: bool = False
    ) -> list[dict[str, Any]]:
        # Closing rolls back what was not committed.
        with contextlib.closing(sqlite3.connect(self._path, timeout=30.0, isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = _as_text
            if is_alone:
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            with contextlib.suppress(sqlite3.OperationalError):  # another process is switching it at this moment
                connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            # Who only reads waits for no writer: one may have been stopped (Ctrl-Z) in the midst of its write.
            is_read = all(sql.startswith(("SELECT", "WITH")) for sql, _ in statements)
            connection.execute("BEGIN" if is_read else "BEGIN IMMEDIATE")
            rows: list[dict[str, Any]] = []
            for sql, params in statements:
                rows = [dict(row) for row in connection.execute(sql, params)]
            connection.execute("COMMIT")
            return rows


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
