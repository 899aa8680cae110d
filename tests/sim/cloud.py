"""The provider's side of the stage: the fake cloud behind a network that loses things, its machines as hosts.

A request that is under way arrives even if its sender dies meanwhile: that is how a cloud comes to
have machines that no ledger knows.
"""

from __future__ import annotations

import dataclasses
import math
import signal as signals
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tests.doubles.absurd import chance
from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim.host import EPOCH, Host
from tests.sim.kernel import Broken
from tests.sim.world import Proc, SimWorld

from homing.cloud.providers.fake import cloud_types
from homing.cloud.providers.fake import faults as fake_faults
from homing.cloud.providers.fake.cloud import FakeCloud
from homing.world import HttpRequest, HttpResponse, NetworkError

if TYPE_CHECKING:
    from tests.sim.stage import Stage

__all__ = ["API_KEY", "CLOUD_HOST", "SimCloud"]

API_KEY = "canary-api-key"
CLOUD_HOST = "cloud.sim"
_LATENCY_S = (0.02, 0.3)
_CUT_S = 10.0  # until the caller of a cut line gives up


class _Fake(FakeCloud):
    """The package's fake cloud, with the faults of a simulated day."""

    def change_faults(self, faults: Any) -> None:
        super().change_faults(_for_fake(faults) if isinstance(faults, Faults) else faults)


def _for_fake(faults: Faults) -> fake_faults.Faults:
    return fake_faults.Faults.from_dict({**dataclasses.asdict(faults), "rates": dict(faults.rates)})


class SimCloud:
    """FakeCloud with machines that are hosts of the stage, and the line to it."""

    errors: tuple[type[Exception], ...] = (NetworkError,)  # which are answers, and no finding

    def __init__(self, stage: Stage, settings: Settings, faults: Faults, rate_usd_per_hour: str) -> None:
        self._stage = stage
        self.machines: dict[str, Host] = {}
        self.first: dict[str, Proc] = {}  # the first process of each machine
        self.machine_skew_s = 0.0  # how far the clocks of new machines may be off
        self.is_down = False  # unreachable
        self.absurd_rate = 0.0  # the chance that a figure of an answer is absurd: NaN, 1e308, text
        self.absurd_dice = Random(f"absurd {stage.seed}")
        offer = cloud_types.FakeOffer("sim-gpu", "H100", 1, 8, 80 << 30, rate_usd_per_hour, disk_gb=20)
        seed = stage.random.getrandbits(32)
        self.cloud: FakeCloud = _Fake(
            now=lambda: EPOCH + stage.t,
            machines=self,
            offers=[offer],
            api_key=API_KEY,
            settings=cloud_types.Settings(**dataclasses.asdict(settings)),
            faults=_for_fake(faults),
            seed=seed,
            on_change=stage.on_cloud_change,
        )
        self._planned = math.inf

    # --- the line ---

    def http(self, world: SimWorld, request: HttpRequest) -> HttpResponse:
        parts = urlsplit(request.url)
        if parts.hostname != CLOUD_HOST:
            raise Broken(f"{world.proc} asks {request.url}, and there is no such host")
        what = f"{request.method} {parts.path}"
        answer: HttpResponse = self.carry(world, what, lambda: self.cloud.handle(request), request.timeout_s)
        spoiled = chance(answer, self.absurd_dice, self.absurd_rate)
        self._stage.say(f"{world.proc}   -> {answer.status}{'' if spoiled is answer else ' with an absurd figure'}")
        return spoiled

    def carry(self, world: SimWorld, what: str, deed: Callable[[], Any], timeout_s: float) -> Any:
        """Takes a request to the cloud, where `deed` is done, and its answer back."""
        world.point("http", what)
        if self.is_down or "cloud" in world.machine.cut:
            self._pause(world, min(timeout_s, _CUT_S))
            raise NetworkError(f"{what}: no route")
        low, high = _LATENCY_S
        seconds = low + (high - low) * self._stage.random.random() ** 4
        box: list[Any] = []
        self._stage.at(self._stage.t + seconds / 2, lambda: box.append(self._arrive(deed)))
        self._pause(world, seconds)
        if isinstance(box[0], Exception):
            self._stage.say(f"{world.proc}   -> {box[0]}")
            raise box[0]
        return box[0]

    def _arrive(self, deed: Callable[[], Any]) -> Any:
        try:
            return deed()
        except self.errors as exc:
            return exc
        finally:
            self.plan()

    def _pause(self, world: SimWorld, seconds: float) -> None:
        until = self._stage.t + seconds
        while self._stage.t < until:
            self._stage.give_way(world.proc.task, until)
            world.still_alive()

    # --- its own time ---

    def plan(self) -> None:
        """Puts the cloud's next own act on the heap; an act planned too early finds nothing to do."""
        due = self.cloud.next_due()
        if due is not None and due - EPOCH < self._planned:
            self._planned = due - EPOCH
            self._stage.at(max(self._stage.t, self._planned), self._act)

    def _act(self) -> None:
        self._planned = math.inf
        self.cloud.tick()
        self.plan()

    # --- Machines ---

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None:
        if instance_id in self.machines:
            return
        skew_s = self._stage.random.uniform(-self.machine_skew_s, self.machine_skew_s)
        host = self._stage.add_host(instance_id, skew_s=skew_s)
        self.machines[instance_id] = host
        host.env = {**host.env, **env}
        work_dir = next(word for word in argv if word.startswith("/") and word.endswith(".json")).rpartition("/")[0]
        for name, data in files.items():
            path = name if name.startswith("/") else f"{work_dir}/{name}"
            host.disk.make(path.rpartition("/")[0])
            host.disk.put(path, data, host.now())
        self._stage.say(f"cloud starts {instance_id}: {' '.join(argv)}")
        self.first[instance_id] = self._stage.programs.start(host, argv, dict(host.env))

    def end(self, instance_id: str) -> None:
        host = self.machines.get(instance_id)
        if host is not None and host.is_up:
            host.end()

    def is_running(self, instance_id: str) -> bool:
        host = self.machines.get(instance_id)
        return host is not None and host.is_up and bool(host.living())

    def notice(self, instance_id: str, seconds: float) -> None:
        self._stage.say(f"cloud gives notice to {instance_id}: {seconds:g} s")
        first = self.first.get(instance_id)
        if first is not None:
            first.signal(signals.SIGTERM)

    def freeze(self, instance_id: str) -> None:
        if instance_id in self.machines:
            self.machines[instance_id].freeze()

    def log(self, instance_id: str) -> str:
        return ""

    # --- what the machines' own systems do ---

    def is_armed(self, host: Host) -> bool:
        """Whether its system itself will shut it down in time, which ends its billing."""
        return False
