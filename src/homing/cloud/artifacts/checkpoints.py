"""Finds the complete, newest and best checkpoints of a run in its store; fetches one and verifies it by hash.

    choose a checkpoint -> fetch its files into a temporary folder, verify each -> rename the folder to ./models/NAME
                        -> fetch logs, metrics, samples to $HOMING_HOME/runs/<id>/

A checkpoint without a manifest does not count, because the manifest is pushed last, after every file that it names has
been read back.

A fetch is atomic: if it fails, the previous content stays in place. An earlier, unmodified fetch of the same run is
replaced. Anything else, including the only copy of a newer checkpoint, is replaced only with `force`. The instance need
not be running, because everything comes from the store. A damaged checkpoint raises IntegrityError. With `or_older`,
the next older intact one is fetched instead, and the damaged ones are reported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from homing import progress
from homing.cloud.contact.heartbeats import phases_of, read_document
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.errors import IntegrityError, UsageError
from homing.store import NotInStore, Store, run_key
from homing.store.base import unwatched
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, Pointer
from homing.wire.codec import WireError
from homing.world import World

__all__ = [
    "Fetched",
    "Shown",
    "StoredCheckpoint",
    "best_step",
    "choose",
    "damage",
    "fetch",
    "known_hash",
    "list_checkpoints",
    "place_of",
    "show",
]

_FINDER = ".DS_Store"  # macOS Finder creates this file in every folder it opens
_RUN_DOCUMENTS = (
    file_names.EVENTS,
    file_names.METRICS,
    file_names.METRICS_CSV,
    file_names.OUTCOME,
    file_names.HEARTBEAT,
    file_names.RECORD,
)


@dataclass(frozen=True)
class StoredCheckpoint:
    run_id: str
    manifest: CheckpointManifest
    text: bytes  # the text of the manifest as stored
    problem: str = ""  # why the manifest cannot be trusted; an untrusted manifest lists no files

    @property
    def folder(self) -> str:
        """Return the checkpoint's path relative to the run directory."""
        return "/".join((file_names.CHECKPOINTS, self.manifest.phase, file_names.step_dir(self.manifest.step)))

    def key(self, name: str) -> str:
        return run_key(self.run_id, self.folder, name)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.manifest.files)


def list_checkpoints(store: Store, run_id: str, phases: list[str]) -> list[StoredCheckpoint]:
    """Return the checkpoints, newest first: by phase order in the run, then by step.

    A damaged manifest does not hide the other checkpoints.
    """
    prefix = run_key(run_id, file_names.CHECKPOINTS) + "/"
    found = []
    for entry in store.list(prefix):
        parts = entry.key[len(prefix) :].split("/")
        if len(parts) == 3 and parts[2] == file_names.MANIFEST and file_names.parse_step(parts[1]) is not None:
            with contextlib.suppress(NotInStore):  # retention may have deleted the checkpoint since it was listed
                found.append(_load(store, run_id, entry.key))
    order = {phase: number for number, phase in enumerate(phases)}
    return sorted(found, key=lambda c: (order.get(c.manifest.phase, -1), c.manifest.step), reverse=True)


def best_step(store: Store, run_id: str, phase: str) -> int | None:
    pointer = read_document(store, run_key(run_id, file_names.CHECKPOINTS, phase, file_names.BEST), Pointer)
    return pointer.step if pointer is not None else None


def known_hash(store: Store, key: str) -> str | None:
    """Return the sha256 that a file must have, according to its own name or its manifest, or None if unknown."""
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
            return f"{file.name} has sha256 {digest[:12]}, but the manifest says {file.sha256[:12]}"
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
        # Without this check, one corrupted character in the name of the hash field would disable the verification.
        return StoredCheckpoint(run_id, unknown, text, f"its manifest has no sha256, but {strange_keys[0]!r}")
    if (manifest.phase, manifest.step) != (phase, step):
        return StoredCheckpoint(run_id, unknown, text, f"its manifest belongs to {manifest.phase} {manifest.step}")
    strange = [file.name for file in manifest.files if not re.fullmatch(r"[\w-][\w.-]*", file.name)]
    if strange:
        # A file name such as ../../.bashrc would make a fetch write outside the target folder.
        raise IntegrityError(
            f"{key} lists files that do not belong to a checkpoint.", f"{strange[0]!r}", "Do not use this store."
        )
    if file_names.STATE not in {file.name for file in manifest.files}:
        # A manifest from models/<name>/ can also have this step and a valid hash, but no run could resume from a model.
        return StoredCheckpoint(
            run_id, unknown, text, f"its manifest lists no {file_names.STATE}: it belongs to a model"
        )
    return StoredCheckpoint(run_id, manifest, text)


