"""Describe which weights a launch starts from: a model at home, open weights, or a checkpoint in the store."""

from __future__ import annotations

import os
from pathlib import Path

from homing.cloud.artifacts.stored_checkpoints import list_checkpoints
from homing.cloud.home import Home
from homing.cloud.launch.draft import Draft
from homing.config.paths import shown
from homing.store import open_store
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import CheckpointManifest, reported_checkpoint
from homing.wire.run_json import Phase, Run

__all__ = ["describe_starts"]


def describe_starts(draft: Draft, home: Home) -> list[str]:
    """Return a sentence per phase that starts from other weights; for a resumed run, its checkpoint."""
    run = draft.run
    if draft.order.resume:
        return [_resume_point(run, home)]
    starts = [f"{phase.kind} starts from {_describe_folder(phase, home)}." for phase in run.phases if phase.init_from]
    if run.base and not run.phases[0].init_from:
        address = run.base.address if ":" in run.base.address else shown(Path(run.base.address))
        starts.insert(0, f"{run.phases[0].kind} starts from {address}.")
    return starts


def _resume_point(run: Run, home: Home) -> str:
    """Return where a resumed run continues, by the manifests alone: the launch verifies the files themselves."""
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
    except ValueError:  # weights from another tool
        return folder
