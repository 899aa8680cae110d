"""RUN, as a person types it, to one checkpoint folder. `generate chat eval serve export publish` share this rule,
and `report` (find_run.find_finished) follows it too.

    with a slash    a folder: a checkpoint, an export, anybody's model, or a run directory with checkpoints/ in it
    NAME            the newest finished run of that name: what `homing fetch` brought to models/, or the run directory
                    under $HOMING_HOME/runs. If none has finished, the newest checkpoint, and that is said. Else the run
                    that runs/NAME.yaml gives another name; else a folder of that name here
    NAME@RUN        that run of NAME: its id, or the end of it
    (left out)      the newest finished model of this folder, in models/ or of the runs that were begun here

A newer run that has not finished is named with the way to choose it. A newer finished run whose model is only in the
store is an error that names `homing fetch`: no verb opens an older model in its place.
In a run directory the last phase counts, and in it the best checkpoint, or the latest where none was evaluated; the
person may ask for others. A phase that is asked for is looked for in every run of the name, the newest first, and in
what was fetched. Of a best one that is not the last it is said why it is taken. Runs of another folder whose name a
run file here has too are passed over; their id names them. Reads the disk and nothing else: no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from homing.cli import talk
from homing.cli.run_at import pick_run, split_run
from homing.cloud.home import Home
from homing.cloud.record import is_removed
from homing.config import home, run_files
from homing.config.models import MODELS, manifest_in
from homing.config.names import nearest
from homing.config.projects import begun_elsewhere, file_called, is_still_theirs, name_meant
from homing.errors import DataError, HomingError, UsageError
from homing.wire import codec, names
from homing.wire.checkpoint import Pointer, figure_of
from homing.wire.event import Outcome
from homing.wire.run import Run
from homing.world import World

__all__ = ["MODELS", "Chosen", "choose_in_run", "find_model", "finished_here"]

PHASES = ("pretrain", "mid", "sft", "rl")  # in the order in which a model goes through them
_SHOWN = 5
_RUN_ID = r"{name}-\d{{8}}-\d{{6}}(-\w+)?"


@dataclass(frozen=True)
class Chosen:
    folder: Path
    why: str = ""  # where it is not the last one, and nobody asked for it by name


@dataclass(frozen=True)
class _Models:
    """What is on this computer of one run."""

    run: str  # its id; "" for weights in models/NAME that no run of ours made
    fetched: tuple[Path, ...] = ()
    run_dir: Path | None = None  # with checkpoints in it

    @property
    def folders(self) -> list[Path]:
        return [*self.fetched, *([self.run_dir] if self.run_dir is not None else [])]

    def has_finished(self, phase: str | None) -> bool:
        """Whether it ended with a finished model; of one phase, whether that did."""
        if phase is None and self.run and _outcome_of(self.run) == "done":
            return True
        return any(_is_finished(folder, phase) for folder in self.folders if _has_phase(folder, phase))


def find_model(run: str | None, *, checkpoint: str | None = None, phase: str | None = None) -> Path:
    """`checkpoint` is best, latest, a step, or None for best-else-latest."""
    if checkpoint not in (None, "best", "latest") and not str(checkpoint).isdecimal():
        raise UsageError(
            what=f"{checkpoint!r} names no checkpoint.",
            why="A checkpoint is best, latest, or the number of a step.",
            fix="--checkpoint latest",
        )
    if phase is not None and phase not in PHASES:
        raise UsageError(
            what=f"There is no phase {phase!r}.",
            why=f"The phases are {', '.join(PHASES)}.",
            fix=f"--phase {nearest(phase, list(PHASES)) or 'pretrain'}",
        )
    folder = _find_folder(run, checkpoint, phase)
    if _is_checkpoint(folder):
        return _only(run, folder, checkpoint, phase)
    chosen = choose_in_run(folder, checkpoint, phase)
    if chosen.why:
        talk.say(chosen.why)
    if checkpoint is None:
        _say_unfinished(folder, chosen.folder.parent)
    return chosen.folder


def finished_here(name: str) -> set[str]:
    """Ids of the runs of this name that left a finished model on this computer."""
    return {each.run for each in _models_called(name) if each.has_finished(None)}


def _only(run: str | None, folder: Path, checkpoint: str | None, phase: str | None) -> Path:
    """One checkpoint, where it is the one that is asked for."""
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
            what=f"{folder} is one checkpoint, so there is none to choose.",
            why="--checkpoint and --phase choose in a run directory, which holds several.",
            fix=f"Leave them out; {again} {checkpoint or 'STEP'} --to FOLDER brings another one home.",
        )
    if (
        manifest is not None
        and checkpoint is None
        and not _is_finished(folder)
        and _outcome_of(manifest.run_id) != "done"
    ):
        talk.say(
            f"{manifest.run_id} is not finished: this is {manifest.phase} step {manifest.step:,}{_planned(folder)}."
        )
    return folder


def _nothing_of(run: str, phase: str) -> UsageError:
    name = split_run(run)[0]
    folders = [folder for each in _models_called(name) for folder in each.fetched]
    there = ", ".join(f"{_phase_of(each) or 'weights'} in {each}" for each in sorted(folders))
    return UsageError(
        what=f"{run} has nothing of the phase {phase} here.",
        why=f"At home of it: {there or 'nothing'}.",
        fix=f"Bring it home: homing fetch {name} --checkpoint {phase}:STEP   Or leave --phase out.",
    )


def _say_unfinished(run_dir: Path, phase_dir: Path) -> None:
    """Nobody should export a run that was stopped early and take it for the whole."""
    folder = phase_dir / names.step_dir(_steps(phase_dir)[-1])
    last = manifest_in(folder)
    if last is not None and not last.is_final:
        at = f"{last.phase} step {last.step:,}{_planned(folder)}"
        talk.say(f"{run_dir.name} is not finished: its last checkpoint is {at}.")


def _planned(folder: Path) -> str:
    """ " of 200": the steps of the phase that this checkpoint is of; "" where nothing says it."""
    run, phase = _run_in(folder), _phase_of(folder)
    return next((f" of {each.num_steps:,}" for each in run.phases if each.kind == phase), "") if run is not None else ""


def _run_in(folder: Path) -> Run | None:
    try:
        return codec.loads(Run, (folder / names.RUN).read_bytes())
    except (OSError, ValueError):
        return None


def _outcome_of(run_id: str) -> str:
    """done, stopped or failed, as the run's outcome at home says it; "" without one."""
    try:
        return codec.loads(Outcome, (home() / "runs" / run_id / names.OUTCOME).read_bytes()).state
    except (OSError, ValueError):
        return ""


