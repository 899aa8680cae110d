"""Removes files from a store, but never a run's best or last checkpoint, a live run, or another home directory's data.

    plan_removal   a key or a folder -> what would be deleted, in order; raises if something must stay
    remove         deletes the keys, then checks each one: anything still there is an error
    kept_by        returns the size of what a run keeps in its store, and what keeping it costs
    remove_stored  permanently deletes everything that a run keeps in its store

Several home directories may share a store. A run belongs to the owner of its newest lease, or of its record. A model
belongs to the run that its manifest names. Inputs below objects/ are shared, so they are kept while any run in the
store is live. A checkpoint's manifest is deleted first, so that an interrupted removal leaves no checkpoint that looks
complete.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from homing.cloud.artifacts.checkpoints import best_step, list_checkpoints
from homing.cloud.contact.heartbeats import phases_of, read_document
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import ADOPTED, LIVE_STATES, RunRow
from homing.cloud.ledger.run_lease import describe, keep_no_record, stored_runs
from homing.errors import HomingError, IntegrityError, NotOwner, StoreError, UsageError
from homing.store import Store, run_key
from homing.store.base import Entries, Resuming
from homing.store.read_lease import newest
from homing.store.storage_price import Kept, kept
from homing.units import counted
from homing.wire import file_names
from homing.wire.checkpoint_manifest import CheckpointManifest
from homing.wire.run_record import RunRecord

__all__ = ["Removal", "in_order", "kept_by", "not_there", "plan_removal", "remove", "remove_stored", "stored_keys"]

_AT_ONCE = 100  # maximum number of keys per delete call; on the Hub, each call is one commit


@dataclass(frozen=True)
class Removal:
    keys: list[str]  # keys in the order in which they are deleted
    num_bytes: int
    warning: str = ""  # a sentence to show before asking for confirmation
    folders: tuple[str, ...] = ()  # folders that are deleted with everything below them, including incomplete uploads


def plan_removal(store: Store, key: str, home: Home) -> Removal:
    """Return everything that removing this key or folder would delete. Raise an error if any of it must be kept."""
    prefix = key.rstrip("/")
    entries = [entry for entry in store.list(prefix) if entry.key == prefix or entry.key.startswith(prefix + "/")]
    if not entries:
        raise not_there(store, prefix)
    parts = prefix.split("/")
    warning = ""
    if parts[0] == file_names.STORE_RUNS:
        _check_run(store, parts, home)
    elif parts[0] == file_names.STORE_MODELS:
        _check_model(store, parts, home)
    elif parts[0] == file_names.STORE_OBJECTS:
        warning = _check_no_run_lives(store, home)
    keys = in_order(entry.key for entry in entries)
    num_bytes = sum(entry.num_bytes for entry in entries)
    # Keep incomplete uploads of inputs: another home directory may be uploading them for its first run, which has no
    # record in the store yet. Abandoned uploads expire within a day.
    folders = () if parts[0] == file_names.STORE_OBJECTS else (prefix,)
    return Removal(keys, num_bytes, warning or _warning(store, parts, home), folders)


def not_there(store: Store, key: str) -> UsageError:
    """Return the error for a key that the store does not contain."""
    keys = [entry.key for entry in store.list("")]
    if below := [each for each in keys if each.startswith(key.rstrip("/") + "/")]:
        return UsageError(
            what=f"{key} is a folder with {counted(len(below), 'file')}.",
            why="This command copies a single file. To fetch a whole model, use `homing fetch RUN`.",
            fix=f"Get one file: homing store get {below[0]} --store {store.url}",
        )
    folders = {"/".join(key.split("/")[:depth]) for key in keys for depth in range(1, 6)}
    near = difflib.get_close_matches(key, sorted(folders | set(keys)), n=5, cutoff=0.5)
    return UsageError(
        what=f"There is no {key} in {store.url}.",
        why=f"Closest: {', '.join(near)}." if near else f"The store contains {len(keys)} files.",
        fix=f"List the store: homing store ls --store {store.url}",
    )


def in_order(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: (not key.endswith("/" + file_names.MANIFEST), key))


def remove(store: Store, removal: Removal) -> None:
    for start in range(0, len(removal.keys), _AT_ONCE):
        store.delete_many(removal.keys[start : start + _AT_ONCE])
    if isinstance(store, Resuming):
        for folder in removal.folders:
            store.drop_cut(folder)
    left = [key for key in removal.keys if store.exists(key)]
    if left:
        raise StoreError(
            what=f"{len(left)} of {len(removal.keys)} files are still in the store after the removal.",
            why=f"The first of them is {left[0]}.",
            fix="Run the same command again.",
        )


def _warning(store: Store, parts: list[str], home: Home) -> str:
    if parts[0] == file_names.STORE_MODELS:
        return "It may be the only copy of these weights."
    if parts[0] != file_names.STORE_RUNS or len(parts) != 2:
        return ""
    run = home.ledger.run(parts[1])
    if run is None:
        return "It may be the only copy: the run is not in the local ledger."
    if run.fetched_step is None:
        return f"It is the only copy: {run.name} was never fetched."
    try:
        last = next(iter(list_checkpoints(store, run.id, phases_of(store, run))), None)
    except IntegrityError as exc:  # damaged data must not prevent its removal
        return f"It may be the only copy: step {run.fetched_step:,} was fetched, and {exc.what}"
    if last is None or last.manifest.step == run.fetched_step:
        return ""
    at = f"{last.manifest.phase} step {last.manifest.step:,}"
    return f"It may be the only copy: step {run.fetched_step:,} was fetched, but its last checkpoint is {at}."


def _check_run(store: Store, parts: list[str], home: Home) -> None:
    if len(parts) < 2:
        raise UsageError(
            "This command would remove every run.", "Remove one at a time.", "List them: homing store ls runs"
        )
    run_id = parts[1]
    _check_owner(store, run_id, home)
    is_inside_checkpoints = len(parts) > 2 and parts[2] == file_names.CHECKPOINTS
    if not is_inside_checkpoints:
        return
    if len(parts) < 5:
        raise UsageError(
            what="This command would remove every checkpoint, including the best and the last.",
            why="Without a checkpoint, there is nothing to resume from and nothing to fetch.",
            fix=f"Remove a single checkpoint: homing store rm {'/'.join(parts[:3])}/PHASE/{file_names.step_dir(100)}",
        )
    phase, step = parts[3], file_names.parse_step(parts[4])
    found = [c for c in list_checkpoints(store, run_id, [phase]) if c.manifest.phase == phase]
    kept, whole = [c.manifest.step for c in found], [c.manifest.step for c in found if not c.problem]
    last, best = max(whole, default=None), best_step(store, run_id, phase)
    called = "last" if kept == whole else "last intact"  # no run can resume from a damaged checkpoint
    role = called if step == last else "best" if step == best else ""
    if role and step is not None:
        raise UsageError(
            what=f"Step {step:,} is the {role} checkpoint of {run_id} and cannot be removed.",
            why=f"The stored steps are {', '.join(f'{s:,}' for s in sorted(kept))}"
            + (f"; the {called} is {last:,}" if last is not None else "")
            + (f", the best {best:,}." if best is not None else "."),
            fix="Remove another one, or fetch this one first and remove the whole run: "
            f"homing store rm {file_names.STORE_RUNS}/{run_id}",
        )


def _check_owner(store: Store, run_id: str, home: Home) -> None:
    """Raise unless this home directory owns the run and the run has ended. A run without an owner can be removed."""
    lease, record = newest(store, run_id), read_document(store, run_key(run_id, file_names.RECORD), RunRecord)
    owner = lease.owner if lease is not None else record.owner if record is not None else home.owner
    if owner != home.owner:
        host = (lease.host if lease is not None else record.host if record is not None else "") or "another computer"
        raise NotOwner(
            what=f"{run_id} in {store.url} belongs to the homing home directory {owner} on {host} and was not removed.",
            why=f"Yours is {home.owner}. The run may still be live, and this may be its only copy.",
            fix=f"Remove it on that computer, or adopt it: homing adopt {shlex.quote(store.url)} {run_id}",
        )
    run = home.ledger.run(run_id)
    state = run.state if run is not None else record.state if record is not None else ""
    if state in LIVE_STATES:
        raise UsageError(
            what=f"{run_id} is live, so its files cannot be removed.",
            why=f"Its state is {state}."
            if run is not None
            else f"Its record says {state}; the run is not in the local ledger.",
            fix=f"homing stop {run_id}, then try again"
            if run is not None
            else f"homing adopt {shlex.quote(store.url)} {run_id}",
        )


def _check_model(store: Store, parts: list[str], home: Home) -> None:
    if len(parts) < 2:
        raise UsageError(
            "This command would remove every model.", "Remove one at a time.", "List them: homing store ls models"
        )
    key = f"{file_names.STORE_MODELS}/{parts[1]}/{file_names.MANIFEST}"
    manifest = read_document(store, key, CheckpointManifest)
    if manifest is not None:
        _check_owner(store, manifest.run_id, home)


def _check_no_run_lives(store: Store, home: Home) -> str:
    """Raise if any run in the store is live; return a warning about ended runs of other home directories.

    Their owners may resume those runs, and may no longer have the training text.
    """
    records = stored_runs(store)
    # for an adopted run, the record in the store is newer than the local ledger
    known = {run.id: run.state for run in home.ledger.runs() if run.state != ADOPTED}
    states = {**{record.run_id: record.state for record in records}, **known}
    live = [run_id for run_id, state in states.items() if state in LIVE_STATES]
    if live:
        raise UsageError(
            what="Inputs cannot be removed while a run is live, because the run may still need them.",
            why=f"Live runs: {', '.join(live)}.",
            fix=f"List your runs: homing runs   or all runs in this store: homing adopt {shlex.quote(store.url)}",
        )
    other_homes = [record.run_id for record in records if record.owner != home.owner]
    return f"Runs of other home directories may need it to resume: {', '.join(other_homes)}." if other_homes else ""


# --- a whole run in its store ---


def kept_by(home: Home, run: RunRow) -> Kept | None:
    """Return the size and cost of what the run keeps in its store, or None if the store cannot be listed."""
    try:
        entries = _entries(home.store_of(run), run)
        environment = home.world.environment()
        region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or ""
        endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL") or ""
        return kept(run.store, sum(entry.num_bytes for entry in entries), region, endpoint)
    except (HomingError, OSError):
        return None  # a receipt must be shown even if the store cannot be read


def stored_keys(home: Home, run: RunRow) -> tuple[list[str], list[str]]:
    """Return the keys that belong to this run alone, including its model, and a sentence for each item left out."""
    store = home.store_of(run)
    lease = newest(store, run.id)  # raises an error if the owner is uncertain, because removal is permanent
    if lease is not None and lease.owner != home.owner:
        return [], [f"{run.id} was adopted {describe(lease)}"]
    named = f"{file_names.STORE_MODELS}/{run.name}"
    others = [] if _pushed(store, named) == run.id or not store.list(named + "/") else [_others(store, named)]
    return [entry.key for entry in _entries(store, run)], others


def remove_stored(home: Home, run: RunRow, keys: list[str]) -> None:
    """Permanently remove the keys and verify that they are gone. The caller must ask for confirmation first."""
    store = home.store_of(run)
    keep_no_record(home, run.id)  # must come first: otherwise, a concurrent guard could write the record again
    remove(store, Removal(in_order(keys), 0, folders=tuple(_folders(store, run))))


def _entries(store: Store, run: RunRow) -> Entries:
    return [entry for folder in _folders(store, run) for entry in store.list(folder + "/")]


def _folders(store: Store, run: RunRow) -> list[str]:
    named = f"{file_names.STORE_MODELS}/{run.name}"
    own = [named] if _pushed(store, named) == run.id else []
    return [run_key(run.id), f"{file_names.STORE_MODELS}/{run.id}", *own]


def _pushed(store: Store, model: str) -> str:
    """Return the id of the run that pushed this model, or "" if it is unknown."""
    manifest = read_document(store, f"{model}/{file_names.MANIFEST}", CheckpointManifest)
    return manifest.run_id if manifest is not None else ""


def _others(store: Store, model: str) -> str:
    owner = _pushed(store, model)
    return f"{model} in {store.url} belongs to {owner}" if owner else f"The owner of {model} in {store.url} is unknown"
