"""Checkpoints of a run as they lie in the store: which are whole, which is newest, which is best.

One without its manifest is none: the manifest is pushed last, after every file it names was read back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass

from homing.cloud.signs import read_document
from homing.errors import IntegrityError
from homing.store import NotInStore, Store, run_key
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest, Pointer
from homing.wire.codec import WireError

__all__ = ["StoredCheckpoint", "best_step", "damage", "known_hash", "list_checkpoints"]


@dataclass(frozen=True)
class StoredCheckpoint:
    run_id: str
    manifest: CheckpointManifest
    text: bytes  # of the manifest, as stored
    problem: str = ""  # why the manifest itself cannot be trusted; it then names no files

    @property
    def folder(self) -> str:
        """Its place in the run directory."""
        return "/".join((names.CHECKPOINTS, self.manifest.phase, names.step_dir(self.manifest.step)))

    def key(self, name: str) -> str:
        return run_key(self.run_id, self.folder, name)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files)


def list_checkpoints(store: Store, run_id: str, phases: list[str]) -> list[StoredCheckpoint]:
    """Newest first: by the order of phases in the run, then by step. A damaged manifest hides no other checkpoint."""
    prefix = run_key(run_id, names.CHECKPOINTS) + "/"
    found = []
    for entry in store.list(prefix):
        parts = entry.key[len(prefix) :].split("/")
        if len(parts) == 3 and parts[2] == names.MANIFEST and names.parse_step(parts[1]) is not None:
            with contextlib.suppress(NotInStore):  # retention took it between the list and the look
                found.append(_load(store, run_id, entry.key))
    order = {phase: number for number, phase in enumerate(phases)}
    return sorted(found, key=lambda c: (order.get(c.manifest.phase, -1), c.manifest.step), reverse=True)


def best_step(store: Store, run_id: str, phase: str) -> int | None:
    pointer = read_document(store, run_key(run_id, names.CHECKPOINTS, phase, names.BEST), Pointer)
    return pointer.step if pointer is not None else None


def known_hash(store: Store, key: str) -> str | None:
    """What the store itself promises of a key: an object by its name, a file by the manifest beside it."""
    folder, _, name = key.rpartition("/")
    if folder == names.STORE_OBJECTS and re.fullmatch(r"[0-9a-f]{64}", name):
        return name
    if not folder or name == names.MANIFEST:
        return None
    try:
        manifest = codec.loads(CheckpointManifest, store.read(f"{folder}/{names.MANIFEST}"))
    except (NotInStore, WireError):
        return None
    return next((file.sha256 for file in manifest.files if file.name == name), None)


def damage(store: Store, checkpoint: StoredCheckpoint) -> str:
    """The first file whose bytes in the store are not those of the manifest; "" when it is whole."""
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
    phase, step = key.split("/")[-3], names.parse_step(key.split("/")[-2]) or 0
    unknown = CheckpointManifest("", run_id, phase, step, 0, False, "", 0, [])
    try:
        manifest = codec.loads(CheckpointManifest, text)
    except WireError as exc:
        return StoredCheckpoint(run_id, unknown, text, f"its manifest cannot be read ({exc})")
    seal = manifest.sha256.encode()
    if seal and hashlib.sha256(text.replace(seal, b"", 1)).hexdigest() != manifest.sha256:
        return StoredCheckpoint(run_id, unknown, text, "its manifest has not the sha256 that is written in it")
    if not seal and (strange_keys := _unknown_keys(text)):
        # One flipped letter in the name of the seal would otherwise take the seal away.
        return StoredCheckpoint(run_id, unknown, text, f"its manifest has no sha256, but {strange_keys[0]!r}")
    if (manifest.phase, manifest.step) != (phase, step):
        return StoredCheckpoint(run_id, unknown, text, f"its manifest is that of {manifest.phase} {manifest.step}")
    strange = [file.name for file in manifest.files if not re.fullmatch(r"[\w-][\w.-]*", file.name)]
    if strange:
        # A name such as ../../.bashrc would be written outside of the folder that it is fetched into.
        raise IntegrityError(f"{key} names files that no checkpoint has.", f"{strange[0]!r}", "Do not use this store.")
    if names.STATE not in {file.name for file in manifest.files}:
        # That of models/<name>/ has the same step and is sealed too; nothing could be resumed by it.
        return StoredCheckpoint(run_id, unknown, text, f"its manifest lists no {names.STATE}: it is that of a model")
    return StoredCheckpoint(run_id, manifest, text)


def _unknown_keys(text: bytes) -> list[str]:
    known = {field.name for field in dataclasses.fields(CheckpointManifest)} | {"schema"}
    return sorted(set(json.loads(text)) - known)
