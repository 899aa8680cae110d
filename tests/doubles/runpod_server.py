"""RunPod on a loopback port, with pods that really run: each is a Machine, started by the args of its create call.

    with RunpodServer(folder) as runpod:  runpod.url, runpod.double, runpod.machine(pod_id)
    python -m tests.doubles.runpod_server FOLDER     as a process: FOLDER/server.json says where; it ends at SIGTERM

Like RunPod it restarts a container after its first process ended, with an empty disk.
"""

from __future__ import annotations

import base64
import gzip
import time
from pathlib import Path

from tests.doubles.cloud_state import Settings
from tests.doubles.drivers import driver_name
from tests.doubles.faults import Faults
from tests.doubles.machine import Machine
from tests.doubles.rest_server import SERVER, RestServer, serve_as_process
from tests.doubles.runpod import RunpodDouble

__all__ = ["KEY", "SERVER", "RealPods", "RunpodServer"]

KEY = "rpa_canary-key-of-the-account"


class RealPods:
    """Pods as machines on this computer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machines: dict[str, Machine] = {}
        self.restarts: dict[str, int] = {}
        self.restarts_ended = True

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None:
        machine = Machine(self.folder / instance_id, _script(argv), env=env, kind="container")
        shown = driver_name(env["RUNPOD_GPU_NAME"])
        cards = "".join(f"echo '{shown}, 580.65.06'\n" for _ in range(int(env["RUNPOD_GPU_COUNT"])))
        machine._program("nvidia-smi", cards)  # as the driver would show what was rented
        self.machines[instance_id] = machine
        machine.start()

    def end(self, instance_id: str) -> None:
        if instance_id in self.machines:
            self.machines.pop(instance_id).close()

    def is_running(self, instance_id: str) -> bool:
        return instance_id in self.machines and self.machines[instance_id].is_running

    def notice(self, instance_id: str, seconds: float) -> None:
        raise AssertionError("RunPod gives no notice")

    def freeze(self, instance_id: str) -> None:
        raise AssertionError("a hung pod is a matter for the simulator")

    def log(self, instance_id: str) -> str:
        return self.machines[instance_id].log() if instance_id in self.machines else ""

    def address(self, instance_id: str) -> tuple[str, str, int] | None:
        machine = self.machines.get(instance_id)
        return None if machine is None else (machine.user, "127.0.0.1", machine.port)

    def look_after(self) -> None:
        for instance_id, machine in list(self.machines.items()):
            if self.restarts_ended and not machine.is_running:
                self.restarts[instance_id] = self.restarts.get(instance_id, 0) + 1
                machine.restart(is_wiped=True)


class RunpodServer(RestServer):
    root = "/v2"

    def __init__(self, folder: Path, *, faults: Faults | None = None, seed: int = 0) -> None:
        self.pods = RealPods(folder)
        self.machines_by_id = self.pods.machines
        self.double = RunpodDouble(
            now=time.time,
            machines=self.pods,
            api_key=KEY,
            faults=faults,
            settings=Settings(boot_s=0.5),
            seed=seed,
        )
        super().__init__(self.double, lambda url: {"RUNPOD_API_URL": url, "RUNPOD_API_KEY": KEY})

    def lose(self, pod_id: str, how: str = "gone") -> None:
        """The host dies, without a word to anybody."""
        with self._lock:
            self.pods.end(pod_id)
            self.double.lose(pod_id, how)

    def look_after(self) -> None:
        self.pods.look_after()


def _script(argv: list[str]) -> str:
    """What `bash -c '... echo PACKED | base64 -d | gzip -d ...'` would run."""
    packed = argv[2].split("echo ")[1].split(" |")[0]
    return gzip.decompress(base64.b64decode(packed)).decode()


if __name__ == "__main__":
    raise SystemExit(serve_as_process(RunpodServer))
