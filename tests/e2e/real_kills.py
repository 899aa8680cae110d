"""kill -9 of real processes, beside the simulated ones: a launch at points spread over it, and what it started.

    strikes(provider, num) -> Real, Real, ...     a forked client dies at its n-th call of the World
                                                  agent, trainer or sync die at a random moment

After each: whatever runs is shown as billing, destroy ends all of it, and every few strikes a run goes the whole way.
"""

from __future__ import annotations

import contextlib
import dataclasses
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

import pytest
from tests.cloud.rig import look_more_often, make_draft, make_run, marked_now, trainer_argv
from tests.doubles import aws_server, modal_server, runpod_server, shadeform_server
from tests.doubles.sshd import Sshd, have_sshd
from tests.e2e.test_kill_points import ENDLESS, FaultyWorld, end_some

from homing.cloud.destroy import destroy_lines, destroy_run, open_lines
from homing.cloud.guards import sign_in
from homing.cloud.home import Home
from homing.cloud.launch import Draft, LaunchOrder, draft, launch
from homing.cloud.providers.aws import Aws
from homing.cloud.providers.base import Needs, wait_until
from homing.cloud.providers.fake import SERVER
from homing.cloud.providers.modal import Modal
from homing.cloud.providers.runpod import Runpod
from homing.cloud.providers.shadeform import Shadeform
from homing.cloud.reconcile import refresh
from homing.cloud.status import billing_lines
from homing.cloud.watch import watch
from homing.wire.run import Cloud
from homing.world import World

__all__ = ["PROVIDERS", "Real", "is_here", "strikes"]

PROVIDERS = ("local", "fake", "ssh", "runpod", "shadeform", "aws", "modal")
_TRIP_EVERY = 8  # strikes between two runs that are let through to their end
_PARTS = ("agent", "trainer", "sync")
_START_S = 60.0
_ROOT = Path(__file__).resolve().parents[2]


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
    with pytest.MonkeyPatch.context() as patch:
        look_more_often(patch)
        home = Home(folder / "home", World())
        home.owner  # noqa: B018 (made once: a killed child must not decide it)
        server = _serve_cloud(home.path, patch) if provider == "fake" else None
        if provider == "runpod":
            server = _serve_runpod(folder / "runpod", patch)
        if provider == "shadeform":
            server = _serve_shadeform(folder / "shadeform", patch)
            sign_in(home, 3600.0)  # a launch wants one on duty where no machine can end itself
        if provider == "aws":
            server = _serve_aws(folder / "aws", patch)
        if provider == "modal":
            server = _serve_modal(folder / "modal", patch)
        sshd = Sshd(folder / "sshd") if provider == "ssh" else None
        if sshd is not None:
            sshd.start()
        rig = Rig(provider, home, folder, sshd)
        try:
            yield rig
        finally:
            for instance in home.provider(provider).list_owned():
                home.provider(provider).destroy(instance.id)
            if server is not None:
                server.terminate()
                server.wait(timeout=_START_S)
            if sshd is not None:
                sshd.stop()


def _serve_cloud(home: Path, patch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "homing.cloud.providers.fake_server", "--home", str(home), "--settle-s", "0.2"]
    server = subprocess.Popen(argv)
    world = World()
    assert wait_until(lambda: world.exists(home / SERVER), timeout_s=_START_S, every_s=0.1, world=world), "no server"
    for module in ("destroy", "reconcile"):  # who dies before the answer to its create call waits for it; not for long
        patch.setattr(f"homing.cloud.{module}.CREATE_GRACE_S", 3.0)
    return server


