"""Resolve RUN, as the user types it, to one checkpoint folder.

The verbs generate, chat, eval, serve, export and publish use this rule; so does report, in find_runs.find_finished.

  with a slash    a folder: a checkpoint, an export, any model, or a run directory with checkpoints/
  NAME            the newest finished run of that name: fetched into models/, or the run directory under
                  $HOMING_HOME/runs. If none has finished, the newest checkpoint, with a notice. If there is none, a
                  folder of that name here, or the run of runs/NAME.yaml, if that file gives it another name
  NAME@RUN        one run of NAME: RUN is its id, or the end of its id
  (omitted)       the newest finished model of this folder, in models/ or of runs started here

If a newer run has not finished, a notice says how to choose it. If a newer finished run has its model only in the
store, an error suggests `homing fetch`: no verb silently opens an older model instead.

In a run directory the last phase is used, and in it the best checkpoint, or the latest if none was evaluated; the user
can choose another. A given phase is searched for in every run of the name, newest first, and in fetched models. If the
best checkpoint is not the last one, a notice says why it is used. A run from another folder is skipped if a run file
here has the same name; use its id. This module only reads the disk and does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from homing.api import notices
from homing.cloud.home import Home
from homing.cloud.ledger.run_lease import is_removed
from homing.config.home_and_run_files import (
    MODELS,
    begun_elsewhere,
    belongs_to_other_folder,
    file_called,
    home,
    manifest_in,
    name_meant,
    pick_run,
    run_files,
    split_run,
)
from homing.config.parse.key_suggestions import nearest
from homing.errors import DataError, HomingError, UsageError
from homing.wire import codec, file_names
from homing.wire.checkpoint_manifest import Pointer, figure_of
from homing.wire.event_lines import Outcome
from homing.wire.run_json import Run
from homing.world import World

__all__ = ["MODELS", "PHASES", "Chosen", "choose_in_run", "find_model", "finished_here"]

PHASES = ("pretrain", "mid", "sft", "rl")  # in training order
_SHOWN = 5
_RUN_ID = r"{name}-\d{{8}}-\d{{6}}(-\w+)?"


@dataclass(frozen=True)
class Chosen:
    folder: Path
    why: str = ""  # why the last checkpoint was not chosen; "" if it was, or if the user chose


@dataclass(frozen=True)
class _Models:
    """The local models of one run."""

    run: str  # its id; "" for weights in models/NAME that do not come from a homing run
    fetched: tuple[Path, ...] = ()
    run_dir: Path | None = None  # if it has checkpoints

    @property
    def folders(self) -> list[Path]:
        return [*self.fetched, *([self.run_dir] if self.run_dir is not None else [])]

    def has_finished(self, phase: str | None) -> bool:
        """Return whether the run, or the given phase of it, finished with a model."""
        if phase is None and self.run and _outcome_of(self.run) == "done":
            return True
        return any(_is_finished(folder, phase) for folder in self.folders if _has_phase(folder, phase))


def find_model(run: str | None, *, checkpoint: str | None = None, phase: str | None = None) -> Path:
    """Return the checkpoint folder. `checkpoint` is best, latest, a step, or None for best, else latest."""
    if checkpoint not in (None, "best", "latest") and not str(checkpoint).isdecimal():
        raise UsageError(
            what=f"Invalid checkpoint: {checkpoint!r}.",
            why="A checkpoint is best, latest or a step number.",
            fix="Use --checkpoint latest",
        )
    if phase is not None and phase not in PHASES:
        raise UsageError(
            what=f"Unknown phase: {phase!r}.",
            why=f"The phases are {', '.join(PHASES)}.",
            fix=f"Use --phase {nearest(phase, list(PHASES)) or 'pretrain'}",
        )
    folder = _find_folder(run, checkpoint, phase)
    if _is_checkpoint(folder):
        return _only(run, folder, checkpoint, phase)
    try:
        chosen = choose_in_run(folder, checkpoint, phase)
    except DataError as exc:
        if fix := _other_run_with(run, folder, checkpoint, phase):
            raise DataError(what=exc.what, why=exc.why, fix=fix) from exc
        raise
    if chosen.why:
        notices.say(chosen.why)
    if checkpoint is None:
        _say_unfinished(folder, chosen.folder.parent)
    return chosen.folder


def _other_run_with(run: str | None, folder: Path, checkpoint: str | None, phase: str | None) -> str:
    """Return the fix that names the newest other run of this name that has the requested step; "" if there is none."""
    name, wanted = split_run(run or "")
    if wanted or not str(checkpoint).isdecimal():
        return ""
    for each in _models_called(name):
        if each.run_dir is None or each.run_dir == folder:
            continue
        kind = phase or _last_phase(each.run_dir)
        if int(str(checkpoint)) in _steps(each.run_dir / file_names.CHECKPOINTS / kind):
            return f"Another run has it: use {each.run} instead of {run}"
    return ""


def finished_here(name: str) -> set[str]:
    """Return the ids of the runs of this name that have a finished model on this computer."""
    return {each.run for each in _models_called(name) if each.has_finished(None)}


def _only(run: str | None, folder: Path, checkpoint: str | None, phase: str | None) -> Path:
    """Return this single checkpoint if it is the requested one; otherwise raise UsageError."""
    manifest = manifest_in(folder)
    at = manifest.phase if manifest is not None else ""
    if run is not None and "/" not in run and phase is not None and checkpoint is None and phase != at:
        raise _nothing_of(run, phase)
    is_that_step = manifest is not None and checkpoint == str(manifest.step)
    if phase not in (None, at) or (checkpoint is not None and not is_that_step):
        again = (
            f"homing fetch {manifest.run_id} --checkpoint" if manifest is not None else "homing fetch NAME --checkpoint"
        )
        raise UsageError(
            what=f"{folder} is a single checkpoint, so there is nothing to choose.",
            why="--step, --checkpoint and --phase select from a run directory with several checkpoints.",
            fix=f"Leave them out, or fetch another checkpoint: {again} {checkpoint or 'STEP'} --to FOLDER",
        )
    if (
        manifest is not None
        and checkpoint is None
        and not _is_finished(folder)
        and _outcome_of(manifest.run_id) != "done"
    ):
        notices.say(
            f"{manifest.run_id} is not finished: this is {manifest.phase} step {manifest.step:,}{_planned(folder)}."
        )
    return folder


def _nothing_of(run: str, phase: str) -> UsageError:
    name = split_run(run)[0]
    folders = [folder for each in _models_called(name) for folder in each.fetched]
    there = ", ".join(f"{_phase_of(each) or 'weights'} in {each}" for each in sorted(folders))
    return UsageError(
        what=f"{run} has no local checkpoint of the {phase} phase.",
        why=f"Local checkpoints: {there or 'none'}.",
        fix=f"Fetch it: homing fetch {name} --checkpoint {phase}:STEP   Or leave out --phase.",
    )


def _say_unfinished(run_dir: Path, phase_dir: Path) -> None:
    """Warn if the run was stopped early, so that the user does not mistake it for a finished model."""
    folder = phase_dir / file_names.step_dir(_steps(phase_dir)[-1])
    last = manifest_in(folder)
    if last is not None and not last.is_final:
        at = f"{last.phase} step {last.step:,}{_planned(folder)}"
        notices.say(f"{run_dir.name} is not finished: its last checkpoint is {at}.")


def _planned(folder: Path) -> str:
    """Return the planned steps of this checkpoint's phase as " of 200"; "" if unknown."""
    run, phase = _run_in(folder), _phase_of(folder)
    return next((f" of {each.num_steps:,}" for each in run.phases if each.kind == phase), "") if run is not None else ""


