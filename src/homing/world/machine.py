"""What every machine gives: clock, disk, processes and network. All that an agent ever touches.

Synchronous, standard library only, Python 3.8: it travels with the agent.
"""

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

from homing.wire.clock import boot_clock_s

__all__ = ["Completed", "HttpRequest", "HttpResponse", "Machine", "NetworkError", "PathLike", "Process"]

PathLike = Union[str, "os.PathLike[str]"]
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


class Machine:
    # --- clock ---

    def now(self) -> float:
        """Unix seconds; may jump. For records and for comparing machines."""
        return time.time()

    def boottime(self) -> float:
        """Seconds of a clock that nobody can set and that goes on during sleep; the same in all processes of this
        machine until it starts again. For what costs money by the hour."""
        return boot_clock_s()

    def boot_id(self) -> str:
        """Changes when the machine starts again; "" where the machine has none."""
        try:
            return self.read("/proc/sys/kernel/random/boot_id").decode().strip()
        except OSError:
            return ""

    def monotonic(self) -> float:
        """Never goes back, means nothing across processes. For waits."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))

    # --- disk ---

    def read(self, path: PathLike, offset: int = 0, max_bytes: int = -1) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(max_bytes)

    def write(self, path: PathLike, data: bytes, mode: int = 0o644) -> None:
        """Whole or absent: written aside, synced, renamed, and the rename synced too."""
        with whole(path, os.replace, mode) as file:
            file.write(data)

    def append(self, path: PathLike, data: bytes) -> None:
        """One write to an O_APPEND file, so that lines of several writers never mix."""
        with open(path, "ab", buffering=0) as file:
            file.write(data)

    def size(self, path: PathLike) -> int:
        return os.path.getsize(path)

    def mkdir(self, path: PathLike) -> None:
        os.makedirs(path, exist_ok=True)

    def remove(self, path: PathLike) -> None:
        """Absent already is success."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)

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

    def marked(self, variable: str, prefix: str) -> List[Tuple[Process, str]]:
        """Live processes whose environment has VARIABLE=PREFIX..., with the value; raises where it cannot look."""
        seen = _seen_in_proc() if os.path.isdir("/proc/self") else self._seen_by_ps()
        found = [
            (process, word) for process, words in seen for word in words if word.startswith(f"{variable}={prefix}")
        ]
        return [(process, word.split("=", 1)[1]) for process, word in found]

    def _seen_by_ps(self) -> Iterator[Tuple[Process, List[str]]]:
        listing = self.run(["ps", "-axEww", "-o", "pid=,lstart=,command="], timeout_s=30.0)
        if listing.code != 0:
            raise OSError(f"ps could not list processes: {listing.err.strip()}")
        for words in map(str.split, listing.out.splitlines()):
            yield Process(int(words[0]), " ".join(words[1:6])), words[6:]

    # --- network ---

    def http(self, request: HttpRequest) -> HttpResponse:
        """Any status is an answer; no answer is a NetworkError. Redirects are not followed with our headers."""
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
    sync_folder_of(path)


def sync_folder_of(path: PathLike) -> None:
    # Without this a crash can undo a rename. Some file systems refuse to sync a folder; they say EINVAL.
    fd = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
    finally:
        os.close(fd)


class _Child(subprocess.Popen):  # type: ignore[type-arg]  # Popen[bytes] is not yet Python 3.8
    def __del__(self) -> None:
        pass  # subprocess warns of a child that outlives its parent; ours are meant to


# Keeping them lets poll() reap without racing the interpreter's own clean-up.
_children: Dict[int, _Child] = {}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


opener = urllib.request.build_opener(_NoRedirect)


def _seen_in_proc() -> Iterator[Tuple[Process, List[str]]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", encoding="utf-8", errors="replace") as file:
                words = file.read().split("\0")
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command may hold spaces and brackets; what follows the last bracket is plain.
                fields = file.read().rsplit(b")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # it ended while we looked, or it is another person's
        if fields[0] not in (b"Z", b"X"):
            yield Process(int(name), fields[19].decode()), words
