"""RunPod on the stage: its double behind the same bad line, its pods as hosts, the hand-over by a simulated ssh.

The adapter is the real one, from the create call's body to `ssh`'s arguments. The startup script is bash and cannot run
here; `Startup` does the same: the timer, the check for a restart, the wait for the hand-over, the agent. Like RunPod
it restarts a pod with an empty disk after its first process died.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
import re
import signal as signals
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.doubles.runpod import Gpu, RunpodDouble
from tests.sim.cloud import API_KEY, CLOUD_HOST, SimCloud
from tests.sim.host import EPOCH, Host
from tests.sim.world import PYTHON, Proc, SimWorld

from homing.cloud.machine_setup import receive_hand_over
from homing.cloud.machine_setup.startup_script import ROOT, WORK_DIR
from homing.cloud.providers.base import Place
from homing.cloud.providers.runpod import offers
from homing.cloud.providers.runpod.provider import KEY_ENV, URL_ENV, Runpod
from homing.wire import file_names
from homing.wire.boot_json import EndBilling
from homing.world import Completed, HttpRequest, NetworkError

if TYPE_CHECKING:
    from tests.sim.stage import Stage

__all__ = ["ENV", "SimRunpod", "Startup", "end_billing", "pace"]

URL = f"https://{CLOUD_HOST}/v2"
ENV = {URL_ENV: URL, KEY_ENV: API_KEY}
_SSH_S = 0.4
_REFUSED_S = 10.0  # ssh's ConnectTimeout
_RESTART_S = 3.0


class SimRunpod(SimCloud):
    def __init__(self, stage: Stage, settings: Settings, faults: Faults, rate_usd_per_hour: str) -> None:
        super().__init__(stage, settings, faults, rate_usd_per_hour)
        self.cloud: RunpodDouble = RunpodDouble(  # type: ignore[assignment]
            now=lambda: EPOCH + stage.t,
            machines=self,
            api_key=API_KEY,
            gpus=(Gpu("NVIDIA H100 80GB HBM3", "H100 SXM", 80, float(rate_usd_per_hour)),),
            settings=settings,
            faults=faults,
            seed=stage.random.getrandbits(32),
            on_change=stage.on_cloud_change,
        )
        offers._BOOT_S = settings.boot_s + 10.0  # until `pace` ends: nothing is pulled and installed here
        self._orders: dict[str, tuple[str, dict[str, str]]] = {}  # pod -> script, environment
        self.num_restarts = 0

    # --- PodMachines ---

    def start(self, instance_id: str, files: dict[str, bytes], argv: list[str], env: dict[str, str]) -> None:
        if instance_id in self.machines:
            return
        skew_s = self._stage.random.uniform(-self.machine_skew_s, self.machine_skew_s)
        host = self._stage.add_host(instance_id, skew_s=skew_s)
        self.machines[instance_id] = host
        host.env = {**host.env, **env}
        packed = argv[2].split("echo ")[1].split(" |")[0]
        self._orders[instance_id] = (gzip.decompress(base64.b64decode(packed)).decode(), env)
        self._begin(instance_id)

    def address(self, instance_id: str) -> tuple[str, str, int] | None:
        return ("root", instance_id, 22)

    def _begin(self, instance_id: str) -> None:
        host, (script, _) = self.machines[instance_id], self._orders[instance_id]
        self._stage.say(f"runpod starts the container of {instance_id}")
        begin = lambda world: Startup(world, script).run()  # noqa: E731
        proc = self.first[instance_id] = self._stage.programs.begin(host, "startup", begin, dict(host.env))
        self._stage.at(self._stage.t + _RESTART_S, lambda: self._look_after(instance_id, proc))

    def _look_after(self, instance_id: str, proc: Proc) -> None:
        host = self.machines[instance_id]
        if not host.is_up or instance_id not in self.cloud._live:
            return
        if not proc.is_alive and not host.is_frozen:
            for left in host.living():
                left.kill()
            if ROOT in host.disk.folders:
                host.disk.tree(ROOT)
            self.num_restarts += 1
            self._begin(instance_id)
            return
        self._stage.at(self._stage.t + _RESTART_S, lambda: self._look_after(instance_id, proc))

    # --- OpenSSH, as `World.run` meets it ---

    def ssh(self, world: SimWorld, argv: Sequence[str], timeout_s: float, stdin: str) -> Completed:
        name = next(word for word in argv if word.startswith("root@")).partition("@")[2]
        host = self.machines.get(name)
        if self.is_down or "cloud" in world.machine.cut or host is None or not host.is_up or host.is_frozen:
            self._pause(world, min(timeout_s, _REFUSED_S))
            return Completed(255, "", f"ssh: connect to host {name} port 22: Connection timed out")
        box: list[Completed] = []
        # What is under way arrives, also when its sender dies meanwhile.
        self._stage.at(self._stage.t + _SSH_S / 2, lambda: box.append(self._arrive_by_ssh(host, argv[-1], stdin)))
        self._pause(world, _SSH_S)
        self._stage.say(f"{world.proc}   -> {box[0].code} {(box[0].out or box[0].err).strip()[-80:]}")
        return box[0]

    def ssh_keygen(self, world: SimWorld, argv: Sequence[str]) -> Completed:
        path, bits = argv[argv.index("-f") + 1], f"{self._stage.random.getrandbits(64):016x}"
        world.write(path, f"private {bits}\n".encode(), mode=0o600)
        world.write(f"{path}.pub", f"ssh-ed25519 {bits} {argv[argv.index('-C') + 1]}\n".encode())
        return Completed(0, "", "")

    def _arrive_by_ssh(self, host: Host, command: str, stdin: str) -> Completed:
        if not host.is_up or f"{ROOT}/ready" not in host.disk.files:
            return Completed(255, "", "Connection refused")
        if command.startswith("cat "):
            return Completed(0, "yes\n", "")
        try:
            state = _receive(host, json.loads(stdin)["order"])
        except OSError as exc:
            state = {"state": "failed", "why": str(exc)}
        return Completed(0, f"\n{receive_hand_over.SIGN}{json.dumps(state)}\n", "")


def _receive(host: Host, order: dict[str, Any]) -> dict[str, str]:
    """What receive.py does there, in one moment: it writes each file whole, and `go` last."""
    disk, now = host.disk, host.now()
    if f"{ROOT}/ended" in disk.files:
        return {"state": "ended", "why": "it was ended"}
    if f"{WORK_DIR}/go" not in disk.files:
        for name, data in order["files"].items():
            disk.put(f"{WORK_DIR}/{name}", base64.b64decode(data), now)
        disk.put(f"{WORK_DIR}/{file_names.BOOT}", order["boot"].encode(), now)
        disk.put(f"{ROOT}/secrets", json.dumps(order["secrets"]).encode(), now)
        disk.put(f"{WORK_DIR}/go", b"", now)
    return {"state": "done"}


class Startup:
    """startup.sh, as far as it matters to money and to work."""

    def __init__(self, world: SimWorld, script: str) -> None:
        self.world = world
        messages = dict(re.findall(r"^([A-Z_]+)='?([^'\n]*)'?$", script, re.MULTILINE))
        self.end_within_s, self.grace_s = float(messages["END_WITHIN_S"]), float(messages["GRACE_S"])
        self.begin_by, self.look_s = float(messages["BEGIN_BY"]), float(messages["LOOK_S"])
        self.mark = messages["MARK"]
        self.agent: int | None = None

    def run(self) -> int:
        world = self.world
        world.on_signal(signals.SIGTERM, lambda got: self._signal_agent())
        began = world.now()
        if world.exists(f"{ROOT}/began"):
            began = float(world.read(f"{ROOT}/began"))
        left_s = began + self.end_within_s - world.now()
        end_at = world.monotonic() + (left_s if 0 <= left_s <= self.end_within_s else 0.0)
        self._keep("began", str(began))
        if world.exists(f"{ROOT}/ended") or world.exists(f"{ROOT}/started") or world.now() > self.begin_by:
            self._end()
        self.prepare()
        self._keep("ready")
        seen_at = world.monotonic() - self.grace_s
        while True:
            if self.agent is None and world.exists(f"{WORK_DIR}/go"):
                self._start_agent()
            if world.is_locked(f"{WORK_DIR}/{file_names.DEAD_MAN_LOCK}"):
                seen_at = world.monotonic()
            elif world.monotonic() >= end_at and world.monotonic() - seen_at >= self.grace_s:
                self._end()
            self.look_around()
            world.sleep(1.0 if self.agent is None else self.look_s)

    def prepare(self) -> None:
        """What one provider's machines do before anybody may log in."""

    def look_around(self) -> None:
        """What they also do, periodically."""

    def _keep(self, name: str, text: str = "") -> None:
        with contextlib.suppress(OSError):
            self.world.mkdir(WORK_DIR)
            self.world.write(f"{ROOT}/{name}", text.encode())

    def _start_agent(self) -> None:
        self._keep("started")
        secrets = json.loads(self.world.read(f"{ROOT}/secrets"))
        self.world.remove(f"{ROOT}/secrets")
        env = {**self.world.environment(), **secrets, file_names.MARK_ENV: self.mark}
        argv = ["python3", "-I", f"{WORK_DIR}/agent.zip", f"{WORK_DIR}/{file_names.BOOT}"]
        with contextlib.suppress(OSError):
            self.agent = self.world.spawn(argv, env, WORK_DIR, f"{ROOT}/boot.log")

    def _signal_agent(self) -> None:
        if self.agent is not None:
            self.world.signal(self.agent, signals.SIGTERM)

    def _end(self) -> None:
        self._keep("ended")
        pause_s = 5.0
        while True:
            end_billing(self.world)
            self.world.sleep(pause_s)
            pause_s = min(60.0, pause_s * 2)


def end_billing(world: SimWorld) -> int:
    """What the pod's own command does, as far as the double's API goes: DELETE with the pod's key."""
    env = world.environment()
    head = {"authorization": f"Bearer {env[KEY_ENV]}"}
    try:
        reply = world.http(HttpRequest("DELETE", f"{URL}/pods/{env['RUNPOD_POD_ID']}", head))
    except NetworkError:
        return 1
    return 0 if 200 <= reply.status < 300 else 1


@contextlib.contextmanager
def pace() -> Iterator[None]:
    """What the simulation cannot do is left out: installing an environment there, and a store that is far away."""
    can = {feature: text for feature, text in Runpod.cannot.items() if feature != "file_store"}
    with (
        mock.patch.object(Runpod, "cannot", can),
        mock.patch("homing.cloud.machine_setup.startup_script.place", _place),
        mock.patch("homing.cloud.providers.runpod.offers._BOOT_S", 45.0),
    ):
        yield


def _place(end: EndBilling) -> Place:
    return Place(WORK_DIR, PYTHON, end)