def _is_finished(model: Path, phase: str | None = None) -> bool:
    """Whether the weights are the last of their run, or of the phase. Weights that no run of ours made are whole."""
    if not _is_checkpoint(model):
        phase_dir = model / names.CHECKPOINTS / (phase or _last_phase(model))
        model = phase_dir / names.step_dir(_steps(phase_dir)[-1])
    manifest = manifest_in(model)
    if manifest is None or not manifest.is_final:
        return manifest is None
    run = _run_in(model)
    planned = [each.kind for each in run.phases] if run is not None and phase is None else []
    return manifest.phase not in planned[:-1]


def _has_phase(model: Path, phase: str | None) -> bool:
    if phase is None:
        return True
    return _phase_of(model) == phase if _is_checkpoint(model) else bool(_steps(model / names.CHECKPOINTS / phase))


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
        # Weights that somebody put there have neither steps nor phases to choose.
        found = [each for each in found if each.run] or found
    if found:
        taken = _choose(name, found, checkpoint, phase, is_chosen=bool(wanted))
        if _is_model(path) and path.absolute() != taken.absolute():
            talk.say(f"{run} is a run and a folder here: {taken} is taken. The folder is ./{run}")
        return taken
    if _is_model(path):
        return path
    file = run_files().get(run)
    if file is not None and (meant := name_meant(file)) != run:
        talk.say(f"{file} is the run {meant}.")
        return _find_folder(meant, checkpoint, phase)
    called = _runs_called(run)
    strangers = {each: theirs for each in called if (theirs := _stranger(run, each.name)) is not None}
    if strangers and len(strangers) == len(called):
        each, theirs = next(iter(strangers.items()))
        raise DataError(
            what=f"There is no trained model of the run {run!r} of this folder.",
            why=f"{each.name} was begun in {theirs}; {file_called(run)} here describes another run of that name.",
            fix="If you mean that one, as after moving its folder, name it by its id: "
            + (each.name if _is_model(each) else f"homing fetch {each.name}"),
        )
    raise DataError(
        what=f"There is no trained model called {run!r} here.",
        why=f"Looked for the folders {run}, {MODELS / run} and {home() / 'runs' / run}-*.",
        fix=f"homing fetch {run} brings it home; homing runs lists what there is.",
    )


