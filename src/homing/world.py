"""The one door of cloud, store and agent to clock, disk, processes and network.

    World             the real one, below
    a simulator       subclasses it; there each method is a point where it may yield, fail or kill the caller

Code that takes a `world` touches nothing else: no `time`, `open`, `os`, `subprocess`, `sqlite3` or `urllib` of its own.
That is what lets one seed replay one bad day exactly. Synchronous, standard library only, Python 3.8.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

__all__ = ["Completed", "Database", "HttpRequest", "HttpResponse", "NetworkError", "Process", "World"]

PathLike = Union[str, "os.PathLike[str]"]
_PIECE = 1 << 20
_locks: List[int] = []  # open until this process ends


class NetworkError(OSError):
    """No answer: refused, reset, timed out or unresolvable. Whether the request took effect is not known."""


@dataclass(frozen=True)
class HttpRequest:
    method: str
    url: str
    headers: Dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    timeout_s: float = 30.0


@dataclass(frozen=True)
class HttpResponse:
    status: int
    headers: Dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Completed:
    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Process:
    """A process and when it began; the pair tells it from a later one that got the same pid."""

    pid: int
    started: str


class World:
    # --- clock ---

    def now(self) -> float:
        """Unix seconds; may jump. For records and for what a provider bills."""
        return time.time()

    def monotonic(self) -> float:
        """Never goes back, means nothing across processes. For waits."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    def random_hex(self, num_chars: int) -> str:
        return uuid.uuid4().hex[:num_chars]

    # --- disk ---

    def read(self, path: PathLike, offset: int = 0, max_bytes: int = -1) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(max_bytes)

    def write(self, path: PathLike, data: bytes, mode: int = 0o644) -> None:
        """Whole or absent: written aside, synced, renamed, and the rename synced too."""
        with _whole(path, os.replace, mode) as file:
            file.write(data)

    def append(self, path: PathLike, data: bytes) -> None:
        """One write to an O_APPEND file, so that lines of several writers never mix."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def create(self, path: PathLike, data: bytes) -> bool:
        """True if this call made the file, False if it was there: the O_EXCL lease. Whole or absent, like write."""
        try:
            # link(2) is the one call that both refuses an existing name and shows only a finished file.
            with _whole(path, os.link) as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def copy(self, source: PathLike, target: PathLike) -> str:
        """Copies a file whole or not at all; returns the sha256 of the bytes that were read."""
        digest = hashlib.sha256()
        with open(source, "rb") as src, _whole(target, os.replace) as dst:
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

    def size(self, path: PathLike) -> int:
        return os.path.getsize(path)

    def modified_at(self, path: PathLike) -> float:
        return os.path.getmtime(path)

    def listdir(self, path: PathLike) -> List[str]:
        """Sorted names; an absent folder raises, it is not empty."""
        return sorted(os.listdir(path))

    def walk(self, path: PathLike) -> List[str]:
        """Relative paths of all files below, sorted, with forward slashes; a folder that cannot be listed raises."""
        root = os.fspath(path)
        tree = os.walk(root, onerror=_unless_gone)
        found = [os.path.relpath(os.path.join(base, name), root) for base, _, names in tree for name in names]
        return sorted(name.replace(os.sep, "/") for name in found)

    def mkdir(self, path: PathLike) -> None:
        os.makedirs(path, exist_ok=True)

    def rename(self, source: PathLike, target: PathLike) -> None:
        os.replace(source, target)
        _sync_folder_of(target)

    def remove(self, path: PathLike) -> None:
        """Absent already is success."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def rmtree(self, path: PathLike) -> None:
        if os.path.exists(path):
            shutil.rmtree(path)

    def free_bytes(self, path: PathLike) -> int:
        return shutil.disk_usage(path).free

    def lock(self, path: PathLike) -> bool:
        """True if it is ours until this process ends, however it ends; False while another holds it."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            pass  # a file system without locks: a guard that does not start would be the worse end
        _locks.append(fd)  # closing it would give the lock back
        return True

    def is_locked(self, path: PathLike) -> bool:
        """Whether another process holds it. Looking takes it for a moment, so whoever wants it asks more than once."""
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # also on a file system without locks: nobody is taken for dead there
        return False

    def database(self, path: PathLike) -> Database:
        return Database(path)

    # --- processes ---

    def spawn(self, argv: Sequence[str], env: Dict[str, str], cwd: PathLike, log: PathLike) -> int:
        """Starts a program in a session of its own, so that neither our death nor Ctrl-C reaches it."""
        with open(log, "ab") as out:
            files: Dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            child = _Child(list(argv), env=env, cwd=cwd, start_new_session=True, **files)
        _children[child.pid] = child
        return child.pid

    def poll(self, pid: int) -> Optional[int]:
        """Exit code of a child that `spawn` started here (negative: a signal), or None while it runs."""
        return _children[pid].poll()

    def signal(self, pid: int, number: int, is_group: bool = False) -> bool:
        """False if there was nobody to signal."""
        try:
            (os.killpg if is_group else os.kill)(pid, number)
        except ProcessLookupError:
            return False
        return True

    def on_signal(self, number: int, handler: Optional[Callable[[int], None]]) -> None:
        """Calls it with the number when the signal comes to this process; None ignores the signal."""
        signal.signal(number, signal.SIG_IGN if handler is None else lambda got, _frame: handler(got))

    def run(
        self, argv: Sequence[str], timeout_s: float, env: Optional[Dict[str, str]] = None, stdin: str = ""
    ) -> Completed:
        """A short program, waited for; code 124 when it ran out of time, 127 when it could not start."""
        try:
            text: Dict[str, Any] = {"input": stdin, "encoding": "utf-8", "errors": "replace"}
            done = subprocess.run(list(argv), env=env, capture_output=True, timeout=timeout_s, check=False, **text)
        except subprocess.TimeoutExpired:
            return Completed(124, "", f"timed out after {timeout_s:g} s")
        except OSError as exc:
            return Completed(127, "", str(exc))
        return Completed(done.returncode, done.stdout, done.stderr)

    def environment(self) -> Dict[str, str]:
        return dict(os.environ)

    def pid(self) -> int:
        return os.getpid()

    def host(self) -> str:
        return os.uname().nodename

    def python(self) -> str:
        return sys.executable

    def marked(self, variable: str, prefix: str) -> List[Tuple[Process, str]]:
        """Live processes whose environment has VARIABLE=PREFIX..., with the value; raises where it cannot look."""
        if os.path.isdir("/proc/self"):
            return list(_marked_by_proc(variable, prefix))
        listing = self.run(["ps", "-axEww", "-o", "pid=,lstart=,command="], timeout_s=30.0)
        if listing.code != 0:
            raise OSError(f"ps could not list processes: {listing.err.strip()}")
        return list(_marked_by_ps(listing.out, f"{variable}={prefix}"))

    # --- network ---

    def http(self, request: HttpRequest) -> HttpResponse:
        """Any status is an answer; no answer is a NetworkError. Redirects are not followed with our headers."""
        req = urllib.request.Request(request.url, request.body or None, request.headers, method=request.method)
        try:
            with _opener.open(req, timeout=request.timeout_s) as reply:
                return HttpResponse(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())
        except urllib.error.HTTPError as exc:
            with exc:
                return HttpResponse(exc.code, {k.lower(): v for k, v in exc.headers.items()}, exc.read())
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise NetworkError("{} {}: {}".format(request.method, request.url.split("?")[0], exc)) from exc


class Database:
    """SQLite, one durable transaction per call. Opened per call: no handle to leak into a forked or killed process."""

    def __init__(self, path: PathLike) -> None:
        self._path = os.fspath(path)

    def execute(self, *statements: Tuple[str, Sequence[Any]]) -> List[Dict[str, Any]]:
        """Runs the statements in one transaction; returns the rows of the last. What SQLite refuses is an OSError."""
        try:
            # Closing rolls back what was not committed.
            with contextlib.closing(sqlite3.connect(self._path, timeout=30.0, isolation_level=None)) as connection:
                connection.row_factory = sqlite3.Row
                with contextlib.suppress(sqlite3.OperationalError):  # another process is switching it at this moment
                    connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute("BEGIN IMMEDIATE")
                rows: List[Dict[str, Any]] = []
                for sql, params in statements:
                    rows = [dict(row) for row in connection.execute(sql, params)]
                connection.execute("COMMIT")
                return rows
        except sqlite3.Error as exc:
            raise OSError(f"{self._path}: {exc}") from exc


@contextlib.contextmanager
def _whole(path: PathLike, place: Callable[[str, PathLike], None], mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file beside `path` to write into; synced and put in its place when all was written, else removed."""
    aside = f"{os.fspath(path)}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        place(aside, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(aside)
    _sync_folder_of(path)


