"""kill -9 of real processes, in addition to the simulated ones: a launch at points spread over it, and what it started.

    strikes(provider, num) -> Real, Real, ...     a forked client dies at its n-th call of the World
                                                  agent, trainer or sync die at a random moment

After each: whatever runs is shown as billing, destroy ends all of it, and every few strikes a run goes the whole way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from tests.cloud.rig import look_more_often, make_draft, make_run, marked_now, trainer_argv
from tests.doubles import aws_server, modal_server, runpod_server, shadeform_server
from tests.doubles.sshd import Sshd, have_sshd
from tests.e2e.test_kill_points import ENDLESS, FaultyWorld, end_some

from homing.cloud.contact.home_guard import sign_in
from homing.cloud.destroy import destroy_lines, destroy_run, open_lines
from homing.cloud.home import Home
from homing.cloud.launch.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.providers.aws.provider import Aws
from homing.cloud.providers.base import Needs, Provider, wait_until
from homing.cloud.providers.fake.provider import SERVER as FAKE_SERVER
from homing.cloud.providers.modal.provider import Modal
from homing.cloud.providers.runpod.provider import Runpod
from homing.cloud.providers.shadeform.provider import Shadeform
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.watch.follow import watch
from homing.wire.run_json import Cloud
from homing.world import World

__all__ = ["PROVIDERS", "Real", "is_here", "strikes"]

PROVIDERS = ("local", "fake", "ssh", "runpod", "shadeform", "aws", "modal")
_TRIP_EVERY = 8  # strikes between two runs that are let through to their end
_PARTS = ("agent", "trainer", "sync")
_START_S = 60.0
_ROOT = Path(__file__).resolve().parents[2]
# module, words before the folder, and the file there by which it says that it is up
_SERVERS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "fake": ("homing.cloud.providers.fake.server", ("--settle-s", "0.2", "--home"), FAKE_SERVER),
    "modal": ("tests.doubles.modal_server", (), modal_server.SERVER),
    "runpod": ("tests.doubles.runpod_server", (), runpod_server.SERVER),
    "shadeform": ("tests.doubles.shadeform_server", (), shadeform_server.SERVER),
}
# how late its double's list is, and the pauses between two looks
_ADAPTERS: dict[str, tuple[Any, float, dict[str, float]]] = {
    "aws": (Aws, 0.5, {"aws.provider._DESCRIBE_EVERY_S": 0.5, "aws.provider._LOOK_S": 0.3}),
    "modal": (Modal, 0.2, {"modal.provider._DESCRIBE_EVERY_S": 0.5}),
    "runpod": (Runpod, 0.2, {"runpod.hand_over.EVERY_S": 0.3, "runpod.provider._DESCRIBE_EVERY_S": 0.5}),
    "shadeform": (
        Shadeform,
        0.2,
        {"shadeform.provider._DESCRIBE_EVERY_S": 0.5, "shadeform.provider._LOOK_EVERY_S": 0.3},
    ),
}


@dataclass
class Real:
    provider: str
    what: str
    was_hit: bool = False
    broken: str = ""


def is_here(provider: str) -> bool:
    """Whether this machine has what the provider's double needs."""
    return provider not in ("ssh", "runpod", "shadeform", "aws") or have_sshd()


def strikes(provider: str, num: int, folder: Path, seed: int = 0) -> Iterator[Real]:
    """Two thirds of them on the client that launches, the rest on what it launched."""
    chance = random.Random(seed)
    with _rig(provider, folder) as rig:
        total, num_launch = rig.count(), num * 2 // 3
        for number in range(num_launch):
            at = 1 + number * (total - 1) // max(1, num_launch - 1)
            yield rig.struck(f"launch at call {at} of {total}", lambda at=at: rig.die(at))  # type: ignore[misc]
            if number % _TRIP_EVERY == 0:
                yield rig.struck("a whole trip", rig.trip)
        for number in range(num - num_launch):
            part = _PARTS[number % len(_PARTS)]
            yield rig.struck(f"kill {part}", lambda part=part: rig.end(part, chance.random()))  # type: ignore[misc]


@contextlib.contextmanager
def _rig(provider: str, folder: Path) -> Iterator[Rig]:
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        look_more_often(patch)
        home = Home(folder / "home", World())
        home.owner  # noqa: B018 (made once: a killed child must not decide it)
        sshd = Sshd(folder / "sshd") if provider == "ssh" else None
        if sshd is not None:
            sshd.start()
            stack.callback(sshd.stop)
        elif provider != "local":
            server = _serve(provider, home.path if provider == "fake" else folder / provider, patch)
            stack.callback(lambda: server.wait(timeout=_START_S))
            stack.callback(server.terminate)
            _shorten_waits(provider, patch)
        if provider == "shadeform":
            sign_in(home, 3600.0, reached=[provider])  # a launch wants one on duty where no machine can end itself
        stack.callback(_end_all, home.provider(provider))
        yield Rig(provider, home, folder, sshd)