def _run_in(folder: Path) -> Run | None:
    try:
        return codec.loads(Run, (folder / file_names.RUN).read_bytes())
    except (OSError, ValueError):
        return None


def _outcome_of(run_id: str) -> str:
    """Return done, stopped or failed from the run's local outcome file; "" if there is none."""
    try:
        return codec.loads(Outcome, (home() / "runs" / run_id / file_names.OUTCOME).read_bytes()).state
    except (OSError, ValueError):
        return ""


def _is_finished(model: Path, phase: str | None = None) -> bool:
    """Return True if these are the final weights of their run, or of the given phase.

    Weights that do not come from homing count as finished.
    """
    if not _is_checkpoint(model):
        phase_dir = model / file_names.CHECKPOINTS / (phase or _last_phase(model))
        model = phase_dir / file_names.step_dir(_steps(phase_dir)[-1])
    manifest = manifest_in(model)
    if manifest is None or not manifest.is_final:
        return manifest is None
    run = _run_in(model)
    planned = [each.kind for each in run.phases] if run is not None and phase is None else []
    return manifest.phase not in planned[:-1]


def _has_phase(model: Path, phase: str | None) -> bool:
    if phase is None:
        return True
    return _phase_of(model) == phase if _is_checkpoint(model) else bool(_steps(model / file_names.CHECKPOINTS / phase))


