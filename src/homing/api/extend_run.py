"""Train a finished or stopped model further: turn `homing train|launch RUN --extend STEPS` into --set changes.

newest weights of the last phase -> a new run of that phase from those weights, with its own warm-up and decay

The learning rate of a finished phase has decayed to its floor, so continuing it would teach little. The new run starts
from the weights only, with its own schedule, and with a new seed, so that it reads the same text in a different order.
"""

from __future__ import annotations

import json
from pathlib import Path

from homing.api import notices
from homing.config.home_and_run_files import (
    begun_elsewhere,
    file_called,
    home,
    manifest_in,
    pick_run,
    run_files,
    split_run,
    typed_name,
)
from homing.config.load import Implied, Loaded
from homing.config.parse.source import read_source
from homing.config.resolve.phase_weights import newest_weights
from homing.errors import UsageError
from homing.units import counted
from homing.wire import codec, file_names
from homing.wire.run_json import Phase, Run

__all__ = ["extending_sets", "print_schedule", "run_to_extend"]


def run_to_extend(typed: str) -> tuple[str, str]:
    """Return the name of the run file, and the id of the run whose weights to use; "" for the newest run.

    `typed` is a run file or its name, or selects one run: NAME@RUN or an id.
    """
    if typed in run_files() or "/" in typed:
        return typed, ""
    name, wanted = split_run(typed)
    run_id = _picked(name, wanted) if wanted else typed
    record = _record_of(home() / "runs" / run_id)
    if record is None:
        return (name, run_id) if wanted else (typed, "")
    file = file_called(record.name)
    return (typed_name(file) if file is not None else record.name), run_id


def _picked(name: str, wanted: str) -> str:
    found = sorted((path.name for path in (home() / "runs").glob(f"{name}-*")), reverse=True)
    ids = [run_id for run_id in found if begun_elsewhere(run_id) is None and _is_named(run_id, name)]
    return pick_run(name, wanted, ids, fix=f"Fetch a missing one: homing fetch {wanted}")


def _is_named(run_id: str, name: str) -> bool:
    record = _record_of(home() / "runs" / run_id)
    return record is not None and record.name == name


def extending_sets(
    loaded: Loaded, steps: int, unfinished: Path | None, run_id: str = "", *, verb: str = "train"
) -> tuple[list[str], bool]:
    """Return the --set changes for the extension, and whether they match `unfinished`.

    `unfinished` is a stopped extension by the same number of steps, which the same command resumes. `run_id`: use the
    weights of this run instead of the newest ones. `verb`: the command to name in an error.
    """
    kind = loaded.run.phases[-1].kind
    number = _place(loaded.file, kind)
    started = _of_extension(unfinished, kind, steps, run_id) if unfinished is not None else None
    if started is not None:
        return _sets(number, kind, steps, started[0], started[1]), True
    folder = newest_weights(loaded.run.name, kind, run_id)
    if folder is None and run_id:
        raise UsageError(
            what=f"{run_id} has no trained {kind} phase to extend.",
            why=f"Looked for its checkpoints in ./models and {home() / 'runs' / run_id}.",
            fix=f"Fetch it: homing fetch {run_id}   Or extend the newest run: homing {verb} {loaded.run.name}"
            f" --extend {steps}",
        )
    if folder is None:
        raise UsageError(
            what=f"There is no trained {kind} phase of {loaded.run.name} to extend.",
            why=f"Looked for its checkpoints in ./models and in local runs started in {Path.cwd()}.",
            fix=f"Train it first: homing {verb} {loaded.run.name}   or fetch it: homing fetch {loaded.run.name}",
        )
    manifest = manifest_in(folder)
    assert manifest is not None, "newest_weights reads it"
    return _sets(number, kind, steps, str(folder), loaded.run.seed + manifest.step), False


def _sets(number: int, kind: str, steps: int, folder: str, seed: int) -> list[str]:
    changes = {f"phases.{number}.init_from": json.dumps(folder), f"phases.{number}.steps": steps, "seed": seed}
    return [Implied(f"train.only={kind}"), *(Implied(f"{key}={value}") for key, value in changes.items())]


def _place(file: Path, kind: str) -> int:
    """Return the index of the first phase of this kind in the run file; 0 if there is none."""
    phases = read_source(file).data.get("phases") or []
    return next((number for number, phase in enumerate(phases) if (phase or {}).get("kind") == kind), 0)


def _of_extension(run_dir: Path, kind: str, steps: int, run_id: str) -> tuple[str, int] | None:
    """Return the starting weights and the seed of a stopped extension; None for any other run."""
    run = _record_of(run_dir)
    if run is None:
        return None
    phase = run.phases[-1]
    if len(run.phases) != 1 or (phase.kind, phase.num_steps) != (kind, steps) or not phase.init_from:
        return None
    manifest = manifest_in(Path(phase.init_from))
    is_of_run = not run_id or (manifest is not None and manifest.run_id == run_id)
    return (phase.init_from, run.seed) if is_of_run else None


def _record_of(run_dir: Path) -> Run | None:
    try:
        return codec.loads(Run, (run_dir / file_names.RUN).read_bytes())
    except (OSError, ValueError):
        return None


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