def _serve_runpod(folder: Path, patch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Its double as a process of its own, which is there for whoever is killed. Its pods share our disk."""
    folder.mkdir()
    server = subprocess.Popen([sys.executable, "-m", "tests.doubles.runpod_server", str(folder)], cwd=_ROOT)
    world, path = World(), folder / runpod_server.SERVER
    assert wait_until(lambda: world.exists(path), timeout_s=_START_S, every_s=0.1, world=world), "no server"
    for name, value in json.loads(path.read_bytes()).items():
        patch.setenv(name, value)
    can = {feature: text for feature, text in Runpod.cannot.items() if feature != "file_store"}
    patch.setattr(Runpod, "cannot", can)
    patch.setattr(Runpod, "settle_s", 0.2)
    for module in ("destroy", "reconcile"):  # who dies before the answer to its create call; this line is short
        patch.setattr(f"homing.cloud.{module}.CREATE_GRACE_S", 3.0)
    patch.setattr("homing.cloud.providers.runpod_start.EVERY_S", 0.3)
    patch.setattr("homing.cloud.providers.runpod._DESCRIBE_EVERY_S", 0.5)
    return server


def _serve_shadeform(folder: Path, patch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """As for RunPod. No key is on its machines: who looks at the end of a trip ends it."""
    folder.mkdir()
    server = subprocess.Popen([sys.executable, "-m", "tests.doubles.shadeform_server", str(folder)], cwd=_ROOT)
    world, path = World(), folder / shadeform_server.SERVER
    assert wait_until(lambda: world.exists(path), timeout_s=_START_S, every_s=0.1, world=world), "no server"
    for name, value in json.loads(path.read_bytes()).items():
        patch.setenv(name, value)
    patch.setattr(Shadeform, "cannot", {"end_itself": "It cannot end itself."})  # and shares our disk
    patch.setattr(Shadeform, "settle_s", 0.2)
    for module in ("destroy", "reconcile"):
        patch.setattr(f"homing.cloud.{module}.CREATE_GRACE_S", 3.0)
    patch.setattr("homing.cloud.providers.shadeform._DESCRIBE_EVERY_S", 0.5)
    patch.setattr("homing.cloud.providers.shadeform._LOOK_EVERY_S", 0.3)
    return server


def _serve_aws(folder: Path, patch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """As for RunPod. Files come by SSH; that an instance shares our disk is the double's doing."""
    server, cloud = aws_server.start(folder, pending_s=0.2, late_s=0.2)
    env = {"AWS_ENDPOINT_URL": cloud.url, "AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": "of-the-account"}
    for name, value in {**env, "AWS_REGION": "us-east-1"}.items():
        patch.setenv(name, value)
    patch.setattr(Aws, "cannot", {})
    patch.setattr(Aws, "settle_s", 0.5)
    for module in ("destroy", "reconcile"):
        patch.setattr(f"homing.cloud.{module}.CREATE_GRACE_S", 3.0)
    patch.setattr("homing.cloud.providers.aws._DESCRIBE_EVERY_S", 0.5)
    patch.setattr("homing.cloud.providers.aws._LOOK_S", 0.3)
    return server


def _serve_modal(folder: Path, patch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """As for RunPod: a process of its own, whose sandboxes share our disk."""
    folder.mkdir()
    server = subprocess.Popen([sys.executable, "-m", "tests.doubles.modal_server", str(folder)], cwd=_ROOT)
    world, path = World(), folder / modal_server.SERVER
    assert wait_until(lambda: world.exists(path), timeout_s=_START_S, every_s=0.1, world=world), "no server"
    for name, value in json.loads(path.read_bytes()).items():
        patch.setenv(name, value)
    can = {feature: text for feature, text in Modal.cannot.items() if feature != "file_store"}
    patch.setattr(Modal, "cannot", can)
    patch.setattr(Modal, "settle_s", 0.2)
    for module in ("destroy", "reconcile"):
        patch.setattr(f"homing.cloud.{module}.CREATE_GRACE_S", 3.0)
    patch.setattr("homing.cloud.providers.modal._DESCRIBE_EVERY_S", 0.5)
    return server


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
        """Calls of a launch that nobody disturbs."""
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
        told = self._told()
        if told is None:
            return make_draft(self.home, self.folder, steps=steps, step_s=step_s, provider=self.provider)
        run = dataclasses.replace(make_run(self.folder), cloud=told)
        self.home.configure(run)
        offer = self.home.provider(self.provider).offers(Needs())[0]
        order = LaunchOrder(run, "name: moss\n", is_prepared=True, offer=offer, spend_limit_usd=Decimal("1.00"))
        made = draft(order, self.home)
        work_dir = self.home.provider(self.provider).place(made.mark).work_dir
        argv = tuple(trainer_argv(self.folder, work_dir, steps=steps, step_s=step_s))
        return dataclasses.replace(made, order=dataclasses.replace(order, trainer_argv=argv, heartbeat_s=0.2))

    def _told(self) -> Cloud | None:
        """What the run file has to say to this provider; None where it works without."""
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
