"""Two clients at once on one run: launch, resume, destroy, adopt, stop, interleaved by the seed.

    race(seed) -> Raced     who believes to own the run, and how many machines there ever were at the same time

Two homes that share a store, or two processes of one home. The seed decides when each begins and how long each call
takes, so that in a thousand races any two of their steps happen in either order.
"""

from __future__ import annotations

import json
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tests.doubles.cloud_state import Settings
from tests.doubles.faults import Faults
from tests.sim.host import Host
from tests.sim.kernel import Broken
from tests.sim.schedule import destroy_all
from tests.sim.stage import Client, Stage
from tests.sim.world import STORE

from homing.cloud.destroy import destroy_run
from homing.cloud.home import Home
from homing.cloud.launch.launch import launch
from homing.cloud.ledger.run_lease import other_owner
from homing.cloud.reconcile.adopt import adopt, propose
from homing.cloud.reconcile.reconcile import refresh
from homing.store import open_store
from homing.wire import file_names

__all__ = ["Raced", "race"]

KINDS = (
    "launch and launch",
    "resume and resume",
    "adopt and adopt",
    "adopt and resume",
    "resume and destroy",
    "launch and destroy",
)
RATE_USD_PER_HOUR = "3.6"
LIMIT = Decimal("3")
LONG = {"steps": 400.0, "step_s": 5.0, "save_every": 2.0, "save_s": 0.2}


@dataclass
class Raced:
    seed: int
    kind: str
    owners: int = 0  # clients that became the owner
    most_live: int = 0
    broken: str = ""
    where: str = ""


