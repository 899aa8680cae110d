"""The run directory to the store, in an order in which nothing there ever looks whole and is not.

    live files       run.json, metrics, events, heartbeat, logs, samples, outcome: each again when it changed
    checkpoints      newest first; content, read back and compared, then its manifest.json, then latest and best
    retention        what the trainer dropped is dropped here too, but only behind a newer verified checkpoint
    models/<name>/   the weights of a run that ended, with all that using them needs; another run's are never replaced

Files that came from the store or belong to home (request.json, record.json) are never pushed back.
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
from homing.store.base import Entry, NotInStore, Store, is_aside, run_key
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest, FileHash, Pointer
from homing.wire.codec import WireError, record
from homing.wire.event import Event, Outcome
from homing.world import World

__all__ = ["Pushed", "Pusher"]

_NOT_OURS = (names.REQUEST, names.RECORD, names.USE)
_RESUME_ONLY = (names.OPTIMIZER, names.STATE)  # what models/<name>/ leaves out

Step = tuple[str, int]  # phase, step
Stamp = tuple[int, float]  # size and time of a file: whether it is the one that we saw before
T = TypeVar("T")


@record("pushed", 1)
@dataclass(frozen=True)
class Pushed:
    """pushed.json in the run directory: the newest checkpoint that was verified in the store."""

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
    _pushed_as: dict[str, Stamp] = field(default_factory=dict)  # live files as they were when pushed
    # By the stamp of their manifest: after going back to an older checkpoint, the same step may be saved again.
    _verified: dict[Step, Stamp] = field(default_factory=dict)
    _damaged: dict[Step, Stamp] = field(default_factory=dict)  # a hash here does not match the manifest here
    _mirrored: list[Step] = field(default_factory=list)  # the checkpoints here when retention was last mirrored
    _phases: list[str] = field(default_factory=list)
    _told: Pushed | None = None
    _live_at: float = float("-inf")  # when live files were last pushed

    # --- whole passes ---

    def push_changes(self, *, is_settled: bool = True) -> None:
        """One pass of --watch: everything that is new since the last.

        Not `is_settled`: checkpoints are still being fetched, so one that is not here was not dropped here.
        """
        self.push_live()
        self.push_checkpoints()
        self.push_pointers()
        if is_settled:
            self.mirror_retention()

    def push_everything(self, *, is_settled: bool = True) -> None:
        """One pass of --once: everything, read back; raises unless all that is worth keeping is in the store."""
        self._verified.clear()
        self._damaged.clear()
        self.push_checkpoints()
        self.push_pointers()
        self.push_model()
        if is_settled:
            self.mirror_retention()
        self._pushed_as.clear()  # also what went up beside the checkpoints: it was not read back
        self.push_live(is_verified=True)
        # A damaged checkpoint is none; it is a loss only where no whole one is left beside it.
        missing = [step for step in self.local_steps() if step not in self._verified and step not in self._damaged]
        if missing or (self._damaged and not self._verified):
            lost = ", ".join(f"{phase} step {step}" for phase, step in missing or self._damaged)
            raise StoreError(
                what=f"Not every checkpoint is in {self.store.url}.",
                why=f"Missing: {lost}.",
                fix="Push again; the run directory still has them.",
            )

    # --- live files ---

    def push_live(self, is_verified: bool = False) -> None:
        """The heartbeat goes last: where it is new, all that it tells of is there too."""
        self._live_at = self.world.monotonic()
        found = [name for name in self._walk() if not name.startswith(f"{names.CHECKPOINTS}/")]
        self._push_files(sorted(found, key=lambda name: (name == names.HEARTBEAT, name)), is_verified)

    def _push_live_between(self) -> None:
        """A long push must not hide the heartbeat, nor a store that counts writes be flooded by it."""
        if self.world.monotonic() - self._live_at >= self.store.pace_s:
            self.push_live()

    def push_pointers(self) -> None:
        """latest.json and best.json, once the checkpoint that they name is whole in the store."""
        ready = []
        for name in self._walk():
            parts = name.split("/")
            if len(parts) == 3 and parts[0] == names.CHECKPOINTS and parts[2] in (names.LATEST, names.BEST):
                pointer = self._load_local(Pointer, name)
                if pointer is not None and (parts[1], pointer.step) in self._verified:
                    ready.append(name)
        self._push_files(ready, is_verified=True)

    def _push_files(self, found: list[str], is_verified: bool) -> None:
        """Those that changed, as many in one write as the store takes."""
        stamps = {name: self._stamp(name) for name in found}
        changed = [name for name in found if stamps[name] not in (None, self._pushed_as.get(name))]
        for batch in _batches(changed, self.store.batch_files):
            for name, entry in self._put_those_there(batch):
                # Compared with the bytes that were read, not with the file: logs and heartbeats go on growing.
                if is_verified and self.store.sha256(entry.key) != entry.sha256:
                    raise _read_back_differs(entry.key, self.store)
                stamp = stamps[name]
                assert stamp is not None, "only what is there was pushed"
                self._pushed_as[name] = stamp

    def _put_those_there(self, batch: list[str]) -> list[tuple[str, Entry]]:
        """Left out are files that vanished since they were seen: removed, or renamed."""
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
        """Whole checkpoints here, oldest first: those with a manifest, which is written last."""
        return self._ordered(
            (parts[1], step)
            for parts in (name.split("/") for name in self._walk())
            if len(parts) == 4 and parts[0] == names.CHECKPOINTS and parts[3] == names.MANIFEST
            for step in [names.parse_step(parts[2])]
            if step is not None
        )

    def push_checkpoints(self) -> None:
        """Newest first: after an outage that is the one that must not be lost."""
        for phase, step in reversed(self.local_steps()):
            stamp = self._stamp(f"{_folder(phase, step)}/{names.MANIFEST}")
            if stamp is None or stamp in (self._verified.get((phase, step)), self._damaged.get((phase, step))):
                continue
            try:
                if self._push_checkpoint(phase, step):
                    self._verified[(phase, step)] = stamp
            except IntegrityError as exc:
                # Pushing it again cannot mend it, and the others must still go.
                self._damaged[(phase, step)] = stamp
                self.event("checkpoint_damaged", f"{exc.what} {exc.why}", phase, step)
        self._tell()

    def _push_checkpoint(self, phase: str, step: int) -> bool:
        """True when it is whole and verified in the store; False when retention took it here meanwhile."""
        folder, begun = _folder(phase, step), self.world.monotonic()
        manifest_key = run_key(self.run_id, folder, names.MANIFEST)
        try:
            text = self.world.read(self._path(f"{folder}/{names.MANIFEST}"))
            manifest = codec.loads(CheckpointManifest, text)
        except OSError:
            return False
        except WireError as exc:
            raise IntegrityError(f"{folder} has a manifest that cannot be read.", str(exc)) from exc
        was_there = self._read_or_none(manifest_key)
        if was_there not in (None, text):
            # The same step saved again, after going back to an older one: while its content changes it is none.
            self.store.delete(manifest_key)
        for batch in _batches(manifest.files, self.store.batch_files):
            if not self._push_parts(folder, batch):
                return False
            self._push_live_between()
        if was_there == text:
            return True  # pushed before us, and just now verified again
        self.store.put_bytes(manifest_key, text)
        if self.store.read(manifest_key) != text:
            raise _read_back_differs(manifest_key, self.store)
        num_bytes = sum(file.num_bytes for file in manifest.files)
        told = {"num_bytes": num_bytes, "seconds": self.world.monotonic() - begun}  # the agent keeps time back by it
        self.event("checkpoint_pushed", f"{folder} is in the store, {num_bytes:,} bytes verified.", phase, step, **told)
        return True

    def _push_parts(self, folder: str, files: list[FileHash]) -> bool:
        """Files of a checkpoint, verified in the store; False when they are gone here."""
        keys = {file.name: run_key(self.run_id, folder, file.name) for file in files}
        missing = [file for file in files if not self._is_there(keys[file.name], file)]
        if not missing:
            return True
        paths = {file.name: self._path(f"{folder}/{file.name}") for file in missing}
        try:
            entries = self.store.put_many([(keys[file.name], paths[file.name]) for file in missing])
        except StoreError:
            if not self.world.exists(self._path(f"{folder}/{names.MANIFEST}")):
                return False
            lost = [name for name, path in paths.items() if not self.world.exists(path)]
            if lost:
                raise IntegrityError(f"{lost[0]} is missing from its checkpoint.", f"{folder} lists it.") from None
            raise
        for file, entry in zip(missing, entries, strict=True):
            if entry.sha256 != file.sha256:
                self.store.delete(entry.key)
                raise IntegrityError(
                    what=f"{folder}/{file.name} is damaged on this machine.",
                    why=f"Its sha256 is {entry.sha256}, the manifest says {file.sha256}.",
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
        """Deletes a checkpoint that is gone here, if a newer one is verified there and no pointer there names it."""
        local = self.local_steps()
        if local == self._mirrored or not self._verified:
            return
        in_store: dict[Step, list[str]] = {}
        kept: set[Step] = set()
        for entry in self.store.list(run_key(self.run_id, names.CHECKPOINTS) + "/"):
            parts = entry.key.split("/")[2:]
            step = names.parse_step(parts[2]) if len(parts) >= 4 else None
            if step is not None:
                in_store.setdefault((parts[1], step), []).append(entry.key)
            elif len(parts) == 3:
                kept.add((parts[1], _pointed_at(entry.key, self.store)))
        newest = self._order(self._ordered(self._verified)[-1])
        here = {tuple(name.split("/")[1:3]) for name in self._walk() if name.startswith(f"{names.CHECKPOINTS}/")}
        for phase, step in self._ordered(in_store):
            if (
                self._order((phase, step)) < newest
                and (phase, step) not in kept
                and (phase, names.step_dir(step)) not in here
            ):
                # Its manifest first: from then on it is no checkpoint, however far the rest gets.
                keys = sorted(in_store[(phase, step)], key=lambda key: not key.endswith(f"/{names.MANIFEST}"))
                self.store.delete_many(keys)
                self._verified.pop((phase, step), None)
        self._mirrored = local

    # --- what a run leaves behind ---

    def push_model(self) -> None:
        """models/<name>/: the newest whole checkpoint of a run that is done or was stopped, without resume state."""
        outcome = self._load_local(Outcome, names.OUTCOME)
        steps = [step for step in self.local_steps() if step in self._verified]
        if outcome is None or outcome.state not in ("done", "stopped") or not steps:
            return
        folder = _folder(*steps[-1])
        whole = codec.loads(CheckpointManifest, self.world.read(self._path(f"{folder}/{names.MANIFEST}")))
        files = [file for file in whole.files if file.name not in _RESUME_ONLY]
        text = _sealed(dataclasses.replace(whole, files=files, run_id=self.run_id, run_name=self.run_name))
        prefix = self._model_prefix()
        manifest_key = f"{prefix}/{names.MANIFEST}"
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
        """models/<name>, or models/<run id> where another run's model has the name: what is there is never replaced."""
        named = f"{names.STORE_MODELS}/{self.run_name}"
        text = self._read_or_none(f"{named}/{names.MANIFEST}")
        if text is None:
            return named  # nothing, or what a push left that never came to its manifest
        try:
            is_ours = codec.loads(CheckpointManifest, text).run_id == self.run_id
        except WireError:
            is_ours = False
        return named if is_ours else f"{names.STORE_MODELS}/{self.run_id}"

    # --- telling ---

    def event(self, kind: str, text: str, phase: str = "", step: int | None = None, **data: float | str) -> None:
        line = Event(t=self.world.now(), source="sync", kind=kind, text=text, phase=phase, step=step, data=data)
        self.world.append(self._path(names.EVENTS), (codec.dumps(line) + "\n").encode())

    def tell_problem(self, problem: str) -> None:
        self._tell(problem)

    def _tell(self, problem: str = "") -> None:
        verified = self._ordered(self._verified)
        phase, step = verified[-1] if verified else ("", None)
        told = self._told
        if told is None or (told.phase, told.step, told.problem) != (phase, step, problem):
            self._told = Pushed(t=self.world.now(), phase=phase, step=step, problem=problem)
            self.world.write(self._path(names.PUSHED), codec.dumps(self._told).encode())

    # --- helpers ---

    def _walk(self) -> list[str]:
        """Files that are meant for others: hidden ones are locks and unfinished checkpoints."""
        found = [name for name in self.world.walk(self.run_dir) if "/." not in f"/{name}" and ".tmp" not in name]
        return [name for name in found if name not in _NOT_OURS and not is_aside(name)]

    def _path(self, name: str) -> str:
        return os.path.join(self.run_dir, name)

    def _stamp(self, name: str) -> Stamp | None:
        """None when it is gone: removed or renamed between the walk and the look."""
        try:
            return self.world.size(self._path(name)), self.world.modified_at(self._path(name))
        except OSError:
            return None

    def _ordered(self, steps: Iterable[Step]) -> list[Step]:
        return sorted(steps, key=self._order)

    def _order(self, step: Step) -> tuple[int, str, int]:
        """Phases in the order of the run, then steps."""
        if not self._phases and self.world.exists(self._path(names.RUN)):
            try:
                self._phases = [phase["kind"] for phase in json.loads(self.world.read(self._path(names.RUN)))["phases"]]
            except (ValueError, KeyError, TypeError) as exc:
                raise StoreError(f"{names.RUN} cannot be read.", str(exc), "Fetch the inputs again.") from exc
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
    return f"{names.CHECKPOINTS}/{phase}/{names.step_dir(step)}"


def _sealed(manifest: CheckpointManifest) -> bytes:
    """The manifest with its own sha256 in it, taken as wire says: of the document with that one value empty."""
    empty = codec.dumps(dataclasses.replace(manifest, sha256=""), indent=1).encode()
    return codec.dumps(dataclasses.replace(manifest, sha256=hashlib.sha256(empty).hexdigest()), indent=1).encode()


def _pointed_at(key: str, store: Store) -> int:
    try:
        return codec.loads(Pointer, store.read(key)).step
    except WireError as exc:
        raise StoreError(f"{key} in {store.url} cannot be read.", str(exc), "Nothing is deleted until it can.") from exc


def _read_back_differs(key: str, store: Store) -> StoreError:
    return StoreError(
        what=f"{key} reads back from {store.url} with other bytes than were pushed.",
        why="The store lost or changed them, or somebody else writes to the same run.",
        fix="Push again; if it stays so, use another store.",
    )
