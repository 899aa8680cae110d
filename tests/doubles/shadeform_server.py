"""Shadeform on a loopback port, with machines that really run: each boots by the startup script of its create call.

    with ShadeformServer(folder) as shadeform:  shadeform.url, shadeform.cloud, shadeform.machine(instance_id)

`ahead_s` sets its clock forward, so that a date comes without being waited for.

    python -m tests.doubles.shadeform_server FOLDER    as a process of its own; FOLDER/server.json is its environment
"""

from __future__ import annotations

import time
from pathlib import Path

from tests.doubles.drivers import driver_name
from tests.doubles.faults import Faults
from tests.doubles.machine import Machine
from tests.doubles.rest_server import SERVER, RestServer, serve_as_process
from tests.doubles.shadeform import KEY, Settings, ShadeformCloud

__all__ = ["SERVER", "RealMachines", "ShadeformServer"]


class RealMachines:
    """Virtual machines as process trees on this computer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.card = "A6000"  # of each, as the catalogue names it

    def boot(self, instance_id: str, script: str) -> None:
        machine = Machine(self.folder / instance_id, script, kind="vm")
        machine._program("nvidia-smi", f"echo '{driver_name(self.card)}, 580.65.06'\n")
        self.machines[instance_id] = machine
        machine.start()

    def end(self, instance_id: str) -> None:
        if instance_id in self.machines:
            self.machines.pop(instance_id).close()

    def freeze(self, instance_id: str) -> None:
        raise AssertionError("a machine that hangs is a matter for the simulator")

    def address(self, instance_id: str) -> tuple[str, int, str]:
        machine = self.machines[instance_id]
        return "127.0.0.1", machine.port, machine.user


class ShadeformServer(RestServer):
    def __init__(self, folder: Path, *, settings: Settings | None = None, faults: Faults | None = None) -> None:
        self.ahead_s = 0.0
        self.machines = RealMachines(folder)
        self.machines_by_id = self.machines.machines
        self.cloud = ShadeformCloud(
            now=lambda: time.time() + self.ahead_s,
            machines=self.machines,
            settings=settings or Settings(boot_s=0.5, delete_s=0.5),
            faults=faults,
        )
        super().__init__(self.cloud, lambda url: {"HOMING_SHADEFORM_URL": url, "SHADEFORM_API_KEY": KEY})

    def take(self, instance_id: str) -> None:
        """A spot machine is wanted back: gone at once, without a word to it."""
        with self._lock:
            self.cloud.preempt(instance_id)


if __name__ == "__main__":
    raise SystemExit(serve_as_process(ShadeformServer))