def _find_folder(run: str | None, checkpoint: str | None, phase: str | None) -> Path:
    if run is None:
        return _newest()
    path = Path(run).expanduser()
    if "/" in run or run.startswith((".", "~")):
        return _need_folder(path)
    name, wanted = split_run(run)
    found = _models_called(name)
    if wanted:
        found = _that_run(name, wanted, found)
    elif checkpoint is not None or phase is not None:
        # Weights from elsewhere have no steps or phases to choose from.
        found = [each for each in found if each.run] or found
    if found:
        taken = _choose(name, found, checkpoint, phase, is_chosen=bool(wanted))
        if _is_model(path) and path.absolute() != taken.absolute():
            notices.say(f"{run} is both a run and a folder: using {taken}. For the folder, type ./{run}")
        return taken
    if _is_model(path):
        return path
    file = run_files().get(run)
    if file is not None and (meant := name_meant(file)) != run:
        notices.say(f"{file} describes the run {meant}.")
        return _find_folder(meant, checkpoint, phase)
    called = _runs_called(run)
    strangers = {each: other_folder for each in called if (other_folder := _stranger(run, each.name)) is not None}
    if strangers and len(strangers) == len(called):
        each, other_folder = next(iter(strangers.items()))
        raise DataError(
            what=f"No trained model found for the run {run!r} in this folder.",
            why=f"{each.name} was started in {other_folder};"
            f" {file_called(run)} describes another run with the same name.",
            fix=f"If you mean {each.name} (for example because you moved its folder), use its id: "
            + (each.name if _is_model(each) else f"homing fetch {each.name}"),
        )
    train = f"Train it here: homing train {run}   " if file is not None and not called else ""
    raise DataError(
        what=f"No trained model called {run!r} found.",
        why=f"Looked for the folders {run}, {MODELS / run} and {home() / 'runs' / run}-*.",
        fix=f"{train}{'Fetch it if it was launched' if train else 'Fetch it'}: homing fetch {run}"
        "   List all runs: homing runs",
    )


def _choose(name: str, found: list[_Models], checkpoint: str | None, phase: str | None, *, is_chosen: bool) -> Path:
    """Choose among the local models by the rule in the module docstring."""
    having = [each for each in found if any(_has_phase(folder, phase) for folder in each.folders)]
    of_phase = having or found  # if no run has the phase, the code that opens the model reports which phases exist
    finished = [each for each in of_phase if each.has_finished(phase)]
    taken = (finished or of_phase)[0]
    if phase is None and not is_chosen and taken.run:
        _need_newest(name, taken, found)
    folders = [folder for folder in taken.folders if not having or _has_phase(folder, phase)]
    if checkpoint is not None and taken.run_dir is not None:
        folder = taken.run_dir  # because a fetched folder contains only one checkpoint
    else:
        folder = max(folders, key=_how_far) if phase is None else folders[-1]
    if having and having[0] is not found[0]:
        notices.say(f"{found[0].run} has no {phase} checkpoint: using {folder}")
    if not is_chosen:
        _say_passed_over(name, of_phase, finished)
    _say_taken(name, folder, [other for each in found for other in each.folders])
    return folder