class _Race:
    def __init__(self, seed: int, trace: Callable[[str], None] | None) -> None:
        self.random = random.Random(f"race {seed}")
        self.kind = self.random.choice(KINDS)
        self.stage = Stage(seed, trace=trace)
        settings = Settings(has_guard=self.random.random() < 0.5, settle_s=2.0, boot_s=self.random.choice((1.0, 5.0)))
        self.cloud = self.stage.rent(settings, Faults(rates={"list_late": 0.3}, list_lag_s=1.8), RATE_USD_PER_HOUR)
        self.stage.programs.trainer = LONG
        self.first = self.stage.home
        self.second = self.stage.home  # another process of the same home, unless the race needs two homes

    def go(self) -> tuple[int, int]:
        verbs = self._prepare()
        clients = [self.stage.client(f"racer {verb.__name__}", verb, host) for verb, host in verbs[:1]]
        self.stage.advance(self.random.choice((0.0, 0.0, 0.01, 0.1, 0.5, 2.0)) * self.random.random())
        clients += [self.stage.client(f"racer {verb.__name__}", verb, host) for verb, host in verbs[1:]]
        for client in clients:
            self.stage.finish(client)
        self.stage.advance(10.0)
        self._check(clients, [verb.__name__ for verb, _ in verbs])
        winners = [c for c, (verb, _) in zip(clients, verbs, strict=True) if c.error is None and verb != self.destroy]
        return len(winners), self.stage.truth.most_live

    def _prepare(self) -> list[tuple[Callable[[Home], Any], Host]]:
        """What was there before, and the two verbs of this race with the machine of each."""
        if self.kind in ("resume and resume", "adopt and adopt", "adopt and resume", "resume and destroy"):
            self._do(self.launch, self.first)
            self.stage.advance(self.random.uniform(8.0, 20.0))
            if self.kind != "adopt and adopt" or self.random.random() < 0.5:
                self._do(self.destroy, self.first)
        if "adopt" in self.kind:
            self.second = self.stage.add_home("home2")
        return {
            "launch and launch": [(self.launch, self.first), (self.launch, self.second)],
            "resume and resume": [(self.resume, self.first), (self.resume, self.second)],
            "adopt and adopt": [(self.adopt, self.second), (self.adopt, self._third())],
            "adopt and resume": [(self.adopt, self.second), (self.resume, self.first)],
            "resume and destroy": [(self.resume, self.first), (self.destroy, self.second)],
            "launch and destroy": [(self.launch, self.first), (self.destroy, self.second)],
        }[self.kind]

    def _third(self) -> Host:
        return self.stage.add_home("home3") if self.kind == "adopt and adopt" else self.first

    def _do(self, verb: Callable[[Home], Any], host: Host) -> Client:
        client = self.stage.finish(self.stage.client(verb.__name__, verb, host))
        if client.error is not None:
            raise Broken(f"before the race: {client.error}")
        return client

    # --- verbs ---

    def launch(self, home: Home) -> Any:
        return self._launch(home, is_resume=False)

    def resume(self, home: Home) -> Any:
        return self._launch(home, is_resume=True)

    def _launch(self, home: Home, *, is_resume: bool) -> Any:
        ready = self.stage.draft(home, provider="fake", limit=str(LIMIT), resume=is_resume)
        self.stage.truth.limits_usd[ready.run.id] = LIMIT
        return launch(ready, home)

    def destroy(self, home: Home) -> Any:
        return destroy_run(home, home.ledger.find("moss"))

    def adopt(self, home: Home) -> Any:
        store = open_store(f"file:{STORE}/mine", home.world, create=False)
        return adopt(propose(store, "moss", home), store, home)

    # --- what must hold ---

    def _check(self, clients: list[Client], verbs: list[str]) -> None:
        live = self.cloud.cloud.live()
        if sum(live.values()) > 1:
            raise Broken(f"{self.kind}: {live} live at once when both have ended")
        self._check_leases()
        winners = [
            c for c, verb in zip(clients, verbs, strict=True) if c.error is None and verb in ("launch", "resume")
        ]
        if len(winners) > 1:
            raise Broken(f"{self.kind}: {len(winners)} launches of one run succeeded")
        for host in [h for name, h in self.stage.hosts.items() if name.startswith("home")]:
            self._tidy(host)
        if self.cloud.cloud.live():
            raise Broken(f"{self.kind}: leaked {self.cloud.cloud.live()}")
        self.stage.truth.check_receipts()

    def _check_leases(self) -> None:
        """One owner: of all homes at most one takes the run for its own, and it is the one in the newest lease."""
        believers = {}
        for name, host in self.stage.hosts.items():
            if not name.startswith("home"):
                continue
            looked = self.stage.finish(self.stage.client("runs", _own_runs, host))
            for run_id, owner in looked.answer or []:
                believers.setdefault(run_id, []).append((name, owner))
        for run_id, who in believers.items():
            owners = self._owners(run_id)
            if len(who) > 1 or (owners and owners[-1] != who[0][1]):
                raise Broken(f"{self.kind}: {who} take {run_id} for their own; the leases say {owners}")

    def _owners(self, run_id: str) -> list[str]:
        folder = f"{STORE}/mine/runs/{run_id}/{file_names.LEASES}"
        disk = self.stage.store.disk
        found = [
            disk.files[f"{folder}/{name}"] for name in sorted(disk.folders.get(folder, ())) if name.endswith(".json")
        ]
        return [json.loads(data)["owner"] for data in found]

    def _tidy(self, host: Host) -> None:
        for _ in range(40):
            client = self.stage.finish(self.stage.client("tidy", destroy_all, host))
            if client.error is None and not client.answer:
                return
            self.stage.advance(30.0)
        raise Broken(f"{self.kind}: cannot be tidied up: {client.error or client.answer}")


def race(seed: int, *, trace: Callable[[str], None] | None = None) -> Raced:
    ran = _Race(seed, trace)
    raced = Raced(seed, ran.kind)
    try:
        raced.owners, raced.most_live = ran.go()
    except BaseException as exc:
        raced.broken = f"{type(exc).__name__}: {exc}"
        raced.where = traceback.format_exc()
    finally:
        ran.stage.close()
    return raced


def _own_runs(home: Home) -> list[tuple[str, str]]:
    """Runs that this home takes for its own after it has looked, with its owner."""
    refresh(home)
    return [(run.id, home.owner) for run in home.ledger.runs() if other_owner(home, run) is None]
