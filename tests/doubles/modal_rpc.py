"""The RPCs of the Modal double that the SDK asks for; what is not here answers UNIMPLEMENTED."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2, task_command_router_pb2
from tests.doubles.modal_cloud import GPU_USD, Modal, Sandbox, new_id, tags_of, task_id_of
from tests.doubles.modal_volumes import BLOCK, Volume

_Result = api_pb2.GenericResult


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
        return api_pb2.WorkspaceNameLookupResponse(workspace_name=self.modal.name, username=self.modal.name)

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
            apps[ask.app_name] = new_id("ap")
        return api_pb2.AppGetOrCreateResponse(app_id=apps[ask.app_name])

    # --- what a sandbox is made of ---

    def ImageGetOrCreate(self, ask: Any) -> Any:
        if self.modal.build_problem:
            failed = _Result(status=_Result.GENERIC_STATUS_FAILURE, exception=self.modal.build_problem)
            return api_pb2.ImageGetOrCreateResponse(image_id=new_id("im"), result=failed)
        commands = [*ask.image.dockerfile_commands, *(file.data.decode() for file in ask.image.context_files)]
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
        mount_id = new_id("mo")
        self.modal.mounts[mount_id] = [(file.filename, file.sha256_hex) for file in ask.files]
        return api_pb2.MountGetOrCreateResponse(mount_id=mount_id)

    def SecretGetOrCreate(self, ask: Any) -> Any:
        secret_id = new_id("st")
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
        task_id = task_id_of(one)
        return api_pb2.SandboxCreateV2Response(sandbox_id=one.id, task_id=task_id, metadata=self._metadata(one))

    def SandboxGetTaskId(self, ask: Any) -> Any:
        one = self.modal.find(ask.sandbox_id)
        if one.started_at is None:
            time.sleep(0.05)
            return api_pb2.SandboxGetTaskIdResponse(task_result=one.result)
        return api_pb2.SandboxGetTaskIdResponse(task_id=task_id_of(one))

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
        wanted, before = tags_of(ask.tags), ask.before_timestamp or float("inf")
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
            if task_id_of(one) == ask.task_id and one.box is not None:
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
            if task_id_of(one) == ask.task_id and one.box is not None and one.is_running:
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
