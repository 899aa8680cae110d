"""The faults that can be rehearsed, by name, and the fake cloud in which they happen.

SCENES        each is an API fault that is set up beforehand (for example, the n-th create fails), or an act
Acts          plays each act once during training, as soon as the run has progressed far enough:
                preempt vanish hang    take the machine away; the next act of this kind waits for the next machine
                store-down cloud-down  cause a temporary outage; the machine keeps running
              The first act is played before `watch` starts, later acts while `watch` runs, because the guard in `watch`
              relaunches the run automatically.
ServedCloud   the fake cloud: a server in a separate process, its controls, and a clean shutdown
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from homing.cloud.destroy import destroy_run
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.providers.base import wait_until
from homing.cloud.providers.fake.cloud import KEY_HEADER
from homing.cloud.providers.fake.faults import REQUEST_WAYS, Faults, Strike
from homing.cloud.providers.fake.machines import machine_prefix
from homing.cloud.providers.fake.provider import SERVER
from homing.cloud.providers.simulated_machine import MACHINE_ENV
from homing.cloud.reconcile.run_status import look
from homing.errors import HomingError, UsageError
from homing.store import run_key
from homing.units import format_duration
from homing.wire import file_names
from homing.world import HttpRequest, World

__all__ = ["SCENES", "Act", "Acts", "Scene", "ServedCloud", "faults_of", "find_scenes"]

Act = Literal["", "preempt", "vanish", "hang", "store-down", "cloud-down"]


@dataclass(frozen=True)
class Scene:
    text: str
    strikes: tuple[Strike, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)
    act: Act = ""
    fails_launches: int = 0  # how many launches may fail because of this fault; the launch after them must succeed


SCENES: dict[str, Scene] = {
    "bad-day": Scene(
        "Any call to the cloud may be lost, late, refused or answered with an error, depending on the seed.",
        rates={**dict.fromkeys(REQUEST_WAYS, 0.05), "list_late": 0.3, "odd_state": 0.2},
        fails_launches=2,
    ),
    "boot-dies": Scene(
        "The first instance never runs its first command; homing undoes the launch.",
        strikes=(Strike("boot_dies", 1, "create"),),
        fails_launches=1,
    ),
    "cloud-down": Scene("The cloud's API goes down during training, and comes back later.", act="cloud-down"),
    "create-lost": Scene(
        "The create call succeeds, but its response is lost:"
        " homing finds the instance by its tag and does not create it twice.",
        strikes=(Strike("lost_after", 1, "create"),),
    ),
    "dearer": Scene(
        "The first instance starts at a higher rate than offered; the launch destroys it.",
        strikes=(Strike("dearer", 1, "create"),),
        fails_launches=1,
    ),
    "destroy-lies": Scene(
        "The provider confirms the first destroy request but does nothing.",
        strikes=(Strike("destroy_lies", 1, "destroy"),),
    ),
    "destroy-stubborn": Scene(
        "The instance is destroyed only at the third request.", strikes=(Strike("destroy_stubborn", 1, "destroy"),)
    ),
    "hang": Scene("The instance freezes during training and is still billed.", act="hang"),
    "list-late": Scene("The list of instances is always out of date.", rates={"list_late": 1.0}),
    "no-capacity": Scene(
        "The first create request is refused because the offer is sold out.",
        strikes=(Strike("no_capacity", 1, "create"),),
        fails_launches=1,
    ),
    "preempt": Scene("The instance is preempted after a notice; the run resumes on another instance.", act="preempt"),
    "store-down": Scene("The store is unreachable for a while; training continues.", act="store-down"),
    "vanish": Scene("The instance is preempted without notice; the run resumes on another instance.", act="vanish"),
    "volume-left": Scene(
        "The instance's disk remains after the instance is gone, and is still billed.",
        strikes=(Strike("leaves_volume", 1, "create"),),
    ),
}


def find_scenes(names: Sequence[str]) -> dict[str, Scene]:
    for name in names:
        if name not in SCENES:
            raise UsageError(
                what=f"Unknown fault: {name!r}.",
                why=f"Known faults: {', '.join(SCENES)}.",
                fix="List them: homing rehearse --list-faults",
            )
    return {name: SCENES[name] for name in dict.fromkeys(names)}


def faults_of(scenes: dict[str, Scene]) -> Faults:
    rates: dict[str, Any] = {}
    for scene in scenes.values():
        rates |= {way: max(rates.get(way, 0.0), chance) for way, chance in scene.rates.items()}
    return Faults(rates=rates, strikes=tuple(strike for scene in scenes.values() for strike in scene.strikes))


_WAIT_S = 300.0  # maximum time to wait until the next act is due
_SILENCE_S = 10.0  # after this long without a heartbeat, the rehearsal destroys a frozen machine, as a user would
_DOWN_S = 5.0
_NOTICE_S = 30.0
_POLL_S = 0.3
_TAKES_MACHINE: tuple[Act, ...] = ("preempt", "vanish", "hang")


class Acts:
    def __init__(self, acts: list[Act], home: Home, cloud: ServedCloud, notify: Callable[[str, str], None]) -> None:
        self.left = list(acts)
        self._home, self._cloud, self._notify = home, cloud, notify
        self._taken: list[str] = []  # marks of the machines that an act has preempted or frozen

    def await_first(self, run: RunRow) -> None:
        """Wait until the next act is due and play it; skip the act if the run ends first."""
        if self.left:
            world = self._home.world
            wait_until(lambda: self._due(run) != "later", timeout_s=_WAIT_S, every_s=_POLL_S, world=world)
            self.play_if_due(run)

    def play_if_due(self, run: RunRow) -> None:
        if not self.left or self._due(run) != "now":
            return
        instances = self._cloud.living()
        if len(instances) == 1:
            act = self.left.pop(0)
            self._notify("fault", f"{act}: now")
            self._play(act, run, instances[0])

    def _due(self, run: RunRow) -> Literal["later", "now", "over"]:
        """Return whether the next act is due, judging by the newest heartbeat.

        The act `vanish` is due once a checkpoint exists; any other act is due after the first step.
        """
        status = look(self._home, run)
        beat = status.reports.heartbeat if status.reports else None
        if beat is None or beat.mark in self._taken:
            return "later"
        if beat.state not in ("booting", "fetching", "training"):
            return "over"
        if beat.step < 1 or (self.left[0] == "vanish" and not self._has_checkpoint(run)):
            return "later"
        return "now"

    def _has_checkpoint(self, run: RunRow) -> bool:
        stored = self._home.store_of(run).list(run_key(run.id, file_names.CHECKPOINTS) + "/")
        return any(entry.key.endswith(file_names.MANIFEST) for entry in stored)

    def _play(self, act: Act, run: RunRow, instance_id: str) -> None:
        if act in _TAKES_MACHINE:
            self._taken.append(self._home.ledger.lines(run.id)[-1].mark)
        if act in ("preempt", "vanish"):
            notice_s = _NOTICE_S if act == "preempt" else None
            self._cloud.post("preempt", {"instance": instance_id, "notice_s": notice_s})
        elif act == "hang":
            self._cloud.post("hang", {"instance": instance_id})
            self._wait_for_silence(run)
        elif act == "store-down":
            self._take_store_away()
        else:
            self._cloud.kill()
            self._home.world.sleep(_DOWN_S)
            self._cloud.serve()
            self._notify("line", "the cloud is back")

    def _wait_for_silence(self, run: RunRow) -> None:
        """Wait until a frozen machine has sent no heartbeat for a while, then destroy it as a user would."""

        def is_silent() -> bool:
            return (look(self._home, run).heartbeat_age_s or 0.0) > _SILENCE_S

        wait_until(is_silent, timeout_s=_WAIT_S, every_s=_POLL_S, world=self._home.world)
        self._notify("line", f"no heartbeat for {format_duration(_SILENCE_S)}: homing destroy {run.name}")
        destroy_run(self._home, run)

    def _take_store_away(self) -> None:
        store, world = self._home.path / "store", self._home.world
        world.rename(store, store.with_name("store-away"))
        world.sleep(_DOWN_S)
        world.rename(store.with_name("store-away"), store)
        self._notify("line", f"the store is back after {format_duration(_DOWN_S)}")


_START_S = 60.0  # maximum time to wait for the fake cloud's server to respond
_LEAVE_S = 60.0


class ServedCloud:
    def __init__(self, folder: Path, world: World, *, seed: int, has_guard: bool) -> None:
        self._folder, self._world = folder, world
        self._pid = 0
        self._argv = [world.python(), "-m", "homing.cloud.providers.fake.server", "--home", str(folder)]
        self._argv += ["--seed", str(seed), *([] if has_guard else ["--no-guard"])]

    def serve(self) -> None:
        """Start the fake cloud's server, or restart it with its previous state."""
        log = self._folder / "fake-server.log"
        self._pid = self._world.spawn(self._argv, self._world.environment(), self._folder, log)
        failed = HomingError(
            what="The fake cloud did not start.",
            why=f"Its server exited or did not respond within {format_duration(_START_S)}; see {log}",
            fix="Try again: homing rehearse RUN",
        )

        def answers() -> bool:
            if self._world.poll(self._pid) is not None:
                raise failed
            # The file may still contain an earlier server's address, so compare the pid.
            return self._world.exists(self._folder / SERVER) and self._address()["pid"] == self._pid

        wait_until(answers, timeout_s=_START_S, every_s=0.05, world=self._world, on_timeout=failed)

    def kill(self) -> None:
        self._world.signal(self._pid, signal.SIGKILL)
        wait_until(lambda: self._world.poll(self._pid) is not None, timeout_s=10, every_s=0.05, world=self._world)

    def set_faults(self, body: dict[str, Any]) -> None:
        self._ask("PUT", "/double/faults", body)

    def post(self, what: str, body: dict[str, Any]) -> None:
        self._ask("POST", f"/double/{what}", body)

    def living(self) -> list[str]:
        bill = self._ask("GET", "/double/bill")["bill"]
        return [each["id"] for each in bill if each["until"] is None and each["kind"] == "instance"]

    def close(self) -> tuple[list[dict[str, Any]], float, list[int]]:
        """Turn the faults off, shut down everything that is still alive, stop the server, and return the bill.

        The bill is read before the shutdown. Also return the server's time and the pids of processes still running.
        """
        if self._world.poll(self._pid) is not None:
            self.serve()
        said = self._ask("GET", "/double/bill")
        self.set_faults({})
        for each in said["bill"]:
            if each["until"] is None:
                self._ask("DELETE", f"/{each['kind']}s/{each['id']}")
        self.post("leave", {})
        if not wait_until(
            lambda: self._world.poll(self._pid) is not None, timeout_s=_LEAVE_S, every_s=0.05, world=self._world
        ):
            self.kill()
        prefix = machine_prefix(self._folder / "fake" / "machines")
        left = [process.pid for process, _ in self._world.marked(MACHINE_ENV, prefix)]
        return said["bill"], float(said["now"]), left

    def _address(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self._world.read(self._folder / SERVER))
        return body

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        address = self._address()
        data = b"" if body is None else json.dumps(body).encode()
        headers = {KEY_HEADER: address["api_key"]}
        reply = self._world.http(HttpRequest(method, address["url"] + path, headers, data))
        assert reply.status < 300, (method, path, reply)
        said: dict[str, Any] = json.loads(reply.body) if reply.body else {}
        return said
