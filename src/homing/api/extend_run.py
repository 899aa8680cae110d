"""Train a finished or stopped model further: turn `homing train|launch RUN --extend STEPS` into --set changes.

newest weights of the last phase -> a new run of that phase from those weights, with its own warm-up and decay

The learning rate of a finished phase has decayed to its floor, so continuing it would teach little. The new run starts
from the weights only, with its own schedule, and with a new seed, so that it reads the same text in a different order.
"""

from __future__ import annotations

import json
from pathlib import Path

from homing.api import notices
from homing.config.home_and_run_files import manifest_in
from homing.config.load import Loaded
from homing.config.parse.source import read_source
from homing.config.resolve.phase_weights import newest_weights
from homing.errors import UsageError
from homing.units import counted
from homing.wire import codec, file_names
from homing.wire.run_json import Phase, Run

__all__ = ["extending_sets", "print_schedule"]


def extending_sets(loaded: Loaded, steps: int, unfinished: Path | None) -> tuple[list[str], bool]:
    """Return the --set changes for the extension, and whether they match `unfinished`.

    `unfinished` is a stopped extension by the same number of steps, which the same command resumes.
    """
    kind = loaded.run.phases[-1].kind
    number = _place(loaded.file, kind)
    started = _of_extension(unfinished, kind, steps) if unfinished is not None else None
    if started is not None:
        return _sets(number, kind, steps, started[0], started[1]), True
    folder = newest_weights(loaded.run.name, kind)
    if folder is None:
        raise UsageError(
            what=f"There is no trained {kind} phase of {loaded.run.name} to extend.",
            why=f"Looked for its checkpoints in ./models and in local runs started in {Path.cwd()}.",
            fix=f"Train it first: homing train {loaded.run.name}   or fetch it: homing fetch {loaded.run.name}",
        )
    manifest = manifest_in(folder)
    assert manifest is not None, "newest_weights reads it"
    return _sets(number, kind, steps, str(folder), loaded.run.seed + manifest.step), False


def _sets(number: int, kind: str, steps: int, folder: str, seed: int) -> list[str]:
    changes = {f"phases.{number}.init_from": json.dumps(folder), f"phases.{number}.steps": steps, "seed": seed}
    return [f"train.only={kind}", *(f"{key}={value}" for key, value in changes.items())]


def _place(file: Path, kind: str) -> int:
    """Return the index of the first phase of this kind in the run file; 0 if there is none."""
    phases = read_source(file).data.get("phases") or []
    return next((number for number, phase in enumerate(phases) if (phase or {}).get("kind") == kind), 0)


def _of_extension(run_dir: Path, kind: str, steps: int) -> tuple[str, int] | None:
    """Return the starting weights and the seed of a stopped extension; None for any other run."""
    try:
        run = codec.loads(Run, (run_dir / file_names.RUN).read_bytes())
    except (OSError, ValueError):
        return None
    phase = run.phases[-1]
    is_same = len(run.phases) == 1 and (phase.kind, phase.num_steps) == (kind, steps) and phase.init_from
    return (phase.init_from, run.seed) if is_same else None


def print_schedule(run: Run) -> None:
    phase = run.phases[-1]
    manifest = manifest_in(Path(phase.init_from))
    at = f"step {manifest.step:,} of {manifest.run_id}" if manifest is not None else phase.init_from
    notices.say(
        f"Extending {run.name}: {phase.kind} continues from {at}, with {counted(phase.num_steps, 'more step')} of"
        f" {phase.batch_tokens:,} tokens."
    )
    notices.say(f"New schedule: {_schedule(phase)}.")


def _schedule(phase: Phase) -> str:
    schedule, last = phase.schedule, phase.num_steps
    warmup = f"{counted(schedule.warmup_steps, 'step')} of warm-up to a learning rate of {phase.optimizer.lr:.3g}"
    if schedule.kind == "constant":
        return f"{warmup}, then constant to step {last:,}"
    floor = f"down to {100 * schedule.floor:g}% of it at step {last:,}"
    if schedule.kind == "cosine":
        return f"{warmup}, then cosine decay {floor}"
    return f"{warmup}, constant to step {last - schedule.decay_steps:,}, then decay {floor}"
