"""Determines where a launch starts: at the checkpoint of a resumed run, or with the weights of its first phase.

    resume_inputs     the newest complete checkpoints of the previous attempt, and its history, as inputs
    clear_requests    clears the previous attempt's stop request and outcome, so that they do not apply to the new one
    describe_starts   describes where the launch starts: a model on this computer, open weights, or a stored checkpoint

The new instance starts with an empty disk, so it gets the run directory as inputs. They include the metrics, the events
and the trainer's log, because the new attempt continues these files and its pushes replace those in the store. The
files are copied to content-addressed objects, because they may be replaced before they are fetched. The agent and the
sync process start new logs; the old ones are renamed with their attempt's number.
"""

from __future__ import annotations

import os
from pathlib import Path

from homing.cloud.artifacts.checkpoints import StoredCheckpoint, damage, list_checkpoints
from homing.cloud.contact.control_request import ask, last_asked
from homing.cloud.contact.heartbeats import read_document
from homing.cloud.home import Home
from homing.cloud.launch.draft import Draft
from homing.cloud.launch.inputs import object_key, push_object
from homing.config.home_and_run_files import shown
from homing.errors import IntegrityError
from homing.store import Store, open_store, run_key
from homing.wire import codec, file_names
from homing.wire.boot_json import Input
from homing.wire.checkpoint_manifest import CheckpointManifest, Pointer, reported_checkpoint
from homing.wire.run_json import Phase, Run

__all__ = ["clear_requests", "describe_starts", "resume_inputs"]

_KEPT = 2  # fetch this many of the newest complete checkpoints, so that the trainer has a fallback
_HISTORY = (file_names.EVENTS, file_names.METRICS, file_names.METRICS_CSV, f"{file_names.LOGS}/trainer.log")
_BEGUN_ANEW = ("agent", "sync")


def resume_inputs(store: Store, run_id: str, phases: list[str]) -> tuple[list[Input], list[str]]:
    """Return the inputs, and a sentence for each checkpoint or pointer file that is left out because it is damaged."""
    whole: list[StoredCheckpoint] = []
    damaged: list[str] = []
    for checkpoint in list_checkpoints(store, run_id, phases):
        problem = damage(store, checkpoint)
        if problem:
            damaged.append(f"{checkpoint.folder} is damaged and was skipped: {problem}.")
        else:
            whole.append(checkpoint)
    if damaged and not whole:
        raise IntegrityError(
            what=f"Every checkpoint of {run_id} is incomplete or damaged.",
            why="\n".join(damaged),
            fix="Start over: launch without --resume.",
        )
    inputs = [_copy(store, run_id, name) for name in _HISTORY if store.exists(run_key(run_id, name))]
    taken = {checkpoint.manifest.phase for checkpoint in whole}
    pointers = _pointers(store, run_id, [phase for phase in phases if phase in taken], damaged)
    for checkpoint in _worth_taking(pointers, whole):
        inputs += [
            Input(checkpoint.key(file.name), f"run/{checkpoint.folder}/{file.name}", file.num_bytes, file.sha256)
            for file in checkpoint.manifest.files
        ]
        inputs.append(_copy(store, run_id, f"{checkpoint.folder}/{file_names.MANIFEST}"))
    return inputs + [_copy(store, run_id, path) for path in pointers], damaged


def clear_requests(home: Home, store: Store, run_id: str, attempt: int, *, is_stop_over: bool) -> bool:
    """Clear the last attempt's stop request and outcome, so that they do not apply to this one.

    With `is_stop_over=False`, keep a stop request and return False if there is one. Such a request must have arrived
    after the guard's own check, because a guard never resumes a stopped run.
    """
    for program in _BEGUN_ANEW:
        old = run_key(run_id, file_names.LOGS, f"{program}.log")
        if store.exists(old):
            store.put_bytes(run_key(run_id, file_names.LOGS, f"{program}-{attempt - 1}.log"), store.read(old))
    left = last_asked(home, run_id, store)
    if left is not None:
        taken_back = {"stop": False, "reason": ""} if is_stop_over else {}
        left = ask(home, run_id, store, spend_limit_usd=None, time_limit_s=None, age_s=None, **taken_back)
    store.delete(run_key(run_id, file_names.OUTCOME))
    return left is None or not left.stop


def _pointers(store: Store, run_id: str, phases: list[str], damaged: list[str]) -> dict[str, int]:
    """Return the step in each latest.json and best.json, by path. A damaged one is reported and skipped."""
    found = {}
    for phase in phases:
        for name in (file_names.LATEST, file_names.BEST):
            path = f"{file_names.CHECKPOINTS}/{phase}/{name}"
            try:
                pointer = read_document(store, run_key(run_id, path), Pointer)
            except IntegrityError as exc:
                damaged.append(f"{path} is damaged and was skipped: {exc.why}")
            else:
                if pointer is not None:
                    found[path] = pointer.step
    return found


def _worth_taking(pointers: dict[str, int], whole: list[StoredCheckpoint]) -> list[StoredCheckpoint]:
    def is_best(checkpoint: StoredCheckpoint) -> bool:
        path = f"{file_names.CHECKPOINTS}/{checkpoint.manifest.phase}/{file_names.BEST}"
        return pointers.get(path) == checkpoint.manifest.step

    return [checkpoint for number, checkpoint in enumerate(whole) if number < _KEPT or is_best(checkpoint)]


def _copy(store: Store, run_id: str, path: str) -> Input:
    data = store.read(run_key(run_id, path))
    digest = push_object(store, data)
    return Input(object_key(digest), f"run/{path}", len(data), digest)


# --- description of the starting weights ---


def describe_starts(draft: Draft, home: Home) -> list[str]:
    """Return a sentence for each phase that starts from existing weights, or one about a resumed run's checkpoint."""
    run = draft.run
    if draft.order.resume:
        return [_resume_point(run, home)]
    starts = [f"{phase.kind} starts from {_describe_folder(phase, home)}." for phase in run.phases if phase.init_from]
    if run.base and not run.phases[0].init_from:
        address = run.base.address if ":" in run.base.address else shown(Path(run.base.address))
        starts.insert(0, f"{run.phases[0].kind} starts from {address}.")
    return starts


def _resume_point(run: Run, home: Home) -> str:
    """Return a sentence that says where a resumed run continues, based only on the checkpoints' manifests.

    The launch itself verifies the files.
    """
    stored = list_checkpoints(open_store(run.store, home.world), run.id, [phase.kind for phase in run.phases])
    newest = next((checkpoint.manifest for checkpoint in stored if not checkpoint.problem), None)
    if newest is None:
        return f"{run.id} has no checkpoint in the store yet: it starts at step 0."
    steps = next((phase.num_steps for phase in run.phases if phase.kind == newest.phase), 0)
    return f"It resumes from {reported_checkpoint(newest)}, of {steps:,} steps: the newest checkpoint in the store."


def _describe_folder(phase: Phase, home: Home) -> str:
    folder, manifest = shown(Path(phase.init_from)), os.path.join(phase.init_from, file_names.MANIFEST)
    if not home.world.exists(manifest):
        return folder
    try:
        return f"{folder}, {reported_checkpoint(codec.loads(CheckpointManifest, home.world.read(manifest)))}"
    except ValueError:  # a different tool wrote these weights
        return folder