def _choose(name: str, found: list[_Models], checkpoint: str | None, phase: str | None, *, is_chosen: bool) -> Path:
    """By the rule of this module's first lines, among what is on this computer."""
    having = [each for each in found if any(_has_phase(folder, phase) for folder in each.folders)]
    of_phase = having or found  # with none, whoever opens it says which phases there are
    finished = [each for each in of_phase if each.has_finished(phase)]
    taken = (finished or of_phase)[0]
    if phase is None and not is_chosen and taken.run:
        _need_newest(name, taken, found)
    folders = [folder for folder in taken.folders if not having or _has_phase(folder, phase)]
    if checkpoint is not None and taken.run_dir is not None:
        folder = taken.run_dir  # a fetched folder holds one set of weights; a person who names a step means the run
    else:
        folder = max(folders, key=_how_far) if phase is None else folders[-1]
    if having and having[0] is not found[0]:
        talk.say(f"{found[0].run} has nothing of {phase}: taken from {folder}")
    if not is_chosen:
        _say_passed_over(name, of_phase, finished)
    _say_taken(name, folder, [other for each in found for other in each.folders])
    return folder


def _say_passed_over(name: str, runs: list[_Models], finished: list[_Models]) -> None:
    if not finished:
        if len(runs) > 1:
            talk.say(f"No run of {name} has finished: this is the newest checkpoint. Choose another: {name}@RUN")
    elif runs[0] is not finished[0]:
        talk.say(
            f"{finished[0].run} is the newest finished run of {name}."
            f" {runs[0].run} is newer and has not finished: {name}@{runs[0].run}"
        )


def _need_newest(name: str, taken: _Models, found: list[_Models]) -> None:
    """DataError where a newer run of the name is done and its model was not fetched yet."""
    if taken.run == name:
        return  # an id means that very run
    home_ = Home(home(), World())
    try:
        rows = home_.ledger.runs_called(name) if home_.has_ledger else []
    except HomingError as exc:
        talk.say(f"warning: whether a newer run of {name} is done is not known: {exc.what}")
        return
    here = {each.run for each in found}
    newer = [
        row
        for row in rows
        if row.state == "done"
        and row.id not in here
        and row.id > taken.run
        # Nor one whose model was removed from the store: nothing could bring it here.
        and begun_elsewhere(row.id) is None
        and not is_removed(home_, row.id)
    ]
    if newer:
        raise DataError(
            what=f"{name} means its newest finished run, {newer[0].id}, and the model of that is not here yet.",
            why=f"It is in {newer[0].store}. The newest one here is of {taken.run}.",
            fix=f"Bring it home: homing fetch {name}   Or use the one that is here: {name}@{taken.run}",
        )


def _that_run(name: str, wanted: str, found: list[_Models]) -> list[_Models]:
    by_id = {each.run: each for each in found if each.run}
    if not by_id:
        raise DataError(
            what=f"There is no trained model called {name!r} here.",
            why=f"Looked for {MODELS / name} and {home() / 'runs' / name}-*.",
            fix="homing runs lists what there is; homing fetch RUN brings one home.",
        )
    return [by_id[pick_run(name, wanted, list(by_id), fix=f"homing fetch {wanted} brings one home that is not here.")]]


def _models_called(name: str) -> list[_Models]:
    """What is here of each run of that name, or with that id: weights of nobody's run, then the newest run first."""
    runs = [each for each in _runs_called(name) if _is_model(each) and _stranger(name, each.name) is None]
    run_dirs = {each.name: each for each in runs}
    by_run: dict[str, list[Path]] = {run_id: [] for run_id in run_dirs}
    for folder in _fetched(name):
        manifest = manifest_in(folder)
        by_run.setdefault(manifest.run_id if manifest is not None else "", []).append(folder)
    found = [_Models(run_id, tuple(folders), run_dirs.get(run_id)) for run_id, folders in by_run.items()]
    found.sort(key=lambda each: each.run, reverse=True)  # ids carry the time
    # Stable: the newest stays first.
    found.sort(key=lambda each: (bool(each.run), not each.fetched and is_still_theirs(each.run)))
    return found


