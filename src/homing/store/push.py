"""Pushes the run directory to the store in an order that never makes incomplete data look complete.

    live files       run.json, metrics, events, heartbeat, logs, samples, outcome: pushed again whenever they change
    checkpoints      newest first: the content, which is read back and compared, then manifest.json, latest and best
    retention        also deletes from the store what the trainer deleted, once a newer checkpoint is verified
    models/<name>/   weights of a finished run and everything needed to use them; never replaces another run's model

Files that the user's computer writes to the store (request.json, record.json) are never pushed back.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from homing.errors import IntegrityError, StoreError
from homing.store.base import Entry, NotInStore, Store, is_temporary_file, run_key
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, FileHash, Pointer
from homing.wire.codec import WireError, record
from homing.wire.event_lines import Event, Outcome
from homing.world import World

__all__ = ["Pushed", "Pusher"]

_NOT_OURS = (file_names.REQUEST, file_names.RECORD, file_names.USE)
_RESUME_ONLY = (file_names.OPTIMIZER, file_names.STATE)  # checkpoint files that are not pushed to models/<name>/

Step = tuple[str, int]  # phase, step
Stamp = tuple[int, float]  # a file's size and modification time, which show whether it has changed
T = TypeVar("T")


@record("pushed", 1)
@dataclass(frozen=True)
class Pushed:
    """The content of pushed.json in the run directory: the newest checkpoint that was verified in the store."""

    t: float
    phase: str = ""
    step: int | None = None
    problem: str = ""


@dataclass
class Pusher:
    run_dir: str
    run_id: str
    run_name: str
    store: Store
    world: World
    _pushed_as: dict[str, Stamp] = field(default_factory=dict)  # state of each file in use at its last push
    # Each verified checkpoint, with the stamp of its manifest. A new stamp shows that the run resumed from an older
    # checkpoint and saved the same step again.
    _verified: dict[Step, Stamp] = field(default_factory=dict)
    # checkpoints with a file that does not match the local manifest
    _damaged: dict[Step, Stamp] = field(default_factory=dict)
    # the checkpoints that existed locally when `mirror_retention` last ran
    _mirrored: list[Step] = field(default_factory=list)
    _phases: list[str] = field(default_factory=list)
    _reported: Pushed | None = None
    _live_at: float = float("-inf")  # when live files were last pushed

    # --- complete passes ---

    def push_changes(self, *, is_settled: bool = True) -> None:
        """Push everything that has changed since the last pass; used by --watch.

        If `is_settled` is false, checkpoints are still being fetched, so a checkpoint that is missing locally must not
        be deleted from the store.
        """
        self.push_live()
        self.push_checkpoints()
        self.push_pointers()
        if is_settled:
            self.mirror_retention()

    def push_everything(self, *, is_settled: bool = True) -> None:
        """Push everything and read it back; used by --once. Raise StoreError if a checkpoint is not in the store."""
        self._verified.clear()
        self._damaged.clear()
        self.push_checkpoints()
        self.push_pointers()
        self.push_model()
        if is_settled:
            self.mirror_retention()
        self._pushed_as.clear()  # push all live files again, because earlier pushes were not read back
        self.push_live(is_verified=True)
        # Report damaged checkpoints as missing only if no checkpoint is intact.
        missing = [step for step in self.local_steps() if step not in self._verified and step not in self._damaged]
        if missing or (self._damaged and not self._verified):
            lost = ", ".join(f"{phase} step {step}" for phase, step in missing or self._damaged)
            raise StoreError(
                what=f"Not every checkpoint is in {self.store.url}.",
                why=f"Missing: {lost}.",
                fix="Push again; the run directory still contains them.",
            )

    # --- live files ---

    def push_live(self, is_verified: bool = False) -> None:
        """Push changed live files, the heartbeat last.

        This order ensures that the store already contains everything that a new heartbeat reports when it arrives.
        """
        self._live_at = self.world.monotonic()
        found = [name for name in self._walk() if not name.startswith(f"{file_names.CHECKPOINTS}/")]
        self._push_files(sorted(found, key=lambda name: (name == file_names.HEARTBEAT, name)), is_verified)

    def _push_live_between(self) -> None:
        """Push live files during a long push, to keep the heartbeat current, but at most once per `store.pace_s`."""
        if self.world.monotonic() - self._live_at >= self.store.pace_s:
            self.push_live()

    def push_pointers(self) -> None:
        """Push latest.json and best.json once the checkpoints they point to are complete in the store."""
        ready = []
        for name in self._walk():
            parts = name.split("/")
            if (
                len(parts) == 3
                and parts[0] == file_names.CHECKPOINTS
                and parts[2] in (file_names.LATEST, file_names.BEST)
            ):
                pointer = self._load_local(Pointer, name)
                if pointer is not None and (parts[1], pointer.step) in self._verified:
                    ready.append(name)
        self._push_files(ready, is_verified=True)

    def _push_files(self, found: list[str], is_verified: bool) -> None:
        """Push the files that changed, in as few writes as the store allows."""
        stamps = {name: self._stamp(name) for name in found}
        changed = [name for name in found if stamps[name] not in (None, self._pushed_as.get(name))]
        for batch in _batches(changed, self.store.batch_files):
            for name, entry in self._put_those_there(batch):
                # Record the stamp from before the push, because logs and heartbeats may change during the push.
                if is_verified and self.store.sha256(entry.key) != entry.sha256:
                    raise _read_back_differs(entry.key, self.store)
                stamp = stamps[name]
                assert stamp is not None, "only the files that exist were pushed"
                self._pushed_as[name] = stamp

    def _put_those_there(self, batch: list[str]) -> list[tuple[str, Entry]]:
        """Push a batch of files, skipping those that have been deleted or renamed in the meantime."""
        try:
            entries = self.store.put_many([(run_key(self.run_id, name), self._path(name)) for name in batch])
        except StoreError:
            left = [name for name in batch if self.world.exists(self._path(name))]
            if len(left) == len(batch):
                raise
            return self._put_those_there(left) if left else []
        return list(zip(batch, entries, strict=True))

    # --- checkpoints ---

    def local_steps(self) -> list[Step]:
        """Return the local checkpoints that have a manifest, oldest first. The manifest completes a checkpoint."""
        return self._ordered(
            (parts[1], step)
            for parts in (name.split("/") for name in self._walk())
            if len(parts) == 4 and parts[0] == file_names.CHECKPOINTS and parts[3] == file_names.MANIFEST
            for step in [file_names.parse_step(parts[2])]
            if step is not None
        )

    def push_checkpoints(self) -> None:
        """Push checkpoints, newest first, because after an outage the newest one matters most."""
        for phase, step in reversed(self.local_steps()):
            stamp = self._stamp(f"{_folder(phase, step)}/{file_names.MANIFEST}")
            if stamp is None or stamp in (self._verified.get((phase, step)), self._damaged.get((phase, step))):
                continue
            try:
                if self._push_checkpoint(phase, step):
                    self._verified[(phase, step)] = stamp
            except IntegrityError as exc:
                # Do not retry: another push cannot repair a damaged checkpoint, and the others must still be pushed.
                self._damaged[(phase, step)] = stamp
                self.event("checkpoint_damaged", f"{exc.what} {exc.why}", phase, step)
        self._report()

    def _push_checkpoint(self, phase: str, step: int) -> bool:
        """Push a checkpoint and verify it in the store. Return False if it was deleted locally in the meantime."""
        folder, begun = _folder(phase, step), self.world.monotonic()
        manifest_key = run_key(self.run_id, folder, file_names.MANIFEST)
        try:
            text = self.world.read(self._path(f"{folder}/{file_names.MANIFEST}"))
            manifest = codec.loads(CheckpointManifest, text)
        except OSError:
            return False
        except WireError as exc:
            raise IntegrityError(f"The manifest of {folder} cannot be read.", str(exc)) from exc
        was_there = self._read_or_none(manifest_key)
        if was_there not in (None, text):
            # The run resumed from an older checkpoint and saved this step again. Delete the old manifest first, so that
            # the old checkpoint does not count as complete while its content is being replaced.
            self.store.delete(manifest_key)
        for batch in _batches(manifest.files, self.store.batch_files):
            if not self._push_parts(folder, batch):
                return False
            self._push_live_between()
        if was_there == text:
            return True  # the checkpoint was pushed earlier, and has now been verified again
        self.store.put_bytes(manifest_key, text)
        if self.store.read(manifest_key) != text:
            raise _read_back_differs(manifest_key, self.store)
        num_bytes = sum(file.num_bytes for file in manifest.files)
        # the agent uses `seconds` to decide how much time to reserve for the last push
        reported = {"num_bytes": num_bytes, "seconds": self.world.monotonic() - begun}
        self.event(
            "checkpoint_pushed", f"{folder} is in the store: {num_bytes:,} bytes verified.", phase, step, **reported
        )
        return True

    def _push_parts(self, folder: str, files: list[FileHash]) -> bool:
        """Push some of a checkpoint's files and verify them; return False if the local checkpoint has been deleted."""
        keys = {file.name: run_key(self.run_id, folder, file.name) for file in files}
        missing = [file for file in files if not self._is_there(keys[file.name], file)]
        if not missing:
            return True
        paths = {file.name: self._path(f"{folder}/{file.name}") for file in missing}
        try:
            entries = self.store.put_many([(keys[file.name], paths[file.name]) for file in missing])
        except StoreError:
            if not self.world.exists(self._path(f"{folder}/{file_names.MANIFEST}")):
                return False
            lost = [name for name, path in paths.items() if not self.world.exists(path)]
            if lost:
                why = f"The manifest of {folder} lists it."
                raise IntegrityError(f"{lost[0]} is missing from its checkpoint.", why) from None
            raise
        for file, entry in zip(missing, entries, strict=True):
            if entry.sha256 != file.sha256:
                self.store.delete(entry.key)
                raise IntegrityError(
                    what=f"{folder}/{file.name} is corrupt on this computer.",
                    why=f"Its sha256 is {entry.sha256}, but the manifest says {file.sha256}.",
                )
            if self.store.sha256(entry.key) != file.sha256:
                raise _read_back_differs(entry.key, self.store)
        return True

    def _is_there(self, key: str, file: FileHash) -> bool:
        try:
            return self.store.exists(key) and self.store.sha256(key) == file.sha256
        except NotInStore:
            return False

    # --- retention ---

    def mirror_retention(self) -> None:
        """Delete checkpoints in the store that no longer exist locally.

        Delete only checkpoints that are older than a verified one, and never one that latest.json or best.json names.
        """
        local = self.local_steps()
        if local == self._mirrored or not self._verified:
            return
        in_store: dict[Step, list[str]] = {}
        kept: set[Step] = set()
        for entry in self.store.list(run_key(self.run_id, file_names.CHECKPOINTS) + "/"):
            parts = entry.key.split("/")[2:]
            step = file_names.parse_step(parts[2]) if len(parts) >= 4 else None
            if step is not None:
                in_store.setdefault((parts[1], step), []).append(entry.key)
            elif len(parts) == 3:
                kept.add((parts[1], _pointed_at(entry.key, self.store)))
        newest = self._order(self._ordered(self._verified)[-1])
        here = {tuple(name.split("/")[1:3]) for name in self._walk() if name.startswith(f"{file_names.CHECKPOINTS}/")}
        for phase, step in self._ordered(in_store):
            if (
                self._order((phase, step)) < newest
                and (phase, step) not in kept
                and (phase, file_names.step_dir(step)) not in here
            ):
                # Delete the manifest first: if the deletion is interrupted, the files left without a manifest do not
                # count as a checkpoint.
                keys = sorted(in_store[(phase, step)], key=lambda key: not key.endswith(f"/{file_names.MANIFEST}"))
                self.store.delete_many(keys)
                self._verified.pop((phase, step), None)
        self._mirrored = local

    # --- the final model ---

    def push_model(self) -> None:
        """If the run is done or stopped, push its newest complete checkpoint to models/<name>/.

        Leave out the state that is needed only for resuming.
        """
        outcome = self._load_local(Outcome, file_names.OUTCOME)
        steps = [step for step in self.local_steps() if step in self._verified]
        if outcome is None or outcome.state not in ("done", "stopped") or not steps:
            return
        folder = _folder(*steps[-1])
        whole = codec.loads(CheckpointManifest, self.world.read(self._path(f"{folder}/{file_names.MANIFEST}")))
        files = [file for file in whole.files if file.name not in _RESUME_ONLY]
        text = _sealed(dataclasses.replace(whole, files=files, run_id=self.run_id, run_name=self.run_name))
        prefix = self._model_prefix()
        manifest_key = f"{prefix}/{file_names.MANIFEST}"
        was_there = self._read_or_none(manifest_key)
        if was_there != text:
            self.store.delete(manifest_key)
        wanted = {f"{prefix}/{file.name}" for file in files} | {manifest_key}
        self.store.delete_many([entry.key for entry in self.store.list(f"{prefix}/") if entry.key not in wanted])
        for file in files:
            key = f"{prefix}/{file.name}"
            if not self._is_there(key, file):
                self.store.put(key, self._path(f"{folder}/{file.name}"))
                if self.store.sha256(key) != file.sha256:
                    raise _read_back_differs(key, self.store)
        self.store.put_bytes(manifest_key, text)
        if self.store.sha256(manifest_key) != hashlib.sha256(text).hexdigest():
            raise _read_back_differs(manifest_key, self.store)
        if was_there != text:
            self.event("model_pushed", f"The model is at {prefix}/ in {self.store.url}.", *steps[-1])

    def _model_prefix(self) -> str:
        """Return models/<name>, or models/<run id> if models/<name> contains the model of another run."""
        named = f"{file_names.STORE_MODELS}/{self.run_name}"
        text = self._read_or_none(f"{named}/{file_names.MANIFEST}")
        if text is None:
            return named  # the folder is empty, or contains the remains of a push that never wrote its manifest
        try:
            is_ours = codec.loads(CheckpointManifest, text).run_id == self.run_id
        except WireError:
            is_ours = False
        return named if is_ours else f"{file_names.STORE_MODELS}/{self.run_id}"

    # --- reporting ---

    def event(self, kind: str, text: str, phase: str = "", step: int | None = None, **data: float | str) -> None:
        line = Event(t=self.world.now(), source="sync", kind=kind, text=text, phase=phase, step=step, data=data)
        self.world.append(self._path(file_names.EVENTS), (codec.dumps(line) + "\n").encode())

    def report_problem(self, problem: str) -> None:
        self._report(problem)

    def _report(self, problem: str = "") -> None:
        verified = self._ordered(self._verified)
        phase, step = verified[-1] if verified else ("", None)
        reported = self._reported
        if reported is None or (reported.phase, reported.step, reported.problem) != (phase, step, problem):
            self._reported = Pushed(t=self.world.now(), phase=phase, step=step, problem=problem)
            self.world.write(self._path(file_names.PUSHED), codec.dumps(self._reported).encode())

    # --- helpers ---

    def _walk(self) -> list[str]:
        """Return the files to push. Hidden files are skipped, because they are locks and unfinished checkpoints."""
        found = [name for name in self.world.walk(self.run_dir) if "/." not in f"/{name}" and ".tmp" not in name]
        return [name for name in found if name not in _NOT_OURS and not is_temporary_file(name)]

    def _path(self, name: str) -> str:
        return os.path.join(self.run_dir, name)

    def _stamp(self, name: str) -> Stamp | None:
        """Return a file's size and modification time, or None if the file has been removed or renamed."""
        try:
            return self.world.size(self._path(name)), self.world.modified_at(self._path(name))
        except OSError:
            return None

    def _ordered(self, steps: Iterable[Step]) -> list[Step]:
        return sorted(steps, key=self._order)

    def _order(self, step: Step) -> tuple[int, str, int]:
        """Return a sort key that orders checkpoints by their phase's position in the run, then by step."""
        if not self._phases and self.world.exists(self._path(file_names.RUN)):
            try:
                self._phases = [
                    phase["kind"] for phase in json.loads(self.world.read(self._path(file_names.RUN)))["phases"]
                ]
            except (ValueError, KeyError, TypeError) as exc:
                raise StoreError(f"{file_names.RUN} cannot be read.", str(exc), "Fetch the inputs again.") from exc
        return (self._phases.index(step[0]) if step[0] in self._phases else -1, step[0], step[1])

    def _load_local(self, cls: type[T], name: str) -> T | None:
        try:
            return codec.loads(cls, self.world.read(self._path(name)))
        except (OSError, WireError):
            return None

    def _read_or_none(self, key: str) -> bytes | None:
        try:
            return self.store.read(key)
        except NotInStore:
            return None


def _batches(items: list[T], size: int) -> Iterable[list[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _folder(phase: str, step: int) -> str:
    return f"{file_names.CHECKPOINTS}/{phase}/{file_names.step_dir(step)}"


def _sealed(manifest: CheckpointManifest) -> bytes:
    """Return the manifest as bytes. Its sha256 field contains the hash of the manifest with that field empty."""
    empty = codec.dumps(dataclasses.replace(manifest, sha256=""), indent=1).encode()
    return codec.dumps(dataclasses.replace(manifest, sha256=hashlib.sha256(empty).hexdigest()), indent=1).encode()


def _pointed_at(key: str, store: Store) -> int:
    try:
        return codec.loads(Pointer, store.read(key)).step
    except WireError as exc:
        raise StoreError(
            f"{key} in {store.url} cannot be read.", str(exc), "Replace it. Until then, no checkpoint is deleted."
        ) from exc


def _read_back_differs(key: str, store: Store) -> StoreError:
    return StoreError(
        what=f"{key} in {store.url} differs from what was pushed.",
        why="The store lost or changed the content, or another process is writing to the same run.",
        fix="Push again; if this persists, use another store.",
    )
