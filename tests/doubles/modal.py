"""A Modal of one process: a gRPC server on the stubs that the SDK itself ships, with state, a billing clock and faults.

It keeps the promises that the adapter leans on: a name is unique among the running sandboxes of an app; a sandbox ends
when its command does, at its timeout (300 s where none was set), or when it is terminated, and bills from the moment it
is scheduled; where no GPU is free it waits in a queue without an error; secrets reach the sandbox's environment and no
listing; a Dict's put tells one of many that it was first. What it does not have answers UNIMPLEMENTED.

    modal.faults        the next calls of a method fail: before the deed, or after it (a lost reply)
    modal.list_delay_s  how late lists and names are        modal.clock_s  moves time on, for timeouts and bills
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import inspect
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpclib.server
import pytest
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2, task_command_router_pb2
from modal_proto.api_grpc import ModalClientBase
from modal_proto.task_command_router_grpc import TaskCommandRouterBase
from tests.doubles.modal_boxes import Box
from tests.doubles.modal_volumes import BLOCK, Mount, Volume

from homing.store import modal_client

TOKEN_ID, TOKEN_SECRET = "ak-double000token", "as-double000secret"
DEFAULT_TIMEOUT_S, LONGEST_TIMEOUT_S = 300, 86400
# Its own price list, as it would be on the bill: for one GPU, a core and a GiB, by the hour.
GPU_USD = {"T4": 0.59, "L4": 0.80, "A10": 1.10, "L40S": 1.95, "A100-40GB": 2.10, "A100-80GB": 2.50, "H100": 3.95,
           "H200": 4.54, "B200": 6.25, "RTX-PRO-6000": 3.03}  # fmt: skip
CORE_USD, GIB_USD = 0.1419, 0.0242
_Result = api_pb2.GenericResult
_TICK_S = 0.1


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
    """Its state, and what tests turn. `replace` is put in the place of Modal's paths in what a sandbox is told."""

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
        self._end(self.sandboxes[sandbox_id], _Result.GENERIC_STATUS_INTERNAL_FAILURE, is_lost=True)

    def notify(self, sandbox_id: str) -> None:
        """The signal that a container gets before it is taken."""
        box = self.sandboxes[sandbox_id].box
        assert box is not None
        box.signal(signal.SIGTERM)

    def volume(self, name: str) -> Volume:
        return next(volume for volume in self.volumes.values() if volume.name == name)

    def add_volume(self, name: str, version: int = 2) -> Volume:
        volume = Volume(_new_id("vo"), name, version)
        self.volumes[volume.id] = volume
        return volume

    def reset(self) -> None:
        """As new, for the next test: one server for a file is enough."""
        self.faults.clear()
        for one in list(self.sandboxes.values()):
            self._end(one, _Result.GENERIC_STATUS_TERMINATED)
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
                self._end(one, _Result.GENERIC_STATUS_TIMEOUT)
            elif one.box is not None and (code := one.box.exit_code()) is not None:
                status = _Result.GENERIC_STATUS_FAILURE if code else _Result.GENERIC_STATUS_SUCCESS
                self._end(one, status, code)

    def create(self, app_id: str, definition: api_pb2.Sandbox, tags: Any, env: dict[str, str], is_v2: bool) -> Sandbox:
        with self.lock:
            self._check(app_id, definition)
            # The SDK tells the older kind by its id: 22 letters and digits.
            sandbox_id = f"sb-{uuid4().hex}" if is_v2 else f"sb-{uuid4().hex[:22]}"
            kept = api_pb2.Sandbox.FromString(definition.SerializeToString())
            kept.timeout_secs = kept.timeout_secs or DEFAULT_TIMEOUT_S
            one = Sandbox(sandbox_id, app_id, kept, _tags(tags), env, self.now(), is_v2)
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
        replace = {theirs: ours.format(box=folder) for theirs, ours in self.replace.items()}
        files = {path: self.data[sha] for mount_id in definition.mount_ids for path, sha in self.mounts[mount_id]}
        box = Box(one.id, folder, replace, list(definition.entrypoint_args), one.env, files, gpu=one.gpu)
        for mount in definition.volume_mounts:
            box.mounts.append(Mount(self.volumes[mount.volume_id], Path(box.here(mount.mount_path))))
        return box

    def _end(self, one: Sandbox, status: Any, code: int = 0, *, is_lost: bool = False) -> None:
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
        self._end(self.find(sandbox_id), _Result.GENERIC_STATUS_TERMINATED)

    def find(self, sandbox_id: str) -> Sandbox:
        if sandbox_id not in self.sandboxes:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {sandbox_id} not found")
        return self.sandboxes[sandbox_id]

    def visible(self) -> list[Sandbox]:
        with self.lock:
            return [one for one in self.sandboxes.values() if self.now() - one.created_at >= self.list_delay_s]


