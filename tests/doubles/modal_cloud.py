"""The state of the Modal double: apps, images, secrets, volumes, dicts, sandboxes, and the clock they bill by."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from grpclib import GRPCError, Status
from modal_proto import api_pb2
from tests.doubles.modal_boxes import Box
from tests.doubles.modal_volumes import Mount, Volume

TOKEN_ID, TOKEN_SECRET = "ak-double000token", "as-double000secret"
DEFAULT_TIMEOUT_S, LONGEST_TIMEOUT_S = 300, 86400
# Its own price list, as it would be on the bill: for one GPU, a core and a GiB, by the hour.
GPU_USD = {"T4": 0.59, "L4": 0.80, "A10": 1.10, "L40S": 1.95, "A100-40GB": 2.10, "A100-80GB": 2.50, "H100": 3.95,
           "H200": 4.54, "B200": 6.25, "RTX-PRO-6000": 3.03}  # fmt: skip
CORE_USD, GIB_USD = 0.1419, 0.0242
_Result = api_pb2.GenericResult


@dataclass
class Fault:
    method: str
    status: Status = Status.UNAVAILABLE
    times: int = 1
    is_after: bool = False  # the deed is done, and its reply is lost
    text: str = "injected"


@dataclass
class Sandbox:
    id: str
    app_id: str
    definition: api_pb2.Sandbox
    tags: dict[str, str]
    env: dict[str, str]
    created_at: float
    is_v2: bool
    box: Box | None = None
    started_at: float | None = None
    ended_at: float | None = None
    result: Any = None

    @property
    def gpu(self) -> tuple[str, int]:
        config = self.definition.resources.gpu_config
        return config.gpu_type.removesuffix("!"), config.count

    @property
    def is_running(self) -> bool:
        return self.result is None

    @property
    def rate_usd(self) -> float:
        resources, (gpu, count) = self.definition.resources, self.gpu
        cores = max(resources.milli_cpu, resources.milli_cpu_max) / 1000
        gib = max(resources.memory_mb, resources.memory_mb_max) / 1024
        return (GPU_USD[gpu] * count if count else 0.0) + cores * CORE_USD + gib * GIB_USD


@dataclass
class Modal:
    """Its state, and settings for tests. `replace` replaces Modal's paths in the create call of a sandbox."""

    folder: Path
    replace: dict[str, str] = field(default_factory=dict)
    port: int = 0
    blocks_port: int = 0
    faults: list[Fault] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    capacity: dict[str, int] = field(default_factory=dict)  # GPU -> free ones; absent: as many as asked for
    max_sandboxes: int = 100
    list_delay_s: float = 0.0
    clock_s: float = 0.0
    build_problem: str = ""
    has_rates: bool = True
    refuses_commits: bool = False
    runs_commands: bool = True  # False: a sandbox lives without processes, for tests of the control plane alone
    volumes: dict[str, Volume] = field(default_factory=dict)  # by id
    dicts: dict[str, dict[bytes, bytes]] = field(default_factory=dict)
    apps: dict[str, str] = field(default_factory=dict)  # name -> id
    secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    images: dict[str, list[str]] = field(default_factory=dict)  # id -> its commands
    mounts: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # id -> file, sha256
    data: dict[str, bytes] = field(default_factory=dict)  # sha256 -> content
    sandboxes: dict[str, Sandbox] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    name: str = "double"  # of the workspace
    workspaces: dict[str, Modal] = field(default_factory=dict)  # by further token ids; the first itself: a second token

    # --- for tests ---

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        return {"MODAL_TOKEN_ID": TOKEN_ID, "MODAL_TOKEN_SECRET": TOKEN_SECRET, "MODAL_SERVER_URL": self.url}

    def now(self) -> float:
        return time.time() + self.clock_s

    def billing(self) -> list[Sandbox]:
        return [one for one in self.sandboxes.values() if one.started_at is not None and one.ended_at is None]

    def bill_usd(self, sandbox_id: str) -> float:
        one = self.sandboxes[sandbox_id]
        if one.started_at is None:
            return 0.0
        return ((one.ended_at or self.now()) - one.started_at) * one.rate_usd / 3600

    def lose(self, sandbox_id: str) -> None:
        """The host is gone, with all that was not committed."""
        self.end(self.sandboxes[sandbox_id], _Result.GENERIC_STATUS_INTERNAL_FAILURE, is_lost=True)

    def volume(self, name: str) -> Volume:
        return next(volume for volume in self.volumes.values() if volume.name == name)

    def add_volume(self, name: str, version: int = 2) -> Volume:
        volume = Volume(new_id("vo"), name, version)
        self.volumes[volume.id] = volume
        return volume

    def reset(self) -> None:
        """As new, for the next test: one server for a file is enough."""
        self.faults.clear()
        for one in list(self.sandboxes.values()):
            self.end(one, _Result.GENERIC_STATUS_TERMINATED)
        fresh = Modal(self.folder, self.replace)
        for name, value in vars(fresh).items():
            if name not in ("port", "blocks_port", "lock", "folder", "replace"):
                setattr(self, name, value)

    # --- the life of sandboxes ---

    def tick(self) -> None:
        with self.lock:
            everyone = [one for one in self.sandboxes.values() if one.is_running]
        for one in everyone:
            if one.started_at is None:
                self._schedule(one)
                continue
            if one.box is not None:
                one.box.serve_commits(is_refused=self.refuses_commits)
            if self.now() >= one.started_at + one.definition.timeout_secs:
                self.end(one, _Result.GENERIC_STATUS_TIMEOUT)
            elif one.box is not None and (code := one.box.exit_code()) is not None:
                status = _Result.GENERIC_STATUS_FAILURE if code else _Result.GENERIC_STATUS_SUCCESS
                self.end(one, status, code)

    def create(self, app_id: str, definition: api_pb2.Sandbox, tags: Any, env: dict[str, str], is_v2: bool) -> Sandbox:
        with self.lock:
            self._check(app_id, definition)
            # The SDK tells the older kind by its id: 22 letters and digits.
            sandbox_id = f"sb-{uuid4().hex}" if is_v2 else f"sb-{uuid4().hex[:22]}"
            kept = api_pb2.Sandbox.FromString(definition.SerializeToString())
            kept.timeout_secs = kept.timeout_secs or DEFAULT_TIMEOUT_S
            one = Sandbox(sandbox_id, app_id, kept, tags_of(tags), env, self.now(), is_v2)
            self.sandboxes[sandbox_id] = one
            self._schedule(one)
            return one

    def _check(self, app_id: str, definition: api_pb2.Sandbox) -> None:
        alive = [one for one in self.sandboxes.values() if one.is_running and one.app_id == app_id]
        if definition.name and any(one.definition.name == definition.name for one in alive):
            raise GRPCError(Status.ALREADY_EXISTS, f"Sandbox with name '{definition.name}' already exists")
        if len(alive) >= self.max_sandboxes:
            raise GRPCError(Status.RESOURCE_EXHAUSTED, "Workspace container limit reached")
        if definition.timeout_secs > LONGEST_TIMEOUT_S:
            raise GRPCError(Status.INVALID_ARGUMENT, "timeout must be at most 86400 seconds")
        config = definition.resources.gpu_config
        if config.count and config.gpu_type.removesuffix("!") not in GPU_USD:
            raise GRPCError(Status.INVALID_ARGUMENT, f"Not a valid GPU type: {config.gpu_type}")

    def _schedule(self, one: Sandbox) -> None:
        gpu, count = one.gpu
        with self.lock:
            if count and self.capacity.get(gpu, count) < count:
                return
            if count and gpu in self.capacity:
                self.capacity[gpu] -= count
            one.started_at = self.now()
            if self.runs_commands:
                one.box = self._box(one)
                one.box.start()

    def _box(self, one: Sandbox) -> Box:
        folder = self.folder / one.id
        folder.mkdir(parents=True)
        definition = one.definition
        replace = {reference: ours.format(box=folder) for reference, ours in self.replace.items()}
        files = {path: self.data[sha] for mount_id in definition.mount_ids for path, sha in self.mounts[mount_id]}
        box = Box(one.id, folder, replace, list(definition.entrypoint_args), one.env, files, gpu=one.gpu)
        for mount in definition.volume_mounts:
            box.mounts.append(Mount(self.volumes[mount.volume_id], Path(box.here(mount.mount_path))))
        return box

    def end(self, one: Sandbox, status: Any, code: int = 0, *, is_lost: bool = False) -> None:
        with self.lock:
            if not one.is_running:
                return
            one.result = _Result(status=status, exitcode=code)
        if one.box is not None:
            one.box.end(is_lost=is_lost)
        with self.lock:
            one.ended_at = self.now()
            gpu, count = one.gpu
            if count and gpu in self.capacity and one.started_at is not None:
                self.capacity[gpu] += count

    def terminate(self, sandbox_id: str) -> None:
        self.end(self.find(sandbox_id), _Result.GENERIC_STATUS_TERMINATED)

    def find(self, sandbox_id: str) -> Sandbox:
        if sandbox_id not in self.sandboxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {sandbox_id} not found")
        return self.sandboxes[sandbox_id]

    def visible(self) -> list[Sandbox]:
        with self.lock:
            return [one for one in self.sandboxes.values() if self.now() - one.created_at >= self.list_delay_s]


def new_id(kind: str) -> str:
    return f"{kind}-{uuid4().hex[:22]}"


def task_id_of(one: Sandbox) -> str:
    return f"ta-{one.id[3:25]}{'V' if one.is_v2 else 'x'}" if one.started_at is not None else ""


def tags_of(pairs: Any) -> dict[str, str]:
    return {pair.tag_name: pair.tag_value for pair in pairs}
