"""Shadeform on the stage: its double behind the same bad line, its machines as hosts, the hand-over by a simulated ssh.

The adapter is the real one, with the account's key at home, as it is by default: nothing on a machine can end it, and
what holds the limit is Shadeform's auto_delete and whoever looks from home. The startup script is that of `runpod`,
without an end of its own; a virtual machine is not started again when its first process dies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING
from unittest import mock

from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.doubles.shadeform import Settings as ShadeformSettings
from tests.doubles.shadeform import ShadeformCloud, card
from tests.sim.cloud import API_KEY, CLOUD_HOST, SimCloud
from tests.sim.host import EPOCH, Host
from tests.sim.runpod import SimRunpod, Startup
from tests.sim.world import SimWorld

from homing.cloud.providers.shadeform.provider import KEY_ENV, URL_ENV, Shadeform
from homing.world import Completed

if TYPE_CHECKING:
    from tests.sim.stage import Stage

__all__ = ["ENV", "SimShadeform", "pace"]

ENV = {URL_ENV: f"https://{CLOUD_HOST}/v1", KEY_ENV: API_KEY}


class SimShadeform(SimRunpod):
    def __init__(self, stage: Stage, settings: Settings, faults: Faults, rate_usd_per_hour: str) -> None:
        SimCloud.__init__(self, stage, settings, faults, rate_usd_per_hour)
        kind = card("simcloud", "H100", round(float(rate_usd_per_hour) * 100), ("sim-1",), interconnect="sxm5")
        kind["boot_time"] = {"min_boot_in_sec": 1, "max_boot_in_sec": int(settings.boot_s) + 1}
        self.cloud: ShadeformCloud = ShadeformCloud(  # type: ignore[assignment]
            now=lambda: EPOCH + stage.t,
            machines=self,
            types=[kind],
            api_key=API_KEY,
            settings=ShadeformSettings(boot_s=settings.boot_s, delete_s=settings.destroy_s),
            faults=faults,
            seed=stage.random.getrandbits(32),
            on_change=stage.on_cloud_change,
        )

    # --- what its machines are ---

    def boot(self, instance_id: str, script: str) -> None:
        if instance_id in self.machines:
            return
        skew_s = self._stage.random.uniform(-self.machine_skew_s, self.machine_skew_s)
        host = self.machines[instance_id] = self._stage.add_host(instance_id, skew_s=skew_s)
        self._stage.say(f"shadeform boots {instance_id}")
        begin = lambda world: _Waiting(world, script).run()  # noqa: E731
        self.first[instance_id] = self._stage.programs.begin(host, "startup", begin, dict(host.env))

    def address(self, instance_id: str) -> tuple[str, int, str]:  # type: ignore[override]
        return instance_id, 22, "root"

    def _arrive_by_ssh(self, host: Host, command: str, stdin: str) -> Completed:
        if command.startswith(("cat ", "tail ")):
            path = next(word for word in command.split() if word.startswith("/"))
            data = host.disk.files.get(path)
            return Completed(0, data.decode(), "") if data is not None else Completed(1, "", "no such file")
        return super()._arrive_by_ssh(host, command, stdin)


class _Waiting(Startup):
    """Its timer finds no key with which it could end anything."""

    def __init__(self, world: SimWorld, script: str) -> None:
        super().__init__(world, script.replace("BEGIN_BY=''", "BEGIN_BY='1e18'"))

    def _end(self) -> None:
        self._keep("ended")
        while True:
            self.world.sleep(60.0)


@contextlib.contextmanager
def pace() -> Iterator[None]:
    """A store that is far away is left out, and the half hour in which a slow machine may start."""
    with (
        mock.patch.object(Shadeform, "cannot", {"end_itself": "It cannot end itself."}),
        mock.patch("homing.cloud.providers.shadeform.provider._START_S", 300.0),
        mock.patch("homing.cloud.providers.shadeform.offers._HAND_OVER_S", 5.0),
    ):
        yield
