"""Finds the checkpoints of a run in the store: which are complete, which is the newest, which is the best.

A checkpoint without a manifest does not count, because the manifest is pushed last, after every file that it names has
been read back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass

from homing.cloud.contact.heartbeats import read_document
from homing.errors import IntegrityError
from homing.store import NotInStore, Store, run_key
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Pointer
from homing.wire.codec import WireError

__all__ = ["StoredCheckpoint", "best_step", "damage", "known_hash", "list_checkpoints"]


@dataclass(frozen=True)
class StoredCheckpoint:
    run_id: str
    manifest: CheckpointManifest
    text: bytes  # the text of the manifest as stored
    problem: str = ""  # why the manifest cannot be trusted; in that case it names no files

    @property
    def folder(self) -> str:
        """The path of the checkpoint inside the run directory."""
        return "/".join((file_names.CHECKPOINTS, self.manifest.phase, file_names.step_dir(self.manifest.step)))

    def key(self, name: str) -> str:
        return run_key(self.run_id, self.folder, name)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files)


def list_checkpoints(store: Store, run_id: str, phases: list[str]) -> list[StoredCheckpoint]:
    """Return the checkpoints, newest first: by phase order in the run, then by step.

    A damaged manifest does not hide the others.
    """
    prefix = run_key(run_id, file_names.CHECKPOINTS) + "/"
    found = []
    for entry in store.list(prefix):
        parts = entry.key[len(prefix) :].split("/")
        if len(parts) == 3 and parts[2] == file_names.MANIFEST and file_names.parse_step(parts[1]) is not None:
            with contextlib.suppress(NotInStore):  # retention may have deleted it between the list and the read
                found.append(_load(store, run_id, entry.key))
    order = {phase: number for number, phase in enumerate(phases)}
    return sorted(found, key=lambda c: (order.get(c.manifest.phase, -1), c.manifest.step), reverse=True)


def best_step(store: Store, run_id: str, phase: str) -> int | None:
    pointer = read_document(store, run_key(run_id, file_names.CHECKPOINTS, phase, file_names.BEST), Pointer)
    return pointer.step if pointer is not None else None


def known_hash(store: Store, key: str) -> str | None:
    """Return the sha256 that a key must have: an object's from its name, a file's from its manifest."""
    folder, _, name = key.rpartition("/")
    if folder == file_names.STORE_OBJECTS and re.fullmatch(r"[0-9a-f]{64}", name):
        return name
    if not folder or name == file_names.MANIFEST:
        return None
    try:
        manifest = codec.loads(CheckpointManifest, store.read(f"{folder}/{file_names.MANIFEST}"))
    except (NotInStore, WireError):
        return None
    return next((file.sha256 for file in manifest.files if file.name == name), None)


def damage(store: Store, checkpoint: StoredCheckpoint) -> str:
    """Return the first file that does not match the manifest, with the reason, or "" if the checkpoint is intact."""
    if checkpoint.problem:
        return checkpoint.problem
    for file in checkpoint.manifest.files:
        try:
            digest = store.sha256(checkpoint.key(file.name))
        except NotInStore:
            return f"{file.name} is missing"
        if digest != file.sha256:
            return f"{file.name} has sha256 {digest[:12]}, its manifest says {file.sha256[:12]}"
    return ""


def _load(store: Store, run_id: str, key: str) -> StoredCheckpoint:
    text = store.read(key)
    phase, step = key.split("/")[-3], file_names.parse_step(key.split("/")[-2]) or 0
    unknown = CheckpointManifest("", run_id, phase, step, 0, False, "", 0, [])
    try:
        manifest = codec.loads(CheckpointManifest, text)
    except WireError as exc:
        return StoredCheckpoint(run_id, unknown, text, f"its manifest cannot be read ({exc})")
    seal = manifest.sha256.encode()
    if seal and hashlib.sha256(text.replace(seal, b"", 1)).hexdigest() != manifest.sha256:
        return StoredCheckpoint(run_id, unknown, text, "its manifest does not match the sha256 recorded in it")
    if not seal and (strange_keys := _unknown_keys(text)):
        # Without this check, a single corrupted character in the name of the hash field would disable verification.
        return StoredCheckpoint(run_id, unknown, text, f"its manifest has no sha256, but {strange_keys[0]!r}")
    if (manifest.phase, manifest.step) != (phase, step):
        return StoredCheckpoint(run_id, unknown, text, f"its manifest belongs to {manifest.phase} {manifest.step}")
    strange = [file.name for file in manifest.files if not re.fullmatch(r"[\w-][\w.-]*", file.name)]
    if strange:
        # A name such as ../../.bashrc would be written outside the target folder.
        raise IntegrityError(
            f"{key} lists files that do not belong to a checkpoint.", f"{strange[0]!r}", "Do not use this store."
        )
    if file_names.STATE not in {file.name for file in manifest.files}:
        # The manifest of models/<name>/ has the same step and a hash too, but no run could resume from that folder.
        return StoredCheckpoint(
            run_id, unknown, text, f"its manifest lists no {file_names.STATE}: it belongs to a model"
        )
    return StoredCheckpoint(run_id, manifest, text)


def _unknown_keys(text: bytes) -> list[str]:
    known = {field.name for field in dataclasses.fields(CheckpointManifest)} | {"schema"}
    return sorted(set(json.loads(text)) - known)