def _unless_gone(exc: OSError) -> None:
    if not isinstance(exc, FileNotFoundError):  # a folder may be removed while we walk; anything else hides files
        raise exc


def _sync_folder_of(path: PathLike) -> None:
    # Without this a crash can undo a rename. Some file systems refuse to sync a folder; they say EINVAL.
    fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


class _Child(subprocess.Popen):  # type: ignore[type-arg]
    def __del__(self) -> None:
        pass  # subprocess warns of a child that outlives its parent; ours are meant to


# Keeping them lets poll() reap without racing the interpreter's own clean-up.
_children: Dict[int, _Child] = {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def _marked_by_proc(variable: str, prefix: str) -> Iterator[Tuple[Process, str]]:
    wanted = (f"{variable}={prefix}").encode()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                entries = file.read().split(b"\0")
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command may hold spaces and brackets; what follows the last bracket is plain.
                fields = file.read().rsplit(b")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or it is another person's
        is_zombie = fields[0] in (b"Z", b"X")
        for entry in entries:
            if entry.startswith(wanted) and not is_zombie:
                yield Process(int(name), fields[19].decode()), entry.split(b"=", 1)[1].decode("utf-8", "replace")


def _marked_by_ps(listing: str, wanted: str) -> Iterator[Tuple[Process, str]]:
    for line in listing.splitlines():
        words = line.split()
        for word in words[6:]:
            if word.startswith(wanted):
                yield Process(int(words[0]), " ".join(words[1:6])), word.split("=", 1)[1]
