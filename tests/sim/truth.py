"""What must hold at every moment, checked where it could break, against what really is and not against what is said.

the cloud changed       never two machines under one mark; nothing bills that a ledger calls gone
a ledger was written    the same
the store was written   a lease is made once; where one checkpoint was whole, one always is; only the instance that
                        the newest lease names writes a run's files
a trainer begins        it resumes from the newest checkpoint that was verified before its instance was requested
near a limit            whether a guard lived that answers for this machine: then the bill may not pass the limit
all is closed           no receipt, in whichever home, is below what was billed under its mark
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING

from tests.sim.host import EPOCH, HOME, Disk, Host
from tests.sim.kernel import Broken
from tests.sim.world import STORE, Proc

from homing.cloud.ledger.mark import owner_prefix, shown_mark
from homing.wire import file_names

if TYPE_CHECKING:
    from tests.doubles.cloud_state import Rental
    from tests.sim.stage import Stage

__all__ = ["ROUNDING_USD", "StoreDisk", "Truth"]

WATCH_S = 60.0  # a guard that lives and reaches the provider in this long before the limit must hold it
_LOOK_S = 5.0
ROUNDING_USD = Decimal("0.000001")  # seconds are floats, dollars are not
_FENCE_S = 90.0  # from a newer lease until the older instance has noticed


@dataclass
class Life:
    """One instance, as it really was."""

    id: str
    mark: str
    run_id: str
    created_t: float
    limit_usd: Decimal
    spent_before_usd: Decimal
    newest_then: int  # the newest whole checkpoint when it was asked for
    rate_usd_per_hour: Decimal
    seen: list[set[str]] = field(default_factory=list)  # in each look before the limit: who could end it

    @property
    def was_guarded(self) -> bool:
        """One and the same guard was able in every look: it had the whole time and needed only to act."""
        return bool(self.seen) and bool(set.intersection(*self.seen) - {"gone"})


class StoreDisk(Disk):
    """The store's disk, with a witness."""

    def __init__(self) -> None:
        super().__init__()
        self.on_put = lambda path: None
        self.on_drop = lambda path: None

    def put(self, path: str, data: bytes, now: float) -> None:
        super().put(path, data, now)
        self.on_put(path)

    def drop(self, path: str) -> None:
        super().drop(path)
        self.on_drop(path)


