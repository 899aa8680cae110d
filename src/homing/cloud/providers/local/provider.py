"""This computer as a provider: each instance is a process tree in its own folder, at a made-up rate.

    $HOMING_HOME/local/<instance id>/
    ├── instance.json      mark, rate, created_at: on disk before the process starts; billing begins here
    ├── started.json       the first process was started
    ├── destroy.json       destroy was requested: nothing may start here from now on
    ├── ended.json         when billing ended
    ├── end_billing.py     the script that the agent runs to end billing
    ├── boot.log
    └── work/              boot.json, agent.zip, run/, data/

An instance behaves like a rented machine, so that everything else can be tried and tested without an account. The
process tree outlives the process that started it. Even after all its processes have exited, the instance bills until it
is destroyed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from homing.cloud.check_numbers import Figures
from homing.cloud.ledger.mark import owner_prefix
from homing.cloud.providers.base import (
    Connection,
    Feature,
    Instance,
    InstanceState,
    Needs,
    Offer,
    Order,
    Place,
    Request,
    Resource,
    lack,
)
from homing.cloud.providers.local import end_billing
from homing.cloud.providers.simulated_machine import MACHINE_ENV, ProcessTree, inherited
from homing.errors import CreateFailed, ProviderRefused, UsageError
from homing.gpus import find_gpu
from homing.units import parse_usd
from homing.wire import codec
from homing.wire import file_names as names
from homing.wire.boot_json import EndBilling
from homing.world import World

__all__ = ["DEFAULT_RATE_USD_PER_HOUR", "RATE_ENV", "Local"]

DEFAULT_RATE_USD_PER_HOUR = Decimal("0.36")  # made up: $0.01 per 100 s, so that even a short run costs something
RATE_ENV = "HOMING_LOCAL_RATE"

_LOG_BYTES = 4000


class Local:
    name = "local"
    page = ""
    guard = ""
    settle_s = 0.0
    cannot: Mapping[Feature, str] = {
        "native_deadline": "A local run has no provider-side timer.",
        "native_spend_limit": "A local run has no provider-side spend guard.",
        "spot": "Local runs have no spot instances.",
        "ssh": "A local instance needs no SSH: its folder is on this computer.",
        "multi_node": "A local run uses one node.",
    }

    def __init__(self, *, home: Path, owner: str, world: World) -> None:
        self._root = home / "local"
        self._prefix = owner_prefix(owner)
        self._world = world

    def account(self) -> str:
        return "this computer"  # a fixed name, because the host name changes with the network

    # --- offers ---

    def offers(self, needs: Needs) -> list[Offer]:
        offer = self._offer()
        return [] if lack(offer, needs) else [offer]

    def place(self, mark: str) -> Place:
        folder = self._folder(mark)
        python = self._world.python()
        argv = [python, "-I", str(folder / "end_billing.py"), str(folder), mark]
        return Place(str(folder / "work"), python, EndBilling(kind="command", argv=argv))

    def plan(self, offer: Offer, order: Order) -> Request:
        work_dir = self._folder(order.mark) / "work"
        return Request(
            provider=self.name,
            mark=order.mark,
            offer=offer,
            order=order,
            argv=(self._world.python(), "-I", str(work_dir / "agent.zip"), str(work_dir / names.BOOT)),
            env={**inherited(self._world), names.MARK_ENV: order.mark},
        )

    # --- instances ---

    def create(self, request: Request) -> Instance:
        """Create an instance. Safe to repeat, because the id is the mark."""
        folder = self._folder(request.mark)
        self._world.mkdir(folder / "work")
        self._record(request)
        if self._exists(folder, "destroy.json", "ended.json"):
            raise CreateFailed(
                what=f"Instance {request.mark} was destroyed while it was being created.",
                fix="Launch again.",
                instance_id=request.mark,
            )
        if not self._exists(folder, "started.json") and not self._tree(request.mark).processes():
            self._start(request, folder)
        if self._exists(folder, "destroy.json"):
            # A destroy was requested after the check above, and it may have scanned for processes before ours started.
            self.destroy(request.mark)
            raise CreateFailed(
                what=f"Instance {request.mark} was destroyed while it was starting.",
                fix="Launch again.",
                instance_id=request.mark,
            )
        return self.describe(request.mark)

    def hand_over(self, request: Request, instance_id: str) -> None:
        """Do nothing, because the create call delivered everything."""

    def describe(self, instance_id: str) -> Instance:
        folder = self._folder(instance_id)
        processes = self._tree(instance_id).processes()
        try:
            made = self._read(folder / "instance.json")
        except ProviderRefused as exc:
            # The recorded rate and start time are lost, but whether the instance is running is still known, so destroy
            # still works.
            is_over = self._exists(folder, "ended.json") and not processes
            return self._instance(instance_id, "gone" if is_over else "unknown", detail=exc.what)
        if made is None:
            if not processes:
                return self._instance(instance_id, "gone", detail="never created, or its folder was deleted")
            return self._instance(
                instance_id, "unknown", detail="processes with this mark are running, but their folder is missing"
            )
        ended = self._read(folder / "ended.json")
        if processes:
            state: InstanceState = "ready"
            if ended or self._exists(folder, "destroy.json"):
                state = "destroying"
            return self._instance(
                instance_id, state, made, detail=f"{len(processes)} process{'es' * (len(processes) != 1)}"
            )
        if ended:
            return self._instance(instance_id, "gone", made, ended, detail=f"ended by {ended.get('by', '?')}")
        if self._exists(folder, "destroy.json"):
            return self._instance(instance_id, "destroying", made, detail="destroy was requested but has not finished")
        if not self._exists(folder, "started.json"):
            return self._instance(
                instance_id, "booting", made, detail="created but not started; billing until destroyed"
            )
        died = self._instance(
            instance_id, "ready", made, detail="all its processes have exited; billing until destroyed"
        )
        return dataclasses.replace(died, is_running=False)

    def remember(self, mark: str) -> Instance | None:
        return self.describe(mark) if self._exists(self._folder(mark), "instance.json") else None

    def list_owned(self) -> list[Instance]:
        folders = self._world.listdir(self._root) if self._world.exists(self._root) else []
        ids = {name for name in (*folders, *self._running()) if name.startswith(self._prefix)}
        found = [self._describe_or_unknown(instance_id) for instance_id in sorted(ids)]
        return [instance for instance in found if instance.state != "gone"]

    def _running(self) -> set[str]:
        """Return the marks of processes on this computer, except those of other providers' machines.

        A process of such a machine may start or end between two scans of the process table. So scan for the machines'
        processes both before and after scanning for ours, and exclude every mark that a machine's process carries.
        """
        inside = {process.pid for process, _ in self._world.marked(MACHINE_ENV, "")}
        marked = self._world.marked(names.MARK_ENV, self._prefix)
        inside |= {process.pid for process, _ in self._world.marked(MACHINE_ENV, "")}
        return {mark for _, mark in marked} - {mark for process, mark in marked if process.pid in inside}

    def _describe_or_unknown(self, instance_id: str) -> Instance:
        """Describe an instance. A damaged folder must not hide other instances or prevent destroying them."""
        try:
            return self.describe(instance_id)
        except ProviderRefused as exc:
            return self._instance(instance_id, "unknown", detail=exc.what)

    def destroy(self, instance_id: str) -> None:
        folder = self._folder(instance_id)
        is_recorded = self._world.exists(folder / "instance.json")
        if is_recorded and not self._exists(folder, "destroy.json"):
            with contextlib.suppress(OSError):
                # Ignore a full disk, so that the processes are still killed. Writing ended.json may then fail.
                self._write(folder / "destroy.json", {"asked_at": self._world.now()})
        self._tree(instance_id).end()
        if is_recorded:
            # Do not overwrite an existing file: if the agent ended billing earlier, the time that it recorded counts.
            body = {"schema": "homing.local-ended/1", "ended_at": self._world.now(), "by": "destroy"}
            body.update(boottime=self._world.boottime(), boot_id=self._world.boot_id())
            self._world.create(folder / "ended.json", _json(body))

    def log(self, instance_id: str) -> str:
        path = self._folder(instance_id) / "boot.log"
        if not self._world.exists(path):
            return ""
        start = max(0, self._world.size(path) - _LOG_BYTES)
        return self._world.read(path, start, _LOG_BYTES).decode("utf-8", "replace")

    def set_guard(self, instance_id: str, spend_limit_usd: Decimal, end_by: float | None) -> None:
        """Do nothing: this computer has no guard. The agent and the dead-man process read new limits from the store."""

    def list_resources(self) -> list[Resource]:
        return []  # there are none: an instance consists only of its folder and its processes

    def destroy_resource(self, resource: Resource) -> None:
        raise AssertionError(f"this computer has no {resource.kind}")

    def connection(self, instance_id: str) -> Connection | None:
        return None

    # --- helpers, in the order they are called ---

    def _offer(self) -> Offer:
        gpus = self._gpus()
        cores = self._world.run(["getconf", "_NPROCESSORS_ONLN"], timeout_s=10)
        memory_bytes, processor = self._machine()
        gpu, gpu_memory_bytes = gpus[0] if gpus else ("", 0)
        # If the folder does not exist yet, it will be on the same disk as its nearest existing parent.
        parent = next(p for p in (self._root, *self._root.parents) if self._world.exists(p))
        return Offer(
            provider=self.name,
            name="this-computer",
            device=gpu or processor,
            num_gpus=len(gpus),
            num_cores=int(cores.out) if cores.code == 0 and cores.out.strip().isdigit() else 1,
            memory_bytes=gpu_memory_bytes or memory_bytes,
            rate_usd_per_hour=self._rate(),
            disk_bytes=self._world.free_bytes(parent),
            boot_s=5.0,
            host_bytes=memory_bytes,
        )

    def _gpus(self) -> list[tuple[str, int]]:
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        answer = self._world.run(query, timeout_s=20)
        if answer.code != 0:
            return []
        rows = [line.rsplit(",", 1) for line in answer.out.splitlines() if "," in line]
        known = [(find_gpu(name), name.strip(), mib.strip()) for name, mib in rows]
        return [(gpu.name if gpu else name, int(mib) * 2**20) for gpu, name, mib in known if mib.isdigit()]

    def _machine(self) -> tuple[int, str]:
        if self._world.exists("/proc/meminfo"):
            memory = re.search(rb"MemTotal:\s+(\d+) kB", self._world.read("/proc/meminfo"))
            model = re.search(rb"model name\s*:\s*(.+)", self._world.read("/proc/cpuinfo"))
            name = model[1].decode("utf-8", "replace").strip() if model else "processor"
            return (int(memory[1]) * 1024 if memory else 0), name
        size = self._world.run(["sysctl", "-n", "hw.memsize"], timeout_s=10)
        name = self._world.run(["sysctl", "-n", "machdep.cpu.brand_string"], timeout_s=10).out.strip()
        return (int(size.out) if size.out.strip().isdigit() else 0), name or "processor"

    def _rate(self) -> Decimal:
        text = self._world.environment().get(RATE_ENV, "")
        try:
            return parse_usd(text) if text else DEFAULT_RATE_USD_PER_HOUR
        except ValueError as exc:
            raise UsageError(
                what=f"{RATE_ENV} is not a valid rate.",
                why=f"{exc}.",
                fix=f"Set it, for example: export {RATE_ENV}=0.36",
            ) from exc

    def _folder(self, instance_id: str) -> Path:
        if not re.fullmatch(r"[a-z0-9-]+", instance_id) or not instance_id.startswith(self._prefix):
            raise ProviderRefused(
                what=f"{instance_id!r} does not belong to this homing home directory.",
                why=f"The names of its instances start with {self._prefix!r}.",
                fix="List its instances: homing runs",
            )
        return self._root / instance_id

    def _record(self, request: Request) -> None:
        """Record the instance. Billing begins here, before anything runs.

        Once the record is written, list_owned shows the instance even if this process crashes.
        """
        body = {
            "schema": "homing.local-instance/1",
            "id": request.mark,
            "mark": request.mark,
            "run_name": request.order.run_name,
            "rate_usd_per_hour": str(request.offer.rate_usd_per_hour),
            "created_at": self._world.now(),
            "boottime": self._world.boottime(),
            "boot_id": self._world.boot_id(),
        }
        self._world.create(self._folder(request.mark) / "instance.json", _json(body))

    def _start(self, request: Request, folder: Path) -> None:
        work_dir = Path(request.order.boot.work_dir)
        self._world.copy(end_billing.__file__, folder / "end_billing.py")
        for file in request.order.files:
            target = work_dir / file.path
            self._world.mkdir(target.parent)
            self._world.copy(file.source, target)
        self._world.write(work_dir / names.BOOT, codec.dumps(request.order.boot, indent=1).encode())
        env = {**request.env, **request.order.secrets}
        self._world.spawn(request.argv, env=env, cwd=work_dir, log=folder / "boot.log")
        self._write(folder / "started.json", {"started_at": self._world.now()})

    def _tree(self, mark: str) -> ProcessTree:
        return ProcessTree(names.MARK_ENV, mark, self._world)

    def _instance(
        self,
        instance_id: str,
        state: InstanceState,
        made: dict[str, Any] | None = None,
        ended: dict[str, Any] | None = None,
        detail: str = "",
    ) -> Instance:
        read, now = Figures(f"{self._folder(instance_id)}/instance.json"), self._world.now()
        rate = read.rate("rate_usd_per_hour", made.get("rate_usd_per_hour") if made else None) or Decimal(0)
        created_at = read.moment("created_at", made.get("created_at") if made else None, now)
        ended_at = read.moment("ended_at", ended.get("ended_at") if ended else None, now)
        until = ended_at if ended_at is not None else now
        lived_s = self._lived_s(made or {}, ended)
        if lived_s is not None:
            # computed backward from the end, because the wall clock may have been adjusted since the start
            created_at = until - lived_s
        seconds = Decimal(str(max(0.0, until - created_at))) if created_at is not None else Decimal(0)
        return Instance(
            id=instance_id,
            mark=instance_id,
            provider=self.name,
            state=state,
            billing="no" if state == "gone" else "yes",
            rate_usd_per_hour=rate,
            created_at=created_at,
            ended_at=ended_at,
            spend_usd=rate * seconds / 3600 if made else None,
            detail=detail,
            page=str(self._folder(instance_id)),
            problems=tuple(read.problems),
        )

    def _lived_s(self, made: dict[str, Any], ended: dict[str, Any] | None) -> float | None:
        """Return the instance's age by the boot clock, or None if it was not recorded or there was a reboot since."""
        if ended is None:
            ended = {"boottime": self._world.boottime(), "boot_id": self._world.boot_id()}
        began, until = made.get("boottime"), ended.get("boottime")
        is_one_boot = bool(made.get("boot_id")) and made.get("boot_id") == ended.get("boot_id")
        if not is_one_boot or not isinstance(began, float) or not isinstance(until, float):
            return None
        return until - began if math.isfinite(until - began) and until >= began else None

    def _exists(self, folder: Path, *file_names: str) -> bool:
        return any(self._world.exists(folder / name) for name in file_names)

    def _read(self, path: Path) -> dict[str, Any] | None:
        if not self._world.exists(path):
            return None
        try:
            body = json.loads(self._world.read(path))
        except ValueError as exc:
            raise ProviderRefused(
                what=f"{path} is corrupt, so the state of this instance is unknown.",
                why=str(exc),
                fix=f"List the instance's processes: ps axe | grep {path.parent.name}",
            ) from exc
        assert isinstance(body, dict), path
        return body

    def _write(self, path: Path, body: dict[str, Any]) -> None:
        self._world.write(path, _json(body))


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body).encode()
