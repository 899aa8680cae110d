"""Shared by all tests: loopback only, one thread, a home of its own for each test."""

from __future__ import annotations

import collections
import gc
import os
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homing.api import notices
from homing.cli import output
from homing.wire import file_names
from homing.world import World, machine

os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.compile would first compile a program for each instruction set of this processor: ten seconds.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# With the person's own accounts a command would ask their clouds: each test names those it wants.
for _name in [
    name for name in os.environ if re.match(r"(RUNPOD|SHADEFORM|AWS|MODAL|HF|HUGGINGFACEHUB|WANDB|MLFLOW)_", name)
]:
    del os.environ[_name]

_MEMORY = Path("/dev/shm")
_LEAST_BYTES = 4 << 30  # a whole run leaves about half a gigabyte there; the rest is for its processes


def _is_fit_for_tests(folder: Path) -> bool:
    """Whether this folder in memory may hold what tests write: there, large enough, and programs in it may be started
    (in a container they may not)."""
    if not os.access(folder, os.W_OK) or os.statvfs(folder).f_flag & os.ST_NOEXEC:
        return False
    available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return min(shutil.disk_usage(folder).free, int(available[1]) << 10 if available else 0) >= _LEAST_BYTES


# Folders of tests in memory, where syncing costs nothing: the tests sync tens of thousands of times. Nothing less is
# proven, for SIGKILL takes nothing back that was written and not synced.
if "PYTEST_DEBUG_TEMPROOT" not in os.environ and _is_fit_for_tests(_MEMORY):
    os.environ["PYTEST_DEBUG_TEMPROOT"] = str(_MEMORY)

_real_connect = socket.socket.connect


# More than two cores would ask for: who really waits (for a heartbeat, an end, a landing) leaves its core to another,
# and the longest tests wait for most of their time.
_WORKERS = max(4, os.cpu_count() or 1)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """All tests, or one tier of them, share the machine out; a part that was asked for by its path runs right here."""
    option = config.option
    is_free = getattr(option, "numprocesses", 0) is None and not (option.usepdb or option.collectonly)
    if is_free and config.args_source is config.ArgsSource.TESTPATHS and not hasattr(config, "workerinput"):
        option.numprocesses, option.dist = _WORKERS, "loadfile"
        # Images of containers forbid keeping bytecode. Each worker would then compile all tests anew, and each command
        # that a test starts all its modules: twice the time.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config: pytest.Config) -> None:
    """By default xdist starts with the files that have the most tests. The end-to-end tests, one per file and minutes
    long, would come last, and one worker would run several of them while the others are idle.

    Each worker collects in an order of its own: after a fresh set-up, it compiles the files that it reaches first and
    finds the others compiled. Otherwise all workers would compile all files, eight seconds each."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False
    if hasattr(config, "workerinput") and config.args == ["tests"]:
        found = [path for path in Path("tests").iterdir() if path.is_dir() or path.match("test_*.py")]
        parts = sorted(str(path) for path in found if path.name != "__pycache__")
        first = len(parts) * int(config.workerinput["workerid"][2:]) // config.workerinput["workercount"]
        config.args = parts[first:] + parts[:first]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported stays, so nothing is collected before the first test."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The proofs run only if asked for, by their marker or one by one.

    Long files come first: those that were given the most time, then those with the most slow tests. The quick ones
    that are left for the end are small change for every worker."""
    if "prove" not in config.option.markexpr and not any("::" in arg for arg in config.args):
        proofs = [item for item in items if item.get_closest_marker("prove")]
        items[:] = [item for item in items if not item.get_closest_marker("prove")]
        config.hook.pytest_deselected(items=proofs)
    given_s: dict[Path, float] = collections.defaultdict(float)
    num_slow: dict[Path, int] = collections.defaultdict(int)
    for item in items:
        if item.get_closest_marker("slow"):
            limit = item.get_closest_marker("timeout")
            given_s[item.path] = max(given_s[item.path], limit.args[0] if limit else 0.0)
            num_slow[item.path] += 1
    items.sort(key=lambda item: (-given_s[item.path], -num_slow[item.path], item.path))


def _loopback_only(self: socket.socket, address: object) -> None:
    host = address[0] if isinstance(address, tuple) else ""
    if isinstance(address, tuple) and not (str(host).startswith("127.") or host in ("::1", "localhost")):
        raise AssertionError(f"a test tried to reach {address!r}; tests stay on loopback")
    _real_connect(self, address)


@pytest.fixture(scope="module", autouse=True)
def _collect_little_garbage() -> None:
    """The garbage collector passes over what the files before this one have imported, a million objects. With them,
    each `gc.collect()` of a test or of the package would take half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A machine that outlives its tests is a leak, whoever made it; on a real cloud it would bill."""
    yield
    if not Path("/proc/self/cmdline").exists():
        return
    deadline = time.monotonic() + 10.0
    while (left := _left_below(tmp_path_factory.getbasetemp())) and time.monotonic() < deadline:
        time.sleep(0.2)  # some are on their way out
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == {}, "processes that the tests of this file left behind"


def _left_below(folder: Path) -> dict[int, str]:
    found = {}
    for process, mark in World().marked(file_names.MARK_ENV, ""):
        try:
            words = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if f"{folder}{os.sep}" in words:
            found[process.pid] = f"{mark}: {words.replace(chr(0), ' ')[:200]}"
    return found


@pytest.fixture(autouse=True)
def _reap_children() -> Iterator[None]:
    """Processes that tests start through World are children of this one, and nothing waits for them at the end.
    Without this, thousands of zombies would slow down every search for processes."""
    yield
    for child in list(machine._children.values()):
        child.poll()


@pytest.fixture(autouse=True)
def _environment_of_its_own() -> Iterator[None]:
    """What a test sets, or `.env` sets for it, does not stay for the next one."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    if "boto3" in sys.modules:  # it remembers the keys that it found first
        sys.modules["boto3"].DEFAULT_SESSION = None  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _stay_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _loopback_only)


@pytest.fixture(scope="module")
def _no_garbage_collection() -> Iterator[None]:
    """For tests that parse Python. Python 3.11 fails with "AST constructor recursion depth mismatch" when the garbage
    collector runs another test's finalizers (an asyncio task, say) while `ast.parse` builds its tree."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def homing_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """$HOMING_HOME of this test; nothing a test does may touch the person's own."""
    home = tmp_path / "homing-home"
    monkeypatch.setenv("HOMING_HOME", str(home))
    monkeypatch.setenv("NO_COLOR", "1")
    return home


@pytest.fixture(autouse=True)
def default_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `-q` or `--json` that an earlier test passed in this process does not apply to this test."""
    monkeypatch.setattr(output, "_loudness", 0)
    monkeypatch.setattr(output, "_is_json", False)


@pytest.fixture(autouse=True)
def printed_notices() -> Iterator[None]:
    """Notices of the library are printed, as under the command line; tests of the Python API replace this fixture."""
    with notices.listening(lambda text: output.say(text)):
        yield