class Truth:
    def __init__(self, stage: Stage, disk: StoreDisk) -> None:
        self._stage, self._disk = stage, disk
        self.lives: dict[str, Life] = {}
        self.most_live = 0  # machines at one moment
        self.limits_usd: dict[str, Decimal] = {}  # run id -> what it may cost
        self._whole: dict[str, set[str]] = {}  # run id -> folders of whole checkpoints in the store
        self._leases: dict[str, tuple[bytes, float]] = {}
        self._newest_lease: dict[str, tuple[int, str, float]] = {}  # run id -> number, mark, when
        self.has_hostile_writer = False  # then a checkpoint in the store may be damaged, and lost with it
        disk.on_put, disk.on_drop = self._stored, self._dropped

    # --- instances and ledgers ---

    def cloud_changed(self) -> None:
        if self._stage.cloud is None:
            return
        cloud = self._stage.cloud.cloud
        for thing in cloud._live.values():
            if thing.kind == "instance" and thing.id not in self.lives:
                self._born(thing)
        self.most_live = max(self.most_live, sum(cloud.live().values()))
        for mark, count in cloud.live().items():
            if count > 1:
                raise Broken(f"doubled: {count} machines bill under {mark}")
        self.check_ledgers()

    def check_ledgers(self) -> None:
        """A line that says gone is a promise that nothing bills under its mark."""
        if self._stage.cloud is None:
            return
        live = self._stage.cloud.cloud.live()
        if not live:
            return
        for host in self._stage.hosts.values():
            for connection in host.databases.values():
                rows = connection.execute("SELECT mark FROM lines WHERE destroyed_at IS NOT NULL").fetchall()
                for row in rows:
                    if row["mark"] in live:
                        raise Broken(f"the ledger of {host.name} says gone while {row['mark']} bills")

    def check_receipts(self) -> None:
        """For every machine that ever billed, also one that no home saw, and for all of one mark together."""
        billed: dict[str, Decimal] = {}
        for bill in self._stage.cloud.cloud.bill():
            if bill.kind == "instance":
                billed[bill.mark] = billed.get(bill.mark, Decimal(0)) + bill.usd
        written = self._receipts()
        for mark, usd in billed.items():
            if usd > 0 and mark not in written:
                raise Broken(f"no receipt: {mark} was billed ${usd:.6f}, and no ledger has closed its line")
            for host, receipt in written.get(mark, {}).items():
                if receipt < usd - ROUNDING_USD:
                    raise Broken(f"receipt: {mark} was billed ${usd:.6f}, and the ledger of {host} says ${receipt:.6f}")

    def _receipts(self) -> dict[str, dict[str, Decimal]]:
        """Mark at the provider -> home -> dollars of its closed lines: a duplicate instance has one of its own."""
        found: dict[str, dict[str, Decimal]] = {}
        for host in self._stage.hosts.values():
            for connection in host.databases.values():
                asked = "SELECT mark, spend_usd FROM lines WHERE destroyed_at IS NOT NULL"
                for row in connection.execute(asked).fetchall():
                    homes = found.setdefault(shown_mark(row["mark"]), {})
                    homes[host.name] = homes.get(host.name, Decimal(0)) + Decimal(row["spend_usd"])
        return found

    def _born(self, thing: Rental) -> None:
        run_id = self.run_of(thing.mark)
        self._check_known(thing)
        limit = self.limits_usd.get(run_id, Decimal("Infinity"))
        spent = self.billed(run_id) - thing.spend(EPOCH + self._stage.t)
        newest, rate = max(self._steps(run_id), default=0), Decimal(thing.rate_usd_per_hour)
        life = Life(thing.id, thing.mark, run_id, self._stage.t, limit, spent, newest, rate)
        self.lives[thing.id] = life
        if limit.is_finite():
            self._watch(life)

    def _check_known(self, thing: Rental) -> None:
        """Who rents knows all that he pays for: what no ledger knows could be rented a second time."""
        bases = [base for host in self._stage.hosts.values() for base in host.databases.values()]
        known = {row["mark"] for base in bases for row in base.execute("SELECT mark FROM lines").fetchall()}
        for mark in self._stage.cloud.cloud.live():
            if mark != thing.mark and mark not in known:
                raise Broken(f"doubled: {thing.mark} is rented while {mark} bills and no ledger knows it")

    # --- the limit ---

    def billed(self, run_id: str) -> Decimal:
        return sum(
            (line.usd for line in self._stage.cloud.cloud.bill() if self.run_of(line.mark) == run_id), Decimal(0)
        )

    def run_of(self, mark: str) -> str:
        """homing-<owner>-<run>-<attempt>; the names here are short enough to stand in a mark unchanged."""
        return mark.split("-", 2)[2].rpartition("-")[0]

    def raise_limit(self, run_id: str, limit: Decimal) -> None:
        """A person said so, and from now on it is what must hold."""
        self.limits_usd[run_id] = limit
        for life in [life for life in self.lives.values() if life.run_id == run_id]:
            life.limit_usd, life.seen = limit, []
            self._watch(life)

    def _watch(self, life: Life) -> None:
        at = life.created_t + float((life.limit_usd - life.spent_before_usd) / life.rate_usd_per_hour * 3600)
        first, seen = max(self._stage.t, at - WATCH_S), life.seen
        num = max(1, int((at - first) / _LOOK_S))
        for number in range(num):
            self._stage.at(first + (at - first) * number / num, lambda: seen.append(self._able(life)))

    def _able(self, life: Life) -> set[str]:
        """Who lives and could end this instance now."""
        stage, found = self._stage, set()
        thing = stage.cloud.cloud._things[life.id]
        if thing.ended_at is not None:
            return {"gone"}
        if thing.guard_usd is not None and Decimal(thing.guard_usd) + life.spent_before_usd <= life.limit_usd:
            found.add("provider")
        if life.id in stage.hosts and stage.cloud.is_armed(stage.hosts[life.id]):
            found.add("its system's timer")
        if stage.cloud.is_down:
            return found
        for host in stage.hosts.values():
            if not host.is_up or host.is_frozen or "cloud" in host.cut:
                continue
            for proc in host.living():
                if host.name == life.id and proc.role in ("agent", "dead-man") and stage.provider != "shadeform":
                    found.add(f"{proc.role}")
                elif proc.role == "guard" and stage.has_keys(proc) and _is_guarded_from(host, life.mark):
                    found.add(f"guard on {host.name}")
                elif host.locks.get(f"{HOME}/launching/{life.mark}") is proc:
                    found.add(f"{proc.role} on {host.name}")
        return found

    # --- the store ---

    def _stored(self, path: str) -> None:
        parts = path[len(STORE) + 1 :].split("/")[1:]  # without the store's own folder
        if len(parts) < 3 or parts[0] != file_names.STORE_RUNS or ".tmp-" in path or ".part-" in path:
            return
        run_id = parts[1]
        if parts[2] == file_names.LEASES:
            self._lease_made(run_id, path)
            return
        self._check_writer(run_id, path)
        if parts[2] == file_names.CHECKPOINTS and len(parts) == 6:
            self._look_at_checkpoint(run_id, path.rpartition("/")[0])

    def _dropped(self, path: str) -> None:
        parts = path[len(STORE) + 1 :].split("/")[1:]
        if len(parts) == 6 and parts[0] == file_names.STORE_RUNS and parts[2] == file_names.CHECKPOINTS:
            self._look_at_checkpoint(parts[1], path.rpartition("/")[0])

    def _lease_made(self, run_id: str, path: str) -> None:
        data = self._disk.files[path]
        if path in self._leases and self._leases[path][0] != data:
            raise Broken(f"lease {path} was changed after it was made: two owners of one number")
        self._leases[path] = (data, self._stage.t)
        body = json.loads(data)
        if body["number"] > self._newest_lease.get(run_id, (0, "", 0.0))[0]:
            self._newest_lease[run_id] = (body["number"], body["mark"], self._stage.t)

    def _check_writer(self, run_id: str, path: str) -> None:
        task = self._stage.running
        proc: Proc | None = getattr(task, "proc", None)
        life = self.lives.get(proc.host.name) if proc is not None else None
        lease = self._newest_lease.get(run_id)
        if life is None or lease is None or not lease[1] or life.mark == lease[1]:
            return
        if self._stage.t - lease[2] > _FENCE_S:
            raise Broken(f"doubled: {life.mark} writes {path} long after lease {lease[0]} named {lease[1]}")

    def _look_at_checkpoint(self, run_id: str, folder: str) -> None:
        whole = self._whole.setdefault(run_id, set())
        was_whole = folder in whole
        if self._is_whole(folder):
            whole.add(folder)
        elif was_whole:
            whole.discard(folder)
            if not whole and not self.has_hostile_writer:
                raise Broken(f"no whole checkpoint of {run_id} is left in the store: {folder} was the last")

    def _is_whole(self, folder: str) -> bool:
        text = self._disk.files.get(f"{folder}/{file_names.MANIFEST}")
        if text is None:
            return False
        try:
            files = json.loads(text)["files"]
        except (ValueError, KeyError, RecursionError):
            return False
        return all(_sha256(self._disk.files.get(f"{folder}/{file['name']}")) == file["sha256"] for file in files)

    def has_checkpoint(self) -> bool:
        """Whether the newest run has one in the store that no hostile writer may have damaged."""
        return not self.has_hostile_writer and bool(self._whole) and bool(self._whole[max(self._whole)])

    def _steps(self, run_id: str) -> list[int]:
        found = [file_names.parse_step(folder.rpartition("/")[2]) for folder in self._whole.get(run_id, ())]
        return [step for step in found if step is not None]

    # --- trainers ---

    def trainer_begins(self, proc: Proc, step: int) -> None:
        life = self.lives.get(proc.host.name)
        if life is not None and step < life.newest_then and not self.has_hostile_writer:
            raise Broken(f"work lost: {life.mark} begins at step {step}, {life.newest_then} was verified in the store")


def _is_guarded_from(host: Host, mark: str) -> bool:
    """Whether a guard there answers for this machine: its own home launched it, or has taken it over.

    What another home launches it must not touch, and that launch counted no guard there: it said so. A ledger that
    lost a line is no excuse, so the home's own mark counts whatever its ledger says.
    """
    owner = host.disk.files.get(f"{HOME}/owner", b"").decode()
    if owner and mark.startswith(owner_prefix(owner)):
        return True
    asked = "SELECT 1 FROM adopted WHERE mark = ?"
    return any(base.execute(asked, [mark]).fetchone() is not None for base in host.databases.values())


def _sha256(data: bytes | None) -> str:
    return "" if data is None else hashlib.sha256(data).hexdigest()
