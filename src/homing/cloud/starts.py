"""Which weights a launch begins with, in a person's words: a model at home, open weights, a checkpoint in the store."""

from __future__ import annotations

import os
from pathlib import Path

from homing.cloud.checkpoints import list_checkpoints
from homing.cloud.draft import Draft
from homing.cloud.home import Home
from homing.config.paths import shown
from homing.store import open_store
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest, told_checkpoint
from homing.wire.run import Phase, Run

__all__ = ["told_starts"]


def told_starts(draft: Draft, home: Home) -> list[str]:
    """One sentence for each phase that begins with weights from elsewhere; of a run that goes on, where it does."""
    run = draft.run
    if draft.order.resume:
        return [_goes_on(run, home)]
    told = [f"{phase.kind} starts from {_told_folder(phase, home)}." for phase in run.phases if phase.init_from]
    if run.base and not run.phases[0].init_from:
        address = run.base.address if ":" in run.base.address else shown(Path(run.base.address))
        told.insert(0, f"{run.phases[0].kind} starts from {address}.")
    return told


def _goes_on(run: Run, home: Home) -> str:
    """By the manifests alone: the launch reads every file of a checkpoint back before it is sent on."""
    stored = list_checkpoints(open_store(run.store, home.world), run.id, [phase.kind for phase in run.phases])
    newest = next((checkpoint.manifest for checkpoint in stored if not checkpoint.problem), None)
    if newest is None:
        return f"{run.id} has no checkpoint in the store yet: it begins at step 0."
    steps = next((phase.num_steps for phase in run.phases if phase.kind == newest.phase), 0)
    return f"It goes on from {told_checkpoint(newest)}, of {steps:,} steps: the newest checkpoint in the store."


def _told_folder(phase: Phase, home: Home) -> str:
    folder, manifest = shown(Path(phase.init_from)), os.path.join(phase.init_from, names.MANIFEST)
    if not home.world.exists(manifest):
        return folder
    try:
        return f"{folder}, {told_checkpoint(codec.loads(CheckpointManifest, home.world.read(manifest)))}"
    except ValueError:  # weights that others made
        return folder