def _say_passed_over(name: str, runs: list[_Models], finished: list[_Models]) -> None:
    if not finished:
        if len(runs) > 1:
            notices.say(f"No run of {name} has finished: using the newest checkpoint. Choose another run: {name}@RUN")
    elif runs[0] is not finished[0]:
        notices.say(
            f"{finished[0].run} is the newest finished run of {name}."
            f" {runs[0].run} is newer but not finished; to use it: {name}@{runs[0].run}"
        )


def _need_newest(name: str, taken: _Models, found: list[_Models]) -> None:
    """Raise DataError if a newer run of this name is done and its model is not fetched yet."""
    if taken.run == name:
        return  # an id means exactly that run
    home_ = Home(home(), World())
    try:
        rows = home_.ledger.runs_called(name) if home_.has_ledger else []
    except HomingError as exc:
        notices.say(f"warning: cannot tell whether a newer run of {name} is done: {exc.what}")
        return
    here = {each.run for each in found}
    newer = [
        row
        for row in rows
        if row.state == "done"
        and row.id not in here
        and row.id > taken.run
        # Skip runs whose model was removed from the store, because it cannot be fetched.
        and begun_elsewhere(row.id) is None
        and not is_removed(home_, row.id)
    ]
    if newer:
        raise DataError(
            what=f"The newest finished run of {name} is {newer[0].id}, but its model has not been fetched yet.",
            why=f"The model is in {newer[0].store}. The newest local model is from {taken.run}.",
            fix=f"Fetch it: homing fetch {name}   Or use the local one: {name}@{taken.run}",
        )


def _that_run(name: str, wanted: str, found: list[_Models]) -> list[_Models]:
    by_id = {each.run: each for each in found if each.run}
    if not by_id:
        raise DataError(
            what=f"No trained model called {name!r} found.",
            why=f"Looked for {MODELS / name} and {home() / 'runs' / name}-*.",
            fix="List all runs: homing runs   Fetch a model: homing fetch RUN",
        )
    return [by_id[pick_run(name, wanted, list(by_id), fix=f"Fetch a missing one: homing fetch {wanted}")]]


def _models_called(name: str) -> list[_Models]:
    """Return the local models of each run with that name or id, newest run first.

    Weights that homing did not produce come before all runs.
    """
    runs = [each for each in _runs_called(name) if _is_model(each) and _stranger(name, each.name) is None]
    run_dirs = {each.name: each for each in runs}
    by_run: dict[str, list[Path]] = {run_id: [] for run_id in run_dirs}
    for folder in _fetched(name):
        manifest = manifest_in(folder)
        by_run.setdefault(manifest.run_id if manifest is not None else "", []).append(folder)
    found = [_Models(run_id, tuple(folders), run_dirs.get(run_id)) for run_id, folders in by_run.items()]
    found.sort(key=lambda each: each.run, reverse=True)  # ids contain the time
    # Stable sort: the newest stays first.
    found.sort(key=lambda each: (bool(each.run), not each.fetched and belongs_to_other_folder(each.run)))
    return found


def _stranger(name: str, run_id: str) -> Path | None:
    """If the run was started in another folder but has the name of a run file here, return that folder; else None."""
    other_folder = begun_elsewhere(run_id) if run_id != name else None
    return other_folder if other_folder is not None and file_called(name) is not None else None


def _fetched(name: str) -> list[Path]:
    """Return the model folders of a name: models/NAME, and those that fetch stored as NAME-PHASE or by run id."""
    siblings = [MODELS / f"{name}-{phase}" for phase in PHASES]
    siblings += sorted(path for path in MODELS.glob(f"{name}-*") if path not in siblings) if MODELS.is_dir() else []
    ours = [folder for folder in siblings if _is_checkpoint(folder) and _is_of(name, folder)]
    return [folder for folder in (MODELS / name, *ours) if _is_model(folder)]


def _is_of(name: str, folder: Path) -> bool:
    manifest = manifest_in(folder)
    return (
        manifest is not None
        and manifest.run_name == name
        and folder.name in (f"{name}-{manifest.phase}", manifest.run_id)
    )