def _stranger(name: str, run_id: str) -> Path | None:
    """Where a run was begun that only shares its name with a run file here."""
    theirs = begun_elsewhere(run_id) if run_id != name else None
    return theirs if theirs is not None and file_called(name) is not None else None


def _fetched(name: str) -> list[Path]:
    """What lies in models/: NAME, and other runs and phases of it, which fetch puts beside it as NAME-PHASE or ID."""
    beside = [MODELS / f"{name}-{phase}" for phase in PHASES]
    beside += sorted(path for path in MODELS.glob(f"{name}-*") if path not in beside) if MODELS.is_dir() else []
    ours = [folder for folder in beside if _is_checkpoint(folder) and _is_of(name, folder)]
    return [folder for folder in (MODELS / name, *ours) if _is_model(folder)]


def _is_of(name: str, folder: Path) -> bool:
    manifest = manifest_in(folder)
    return (
        manifest is not None
        and manifest.run_name == name
        and folder.name in (f"{name}-{manifest.phase}", manifest.run_id)
    )


def _how_far(model: Path) -> int:
    """By phase. What no run of ours made lies under that name because somebody put it there, and comes first."""
    phase = _phase_of(model) if _is_checkpoint(model) else _last_phase(model)
    return PHASES.index(phase) if phase in PHASES else len(PHASES)


def _last_phase(run_dir: Path) -> str:
    return next((phase for phase in reversed(PHASES) if _steps(run_dir / names.CHECKPOINTS / phase)), "")


def _say_taken(name: str, taken: Path, candidates: list[Path]) -> None:
    """What was fetched tells its phase and step nowhere in its path; what lies beside it can be asked for."""
    others = {_phase_of(folder): folder for folder in candidates if folder != taken and _is_checkpoint(folder)}
    told = [f"--phase {phase}: {folder}" for phase, folder in others.items() if phase]
    manifest = manifest_in(taken) if _is_checkpoint(taken) else None
    if manifest is None and not told:
        return
    what = f"{manifest.phase} step {manifest.step:,}" if manifest is not None else _last_phase(taken)
    theirs = _stranger(name, manifest.run_id) if manifest is not None else None
    begun = f", begun in {theirs}" if theirs is not None else ""
    talk.say(f"{taken}, {what}{begun}" + (f"   ({'; '.join(told)})" if told else ""))


def _phase_of(folder: Path) -> str:
    """Of one checkpoint, by its manifest; "" of weights that no run of ours made."""
    manifest = manifest_in(folder)
    return manifest.phase if manifest is not None else ""


def _newest() -> Path:
    runs = home() / "runs"
    found = [path for parent in (MODELS, runs) if parent.is_dir() for path in parent.iterdir()]
    found = sorted((path for path in found if _is_model(path)), key=lambda path: (path.stat().st_mtime, path.name))
    elsewhere = {path: theirs for path in found if path.parent == runs and (theirs := begun_elsewhere(path.name))}
    own = [path for path in found if path not in elsewhere]
    finished = [path for path in own if _is_finished(path)]
    if finished:
        talk.say(f"{finished[-1]}: the newest finished model of this folder.")
        return finished[-1]
    if own:
        talk.say(f"{own[-1]}: the newest model of this folder, where none is finished.")
        return own[-1]
    if elsewhere:
        newest = list(reversed(elsewhere.items()))[:_SHOWN]
        raise DataError(
            what=f"There is no trained model of this folder, {Path.cwd()}.",
            why="Of other folders: " + ", ".join(f"{path.name} ({theirs})" for path, theirs in newest) + ".",
            fix=f"Name one by its id, which works from anywhere: {newest[0][0].name}",
        )
    raise DataError(
        what="There is no trained model here yet.",
        why=f"Looked in ./{MODELS} and {runs}.",
        fix="homing quickstart makes one; homing fetch RUN brings one home.",
    )


def _runs_called(name: str) -> list[Path]:
    """Run directories of that name, or with that id, newest first: the id carries the time."""
    parent = home() / "runs"
    if not parent.is_dir():
        return []
    is_run = re.compile(_RUN_ID.format(name=re.escape(name)) + "|" + re.escape(name)).fullmatch
    return sorted((path for path in parent.iterdir() if path.is_dir() and is_run(path.name)), reverse=True)


