"""Modal on the stage: the real adapter down to `modal_api`, over tests/doubles/cloud_state.py; its sandboxes are hosts.

    modal_api -> SimDoor.call -> the SDK's own names (Sandbox.create.aio, ...) -> the line -> ModalCloud

The SDK speaks gRPC on threads of its own, which no virtual clock can hold; here its calls are answered as it answers
them, in its own exceptions. The SDK itself, against its double's server, is struck by the kill points of real processes
(tests/e2e/real_kills.py).
"""

from __future__ import annotations

import contextlib
import functools
import signal as signals
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from unittest import mock

from modal import exception
from tests.doubles.cloud_state import CloudState, Rental, Settings
from tests.doubles.faults import Faults
from tests.sim.cloud import SimCloud
from tests.sim.host import EPOCH
from tests.sim.modal_sdk import SimDoor
from tests.sim.world import PYTHON, Proc, SimWorld

from homing.cloud.machine_setup import code_bundle
from homing.cloud.machine_setup.startup_script import WORK_DIR
from homing.cloud.providers.base import Place
from homing.cloud.providers.modal import create_request, offers
from homing.cloud.providers.modal.provider import Modal
from homing.store.modal.client import TOKEN_ENV
from homing.wire.boot_json import EndBilling
from homing.world import NetworkError

if TYPE_CHECKING:
    from tests.sim.stage import Stage

__all__ = ["ENV", "ModalCloud", "SimModal", "leave", "pace"]

ENV = dict.fromkeys(TOKEN_ENV, "canary-token")
OVER = f"{WORK_DIR}/over"
_LOOK_S = 1.0  # after a sandbox's command has ended, until Modal has noticed
_CODES = {"guard": 124, "deleted": 137}


class ModalCloud(CloudState):
    """Sandboxes under unique names, each with a timeout of its own."""

    def __init__(self, **messages: Any) -> None:
        super().__init__(**messages)
        self.tags: dict[str, dict[str, str]] = {}
        self.has_app = False

    def ask(self, route: str, deed: Callable[[tuple[str, ...]], Any]) -> Any:
        """One call that has arrived: its effect, and what becomes of the answer."""
        self.tick()
        ways = self._dice.throw(route)
        if "lost_before" in ways:
            raise NetworkError(f"{route}: the line was cut before it arrived")
        if "busy" in ways:
            raise exception.ResourceExhaustedError("rate limit exceeded")
        if "error_before" in ways:
            raise exception.InternalError("unavailable")
        try:
            return deed(ways)
        finally:
            self._publish()
            if "lost_after" in ways:
                raise NetworkError(f"{route}: the line was cut before the answer")
            if "error_after" in ways:
                raise exception.InternalError("internal error")

    def create(self, wanted: dict[str, Any], rate: Decimal, ways: tuple[str, ...]) -> str:
        """Return its id; "" if it waits in the queue because no card is free."""
        if any(thing.mark == wanted["name"] for thing in self._live.values()):
            raise exception.AlreadyExistsError(f"Sandbox with name '{wanted['name']}' already exists")
        if "no_capacity" in ways:
            return ""
        thing = self._add("instance", wanted["name"], rate, f"sb-{self._num_made + 1:022d}")
        self.tags[thing.id] = wanted["tags"]
        thing.files, thing.argv, thing.env = wanted["files"], wanted["argv"], wanted["env"]
        # It ends by itself after so long, wherever its programs are; billing began with it.
        thing.limit_spend(rate * wanted["timeout"] / 3600)
        self._draw_fate(thing, ways)
        return thing.id

    def seen(self, ways: tuple[str, ...]) -> list[Rental]:
        """What runs, or ran a moment ago."""
        late_s = self.faults.list_lag_s * self._dice.rng.random() if "list_late" in ways else 0.0
        at = self.now() - late_s
        return [thing for thing in self._things.values() if thing.is_listed(at)]

    def code_of(self, thing: Rental) -> int | None:
        return _CODES.get(thing.ended_by or "deleted", 0) if thing.state(self.now()) == "gone" else None

    def by_id(self, sandbox_id: str) -> Rental:
        thing = self._things.get(sandbox_id)
        if thing is None or (thing.ended_at or self.now()) + self.settings.retention_s < self.now():
            raise exception.NotFoundError(f"Sandbox {sandbox_id} not found")
        return thing

    def terminate(self, sandbox_id: str, ways: tuple[str, ...]) -> None:
        thing = self.by_id(sandbox_id)
        if thing.ended_at is None:
            self._request_end(thing, ways)

    def command_ended(self, sandbox_id: str) -> None:
        thing = self._live.get(sandbox_id)
        if thing is not None:
            self._end(thing, self.now(), "itself")
            self._publish()

    def _start(self, thing: Rental) -> None:
        self._machines.start(thing.id, thing.files, thing.argv, thing.env)