def _how_far(model: Path) -> int:
    """Return the index of the last trained phase.

    Weights that homing did not produce count as later than any phase, because the user put them there on purpose.
    """
    phase = _phase_of(model) if _is_checkpoint(model) else _last_phase(model)
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _last_phase(run_dir: Path) -> str:
    return next((phase for phase in reversed(PHASES) if _steps(run_dir / file_names.CHECKPOINTS / phase)), "")


def _say_taken(name: str, taken: Path, candidates: list[Path]) -> None:
    """Print the phase and step of a fetched model, which its path does not show, and the other phases available."""
    # `--phase` cannot choose between two runs of one phase: NAME@RUN does.
    phase_taken = _phase_of(taken) if _is_checkpoint(taken) else ""
    others = {_phase_of(folder): folder for folder in candidates if folder != taken and _is_checkpoint(folder)}
    alternatives = [f"--phase {phase}: {folder}" for phase, folder in others.items() if phase not in ("", phase_taken)]
    manifest = manifest_in(taken) if _is_checkpoint(taken) else None
    if manifest is None and not alternatives:
        return
    what = f"{manifest.phase} step {manifest.step:,}" if manifest is not None else _last_phase(taken)
    other_folder = _stranger(name, manifest.run_id) if manifest is not None else None
    begun = f", started in {other_folder}" if other_folder is not None else ""
    notices.say(f"{taken}, {what}{begun}" + (f"   ({'; '.join(alternatives)})" if alternatives else ""))


def _phase_of(folder: Path) -> str:
    """Return the phase of a checkpoint from its manifest; "" for weights from elsewhere."""
    manifest = manifest_in(folder)
    return manifest.phase if manifest is not None else ""


def _newest() -> Path:
    runs = home() / "runs"
    found = [path for parent in (MODELS, runs) if parent.is_dir() for path in parent.iterdir()]
    found = sorted((path for path in found if _is_model(path)), key=lambda path: (path.stat().st_mtime, path.name))
    elsewhere = {
        path: other_folder for path in found if path.parent == runs and (other_folder := begun_elsewhere(path.name))
    }
    own = [path for path in found if path not in elsewhere]
    finished = [path for path in own if _is_finished(path)]
    if finished:
        notices.say(f"Using {finished[-1]}, the newest finished model from this folder.")
        return finished[-1]
    if own:
        notices.say(f"Using {own[-1]}, the newest checkpoint from this folder. No model from this folder is finished.")
        return own[-1]
    if elsewhere:
        newest = list(reversed(elsewhere.items()))[:_SHOWN]
        raise DataError(
            what=f"No trained model from this folder ({Path.cwd()}).",
            why="Models from other folders: "
            + ", ".join(f"{path.name} ({other_folder})" for path, other_folder in newest)
            + ".",
            fix=f"Use an id, which works from any folder: {newest[0][0].name}",
        )
    raise DataError(
        what="No trained model yet.",
        why=f"Looked in ./{MODELS} and {runs}.",
        fix="Train one: homing quickstart   Fetch one: homing fetch RUN",
    )


def _runs_called(name: str) -> list[Path]:
    """Return run directories of that name or id, newest first, which is the order of their ids."""
    parent = home() / "runs"
    if not parent.is_dir():
        return []
    is_run = re.compile(_RUN_ID.format(name=re.escape(name)) + "|" + re.escape(name)).fullmatch
    return sorted((path for path in parent.iterdir() if path.is_dir() and is_run(path.name)), reverse=True)


def _need_folder(path: Path) -> Path:
    is_gguf = path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")))
    if is_gguf and not _is_model(path):
        raise DataError(
            what=f"{path} is a GGUF file, which homing can write but not open.",
            why="GGUF is for llama.cpp and programs based on it.",
            fix="Use the run or checkpoint it was exported from, or: llama-cli -m FILE.gguf",
        )
    if (path / file_names.ADAPTER_CONFIG).is_file() and not (path / file_names.RUN).is_file():
        raise DataError(
            what=f"{path} is an adapter for peft without its base weights.",
            why=f"{file_names.ADAPTER_CONFIG} says which base weights it needs.",
            fix="Use the run it was exported from, or merge the two: homing export RUN --to merged",
        )
    if not path.is_dir():
        raise DataError(
            what=f"Folder not found: {path}.",
            why="A path must be a checkpoint or a run directory.",
            fix="List all runs: homing runs",
        )
    if not _is_model(path):
        raise DataError(
            what=f"{path} contains no model.",
            why=f"It has neither {file_names.WEIGHTS} nor {file_names.CHECKPOINTS}/ with a checkpoint in it.",
            fix="List all runs: homing runs",
        )
    return path


