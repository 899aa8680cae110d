"""What may leave the store: keys by name, never the best or the last checkpoint of a run, never under a live run, never
what is another home's.

    plan_removal   keys or a folder -> what would go, in the order in which it must go; refuses what must stay
    remove         deletes, then looks again: what is still there is an error

Several homes may share a store. Whose a run is, its newest lease tells, or its record; whose a model is, the run in its
manifest; inputs below objects/ are everybody's, so they stay while any run in the store lives. A checkpoint's manifest
goes first, so that a removal that dies half-way leaves no checkpoint that looks whole.
"""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from homing.cloud.adopt import stored_runs
from homing.cloud.checkpoints import best_step, list_checkpoints
from homing.cloud.fetch import phases_of
from homing.cloud.home import Home
from homing.cloud.ledger import ADOPTED, LIVE_STATES
from homing.cloud.signs import read_document
from homing.errors import IntegrityError, NotOwner, StoreError, UsageError
from homing.store import Store, run_key
from homing.store.base import Resuming
from homing.store.lease import newest
from homing.units import counted
from homing.wire import names
from homing.wire.checkpoint import CheckpointManifest
from homing.wire.record import RunRecord

__all__ = ["Removal", "in_order", "not_there", "plan_removal", "remove"]

_AT_ONCE = 100  # keys in one delete: on the Hub that is one commit


@dataclass(frozen=True)
class Removal:
    keys: list[str]  # in the order in which they go
    num_bytes: int
    warning: str = ""  # why a person should think twice, in a sentence
    folders: tuple[str, ...] = ()  # all below them goes, also what was pushed in part


def plan_removal(store: Store, key: str, home: Home) -> Removal:
    """`key` is one key, or a folder with all that lies below it."""
    prefix = key.rstrip("/")
    entries = [entry for entry in store.list(prefix) if entry.key == prefix or entry.key.startswith(prefix + "/")]
    if not entries:
        raise not_there(store, prefix)
    parts = prefix.split("/")
    warning = ""
    if parts[0] == names.STORE_RUNS:
        _check_run(store, parts, home)
    elif parts[0] == names.STORE_MODELS:
        _check_model(store, parts, home)
    elif parts[0] == names.STORE_OBJECTS:
        warning = _check_no_run_lives(store, home)
    keys = in_order(entry.key for entry in entries)
    num_bytes = sum(entry.num_bytes for entry in entries)
    # Inputs are everybody's, and a home that pushes its first ones now has no record yet: what was cut goes in a day.
    folders = () if parts[0] == names.STORE_OBJECTS else (prefix,)
    return Removal(keys, num_bytes, warning or _warning(store, parts, home), folders)


def not_there(store: Store, key: str) -> UsageError:
    """The answer to a key that the store does not have."""
    keys = [entry.key for entry in store.list("")]
    if below := [each for each in keys if each.startswith(key.rstrip("/") + "/")]:
        return UsageError(
            what=f"{key} is a folder of {counted(len(below), 'file')}.",
            why="One file comes at a time; a model comes home whole by `homing fetch RUN`.",
            fix=f"homing store get {below[0]} --store {store.url}",
        )
    folders = {"/".join(key.split("/")[:depth]) for key in keys for depth in range(1, 6)}
    near = difflib.get_close_matches(key, sorted(folders | set(keys)), n=5, cutoff=0.5)
    return UsageError(
        what=f"There is no {key} in {store.url}.",
        why=f"Near it: {', '.join(near)}." if near else f"It holds {len(keys)} files.",
        fix=f"homing store ls --store {store.url}",
    )


def in_order(keys: Iterable[str]) -> list[str]:
    return sorted(keys, key=lambda key: (not key.endswith("/" + names.MANIFEST), key))


def remove(store: Store, removal: Removal) -> None:
    for start in range(0, len(removal.keys), _AT_ONCE):
        store.delete_many(removal.keys[start : start + _AT_ONCE])
    if isinstance(store, Resuming):
        for folder in removal.folders:
            store.drop_cut(folder)
    left = [key for key in removal.keys if store.exists(key)]
    if left:
        raise StoreError(
            what=f"{len(left)} of {len(removal.keys)} files are still in the store.",
            why=f"The first is {left[0]}.",
            fix="Run the same command again.",
        )