class Services:
    """One RPC a method: what it is asked, and what it answers. Both kinds of sandbox share them."""

    def __init__(self, modal: Modal) -> None:
        self.modal = modal

    # --- account ---

    def ClientHello(self, _: Any) -> Any:
        return api_pb2.ClientHelloResponse()

    def AuthTokenGet(self, _: Any) -> Any:
        body = base64.urlsafe_b64encode(json.dumps({"exp": time.time() + 86400}).encode()).decode().rstrip("=")
        return api_pb2.AuthTokenGetResponse(token=f"x.{body}.y")

    def EnvironmentGetOrCreate(self, _: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06", webhook_suffix="")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def WorkspaceNameLookup(self, _: Any) -> Any:
        return api_pb2.WorkspaceNameLookupResponse(workspace_name="double", username="double")

    def WorkspaceBillingRates(self, _: Any) -> Any:
        if not self.modal.has_rates:
            raise GRPCError(Status.UNIMPLEMENTED, "no rates here")
        rates = {f"gpu_hour_cost_{gpu.lower().replace('-', '_')}": str(usd) for gpu, usd in GPU_USD.items()}
        return api_pb2.WorkspaceBillingRatesResponse(rates=rates, formatted="")

    def AppGetOrCreate(self, ask: Any) -> Any:
        apps = self.modal.apps
        if ask.app_name not in apps:
            if ask.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"App {ask.app_name} not found")
            apps[ask.app_name] = _new_id("ap")
        return api_pb2.AppGetOrCreateResponse(app_id=apps[ask.app_name])

    # --- what a sandbox is made of ---

    def ImageGetOrCreate(self, ask: Any) -> Any:
        if self.modal.build_problem:
            failed = _Result(status=_Result.GENERIC_STATUS_FAILURE, exception=self.modal.build_problem)
            return api_pb2.ImageGetOrCreateResponse(image_id=_new_id("im"), result=failed)
        commands = list(ask.image.dockerfile_commands)
        image_id = f"im-{hashlib.sha256(ask.image.SerializeToString()).hexdigest()[:20]}"
        self.modal.images[image_id] = commands
        done = _Result(status=_Result.GENERIC_STATUS_SUCCESS)
        return api_pb2.ImageGetOrCreateResponse(image_id=image_id, result=done, metadata=api_pb2.ImageMetadata())

    def ImageJoinStreaming(self, ask: Any) -> Iterator[Any]:
        failed = bool(self.modal.build_problem)
        status = _Result.GENERIC_STATUS_FAILURE if failed else _Result.GENERIC_STATUS_SUCCESS
        result = _Result(status=status, exception=self.modal.build_problem)
        yield api_pb2.ImageJoinStreamingResponse(result=result, eof=True)

    def MountPutFile(self, ask: Any) -> Any:
        if ask.data:
            assert hashlib.sha256(ask.data).hexdigest() == ask.sha256_hex
            self.modal.data[ask.sha256_hex] = ask.data
        is_empty = ask.sha256_hex == hashlib.sha256(b"").hexdigest()
        if is_empty:
            self.modal.data[ask.sha256_hex] = b""
        return api_pb2.MountPutFileResponse(exists=ask.sha256_hex in self.modal.data)

    def MountBatchedCheckExistence(self, ask: Any) -> Any:
        missing = [sha for sha in ask.sha256_hex_hashes if sha not in self.modal.data]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    def MountGetOrCreate(self, ask: Any) -> Any:
        mount_id = _new_id("mo")
        self.modal.mounts[mount_id] = [(file.filename, file.sha256_hex) for file in ask.files]
        return api_pb2.MountGetOrCreateResponse(mount_id=mount_id)

    def SecretGetOrCreate(self, ask: Any) -> Any:
        secret_id = _new_id("st")
        self.modal.secrets[secret_id] = dict(ask.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=secret_id)

    # --- sandboxes ---

    def SandboxCreate(self, ask: Any) -> Any:
        if not ask.definition.resources.gpu_config.count:
            raise GRPCError(Status.INVALID_ARGUMENT, "the SDK makes these without a GPU another way")
        env: dict[str, str] = {}
        for secret_id in ask.definition.secret_ids:
            env.update(self.modal.secrets[secret_id])
        one = self.modal.create(ask.app_id, ask.definition, ask.tags, env, False)
        return api_pb2.SandboxCreateResponse(sandbox_id=one.id, metadata=self._metadata(one))

    def SandboxCreateV2(self, ask: Any) -> Any:
        env: dict[str, str] = {}
        for source in ask.secret_sources:
            env.update(self.modal.secrets[source.secret_id] if source.secret_id else dict(source.env.contents))
        one = self.modal.create(ask.app_id, ask.definition, ask.tags, env, True)
        task_id = _task_id(one)
        return api_pb2.SandboxCreateV2Response(sandbox_id=one.id, task_id=task_id, metadata=self._metadata(one))

    def SandboxGetTaskId(self, ask: Any) -> Any:
        one = self.modal.find(ask.sandbox_id)
        if one.started_at is None:
            time.sleep(0.05)
            return api_pb2.SandboxGetTaskIdResponse(task_result=one.result)
        return api_pb2.SandboxGetTaskIdResponse(task_id=_task_id(one))

    def SandboxWait(self, ask: Any) -> Any:
        one = self.modal.find(ask.sandbox_id)
        # A container that is on its way out has no result yet.
        result = one.result if one.ended_at is not None else None
        return api_pb2.SandboxWaitResponse(result=result, metadata=self._metadata(one))

    def SandboxTerminate(self, ask: Any) -> Any:
        self.modal.terminate(ask.sandbox_id)
        return api_pb2.SandboxTerminateResponse()

    def SandboxTagsGet(self, ask: Any) -> Any:
        tags = self.modal.find(ask.sandbox_id).tags
        pairs = [api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
        return api_pb2.SandboxTagsGetResponse(tags=pairs)

    def SandboxGetFromName(self, ask: Any) -> Any:
        app_id = self.modal.apps.get(ask.app_name)
        for one in self.modal.visible():
            if one.app_id == app_id and one.definition.name == ask.sandbox_name and one.ended_at is None:
                return api_pb2.SandboxGetFromNameResponse(sandbox_id=one.id, metadata=self._metadata(one))
        raise GRPCError(Status.NOT_FOUND, f"Sandbox {ask.sandbox_name} not found")

    def SandboxGetFromNameV2(self, ask: Any) -> Any:
        found = self.SandboxGetFromName(ask)
        if not self.modal.sandboxes[found.sandbox_id].is_v2:
            raise GRPCError(Status.NOT_FOUND, f"Sandbox {ask.sandbox_name} not found")
        return found

    def SandboxListV2(self, ask: Any) -> Any:
        wanted, before = _tags(ask.tags), ask.before_timestamp or float("inf")
        found = [
            one
            for one in self.modal.visible()
            if one.app_id == ask.app_id and one.ended_at is None and one.created_at < before
            and wanted.items() <= one.tags.items()
        ]  # fmt: skip
        page = sorted(found, key=lambda one: -one.created_at)[:2]  # small, so that more than a page is asked for
        infos = [api_pb2.SandboxInfo(id=one.id, created_at=one.created_at, app_id=one.app_id) for one in page]
        return api_pb2.SandboxListResponse(sandboxes=infos)

    def AppFetchLogs(self, ask: Any) -> Any:
        for one in self.modal.sandboxes.values():
            if _task_id(one) == ask.task_id and one.box is not None:
                lines = one.box.log.splitlines(keepends=True)[-ask.limit :]
                items = [api_pb2.TaskLogs(data=line, timestamp=time.time()) for line in lines]
                batch = api_pb2.TaskLogsBatch(task_id=ask.task_id, items=items)
                return api_pb2.AppFetchLogsResponse(batches=[batch] if items else [])
        return api_pb2.AppFetchLogsResponse()

    def TaskGetCommandRouterAccess(self, ask: Any) -> Any:
        return api_pb2.TaskGetCommandRouterAccessResponse(jwt=self.AuthTokenGet(None).token, url=self.modal.url)

    def SandboxGetCommandRouterAccess(self, ask: Any) -> Any:
        return api_pb2.SandboxGetCommandRouterAccessResponse(jwt=self.AuthTokenGet(None).token, url=self.modal.url)

    def TaskReloadVolumes(self, ask: Any) -> Any:
        for one in self.modal.sandboxes.values():
            if _task_id(one) == ask.task_id and one.box is not None and one.is_running:
                for mount in one.box.mounts:
                    if problem := mount.reload():
                        raise GRPCError(Status.FAILED_PRECONDITION, problem)
                return task_command_router_pb2.TaskReloadVolumesResponse()
        raise GRPCError(Status.NOT_FOUND, f"Task {ask.task_id} not found")

    # --- volumes and dicts ---

    def VolumeGetOrCreate(self, ask: Any) -> Any:
        found = [one for one in self.modal.volumes.values() if one.name == ask.deployment_name]
        if not found:
            if ask.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise GRPCError(Status.NOT_FOUND, f"Volume {ask.deployment_name} not found")
            found = [self.modal.add_volume(ask.deployment_name, ask.version or 1)]
        metadata = api_pb2.VolumeMetadata(version=found[0].version, name=found[0].name)
        return api_pb2.VolumeGetOrCreateResponse(volume_id=found[0].id, version=found[0].version, metadata=metadata)

    def VolumePutFiles2(self, ask: Any) -> Any:
        volume, missing = self._volume(ask), []
        blocks: dict[bytes, bytes] = {}
        for number, file in enumerate(ask.files):
            for index, block in enumerate(file.blocks):
                sha = block.contents_sha256.hex()
                if sha in self.modal.data:
                    blocks[block.contents_sha256] = self.modal.data[sha]
                    continue
                url = f"http://127.0.0.1:{self.modal.blocks_port}/block/{sha}"
                missing.append(
                    api_pb2.VolumePutFiles2Response.MissingBlock(file_index=number, block_index=index, put_url=url)
                )
        if missing:
            return api_pb2.VolumePutFiles2Response(missing_blocks=missing)
        with volume.lock:
            if ask.disallow_overwrite_existing_files and any(f.path.strip("/") in volume.files for f in ask.files):
                raise GRPCError(Status.ALREADY_EXISTS, "file already exists")
            for file in ask.files:
                parts = [blocks[block.contents_sha256] for block in file.blocks]
                whole = b"".join(part.ljust(BLOCK, b"\0") for part in parts[:-1]) + (parts[-1] if parts else b"")
                volume.write(file.path, whole.ljust(file.size, b"\0")[: file.size])
        return api_pb2.VolumePutFiles2Response()

    def VolumeGetFile2(self, ask: Any) -> Any:
        volume, path = self._volume(ask), ask.path.strip("/")
        with volume.lock:
            if path not in volume.files:
                raise GRPCError(Status.NOT_FOUND, f"No such file: {path}")
            data = volume.files[path]
        urls = []
        for start in range(0, len(data), BLOCK):
            piece = data[start : start + BLOCK]
            sha = hashlib.sha256(piece).hexdigest()
            self.modal.data[sha] = piece
            urls.append(f"http://127.0.0.1:{self.modal.blocks_port}/block/{sha}")
        return api_pb2.VolumeGetFile2Response(get_urls=urls, size=len(data), start=0, len=len(data))

    def VolumeListFiles2(self, ask: Any) -> Iterator[Any]:
        found = self._volume(ask).under(ask.path, is_recursive=ask.recursive)
        if found is None:
            raise GRPCError(Status.NOT_FOUND, f"No such file or directory: {ask.path}")
        kinds = api_pb2.FileEntry
        entries = [
            kinds(path=path, type=kinds.DIRECTORY if size < 0 else kinds.FILE, size=max(0, size))
            for path, size in found.items()
        ]
        for start in range(0, len(entries), 100):
            yield api_pb2.VolumeListFiles2Response(entries=entries[start : start + 100])

    def VolumeRemoveFile2(self, ask: Any) -> Any:
        volume, path = self._volume(ask), ask.path.strip("/")
        with volume.lock:
            if path not in volume.files:
                raise GRPCError(Status.NOT_FOUND, f"No such file: {path}")
            del volume.files[path]
        return Empty()

    def VolumeCopyFiles2(self, ask: Any) -> Any:
        volume = self._volume(ask)
        with volume.lock:
            for source in ask.src_paths:
                if source.strip("/") not in volume.files:
                    raise GRPCError(Status.NOT_FOUND, f"No such file: {source}")
                volume.write(ask.dst_path, volume.files[source.strip("/")])
        return Empty()

    def DictGetOrCreate(self, ask: Any) -> Any:
        with self.modal.lock:
            self.modal.dicts.setdefault(f"di-{ask.deployment_name}", {})
        return api_pb2.DictGetOrCreateResponse(dict_id=f"di-{ask.deployment_name}")

    def DictUpdate(self, ask: Any) -> Any:
        with self.modal.lock:
            held = self.modal.dicts[ask.dict_id]
            (pair,) = ask.updates
            is_new = pair.key not in held
            if is_new or not ask.if_not_exists:
                held[pair.key] = pair.value
        return api_pb2.DictUpdateResponse(created=is_new)

    def DictGet(self, ask: Any) -> Any:
        value = self.modal.dicts[ask.dict_id].get(ask.key)
        return api_pb2.DictGetResponse(found=value is not None, value=value)

    def DictPop(self, ask: Any) -> Any:
        with self.modal.lock:
            value = self.modal.dicts[ask.dict_id].pop(ask.key, None)
        return api_pb2.DictPopResponse(found=value is not None, value=value)

    # The newer kind asks under other names; what they mean is the same.
    SandboxWaitV2, SandboxTerminateV2, SandboxTagsGetV2 = SandboxWait, SandboxTerminate, SandboxTagsGet
    SandboxGetTaskIdV2, SandboxList = SandboxGetTaskId, SandboxListV2

    def _metadata(self, one: Sandbox) -> Any:
        return api_pb2.SandboxHandleMetadata(app_id=one.app_id)

    def _volume(self, ask: Any) -> Volume:
        if ask.volume_id not in self.modal.volumes:
            raise GRPCError(Status.NOT_FOUND, f"Volume {ask.volume_id} not found")
        return self.modal.volumes[ask.volume_id]


def _new_id(kind: str) -> str:
    return f"{kind}-{uuid4().hex[:22]}"


def _task_id(one: Sandbox) -> str:
    return f"ta-{one.id[3:25]}{'V' if one.is_v2 else 'x'}" if one.started_at is not None else ""


def _tags(pairs: Any) -> dict[str, str]:
    return {pair.tag_name: pair.tag_value for pair in pairs}


# --- the server around it ---


def _answering(base: type, services: Services) -> Any:
    """A servicer on the SDK's own base: each RPC goes to the method of its name, or answers UNIMPLEMENTED."""

    def handler(name: str) -> Any:
        async def handle(self: Any, stream: Any) -> None:
            modal = services.modal
            ask = await stream.recv_message()
            modal.calls.append(name)
            _check_token(modal, stream, name)
            fault = next((one for one in modal.faults if one.method in (name, "*") and one.times > 0), None)
            if fault is not None:
                fault.times -= 1
                if not fault.is_after:
                    raise GRPCError(fault.status, fault.text)
            method = getattr(services, name, None)
            if method is None:
                raise GRPCError(Status.UNIMPLEMENTED, f"the double has no {name}")
            # In a thread: a sandbox that is started or ended must not hold up the others.
            answer = await asyncio.get_running_loop().run_in_executor(None, _whole, method, ask)
            if fault is not None:
                raise GRPCError(fault.status, fault.text)
            for message in answer:
                await stream.send_message(message)

        return handle

    names = [name for name, _ in inspect.getmembers(base, inspect.isfunction) if name[0].isupper()]
    return type(f"Double{base.__name__}", (base,), {name: handler(name) for name in names})()


def _whole(method: Any, ask: Any) -> list[Any]:
    answer = method(ask)
    return list(answer) if inspect.isgenerator(answer) else [answer]


def _check_token(modal: Modal, stream: Any, name: str) -> None:
    if name.startswith("Task") and not name.startswith("TaskGet"):
        return  # by the token that the router's access brought
    metadata = stream.metadata
    if (metadata.get("x-modal-token-id"), metadata.get("x-modal-token-secret")) != (TOKEN_ID, TOKEN_SECRET):
        raise GRPCError(Status.UNAUTHENTICATED, "Token validation failed")


async def _serve(modal: Modal, is_up: threading.Event, is_over: threading.Event) -> None:
    from aiohttp import web

    async def block(request: web.Request) -> web.Response:
        sha = request.match_info["sha"]
        if request.method == "PUT":
            body = await request.read()
            if hashlib.sha256(body).hexdigest() != sha:
                return web.Response(status=400, text="other bytes than were announced")
            modal.data[sha] = body
            return web.Response(body=b"taken")
        return web.Response(body=modal.data[sha])

    application = web.Application(client_max_size=1 << 30)
    application.router.add_route("*", "/block/{sha}", block)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    modal.blocks_port = runner.addresses[0][1]
    services = Services(modal)
    server = grpclib.server.Server([_answering(ModalClientBase, services), _answering(TaskCommandRouterBase, services)])
    await server.start("127.0.0.1", 0)
    modal.port = server._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    is_up.set()
    while not is_over.is_set():
        await asyncio.get_running_loop().run_in_executor(None, modal.tick)
        await asyncio.sleep(_TICK_S)
    server.close()
    await runner.cleanup()


@contextlib.contextmanager
def running(folder: Path, replace: dict[str, str] | None = None) -> Iterator[Modal]:
    """Up, until the block ends; then every sandbox that still lives is ended."""
    modal = Modal(folder, replace or {})
    is_up, is_over = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(modal, is_up, is_over)), daemon=True)
    thread.start()
    assert is_up.wait(20), "the Modal double did not come up"
    try:
        yield modal
    finally:
        for one in list(modal.sandboxes.values()):
            modal._end(one, _Result.GENERIC_STATUS_TERMINATED)
        _hang_up(modal.url)
        is_over.set()
        thread.join(10)


def let_the_sdk_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK tries again as often as ever, without its pauses."""
    import modal._utils.grpc_utils as theirs

    class Hurried:
        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio, name)

        async def sleep(self, seconds: float) -> None:
            await asyncio.sleep(min(seconds, 0.002))

    monkeypatch.setattr(theirs, "asyncio", Hurried())


def _hang_up(url: str) -> None:
    """The SDK closes a client when its process ends, and this server ends before."""
    for key in [key for key in modal_client._CLIENTS if key[0] == url]:
        modal_client._CLIENTS.pop(key)._close()


__all__ = ["TOKEN_ID", "TOKEN_SECRET", "Fault", "Modal", "let_the_sdk_hurry", "running"]
