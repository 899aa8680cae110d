"""World as the simulation gives it: each call is a point at which the caller may be held up, fail or be killed.

    point     counts, obeys kills and signals, lets others run that are due; only then comes the effect
    Faults    what a schedule wants to happen: the Nth call of a process fails, or kills it
    Proc      a process on a host: pid, environment, signals, exit code

A method of World that is not written here raises: a simulation that quietly used the real disk would prove nothing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal as signals
import sqlite3
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.sim.host import HOME, Disk, Host
from tests.sim.kernel import MAX_CALLS, Broken, Killed

import homing
from homing.world import Completed, Database, HttpRequest, HttpResponse, NetworkError, Process, World

try:
    from homing.world import DatabaseDamaged, MemoryDatabase
except ImportError:  # older sources, against which the regression tests run too: they know no damaged ledger
    DatabaseDamaged, MemoryDatabase = OSError, Database  # type: ignore[misc, assignment]

__all__ = ["CANNOT_FAIL", "Proc", "SimWorld"]

STORE = "/store"
PYTHON = "/usr/bin/python3"
_PACKAGE = os.path.dirname(os.path.abspath(homing.__file__))
_REAL: dict[str, bytes] = {}  # files of the package itself, read once: programs are the same in every world
_REAL_NAMES: dict[str, list[str]] = {}
# Virtual seconds that a call takes. The shared store is a network away.
_CALL_S, _STORE_S, _COMMIT_S = 0.0002, 0.01, 0.004
# They answer from memory; a failure meant for one of them hits the next call that can fail.
CANNOT_FAIL = frozenset(
    [
        "now",
        "monotonic",
        "boottime",
        "boot_id",
        "sleep",
        "random_hex",
        "poll",
        "environment",
        "pid",
        "host",
        "python",
        "on_signal",
        "exists",
        "is_dir",
    ]
) | {"  committed"}
_LONGEST_SLEEP_S = 3600.0
_WRITES = ("write", "append", "create", "copy", "mkdir", "rename", "remove", "rmtree", "lock")
PathLike = Any


class Proc:
    """One process. Its world is its own: after its death every call raises again, without effect."""

    def __init__(self, host: Host, argv: Sequence[str], env: dict[str, str], program: Callable[[SimWorld], int | None]):
        self.host, self.argv, self.env = host, list(argv), env
        self.pid = host.next_pid()
        self.started = f"{host.sim.t:.3f}"
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.pending: list[int] = []
        self.calls = 0
        self.kill_at = 0  # die at this call; 0: never
        self.fail_at = 0  # this call raises an OSError; 0: never
        self.names: list[str] | None = None  # of its calls, if a test records them
        self.children: dict[int, Proc] = {}
        self.role = argv[0] if argv else "?"
        self.world = SimWorld(self)
        host.processes[self.pid] = self
        self.task = host.sim.start(f"{host.name}/{self.pid}", lambda: program(self.world))
        self.task.proc = self  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"{self.host.name}/{self.role}:{self.pid}"

    @property
    def is_alive(self) -> bool:
        return self.task.code is None

    def kill(self, code: int = -9) -> None:
        if self.is_alive:
            self.host.sim.say(f"{self} is killed ({code})")
            self.host.sim.kill(self.task, code)

    def signal(self, number: int) -> bool:
        if not self.is_alive:
            return False
        if number == signals.SIGKILL:
            self.kill(-9)
        elif number:
            self.pending.append(number)
            self.host.sim.wake(self.task)
        return True


class SimWorld(World):
    def __init__(self, proc: Proc) -> None:
        self.proc, self.machine, self.sim = proc, proc.host, proc.host.sim
        self._task: Any = None

    # --- the point ---

    def point(self, name: str, what: object = "", seconds: float = _CALL_S) -> None:
        proc, sim = self.proc, self.sim
        task = self._task
        if task is None:
            task = self._task = proc.task
        if task.is_killed:
            raise Killed
        proc.calls += 1
        sim.num_calls += 1
        sim.note(proc.pid * 131 + proc.calls)
        if proc.names is not None:
            proc.names.append(name)
        if sim.trace is not None:
            sim.say(f"{proc} #{proc.calls} {name} {what}")
        if sim.num_calls > MAX_CALLS:
            raise Broken(f"{proc} turns in circles: {MAX_CALLS} calls in {sim.t:.0f} virtual seconds")
        if proc.calls == proc.kill_at:
            proc.kill()
            raise Killed
        sim.give_way(task, sim.t + seconds)
        self.still_alive()
        if proc.calls == proc.fail_at and name in CANNOT_FAIL:
            proc.fail_at += 1
        if proc.calls == proc.fail_at:
            sim.say(f"{proc} #{proc.calls} {name} fails")
            kind = NetworkError if name == "http" else OSError
            raise kind(errno.EIO, f"simulated failure of {name}", str(what))

    def still_alive(self) -> None:
        """After every pause: dead meanwhile, or a signal to handle?"""
        if self.proc.task.is_killed:
            raise Killed
        while self.proc.pending:
            self._deliver(self.proc.pending.pop(0))

    def _deliver(self, number: int) -> None:
        handler = self.proc.handlers.get(number)
        if handler is None:
            if number == signals.SIGHUP or number in (signals.SIGTERM, signals.SIGINT):
                self.proc.kill(-number)
            raise Killed
        handler(number)

    def _half(self, disk: Disk, path: str, data: bytes) -> None:
        """During a write: a process that dies here leaves its unfinished file behind."""
        temporary = f"{path}.tmp-{self.proc.pid}-{self.sim.random.getrandbits(32):08x}"
        try:
            self.point("  half", path)
        except Killed:
            if self.proc.calls == self.proc.kill_at:
                with contextlib.suppress(OSError):
                    disk.put(temporary, data[: len(data) // 2], self.machine.now())
            raise

    def _at(self, name: str, path: PathLike) -> tuple[Disk, str]:
        """The disk that has this path and the path there, after the point."""
        full = os.fspath(path)
        if full.startswith(STORE):
            self.point(name, full, _STORE_S)
            mounted = self.machine.mounts.get(STORE)
            if mounted is None or mounted.name in self.machine.cut or not mounted.is_up:
                raise OSError(errno.EIO, "the store cannot be reached", full)
            if mounted.is_refusing:
                raise PermissionError(errno.EACCES, "Permission denied", full)
            if mounted.is_ill():
                raise OSError(errno.EIO, "the store answers with an error", full)
            return mounted.disk, full
        self.point(name, full)
        if name in _WRITES and self.machine.is_read_only and full.startswith(str(HOME)):
            raise OSError(errno.EROFS, "read-only file system", full)
        return self.machine.disk, full

    # --- clock ---

    def now(self) -> float:
        self.point("now")
        return self.machine.now()

    def monotonic(self) -> float:
        self.point("monotonic")
        return self.machine.monotonic()

    def boottime(self) -> float:
        self.point("boottime")
        return self.machine.boottime()

    def boot_id(self) -> str:
        self.point("boot_id")
        return self.machine.boot_id()

    def sleep(self, seconds: float) -> None:
        if not 0 <= seconds <= _LONGEST_SLEEP_S:
            self.sim.fail(Broken(f"{self.proc} sleeps {seconds:g} s"))
        self.point("sleep", f"{seconds:.3f}")
        # Two machines are never in step: without this, who acts first would be the same in every schedule.
        until = self.sim.t + seconds + self.sim.random.random() * 0.02
        while self.sim.t < until:
            self.sim.give_way(self._task, until)
            self.still_alive()

    def random_hex(self, num_chars: int) -> str:
        self.point("random_hex")
        return f"{self.sim.random.getrandbits(4 * num_chars):0{num_chars}x}"

    # --- disk ---

    def read(self, path: PathLike, offset: int = 0, max_bytes: int = -1) -> bytes:
        full = os.fspath(path)
        if full.startswith(_PACKAGE):
            self.point("read", full)
            return _real(full)
        disk, full = self._at("read", full)
        data = disk.get(full)
        if full.startswith(STORE) and self.machine.mounts[STORE].damages and self.machine.mounts[STORE].damages in full:
            data = bytes(len(data))
        return data[offset:] if max_bytes < 0 else data[offset : offset + max_bytes]

    def write(self, path: PathLike, data: bytes, mode: int = 0o644) -> None:
        disk, full = self._at("write", path)
        self._half(disk, full, data)
        disk.put(full, bytes(data), self.machine.now())
        disk.unsynced.pop(full, None)
        self.sim.note(zlib.crc32(data))

    def append(self, path: PathLike, data: bytes) -> None:
        disk, full = self._at("append", path)
        old = disk.files.get(full, b"")
        disk.put(full, old + data, self.machine.now())
        disk.unsynced.setdefault(full, len(old))
        self.sim.note(zlib.crc32(data))

    def create(self, path: PathLike, data: bytes) -> bool:
        disk, full = self._at("create", path)
        self._half(disk, full, data)
        if full in disk.files:
            return False
        disk.put(full, bytes(data), self.machine.now())
        self.sim.note(zlib.crc32(data))
        return True

    def copy(self, source: PathLike, target: PathLike) -> str:
        is_database = os.fspath(source) in self.machine.databases
        data = b"a damaged database" if is_database else self.read(source)
        disk, full = self._at("copy", target)
        self._half(disk, full, data)
        if full.startswith(STORE):
            self._at("copy ends", full)  # the connection may break while bytes are under way
        disk.put(full, data, self.machine.now())
        self.sim.note(zlib.crc32(data))
        return hashlib.sha256(data).hexdigest()

    def link(self, source: PathLike, target: PathLike) -> None:
        self.copy(source, target)

    def sha256(self, path: PathLike) -> str:
        return hashlib.sha256(self.read(path)).hexdigest()

    def exists(self, path: PathLike) -> bool:
        full = os.fspath(path)
        if full.startswith(("/proc", _PACKAGE)):
            self.point("exists", full)
            return full.startswith(_PACKAGE) and os.path.exists(full)
        try:  # as os.path.exists: what cannot be looked at is not there
            disk, full = self._at("exists", full)
        except OSError:
            return False
        return full in disk.files or full in disk.folders or full in self.machine.databases

    def is_dir(self, path: PathLike) -> bool:
        full = os.fspath(path)
        if full.startswith(_PACKAGE):
            self.point("is_dir", full)
            return os.path.isdir(full)
        try:
            disk, full = self._at("is_dir", full)
        except OSError:
            return False
        return full in disk.folders

    def mode(self, path: PathLike) -> int:
        disk, full = self._at("mode", path)
        disk.get(full)
        return 0o600  # a simulated machine has one user

    def chmod(self, path: PathLike, mode: int) -> None:
        disk, full = self._at("chmod", path)
        disk.get(full)

    def may_write(self, path: PathLike) -> bool:
        return self.exists(path)

    def size(self, path: PathLike) -> int:
        disk, full = self._at("size", path)
        return 4096 if full in disk.folders else len(disk.get(full))

    def modified_at(self, path: PathLike) -> float:
        disk, full = self._at("modified_at", path)
        disk.get(full)
        return disk.times[full]

    def stamp(self, path: PathLike) -> tuple[int, int, int, int]:
        at = int(self.modified_at(path) * 1e9)
        return self.size(path), at, at, zlib.crc32(os.fspath(path).encode())

    def listdir(self, path: PathLike) -> list[str]:
        disk, full = self._at("listdir", path)
        return disk.names(full)

    def walk(self, path: PathLike) -> list[str]:
        full = os.fspath(path)
        if full.startswith(_PACKAGE):
            self.point("walk", full)
            if full not in _REAL_NAMES:
                _REAL_NAMES[full] = World().walk(full)
            return _REAL_NAMES[full]
        disk, full = self._at("walk", full)
        return sorted(disk.walk(full))

    def mkdir(self, path: PathLike) -> None:
        disk, full = self._at("mkdir", path)
        disk.make(full)

    def rename(self, source: PathLike, target: PathLike) -> None:
        disk, full = self._at("rename", source)
        if full in self.machine.databases:
            self.machine.lose_database(full)  # it is never opened under its other name
            return
        disk.move(full, os.fspath(target), self.machine.now())

    def remove(self, path: PathLike) -> None:
        disk, full = self._at("remove", path)
        if full in disk.files:
            disk.drop(full)
            self.machine.locks.pop(full, None)  # a lock is on the file, not on its name

    def rmtree(self, path: PathLike) -> None:
        disk, full = self._at("rmtree", path)
        if full in disk.folders:
            disk.tree(full)

    def free_bytes(self, path: PathLike) -> int:
        disk, _ = self._at("free_bytes", path)
        return max(0, disk.num_bytes - disk.used)

    def lock(self, path: PathLike) -> bool:
        disk, full = self._at("lock", path)
        if full not in disk.files:
            disk.put(full, b"", self.machine.now())
        holder = self.machine.locks.get(full)
        if holder is not None and holder.is_alive:
            return False
        self.machine.locks[full] = self.proc
        return True

    def is_locked(self, path: PathLike) -> bool:
        _, full = self._at("is_locked", path)
        holder = self.machine.locks.get(full)
        return holder is not None and holder.is_alive

    def database(self, path: PathLike) -> Database:
        return _SimDatabase(path, self)

    def memory_database(self, image: bytes = b"") -> Database:
        return MemoryDatabase(image)

    def keep_private(self, folder: PathLike) -> None:
        pass  # a simulated machine has one user

    # --- processes ---

    def spawn(self, argv: Sequence[str], env: dict[str, str], cwd: PathLike, log: PathLike) -> int:
        self.point("spawn", " ".join(argv)[-80:])
        if not self.machine.is_up:
            raise OSError(errno.EIO, "the machine is going down")
        child = self.sim.programs.start(self.machine, list(argv), dict(env))  # type: ignore[attr-defined]
        self.proc.children[child.pid] = child
        return int(child.pid)

    def poll(self, pid: int) -> int | None:
        self.point("poll", pid)
        code: int | None = self.proc.children[pid].task.code
        return code

    def signal(self, pid: int, number: int, is_group: bool = False) -> bool:
        self.point("signal", f"{pid} {number}")
        target = self.machine.processes.get(pid)
        return target is not None and target.signal(number)

    def on_signal(self, number: int, handler: Callable[[int], None] | None) -> None:
        self.point("on_signal", number)
        self.proc.handlers[number] = handler or (lambda got: None)

    def run(
        self, argv: Sequence[str], timeout_s: float, env: dict[str, str] | None = None, stdin: str = ""
    ) -> Completed:
        self.point("run", argv[0])
        if "homing.store.sync" in argv:
            return self._run_and_wait(argv, timeout_s, env or {})
        if argv[0] == "getconf":
            return Completed(0, "4\n", "")
        if argv[0] == "sysctl":
            return Completed(0, "17179869184\n" if argv[-1] == "hw.memsize" else "simulated processor\n", "")
        if argv[0] == "ssh" and hasattr(self.sim.cloud, "ssh"):  # type: ignore[attr-defined]
            return self.sim.cloud.ssh(self, argv, timeout_s, stdin)  # type: ignore[attr-defined, no-any-return]
        if argv[0] == "ssh-keygen" and hasattr(self.sim.cloud, "ssh_keygen"):  # type: ignore[attr-defined]
            return self.sim.cloud.ssh_keygen(self, argv)  # type: ignore[attr-defined, no-any-return]
        return Completed(127, "", f"{argv[0]}: not found")

    def _run_and_wait(self, argv: Sequence[str], timeout_s: float, env: dict[str, str]) -> Completed:
        child = self.sim.programs.start(self.machine, list(argv), dict(env))  # type: ignore[attr-defined]
        until = self.sim.t + timeout_s
        while child.is_alive and self.sim.t < until:
            self.sim.give_way(self._task, min(until, self.sim.t + 0.5))
            self.still_alive()
        child.kill()
        return Completed(124 if child.task.code == -9 else child.task.code, "", "")

    def environment(self) -> dict[str, str]:
        self.point("environment")
        return dict(self.proc.env)

    def together(self, calls: Sequence[Callable[[], Any]], timeout_s: float) -> list[Any]:
        """One after another: the order of what happens must follow from the seed alone."""
        answers: list[Any] = []
        for call in calls:
            try:
                answers.append(call())
            except Exception as exc:
                answers.append(exc)
        return answers

    def pid(self) -> int:
        self.point("pid")
        return self.proc.pid

    def host(self) -> str:
        self.point("host")
        return self.machine.name

    def python(self) -> str:
        self.point("python")
        return PYTHON

    def marked(self, variable: str, prefix: str) -> list[tuple[Process, str]]:
        self.point("marked", prefix)
        found = [(proc, proc.env.get(variable, "")) for proc in self.machine.living()]
        return [(Process(p.pid, p.started), value) for p, value in found if value.startswith(prefix) and value]

    # --- network ---

    def http(self, request: HttpRequest) -> HttpResponse:
        return self.sim.cloud.http(self, request)  # type: ignore[attr-defined, no-any-return]

    def stream(self, request: HttpRequest, seconds: float) -> HttpResponse:
        return self.http(request)

    def download(
        self, url: str, path: PathLike, max_bytes: int, take: Callable[[bytes], None], timeout_s: float = 60.0
    ) -> HttpResponse:
        offset = self.size(path) if self.exists(path) else 0
        reply = self.http(HttpRequest("GET", url, {"Range": f"bytes={offset}-"} if offset else {}, timeout_s=timeout_s))
        if reply.status == (206 if offset else 200):
            self.append(path, reply.body[: max_bytes - offset + 1])
            take(reply.body[: max_bytes - offset + 1])
        return HttpResponse(reply.status, reply.headers, b"")


def _closed(name: str) -> Callable[..., Any]:
    def call(self: SimWorld, *args: Any, **kwargs: Any) -> Any:
        raise Broken(f"World.{name} has no counterpart in the simulation yet")

    return call


for _name in [name for name in dir(World) if not name.startswith("_") and name not in vars(SimWorld)]:
    setattr(SimWorld, _name, _closed(_name))


class _SimDatabase(Database):
    def __init__(self, path: PathLike, world: SimWorld) -> None:
        super().__init__(path)
        self._world = world

    def execute(self, *statements: tuple[str, Sequence[Any]]) -> list[dict[str, Any]]:
        """Killed before it: nothing. Killed after it: all."""
        world, disk = self._world, self._world.machine.disk
        world.point("transaction", statements[-1][0][:60], _COMMIT_S)
        if (os.path.dirname(self._path) or "/") not in disk.folders:
            raise OSError(f"{self._path}: unable to open database file")
        if self._path in world.machine.damaged:
            raise DatabaseDamaged(f"{self._path}: database disk image is malformed")
        if world.machine.is_read_only:  # in WAL mode also a reader needs files that it can write
            raise OSError(f"{self._path}: unable to open database file")
        if self._path not in world.machine.databases and not any(sql.startswith("CREATE") for sql, _ in statements):
            raise FileNotFoundError(errno.ENOENT, "no such database", self._path)
        connection = world.machine.database(self._path)
        is_writing = any(not sql.lstrip().upper().startswith("SELECT") for sql, _ in statements)
        if is_writing and disk.used >= disk.num_bytes:
            raise OSError(f"{self._path}: database or disk is full")
        try:
            connection.execute("BEGIN")
            rows: list[dict[str, Any]] = []
            for sql, params in statements:
                rows = connection.execute(sql, params).fetchall()
            connection.execute("COMMIT")
            if is_writing:
                world.sim.truth.check_ledgers()  # type: ignore[attr-defined]
        except sqlite3.Error as exc:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise OSError(f"{self._path}: {exc}") from exc
        world.point("  committed", "")
        return rows

    def image(self) -> bytes:
        world = self._world
        world.point("image", self._path)
        if self._path in world.machine.damaged:
            raise DatabaseDamaged(f"{self._path}: database disk image is malformed")
        if self._path not in world.machine.databases:
            raise FileNotFoundError(errno.ENOENT, "no such database", self._path)
        return world.machine.databases[self._path].serialize()

    def restore(self, image: bytes, *, is_replacing: bool = False) -> None:
        world = self._world
        world.point("restore", self._path)
        if world.machine.is_read_only:
            raise OSError(errno.EROFS, "read-only file system", self._path)
        if world.machine.disk.used >= world.machine.disk.num_bytes:
            raise OSError(errno.ENOSPC, "no space left on device", self._path)
        if self._path in world.machine.databases and not is_replacing:
            raise FileExistsError(errno.EEXIST, "is there", self._path)
        world.machine.restore_database(self._path, image)


def _real(path: str) -> bytes:
    if path not in _REAL:
        _REAL[path] = Path(path).read_bytes()
    return _REAL[path]