class SimModal(SimCloud):
    errors = (NetworkError, exception.Error)

    def __init__(self, stage: Stage, settings: Settings, faults: Faults, rate_usd_per_hour: str) -> None:
        super().__init__(stage, settings, faults, rate_usd_per_hour)
        self.cloud: ModalCloud = ModalCloud(  # type: ignore[assignment]
            now=lambda: EPOCH + stage.t,
            machines=self,
            settings=settings,
            faults=faults,
            seed=stage.random.getrandbits(32),
            on_change=stage.on_cloud_change,
        )
        self.rate = Decimal(rate_usd_per_hour)
        offers._BOOT_S = settings.boot_s + 10.0  # until `pace` ends

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None:
        if instance_id in self.machines:
            return
        skew_s = self._stage.random.uniform(-self.machine_skew_s, self.machine_skew_s)
        host = self.machines[instance_id] = self._stage.add_host(instance_id, skew_s=skew_s)
        host.env = {**host.env, **env}
        for path, data in files.items():
            host.disk.make(path.rpartition("/")[0])
            host.disk.put(path, data, host.now())
        self._stage.say(f"modal starts {instance_id}")
        begin = lambda world: _entry(world, sorted(files), argv)  # noqa: E731
        proc = self.first[instance_id] = self._stage.programs.begin(host, "entry", begin, dict(host.env))
        self._look_after(instance_id, proc)

    def _look_after(self, instance_id: str, proc: Proc) -> None:
        if proc.is_alive:
            self._stage.at(self._stage.t + _LOOK_S, lambda: self._look_after(instance_id, proc))
        else:
            self.cloud.command_ended(instance_id)


def _entry(world: SimWorld, files: list[str], argv: list[str]) -> int:
    """The sandbox's first command (modal_box._ENTRY), which ends on request or when none of our programs is left."""
    agent: list[int] = []
    world.on_signal(signals.SIGTERM, lambda got: [world.signal(pid, got) for pid in agent] and None)
    try:
        for path in files:
            target = f"{WORK_DIR}/{path.removeprefix(create_request._PARCEL + '/')}"
            world.mkdir(target.rpartition("/")[0])
            world.copy(path, target)
        agent.append(world.spawn(argv, world.environment(), WORK_DIR, "/dev/stdout"))
    except OSError:
        return 1
    world.sleep(1.0)
    while not world.exists(OVER) and any(each.role in ("agent", "dead-man") for each in world.machine.living()):
        world.sleep(1.0)
    return 0


def leave(world: SimWorld) -> int:
    """How a sandbox ends its own billing: by a word to its first command, or by ending it."""
    try:
        world.write(OVER, b"")
    except OSError:
        for proc in world.machine.living():
            if proc.role == "entry":
                proc.kill()
    return 0


@contextlib.contextmanager
def pace() -> Iterator[None]:
    """What the simulation cannot do is left out, as on RunPod: an environment there, and a store that is far away."""
    can = {feature: text for feature, text in Modal.cannot.items() if feature != "file_store"}
    with (
        mock.patch.object(Modal, "cannot", can),
        mock.patch("homing.cloud.providers.modal.api.connect", SimDoor),
        mock.patch.object(create_request, "place", _place),
        mock.patch.object(offers, "_BOOT_S", 45.0),
        mock.patch.object(
            create_request.code_bundle, "lock", functools.cache(code_bundle.lock)
        ),  # of this installation: the same
    ):
        yield


_real_place = create_request.place


def _place(*, is_own_image: bool) -> Place:
    end: EndBilling = _real_place(is_own_image=is_own_image).end_billing
    return Place(WORK_DIR, PYTHON, end)
