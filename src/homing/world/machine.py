"""Machine: access to the clock, disk, processes and network of any machine. The agent has no other access to them.

This module ships with the agent, so it is synchronous and needs only the standard library of Python 3.8."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import http.client
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from homing.wire.control_files import boot_clock_s

__all__ = ["Completed", "HttpRequest", "HttpResponse", "Machine", "NetworkError", "PathLike", "Process"]

PathLike = Union[str, "os.PathLike[str]"]
_locks: List[int] = []  # file descriptors of locks, which stay open until this process ends


class NetworkError(OSError):
    """Raised if there was no response to a request. The request may have taken effect anyway."""


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
    """A process, identified by its pid and its start time, because a later process may get the same pid."""

    pid: int
    started: str


class Machine:
    # --- clock ---

    def now(self) -> float:
        """Return the Unix time in seconds. This clock may jump; use it for records and for comparing machines."""
        return time.time()

    def boottime(self) -> float:
        """Return the time of a clock that cannot be set and that runs while the machine sleeps. Use it for billed time.

        All processes on this machine share this clock, which restarts when the machine reboots."""
        return boot_clock_s()

    def boot_id(self) -> str:
        """Return an id that changes with every reboot, or "" if the machine has none."""
        try:
            return self.read("/proc/sys/kernel/random/boot_id").decode().strip()
        except OSError:
            return ""

    def monotonic(self) -> float:
        """Return the time of a clock that never goes back. Use it for waits, but only within this process."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    # --- disk ---

    def read(self, path: PathLike, offset: int = 0, max_bytes: int = -1) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(max_bytes)

    def write(self, path: PathLike, data: bytes, mode: int = 0o644) -> None:
        """Write a file completely or not at all: write and sync a temporary file, rename it, and sync the rename."""
        with whole(path, os.replace, mode) as file:
            file.write(data)

    def append(self, path: PathLike, data: bytes) -> None:
        """Append to a file with a single write and O_APPEND, so that lines from several writers never mix."""
        with open(path, "ab", buffering=0) as file:
            file.write(data)

    def size(self, path: PathLike) -> int:
        return os.path.getsize(path)

    def mkdir(self, path: PathLike) -> None:
        os.makedirs(path, exist_ok=True)

    def remove(self, path: PathLike) -> None:
        """Delete a file. Do nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def lock(self, path: PathLike) -> bool:
        """Try to acquire a lock that is held until this process ends; return False if another process holds it."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            pass  # the file system does not support locks, and a guard without a lock is better than no guard
        _locks.append(fd)  # keep the file open, because closing it would release the lock
        return True

    def is_locked(self, path: PathLike) -> bool:
        """Return True if another process holds the lock.

        The check briefly acquires the lock, so a process that wants the lock must try more than once."""
        try:
            with open(path, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # True even if locks are not supported, so that no live process is mistaken for a dead one
        return False

    # --- processes ---

    def spawn(self, argv: Sequence[str], env: Dict[str, str], cwd: PathLike, log: PathLike) -> int:
        """Start a program in its own session and return its pid.

        The program continues if this process dies, and Ctrl-C does not affect it."""
        with open(log, "ab") as out:
            files: Dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
            child = _Child(list(argv), env=env, cwd=cwd, start_new_session=True, **files)
        _children[child.pid] = child
        return child.pid

    def poll(self, pid: int) -> Optional[int]:
        """Return the exit code of a child process (negative for a signal), or None while it runs.

        This process must have started the child with `spawn`."""
        return _children[pid].poll()

    def signal(self, pid: int, number: int, is_group: bool = False) -> bool:
        """Send a signal; return False if there is no such process."""
        try:
            (os.killpg if is_group else os.kill)(pid, number)
        except ProcessLookupError:
            return False
        return True

    def on_signal(self, number: int, handler: Optional[Callable[[int], None]]) -> None:
        """Call `handler` with the signal number when this process receives the signal; None ignores the signal."""
        signal.signal(number, signal.SIG_IGN if handler is None else lambda got, _frame: handler(got))

    def run(
        self, argv: Sequence[str], timeout_s: float, env: Optional[Dict[str, str]] = None, stdin: str = ""
    ) -> Completed:
        """Run a short program until it exits. The exit code is 124 if it timed out, or 127 if it could not start."""
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

    def marked(self, variable: str, prefix: str) -> List[Tuple[Process, str]]:
        """Return the live processes whose environment `variable` starts with `prefix`, and the variable's value."""
        start = f"{variable}={prefix}"
        seen = _seen_in_proc(os.fsencode(start)) if os.path.isdir("/proc/self") else self._seen_by_ps()
        found = [(process, word) for process, words in seen for word in words if word.startswith(start)]
        return [(process, word.split("=", 1)[1]) for process, word in found]

    def _seen_by_ps(self) -> Iterator[Tuple[Process, List[str]]]:
        listing = self.run(["ps", "-axEww", "-o", "pid=,lstart=,command="], timeout_s=30.0)
        if listing.code != 0:
            raise OSError(f"ps could not list processes: {listing.err.strip()}")
        for words in map(str.split, listing.out.splitlines()):
            yield Process(int(words[0]), " ".join(words[1:6])), words[6:]

    # --- network ---

    def http(self, request: HttpRequest) -> HttpResponse:
        """Return the response, whatever its status; do not follow redirects. Raise NetworkError if none arrives."""
        req = urllib.request.Request(request.url, request.body or None, request.headers, method=request.method)
        try:
            with opener.open(req, timeout=request.timeout_s) as reply:
                return HttpResponse(reply.status, {k.lower(): v for k, v in reply.headers.items()}, reply.read())
        except urllib.error.HTTPError as exc:
            with exc:
                return HttpResponse(exc.code, {k.lower(): v for k, v in exc.headers.items()}, exc.read())
        except (OSError, ValueError, http.client.HTTPException) as exc:
            raise NetworkError("{} {}: {}".format(request.method, request.url.split("?")[0], exc)) from exc


@contextlib.contextmanager
def whole(path: PathLike, place: Callable[[str, PathLike], None], mode: int = 0o644) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path`. On success, sync it and move it with `place`; otherwise remove it."""
    temporary = f"{os.fspath(path)}.tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        place(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    sync_folder_of(path)


def sync_folder_of(path: PathLike) -> None:
    # Without this sync, a crash can undo the rename. File systems that cannot sync a folder report EINVAL.
    fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


class _Child(subprocess.Popen):  # type: ignore[type-arg]  # Popen[bytes] needs Python 3.9
    def __del__(self) -> None:
        pass  # suppress the warning that the child is still running: our children are meant to outlive this process


# Child processes by pid, kept so that poll() can reap them without racing the interpreter's own clean-up.
_children: Dict[int, _Child] = {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


opener = urllib.request.build_opener(_NoRedirect)


def _seen_in_proc(start: bytes) -> Iterator[Tuple[Process, List[str]]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb", buffering=0) as file:
                found = file.readall()
            if start not in found:
                continue  # almost all processes; the other steps would take most of the time
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command name may contain spaces and parentheses, so parse the fields after the last parenthesis.
                fields = file.read().rsplit(b")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # skip a process that has ended or belongs to another user
        if fields[0] not in (b"Z", b"X"):
            yield Process(int(name), fields[19].decode()), found.decode("utf-8", "replace").split("\0")
