"""What a new attempt takes over from the one before: its newest whole checkpoints, and its history.

The new instance starts with an empty disk, so the run directory is laid out for it as inputs. Metrics, events and the
trainer's log come along, because what the new attempt pushes replaces the files in the store; they travel as objects by
their hash, because that may happen before they were fetched. Agent and sync begin their logs anew; the old ones are
kept under the number of their attempt.
"""

from __future__ import annotations

from homing.cloud.checkpoints import StoredCheckpoint, damage, list_checkpoints
from homing.cloud.home import Home
from homing.cloud.objects import object_key, push_object
from homing.cloud.signs import read_document
from homing.cloud.wish import ask, last_asked
from homing.errors import IntegrityError
from homing.store import Store, run_key
from homing.wire import names
from homing.wire.boot import Input
from homing.wire.checkpoint import Pointer

__all__ = ["clear_wishes", "resume_inputs"]

_KEPT = 2  # newest whole checkpoints, so that the trainer has one to fall back to
_HISTORY = (names.EVENTS, names.METRICS, names.METRICS_CSV, f"{names.LOGS}/trainer.log")
_BEGUN_ANEW = ("agent", "sync")


def resume_inputs(store: Store, run_id: str, phases: list[str]) -> tuple[list[Input], list[str]]:
    """The inputs, and the checkpoints left out because they are damaged, one sentence each."""
    whole: list[StoredCheckpoint] = []
    damaged: list[str] = []
    for checkpoint in list_checkpoints(store, run_id, phases):
        problem = damage(store, checkpoint)
        if problem:
            damaged.append(f"{checkpoint.folder} is damaged and is left out: {problem}.")
        else:
            whole.append(checkpoint)
    if damaged and not whole:
        raise IntegrityError(
            what=f"No checkpoint of {run_id} is whole.",
            why="\n".join(damaged),
            fix="Start afresh: launch without --resume.",
        )
    inputs = [_copy(store, run_id, name) for name in _HISTORY if store.exists(run_key(run_id, name))]
    taken = {checkpoint.manifest.phase for checkpoint in whole}
    pointers = _pointers(store, run_id, [phase for phase in phases if phase in taken], damaged)
    for checkpoint in _worth_taking(pointers, whole):
        inputs += [
            Input(checkpoint.key(file.name), f"run/{checkpoint.folder}/{file.name}", file.num_bytes, file.sha256)
            for file in checkpoint.manifest.files
        ]
        inputs.append(_copy(store, run_id, f"{checkpoint.folder}/{names.MANIFEST}"))
    return inputs + [_copy(store, run_id, path) for path in pointers], damaged


def clear_wishes(home: Home, store: Store, run_id: str, attempt: int, *, is_stop_over: bool) -> bool:
    """A stop that ended the last attempt must not end this one, nor its outcome stand for this one's.

    False where a stop is wanted all the same: a guard goes on with no run that was stopped, so one that it finds here
    has come since it looked.
    """
    for program in _BEGUN_ANEW:
        old = run_key(run_id, names.LOGS, f"{program}.log")
        if store.exists(old):
            store.put_bytes(run_key(run_id, names.LOGS, f"{program}-{attempt - 1}.log"), store.read(old))
    left = last_asked(home, run_id, store)
    if left is not None:
        taken_back = {"stop": False, "reason": ""} if is_stop_over else {}
        left = ask(home, run_id, store, spend_limit_usd=None, time_limit_s=None, age_s=None, **taken_back)
    store.delete(run_key(run_id, names.OUTCOME))
    return left is None or not left.stop


def _pointers(store: Store, run_id: str, phases: list[str], damaged: list[str]) -> dict[str, int]:
    """Path of latest.json and best.json -> the step it names. A damaged one must not keep whole checkpoints back."""
    found = {}
    for phase in phases:
        for name in (names.LATEST, names.BEST):
            path = f"{names.CHECKPOINTS}/{phase}/{name}"
            try:
                pointer = read_document(store, run_key(run_id, path), Pointer)
            except IntegrityError as exc:
                damaged.append(f"{path} is damaged and is left out: {exc.why}")
            else:
                if pointer is not None:
                    found[path] = pointer.step
    return found


def _worth_taking(pointers: dict[str, int], whole: list[StoredCheckpoint]) -> list[StoredCheckpoint]:
    def is_best(checkpoint: StoredCheckpoint) -> bool:
        path = f"{names.CHECKPOINTS}/{checkpoint.manifest.phase}/{names.BEST}"
        return pointers.get(path) == checkpoint.manifest.step

    return [checkpoint for number, checkpoint in enumerate(whole) if number < _KEPT or is_best(checkpoint)]


def _copy(store: Store, run_id: str, path: str) -> Input:
    data = store.read(run_key(run_id, path))
    digest = push_object(store, data)
    return Input(object_key(digest), f"run/{path}", len(data), digest)
