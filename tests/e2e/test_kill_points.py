"""Kill -9 at every point of a launch, and of what it started: afterwards nothing runs that `runs` does not show and
`destroy` does not end.

Points are found by counting: every call of the World, and every transaction, is one; fault number N hits the Nth, until
a launch comes through untouched.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import clear, look_more_often, make_draft, marked_now

from homing.cloud.destroy import destroy_lines, destroy_run, open_lines
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.providers.base import wait_until
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.watch.follow import watch
from homing.errors import HomingError
from homing.world import Database, World

ENDLESS = 1_000_000
# This many points share a home and its earlier runs. More would prove no more: each check covers all of them.
_PER_HOME = 4
# Every eighth point is struck in the suite, the others in `make prove`.
EIGHTHS = [pytest.param(first, marks=pytest.mark.prove) if first else first for first in range(8)]
_METHODS = [name for name in dir(World) if not name.startswith("_")]


class FaultyWorld(World):
    """Does `fault` at the Nth call, before it takes effect. `count` continues."""

    def __init__(self, at: int, fault: Callable[[], None]) -> None:
        self.at, self.fault, self.count = at, fault, 0
        self.trace: list[str] = []  # what was called at points 1, 2, ...

    def point(self, name: str) -> None:
        self.count += 1
        self.trace.append(name)
        if self.count == self.at:
            self.fault()

    def database(self, path: Any) -> Database:
        self.point("database")
        world = self

        class Counted(Database):
            def execute(self, *statements: Any) -> list[dict[str, Any]]:
                world.point("execute")
                rows = super().execute(*statements)
                world.point("executed")
                return rows

        return Counted(path)


def _counted(name: str) -> Callable[..., Any]:
    real = getattr(World, name)

    def call(self: FaultyWorld, *args: Any, **kwargs: Any) -> Any:
        self.point(name)
        return real(self, *args, **kwargs)

    return call


for _name in _METHODS:
    if _name != "database":
        setattr(FaultyWorld, _name, _counted(_name))


@pytest.fixture
def home(homing_home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    look_more_often(monkeypatch)
    yield Home(homing_home, World())
    for path in homing_home.parent.glob(f"{homing_home.name}*"):  # `homes` makes more of them
        clear(path)


def launch_and_die(tmp_path: Path, home: Home, at: int) -> bool:
    """In a forked child: launch, and SIGKILL it at its Nth call. True if it was killed, False if it came through."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # Drafting is free of side effects and is not counted.
            ready = make_draft(home, tmp_path, steps=ENDLESS)
            world = FaultyWorld(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            launch(ready, Home(home.path, world))
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"launch failed by itself, point {at}"
    return False


def check_nothing_is_hidden(home: Home) -> None:
    """The invariant: whatever runs is shown as billing, and destroy ends all of it and says so in the ledger."""
    assert refresh(home) == []
    shown = {line.mark for line in billing_lines(home.ledger.lines())}
    assert {mark for _, mark in marked_now(home)} <= shown
    for row in home.ledger.runs():
        destroy_run(home, row)
    destroy_lines(home, open_lines(home, None))
    assert marked_now(home) == []
    assert home.provider("local").list_owned() == []
    assert billing_lines(home.ledger.lines()) == []
    assert not any(row.is_live for row in home.ledger.runs())
    assert refresh(home) == []


def homes(first: Home) -> Iterator[Home]:
    """The home of each point in turn: the given one, and a new one every few points."""
    for number in itertools.count():
        home = first if number == 0 else Home(first.path.with_name(f"{first.path.name}-{number}"), World())
        home.owner  # noqa: B018 (made once: a killed child must not decide it)
        yield from itertools.repeat(home, _PER_HOME)


def sweep(tmp_path: Path, first: Home, points: Iterator[int]) -> int:
    """Kill at each point in turn until one is behind the end; return how many killed."""
    killed = 0
    for home, at in zip(homes(first), points, strict=False):
        was_killed = launch_and_die(tmp_path, home, at)
        check_nothing_is_hidden(home)
        if not was_killed:
            break
        killed += 1
    return killed


def points_of_interest(tmp_path: Path, home: Home) -> list[int]:
    """Around the intent, the lease, among the pushes, before and after begin_create, the start, the id, in the wait."""
    world = FaultyWorld(0, lambda: None)
    launch(make_draft(home, tmp_path, steps=ENDLESS), Home(home.path, world))
    check_nothing_is_hidden(home)
    started = world.trace.index("spawn") + 1
    lease = world.trace.index("random_hex") + 1
    executed = [number for number, name in enumerate(world.trace, 1) if name == "executed"]
    begun = max(number for number in executed if number < started)
    known = min(number for number in executed if number > started)
    return [8, lease, lease + 2, (lease + begun) // 2, begun - 1, begun, started, started + 1, known, known + 6]


@pytest.mark.acceptance("P7")
@pytest.mark.slow
def test_a_launch_killed_here_and_there_leaves_nothing_hidden(home: Home, tmp_path: Path) -> None:
    points = points_of_interest(tmp_path, home)
    assert sweep(tmp_path, home, iter(points)) == len(points)


@pytest.mark.acceptance("X26")
@pytest.mark.slow
@pytest.mark.parametrize("first", EIGHTHS)
def test_a_launch_killed_at_any_point_leaves_nothing_hidden(home: Home, tmp_path: Path, first: int) -> None:
    """Every point, dealt out over eight tests; the stop is the first launch that came through."""
    assert sweep(tmp_path, home, itertools.count(1 + first, 8)) >= 30


def fail_at(tmp_path: Path, home: Home, at: int) -> bool:
    def fault() -> None:
        raise OSError(errno.EIO, "the disk is ill")

    world = FaultyWorld(at, fault)
    ready = make_draft(home, tmp_path, steps=ENDLESS)
    try:
        launch(ready, Home(home.path, world))
    except (HomingError, OSError):
        # It has undone itself: nothing is left for destroy to do.
        assert marked_now(home) == [], f"point {at}"
        refresh(home)
        assert billing_lines(home.ledger.lines()) == [], f"point {at}"
        check_nothing_is_hidden(home)
        return True
    check_nothing_is_hidden(home)
    return world.count >= at


@pytest.mark.acceptance(65)
@pytest.mark.slow
def test_a_launch_that_fails_here_and_there_undoes_itself(home: Home, tmp_path: Path) -> None:
    for at in points_of_interest(tmp_path, home)[::2]:
        assert fail_at(tmp_path, home, at)


@pytest.mark.acceptance("X26")
@pytest.mark.slow
@pytest.mark.parametrize("first", EIGHTHS)
def test_a_launch_that_fails_at_any_point_undoes_itself(home: Home, tmp_path: Path, first: int) -> None:
    for its_home, at in zip(homes(home), itertools.count(1 + first, 8), strict=False):
        if not fail_at(tmp_path, its_home, at):
            break
    assert at > 120


def end_some(home: Home, run_id: str, what: str) -> None:
    """SIGKILL to the agent, the trainer or the sync of the run, by what their command lines say."""
    words = {"agent": "agent.zip", "trainer": "trainer.py", "sync": "homing.store.sync"}[what]
    for pid, _ in marked_now(home):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            if words in line:
                os.kill(pid, signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError):
            continue


@pytest.mark.slow
@pytest.mark.parametrize("what", ["agent", "trainer", "sync"])
def test_killing_a_part_of_the_instance_hides_nothing(home: Home, tmp_path: Path, what: str) -> None:
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    end_some(home, done.run.id, what)
    check_nothing_is_hidden(home)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.prove) for seed in range(4, 12))])
