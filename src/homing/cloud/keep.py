"""What may leave the store: keys by name, never the best or the last checkpoint of a run, never under a live run.

    plan_removal   keys or a folder -> what would go, in the order in which it must go; refuses what must stay
    remove         deletes, then looks again: what is still there is an error

A checkpoint's manifest goes first, so that a removal that dies half-way leaves no checkpoint that looks whole.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from homing.cloud.checkpoints import best_step, list_checkpoints
from homing.cloud.home import Home
from homing.errors import StoreError, UsageError
from homing.store import Store
from homing.wire import names

__all__ = ["Removal", "plan_removal", "remove"]

_AT_ONCE = 100  # keys in one delete: on the Hub that is one commit


@dataclass(frozen=True)
class Removal:
    keys: list[str]  # in the order in which they go
    num_bytes: int
    warning: str = ""  # why a person should think twice, in a sentence


def plan_removal(store: Store, key: str, home: Home) -> Removal:
    """`key` is one key, or a folder with all that lies below it."""
    prefix = key.rstrip("/")
    entries = [entry for entry in store.list(prefix) if entry.key == prefix or entry.key.startswith(prefix + "/")]
    if not entries:
        raise _not_there(store, prefix)
    parts = prefix.split("/")
    if parts[0] == names.STORE_RUNS:
        _check_run(store, parts, home)
    elif parts[0] == names.STORE_OBJECTS:
        _check_no_run_lives(home)
    keys = sorted((entry.key for entry in entries), key=lambda k: (not k.endswith("/" + names.MANIFEST), k))
    return Removal(keys, sum(entry.num_bytes for entry in entries), _warning(parts, home))


def remove(store: Store, removal: Removal) -> None:
    for start in range(0, len(removal.keys), _AT_ONCE):
        store.delete_many(removal.keys[start : start + _AT_ONCE])
    left = [key for key in removal.keys if store.exists(key)]
    if left:
        raise StoreError(
            what=f"{len(left)} of {len(removal.keys)} files are still in the store.",
            why=f"The first is {left[0]}.",
            fix="Run the same command again.",
        )


def _warning(parts: list[str], home: Home) -> str:
    if parts[0] == names.STORE_MODELS:
        return "It may be the only copy of these weights."
    run = home.ledger.run(parts[1]) if parts[0] == names.STORE_RUNS and len(parts) == 2 else None
    if run is not None and run.fetched_step is None:
        return f"It is the only copy: {run.name} was never fetched."
    return ""


def _check_run(store: Store, parts: list[str], home: Home) -> None:
    if len(parts) < 2:
        raise UsageError("That would be every run.", "One at a time.", "homing store ls runs")
    run_id = parts[1]
    run = home.ledger.run(run_id)
    if run is not None and run.is_live:
        raise UsageError(
            what=f"{run_id} is live, and what it pushes must stay.",
            why=f"Its state is {run.state}.",
            fix=f"homing stop {run.name}, then try again",
        )
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
    kept = [c.manifest.step for c in list_checkpoints(store, run_id, [phase]) if c.manifest.phase == phase]
    last, best = max(kept, default=None), best_step(store, run_id, phase)
    role = "last" if step == last else "best" if step == best else ""
    if role:
        raise UsageError(
            what=f"Step {step:,} is the {role} checkpoint of {run_id}, and stays.",
            why=f"There are steps {', '.join(f'{s:,}' for s in sorted(kept))}; the last is {last:,}"
            + (f", the best {best:,}." if best is not None else "."),
            fix="Remove another one, or fetch this one home first and remove the whole run: "
            f"homing store rm {names.STORE_RUNS}/{run_id}",
        )


def _check_no_run_lives(home: Home) -> None:
    live = [run.id for run in home.ledger.runs() if run.is_live]
    if live:
        raise UsageError(
            what="A live run may still need its inputs.", why=f"Live: {', '.join(live)}.", fix="homing runs"
        )


def _not_there(store: Store, prefix: str) -> UsageError:
    keys = [entry.key for entry in store.list("")]
    folders = {"/".join(key.split("/")[:depth]) for key in keys for depth in range(1, 6)}
    near = difflib.get_close_matches(prefix, sorted(folders | set(keys)), n=5, cutoff=0.5)
    return UsageError(
        what=f"There is no {prefix} in {store.url}.",
        why=f"Near it: {', '.join(near)}." if near else f"It holds {len(keys)} files.",
        fix="homing store ls",
    )