def _need_folder(path: Path) -> Path:
    is_gguf = path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")))
    if is_gguf and not _is_model(path):
        raise DataError(
            what=f"{path} is a GGUF, which homing writes and does not open.",
            why="It is for llama.cpp and programs that are built on it.",
            fix="Name the run or the checkpoint that it was made from, or: llama-cli -m FILE.gguf",
        )
    if (path / names.ADAPTER_CONFIG).is_file() and not (path / names.RUN).is_file():
        raise DataError(
            what=f"{path} is an adapter alone, for peft: the weights that it belongs to are not in it.",
            why=f"{names.ADAPTER_CONFIG} names them.",
            fix="Name the run that it was made from, or make one of both: homing export RUN --to merged",
        )
    if not path.is_dir():
        raise DataError(
            what=f"There is no folder {path}.",
            why="A path must be a checkpoint or a run directory.",
            fix="homing runs lists what there is.",
        )
    if not _is_model(path):
        raise DataError(
            what=f"{path} holds no model.",
            why=f"It has neither {names.WEIGHTS} nor {names.CHECKPOINTS}/ with a checkpoint in it.",
            fix="homing runs lists what there is.",
        )
    return path


def _is_model(path: Path) -> bool:
    return _is_checkpoint(path) or _is_run_dir(path)


def _is_checkpoint(path: Path) -> bool:
    """Or anybody's model: weights in one file, or in several that an index names, or an adapter alone."""
    wanted = (names.WEIGHTS, f"{names.WEIGHTS}.index.json", names.ADAPTER)
    return any((path / name).is_file() for name in wanted)


def _is_run_dir(path: Path) -> bool:
    return any(_is_checkpoint(step) for step in (path / names.CHECKPOINTS).glob("*/step-*"))


def choose_in_run(run_dir: Path, checkpoint: str | None = None, phase: str | None = None) -> Chosen:
    """What the verbs that use a model open in a run directory."""
    checkpoints = run_dir / names.CHECKPOINTS
    by_phase = {p: _steps(checkpoints / p) for p in PHASES if _steps(checkpoints / p)}
    chosen = phase or _last_phase(run_dir)
    if chosen not in by_phase:
        raise DataError(
            what=f"{run_dir} has no checkpoint of the phase {chosen or 'asked for'}.",
            why=f"It has checkpoints of: {', '.join(by_phase) or 'no phase'}.",
            fix=f"--phase {next(reversed(by_phase), 'pretrain')}",
        )
    steps = by_phase[chosen]
    step = _pick_step(checkpoints / chosen, checkpoint, steps)
    if step not in steps:
        raise DataError(
            what=f"{checkpoints / chosen} has no checkpoint {checkpoint or step}.",
            why=f"It has the steps {', '.join(map(str, steps))}.",
            fix=f"--checkpoint {steps[-1]}",
        )
    why = _why(checkpoints / chosen, step, steps) if checkpoint is None and step != steps[-1] else ""
    return Chosen(checkpoints / chosen / names.step_dir(step), why)


def _why(phase_dir: Path, step: int, steps: list[int]) -> str:
    best = _read_pointer(phase_dir / names.BEST)
    if best is None or best.step != step:
        return ""  # the last one is not whole
    value = "" if best.val_loss is None else f" {best.val_loss:.4f}"
    return (
        f"{phase_dir.name} step {step:,}: best of {len(steps)}, by {figure_of(phase_dir.name)}{value};"
        f" the last is step {steps[-1]:,} (--checkpoint latest)"
    )


def _pick_step(phase_dir: Path, checkpoint: str | None, steps: list[int]) -> int | None:
    if checkpoint is None:
        best = _pointed(phase_dir / names.BEST)
        return best if best in steps else _pointed(phase_dir / names.LATEST) or steps[-1]
    if checkpoint == "latest":
        return _pointed(phase_dir / names.LATEST) or steps[-1]
    return _pointed(phase_dir / names.BEST) if checkpoint == "best" else int(checkpoint)


def _steps(phase_dir: Path) -> list[int]:
    if not phase_dir.is_dir():
        return []
    found = {names.parse_step(path.name): path for path in phase_dir.iterdir()}
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
            what=f"{path} cannot be read.", why=str(exc), fix="Name a step instead: --checkpoint STEP"
        ) from exc