def test_killing_parts_at_random_moments_hides_nothing(home: Home, tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    done = launch(make_draft(home, tmp_path, steps=ENDLESS), home)
    for _ in range(random_.randint(1, 4)):
        home.world.sleep(random_.uniform(0, 1.0))
        end_some(home, done.run.id, random_.choice(["agent", "trainer", "sync"]))
    check_nothing_is_hidden(home)


@pytest.mark.slow
def test_a_trainer_killed_under_way_is_restarted_and_the_run_comes_home(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=150, step_s=0.03), home)
    trainer_log = tmp_path / "store/runs" / done.run.id / "metrics.jsonl"
    assert wait_until(
        lambda: trainer_log.exists() and trainer_log.read_bytes().count(b"\n") > 20,
        timeout_s=30,
        every_s=0.1,
        world=home.world,
    )
    end_some(home, done.run.id, "trainer")
    reports = list(watch(home, done.run, every_s=1))
    assert reports[-1].text.startswith("done")
    assert any("Restart" in report.text for report in reports)
    assert marked_now(home) == []


@pytest.mark.slow
def test_a_watching_client_that_is_killed_changes_nothing(home: Home, tmp_path: Path) -> None:
    done = launch(make_draft(home, tmp_path, steps=60, step_s=0.02), home)
    child = os.fork()
    if child == 0:
        try:
            for _ in watch(home, done.run, every_s=1):
                pass
        finally:
            os._exit(0)
    home.world.sleep(0.5)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert list(watch(home, done.run, every_s=1))[-1].text.startswith("done")
    assert marked_now(home) == []