def _warning(store: Store, parts: list[str], home: Home) -> str:
    if parts[0] == names.STORE_MODELS:
        return "It may be the only copy of these weights."
    if parts[0] != names.STORE_RUNS or len(parts) != 2:
        return ""
    run = home.ledger.run(parts[1])
    if run is None:
        return "It may be the only copy: the ledger here does not know the run."
    if run.fetched_step is None:
        return f"It is the only copy: {run.name} was never fetched."
    try:
        last = next(iter(list_checkpoints(store, run.id, phases_of(store, run))), None)
    except IntegrityError as exc:  # what is damaged may go
        return f"It may be the only copy: step {run.fetched_step:,} was fetched, and {exc.what}"
    if last is None or last.manifest.step == run.fetched_step:
        return ""
    at = f"{last.manifest.phase} step {last.manifest.step:,}"
    return f"It may be the only copy: step {run.fetched_step:,} was fetched, not its last, {at}."


def _check_run(store: Store, parts: list[str], home: Home) -> None:
    if len(parts) < 2:
        raise UsageError("That would be every run.", "One at a time.", "homing store ls runs")
    run_id = parts[1]
    _check_whose(store, run_id, home)
    is_inside_checkpoints = len(parts) > 2 and parts[2] == names.CHECKPOINTS
    if not is_inside_checkpoints:
        return
    if len(parts) < 5:
        raise UsageError(
            what="That would be every checkpoint, the best and the last among them.",
            why="Without one there is nothing to resume from and nothing to fetch.",
            fix=f"Name one: homing store rm {'/'.join(parts[:3])}/PHASE/{names.step_dir(100)}",
        )
    phase, step = parts[3], names.parse_step(parts[4])
    found = [c for c in list_checkpoints(store, run_id, [phase]) if c.manifest.phase == phase]
    kept, whole = [c.manifest.step for c in found], [c.manifest.step for c in found if not c.problem]
    last, best = max(whole, default=None), best_step(store, run_id, phase)
    called = "last" if kept == whole else "last whole"  # of a damaged one nothing can be resumed
    role = called if step == last else "best" if step == best else ""
    if role and step is not None:
        raise UsageError(
            what=f"Step {step:,} is the {role} checkpoint of {run_id}, and stays.",
            why=f"There are steps {', '.join(f'{s:,}' for s in sorted(kept))}"
            + (f"; the {called} is {last:,}" if last is not None else "")
            + (f", the best {best:,}." if best is not None else "."),
            fix="Remove another one, or fetch this one home first and remove the whole run: "
            f"homing store rm {names.STORE_RUNS}/{run_id}",
        )


def _check_whose(store: Store, run_id: str, home: Home) -> None:
    """Its own home removes it, and when it has ended. Of what no home tells that it is its own, nobody is robbed."""
    lease, record = newest(store, run_id), read_document(store, run_key(run_id, names.RECORD), RunRecord)
    owner = lease.owner if lease is not None else record.owner if record is not None else home.owner
    if owner != home.owner:
        host = (lease.host if lease is not None else record.host if record is not None else "") or "another computer"
        raise NotOwner(
            what=f"{run_id} in {store.url} is of the home {owner} on {host}, and stays.",
            why=f"This home is {home.owner}. What another one pushed may be live there, and its only copy.",
            fix=f"Remove it there, or take it over first: homing adopt {shlex.quote(store.url)} {run_id}",
        )
    run = home.ledger.run(run_id)
    state = run.state if run is not None else record.state if record is not None else ""
    if state in LIVE_STATES:
        raise UsageError(
            what=f"{run_id} is live, and what it pushes must stay.",
            why=f"Its state is {state}." if run is not None else f"Its record says {state}; the ledger here forgot it.",
            fix=f"homing stop {run_id}, then try again"
            if run is not None
            else f"homing adopt {shlex.quote(store.url)} {run_id}",
        )


def _check_model(store: Store, parts: list[str], home: Home) -> None:
    if len(parts) < 2:
        raise UsageError("That would be every model.", "One at a time.", "homing store ls models")
    key = f"{names.STORE_MODELS}/{parts[1]}/{names.MANIFEST}"
    manifest = read_document(store, key, CheckpointManifest)
    if manifest is not None:
        _check_whose(store, manifest.run_id, home)


def _check_no_run_lives(store: Store, home: Home) -> str:
    """A reason to think twice where none does: what has ended may be resumed, and not every home has the text still."""
    records = stored_runs(store)
    known = {run.id: run.state for run in home.ledger.runs() if run.state != ADOPTED}  # of those the record is newer
    states = {**{record.run_id: record.state for record in records}, **known}
    live = [run_id for run_id, state in states.items() if state in LIVE_STATES]
    if live:
        raise UsageError(
            what="A live run may still need its inputs.",
            why=f"Live: {', '.join(live)}.",
            fix=f"homing runs   and of other homes: homing adopt {shlex.quote(store.url)}",
        )
    theirs = [record.run_id for record in records if record.owner != home.owner]
    return f"Runs of other homes may need it to go on: {', '.join(theirs)}." if theirs else ""
