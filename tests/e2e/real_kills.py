"""kill -9 of real processes, beside the simulated ones: a launch at points spread over it, and what it started.

    strikes(provider, num) -> Real struck ...     a forked client dies at its n-th call of the World
                                                  agent, trainer, sync or dead-man die at a random moment

After each: whatever runs is shown as billing, destroy ends all of it, and every few strikes a run goes the whole way.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.cloud.rig import look_more_often, make_draft, marked_now
from tests.e2e.test_kill_points import ENDLESS, FaultyWorld, end_some

from homing.cloud.destroy import destroy_lines, destroy_run, open_lines
from homing.cloud.home import Home
from homing.cloud.launch import launch
from homing.cloud.providers.base import wait_until
from homing.cloud.providers.fake import SERVER
from homing.cloud.reconcile import refresh
from homing.cloud.status import billing_lines
from homing.cloud.watch import watch
from homing.world import World

__all__ = ["PROVIDERS", "Real", "strikes"]

PROVIDERS = ("local", "fake")
_TRIP_EVERY = 8  # strikes between two runs that are let through to their end
_PARTS = ("agent", "trainer", "sync")
_START_S = 60.0


@dataclass
class Real:
    provider: str
    what: str
    was_hit: bool = False
    broken: str = ""


def strikes(provider: str, num: int, folder: Path, seed: int = 0) -> Iterator[Real]:
    """Two thirds of them on the client that launches, the rest on what it launched."""
    chance = random.Random(seed)
    with _home(provider, folder) as home:
        total = _count(provider, home, folder)
        num_launch = num * 2 // 3
        for number in range(num_launch):
            at = 1 + number * (total - 1) // max(1, num_launch - 1)
            yield _struck(
                provider,
                home,
                folder,
                f"launch at call {at} of {total}",
                lambda at=at: _die(provider, home, folder, at),
            )
            if number % _TRIP_EVERY == 0:
                yield _struck(provider, home, folder, "a whole trip", lambda: _trip(provider, home, folder))
        for number in range(num - num_launch):
            part = _PARTS[number % len(_PARTS)]
            yield _struck(
                provider, home, folder, f"kill {part}", lambda part=part: _end(provider, home, folder, part, chance)
            )


@contextlib.contextmanager
def _home(provider: str, folder: Path) -> Iterator[Home]:
    with pytest.MonkeyPatch.context() as patch:
        look_more_often(patch)
        home = Home(folder / "home", World())
        server = _serve(home.path) if provider == "fake" else None
        try:
            home.owner  # noqa: B018 (made once: a killed child must not decide it)
            yield home
        finally:
            for instance in home.provider(provider).list_owned():
                home.provider(provider).destroy(instance.id)
            if server is not None:
                server.terminate()
                server.wait(timeout=60)


def _serve(home: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "homing.cloud.providers.fake_server", "--home", str(home), "--settle-s", "0.2"]
    server = subprocess.Popen(argv)
    world = World()
    assert wait_until(lambda: world.exists(home / SERVER), timeout_s=_START_S, every_s=0.1, world=world), "no server"
    return server


def _struck(provider: str, home: Home, folder: Path, what: str, strike: object) -> Real:
    real = Real(provider, what)
    try:
        real.was_hit = strike()  # type: ignore[operator]
        _check(provider, home)
    except Exception as exc:
        real.broken = f"{type(exc).__name__}: {exc}"
        traceback.print_exc()
    return real


def _count(provider: str, home: Home, folder: Path) -> int:
    """Calls of a launch that nobody disturbs."""
    ready = make_draft(home, folder, steps=ENDLESS, provider=provider)
    world = FaultyWorld(0, lambda: None)
    launch(ready, Home(home.path, world))
    _check(provider, home)
    return world.count


def _die(provider: str, home: Home, folder: Path, at: int) -> bool:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ready = make_draft(home, folder, steps=ENDLESS, provider=provider)
            world = FaultyWorld(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
            launch(ready, Home(home.path, world))
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) and os.WEXITSTATUS(status) != 0:
        raise AssertionError(f"the launch failed by itself at call {at}")
    return os.WIFSIGNALED(status)


def _end(provider: str, home: Home, folder: Path, part: str, chance: random.Random) -> bool:
    done = launch(make_draft(home, folder, steps=ENDLESS, provider=provider), home)
    home.world.sleep(chance.uniform(0.0, 1.0))
    end_some(home, done.run.id, part)
    return True


def _trip(provider: str, home: Home, folder: Path) -> bool:
    done = launch(make_draft(home, folder, steps=10, step_s=0.02, provider=provider), home)
    last = [report.text for report in watch(home, done.run, every_s=1)][-1]
    assert last.startswith("done"), last
    return True


def _check(provider: str, home: Home) -> None:
    """Whatever runs is shown as billing, and destroy ends all of it and says so in the ledger."""
    refresh(home)
    shown = {line.mark for line in billing_lines(home.ledger.lines())}
    hidden = {mark for _, mark in marked_now(home)} - shown
    assert not hidden, f"hidden: {hidden}"
    owned = [instance.mark for instance in home.provider(provider).list_owned()]
    assert len(owned) == len(set(owned)), f"doubled: {owned}"
    for row in home.ledger.runs():
        destroy_run(home, row)
    destroy_lines(home, open_lines(home, None))
    gone = wait_until(lambda: not marked_now(home), timeout_s=60, every_s=0.2, world=home.world)
    assert gone, f"leaked: {marked_now(home)}"
    assert home.provider(provider).list_owned() == [], "leaked"
    assert billing_lines(home.ledger.lines()) == [], "the ledger still shows something"