def _unknown_keys(text: bytes) -> list[str]:
    known = {field.name for field in dataclasses.fields(CheckpointManifest)} | {"schema"}
    return sorted(set(json.loads(text)) - known)


# --- fetching ---


@dataclass(frozen=True)
class Fetched:
    model_dir: Path
    run_dir: Path
    manifest: CheckpointManifest
    num_bytes: int
    is_new: bool  # False if model_dir already contained this model
    passed_over: list[str]  # newer checkpoints that were skipped because they are damaged


def fetch(
    home: Home,
    run: RunRow,
    model_dir: Path,
    *,
    which: str = "latest",
    force: bool = False,
    or_older: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> Fetched:
    store = home.store_of(run)
    phases = phases_of(store, run)
    candidates = choose(store, run, which, phases)
    passed_over: list[str] = []
    for checkpoint in candidates if or_older else candidates[:1]:
        try:
            if checkpoint.problem:
                raise IntegrityError(checkpoint.problem)
            is_new = _fetch_model(home, store, checkpoint, phases, model_dir, force, notify)
        except (IntegrityError, NotInStore) as exc:
            passed_over.append(f"{checkpoint.folder}: {str(exc).splitlines()[0]}")
            notify(f"The stored checkpoint {checkpoint.folder} is damaged.")
            continue
        run_dir = _fetch_documents(home, store, run)
        home.ledger.set_run(run.id, fetched_step=checkpoint.manifest.step)
        return Fetched(model_dir, run_dir, checkpoint.manifest, checkpoint.num_bytes, is_new, passed_over)
    rest = candidates[len(passed_over) :]
    fix = f"Fetch the previous one ({rest[0].folder}): homing fetch {run.name} --or-older" if rest else ""
    raise IntegrityError(
        what=f"{run.id}'s checkpoint in the store is damaged and was not fetched.",
        why="\n".join(passed_over),
        fix=fix or f"The store has no older checkpoint. Start over: homing launch {run.name}",
    )


def place_of(home: Home, run: RunRow, phase: str, models: Path) -> Path:
    """Return the default folder for a model of this phase: models/NAME.

    If models/NAME contains the model of another run with this name, as when runs are chained with `--phase`, return
    models/NAME-PHASE. If that folder is taken too, or both models are of the same phase, return models/RUN_ID.
    """
    there = _is_inside(home, models / run.name)
    if there is None or there.run_id == run.id or there.run_name != run.name:
        return models / run.name
    sibling = models / f"{run.name}-{phase}"
    other = _is_inside(home, sibling)
    is_free = not home.world.exists(sibling) or (other is not None and other.run_id == run.id)
    return sibling if is_free and there.phase != phase else models / run.id


def _is_inside(home: Home, folder: Path) -> CheckpointManifest | None:
    try:
        return codec.loads(CheckpointManifest, home.world.read(folder / file_names.MANIFEST))
    except (OSError, WireError):
        return None


@dataclass(frozen=True)
class Shown:
    """A checkpoint in the store that could be fetched."""

    checkpoint: StoredCheckpoint
    names: list[str]  # the checkpoint's aliases: latest, best, both, or none


def show(home: Home, run: RunRow) -> list[Shown]:
    """Return all checkpoints in the store, newest first. Their files are verified only when fetched."""
    store = home.store_of(run)
    found = list_checkpoints(store, run.id, phases_of(store, run))
    best = {phase: best_step(store, run.id, phase) for phase in {each.manifest.phase for each in found}}
    shown = []
    for number, each in enumerate(found):
        is_best = not each.problem and best[each.manifest.phase] == each.manifest.step
        shown.append(Shown(each, ["latest"] * (number == 0) + ["best"] * is_best))
    return shown


def choose(store: Store, run: RunRow, which: str, phases: list[str]) -> list[StoredCheckpoint]:
    """Return the checkpoint that `which` names (latest, best, a step or PHASE:STEP), then older ones as fallbacks."""
    found = list_checkpoints(store, run.id, phases)
    if not found:
        raise UsageError(
            what=f"{run.id} has no checkpoint in the store yet.",
            why=f"It is {run.state}. {run.reason}".strip(),
            fix=f"homing watch {run.name}" if run.is_live else f"homing logs {run.name}",
        )
    if which == "latest":
        return found
    phase, _, number = which.rpartition(":")
    step: int | None
    if which == "best":
        phase = found[0].manifest.phase
        step = best_step(store, run.id, phase)
    else:
        step = int(number) if number.isdigit() else None
    wanted = [each for each in found if each.manifest.step == step and phase in ("", each.manifest.phase)]
    index = found.index(wanted[0]) if wanted else None
    if index is None:
        there = ", ".join(f"{each.manifest.phase} {each.manifest.step}" for each in found)
        raise UsageError(
            what=f"{run.id} has no checkpoint {which!r}.",
            why=f"Available checkpoints: {there}.",
            fix="Use --checkpoint with latest, best, one of these steps, or PHASE:STEP",
        )
    return found[index:]


def _fetch_model(
    home: Home,
    store: Store,
    checkpoint: StoredCheckpoint,
    phases: list[str],
    model_dir: Path,
    force: bool,
    notify: Callable[[str], None],
) -> bool:
    """Fetch the model and replace the folder once every byte is verified. Return False if it was already there."""
    world = home.world
    if _is_same(home, checkpoint, model_dir):
        return False
    before = _stamps(home, model_dir)
    if world.exists(model_dir):
        _check_replaceable(home, store, checkpoint, phases, model_dir, force)
    temporary = model_dir.parent / f".{model_dir.name}.fetching-{world.random_hex(6)}"
    world.mkdir(temporary)
    try:
        before_bytes = 0
        for file in checkpoint.manifest.files:
            notify(f"fetching {file.name}, {file.num_bytes:,} bytes")
            target = temporary / file.name
            world.mkdir(target.parent)
            store.progress = partial(_report, f"Fetching {checkpoint.folder}", before_bytes, checkpoint.num_bytes)
            store.progress(0, file.num_bytes)
            store.get(checkpoint.key(file.name), str(target), file.sha256)
            before_bytes += file.num_bytes
        progress.finished()
        world.write(temporary / file_names.MANIFEST, checkpoint.text)
        if not force and _stamps(home, model_dir) != before:
            raise UsageError(
                what=f"{model_dir} changed during the fetch, so it was not overwritten.",
                why="A file in it was added, removed or modified.",
                fix=f"Fetch it again: homing fetch {checkpoint.manifest.run_name}   or fetch it to another folder:"
                " --to FOLDER",
            )
        _put_in_place(temporary, model_dir, world)
    finally:
        store.progress = unwatched  # what is fetched later is not a part of the model
        world.rmtree(temporary)
    return True


def _report(what: str, before_bytes: int, all_bytes: int, done: int, total: int) -> None:
    """Report a transfer of one file as a part of all files."""
    progress.report(what, before_bytes + done, all_bytes)


def _check_replaceable(
    home: Home, store: Store, checkpoint: StoredCheckpoint, phases: list[str], model_dir: Path, force: bool
) -> None:
    """Raise UsageError if the existing folder contains anything that could not be recovered."""
    again, foreign = f"homing fetch {checkpoint.manifest.run_name}", ""
    if not force:
        foreign = _foreign(home, checkpoint, model_dir) or _last_copy(home, store, checkpoint, phases, model_dir)
    if foreign:
        raise UsageError(
            what=f"{model_dir} was not overwritten.",
            why=foreign,
            fix=f"Overwrite it: {again} --force   or fetch to another folder: --to FOLDER",
        )
    if not _may_replace(home, model_dir):
        raise UsageError(
            what=f"{model_dir} is not a model folder, so homing does not replace it, even with --force.",
            why=f"It has neither {file_names.MANIFEST} nor {file_names.WEIGHTS}."
            " Replacing it would delete its contents.",
            fix=f"Choose a folder that does not exist yet: {again} --to FOLDER",
        )


def _put_in_place(temporary: Path, model_dir: Path, world: World) -> None:
    """Replace the old folder: remove it after the rename has succeeded, or restore it if the rename fails."""
    old = model_dir.parent / f".{model_dir.name}.old-{world.random_hex(6)}"
    if world.exists(model_dir):
        world.rename(model_dir, old)
    try:
        world.rename(temporary, model_dir)
    except BaseException:
        if world.exists(old):
            world.rename(old, model_dir)
        raise
    world.rmtree(old)


def _foreign(home: Home, checkpoint: StoredCheckpoint, folder: Path) -> str:
    """Describe what the folder contains besides an unmodified earlier fetch of this run, or return "" if nothing."""
    world, there = home.world, _is_inside(home, folder)
    if there is None:
        return "It contains a model that homing cannot identify." if not _is_empty(home, folder) else ""
    if there.run_id != checkpoint.run_id:
        return f"It contains another model, {there.phase} step {there.step:,} of {there.run_id or there.run_name}."
    listed = {file.name: file.sha256 for file in there.files}
    found = [name for name in world.walk(folder) if name not in (file_names.MANIFEST, _FINDER)]
    added = [name for name in found if name not in listed]
    changed = [name for name in found if name in listed and world.sha256(folder / name) != listed[name]]
    changes = [f"changed since it was fetched: {', '.join(changed)}"] if changed else []
    changes += [f"added since: {', '.join(added)}"] if added else []
    return f"It is from the same run but was modified ({'; '.join(changes)})." if changes else ""


def _last_copy(home: Home, store: Store, checkpoint: StoredCheckpoint, phases: list[str], folder: Path) -> str:
    """Return a sentence if replacing the folder would lose the last copy of a newer model, otherwise ""."""
    if _is_empty(home, folder):
        return ""
    there = codec.loads(CheckpointManifest, home.world.read(folder / file_names.MANIFEST))
    new = checkpoint.manifest
    order = {phase: number for number, phase in enumerate(phases)}
    # A phase that run.json does not list has no known order, so assume that the model in the folder is newer.
    at = order.get(there.phase, len(order)), order.get(new.phase, -1)
    if (there.step <= new.step) if there.phase == new.phase else (at[0] < at[1]):
        return ""
    stored = list_checkpoints(store, there.run_id, phases)
    same = [each for each in stored if (each.manifest.phase, each.manifest.step) == (there.phase, there.step)]
    # Hash the stored files, because a manifest alone does not prove that the model can be fetched again.
    if any(not damage(store, each) for each in same):
        return ""
    new_name = f"step {new.step:,}" if new.phase == there.phase else f"{new.phase} step {new.step:,}"
    held = f"It contains {there.phase} step {there.step:,}"
    return f"{held}, which is newer than {new_name} and no longer intact in the store."


def _stamps(home: Home, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return each file's stamp (size, times and inode), so that later changes to the folder can be detected."""
    world = home.world
    found = world.walk(folder) if world.is_dir(folder) else []
    return {name: world.stamp(folder / name) for name in found if name != _FINDER and world.exists(folder / name)}


def _is_empty(home: Home, folder: Path) -> bool:
    return home.world.is_dir(folder) and not home.world.listdir(folder)


def _may_replace(home: Home, folder: Path) -> bool:
    """Return True if the folder is empty or contains a model. No other folder, as in `--to .`, may be replaced."""
    if not home.world.is_dir(folder):
        return False
    there = home.world.listdir(folder)
    return not there or not {file_names.MANIFEST, file_names.WEIGHTS, file_names.ADAPTER}.isdisjoint(there)


def _is_same(home: Home, checkpoint: StoredCheckpoint, model_dir: Path) -> bool:
    path = model_dir / file_names.MANIFEST
    if not home.world.exists(path) or home.world.read(path) != checkpoint.text:
        return False
    files = checkpoint.manifest.files
    # Hash the local files too, so that a copy that has been damaged since it was fetched is fetched again.
    return all(
        home.world.exists(model_dir / file.name) and home.world.sha256(model_dir / file.name) == file.sha256
        for file in files
    )


def _fetch_documents(home: Home, store: Store, run: RunRow) -> Path:
    """Fetch logs, metrics and samples. Files that disappear in the meantime are skipped, because none are essential."""
    folder = home.run_dir(run.id)
    prefix = run_key(run.id) + "/"
    for entry in store.list(prefix):
        name = entry.key[len(prefix) :]
        if name in _RUN_DOCUMENTS or name.split("/")[0] in (file_names.LOGS, file_names.SAMPLES):
            home.world.mkdir((folder / name).parent)
            try:
                store.get(entry.key, str(folder / name))
            except NotInStore:
                continue
    return folder