def _serve(provider: str, folder: Path, patch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Its double as a process of its own, which is there for whoever is killed; the environment leads to it."""
    if provider == "aws":
        server, cloud = aws_server.start(folder, pending_s=0.2, late_s=0.2)
        keys = {"AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "of-the-account"}
        messages = {"AWS_ENDPOINT_URL": cloud.url, "AWS_REGION": "us-east-1", **keys}
    else:
        folder.mkdir(exist_ok=True)
        module, words, name = _SERVERS[provider]
        server = subprocess.Popen([sys.executable, "-m", module, *words, str(folder)], cwd=_ROOT)
        world, path = World(), folder / name
        assert wait_until(lambda: world.exists(path), timeout_s=_START_S, every_s=0.1, world=world), "no server"
        messages = json.loads(path.read_bytes()) if provider != "fake" else {}  # who uses the fake cloud looks at home
    for name, value in messages.items():
        patch.setenv(name, value)
    return server


def _shorten_waits(provider: str, patch: pytest.MonkeyPatch) -> None:
    """Shorter waits between two looks; each is taken as often as ever. And what is rented shares our disk."""
    for module in (
        "destroy",
        "reconcile.reconcile",
    ):  # who dies before the answer to its create call waits for it; not for long
        patch.setattr(f"homing.cloud.{module}.CREATE_GRACE_S", 3.0)
    if provider in _ADAPTERS:
        adapter, settle_s, pauses = _ADAPTERS[provider]
        patch.setattr(adapter, "cannot", property(functools.partial(_cannot, adapter.cannot)))
        patch.setattr(adapter, "settle_s", settle_s)
        for name, seconds in pauses.items():
            patch.setattr(f"homing.cloud.providers.{name}", seconds)


def _cannot(cannot: Any, adapter: Any) -> dict[str, str]:
    messages = cannot.fget(adapter) if isinstance(cannot, property) else cannot
    return {feature: text for feature, text in messages.items() if feature != "file_store"}


def _end_all(provider: Provider) -> None:
    for instance in provider.list_owned():
        provider.destroy(instance.id)


class Rig:
    def __init__(self, provider: str, home: Home, folder: Path, sshd: Sshd | None) -> None:
        self.provider, self.home, self.folder, self._sshd = provider, home, folder, sshd

    def struck(self, what: str, strike: Callable[[], bool]) -> Real:
        real = Real(self.provider, what)
        try:
            real.was_hit = strike()
            self.check()
        except Exception as exc:
            real.broken = f"{type(exc).__name__}: {exc}"
            traceback.print_exc()
        return real

    # --- what is struck ---

    def count(self) -> int:
        """Calls of an undisturbed launch."""
        world = FaultyWorld(0, lambda: None)
        self.launch(self.draft(ENDLESS), world)
        self.check()
        return world.count

    def launch(self, ready: Draft, world: World) -> None:
        home = Home(self.home.path, world)
        home.configure(ready.run)
        launch(ready, home)

    def die(self, at: int) -> bool:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ready = self.draft(ENDLESS)
                world = FaultyWorld(at, lambda: os.kill(os.getpid(), signal.SIGKILL))
                self.launch(ready, world)
                code = 0
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the launch failed by itself at call {at}"
        return os.WIFSIGNALED(status)

    def end(self, part: str, after_s: float) -> bool:
        done = launch(self.draft(ENDLESS), self.home)
        self.home.world.sleep(after_s)
        end_some(self.home, done.run.id, part)
        return True

    def trip(self) -> bool:
        done = launch(self.draft(10, step_s=0.02), self.home)
        last = [report.text for report in watch(self.home, done.run, every_s=1)][-1]
        assert last.startswith("done"), last
        return True

    def draft(self, steps: int, step_s: float = 0.01) -> Draft:
        messages = self._cloud_settings()
        if messages is None:
            return make_draft(self.home, self.folder, steps=steps, step_s=step_s, provider=self.provider)
        run = dataclasses.replace(make_run(self.folder), cloud=messages)
        self.home.configure(run)
        offer = self.home.provider(self.provider).offers(Needs())[0]
        order = LaunchOrder(run, "name: moss\n", is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00"))
        made = draft(order, self.home)
        work_dir = self.home.provider(self.provider).place(made.mark).work_dir
        argv = tuple(trainer_argv(self.folder, work_dir, steps=steps, step_s=step_s))
        return dataclasses.replace(made, order=dataclasses.replace(order, trainer_argv=argv, heartbeat_s=0.2))

    def _cloud_settings(self) -> Cloud | None:
        """Return the `cloud` section that this provider needs in the run file; None if it needs none."""
        if self._sshd is not None:
            there = self._sshd.settings(work_dir=str(self.folder / "there"), python=sys.executable)
            return Cloud(providers=["ssh"], ssh=there)
        if self.provider == "aws":
            settings = {"instance_types": ["g5.xlarge"], "ssh_from": "127.0.0.1"}
            return Cloud(providers=["aws"], settings={"aws": settings})
        return None

    # --- what must hold ---

    def check(self) -> None:
        """Whatever runs is shown as billing, and destroy ends all of it and says so in the ledger."""
        home, provider = self.home, self.home.provider(self.provider)
        refresh(home)
        shown = {line.mark for line in billing_lines(home.ledger.lines())}
        hidden = {mark for _, mark in marked_now(home)} - shown
        assert not hidden, f"hidden: {hidden}"
        owned = [instance.mark for instance in provider.list_owned()]
        assert len(owned) == len(set(owned)), f"doubled: {owned}"
        for row in home.ledger.runs():
            destroy_run(home, row)
        destroy_lines(home, open_lines(home, None))
        is_gone = wait_until(lambda: not marked_now(home), timeout_s=60, every_s=0.2, world=home.world)
        assert is_gone, f"leaked: {marked_now(home)}"
        assert provider.list_owned() == [], "leaked"
        assert billing_lines(home.ledger.lines()) == [], "the ledger still shows something"