def _is_model(path: Path) -> bool:
    return _is_checkpoint(path) or _is_run_dir(path)


def _is_checkpoint(path: Path) -> bool:
    """Return whether the folder has weights of any model: one file, several with an index, or an adapter."""
    wanted = (file_names.WEIGHTS, f"{file_names.WEIGHTS}.index.json", file_names.ADAPTER)
    return any((path / name).is_file() for name in wanted)


def _is_run_dir(path: Path) -> bool:
    return any(_is_checkpoint(step) for step in (path / file_names.CHECKPOINTS).glob("*/step-*"))


def choose_in_run(run_dir: Path, checkpoint: str | None = None, phase: str | None = None) -> Chosen:
    """Choose the checkpoint in a run directory: the requested one, or the one that verbs use by default."""
    checkpoints = run_dir / file_names.CHECKPOINTS
    by_phase = {p: _steps(checkpoints / p) for p in PHASES if _steps(checkpoints / p)}
    chosen = phase or _last_phase(run_dir)
    if chosen not in by_phase:
        raise DataError(
            what=f"{run_dir} has no checkpoint of the {chosen or 'requested'} phase.",
            why=f"Phases with checkpoints: {', '.join(by_phase) or 'none'}.",
            fix=f"Use --phase {next(reversed(by_phase), 'pretrain')}",
        )
    steps = by_phase[chosen]
    step = _pick_step(checkpoints / chosen, checkpoint, steps)
    if step not in steps:
        raise DataError(
            what=f"{checkpoints / chosen} has no checkpoint {checkpoint or step}.",
            why=f"Available checkpoints: {', '.join(map(str, steps))}.",
            fix=f"Use --checkpoint {steps[-1]}",
        )
    why = _why(checkpoints / chosen, step, steps) if checkpoint is None and step != steps[-1] else ""
    return Chosen(checkpoints / chosen / file_names.step_dir(step), why)


def _why(phase_dir: Path, step: int, steps: list[int]) -> str:
    best = _read_pointer(phase_dir / file_names.BEST)
    if best is None or best.step != step:
        return ""  # chosen by LATEST; any later checkpoint is incomplete
    value = "" if best.val_loss is None else f" {best.val_loss:.4f}"
    return (
        f"{phase_dir.name} step {step:,}: best of {len(steps)}, by {figure_of(phase_dir.name)}{value};"
        f" the last is step {steps[-1]:,} (--checkpoint latest)"
    )


def _pick_step(phase_dir: Path, checkpoint: str | None, steps: list[int]) -> int | None:
    if checkpoint is None:
        best = _pointed(phase_dir / file_names.BEST)
        return best if best in steps else _pointed(phase_dir / file_names.LATEST) or steps[-1]
    if checkpoint == "latest":
        return _pointed(phase_dir / file_names.LATEST) or steps[-1]
    return _pointed(phase_dir / file_names.BEST) if checkpoint == "best" else int(checkpoint)


def _steps(phase_dir: Path) -> list[int]:
    if not phase_dir.is_dir():
        return []
    found = {file_names.parse_step(path.name): path for path in phase_dir.iterdir()}
    return sorted(step for step, path in found.items() if step is not None and _is_checkpoint(path))


def _pointed(path: Path) -> int | None:
    pointer = _read_pointer(path)
    return pointer.step if pointer is not None else None


def _read_pointer(path: Path) -> Pointer | None:
    if not path.is_file():
        return None
    try:
        return codec.loads(Pointer, path.read_bytes())
    except codec.WireError as exc:
        raise DataError(
            what=f"Cannot read {path}.", why=str(exc), fix="Choose a step instead: --checkpoint STEP"
        ) from exc
