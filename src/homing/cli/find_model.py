"""RUN, as a person types it, to one checkpoint folder.

    with a slash    a folder: a checkpoint, an export, anybody's model, or a run directory with checkpoints/ in it
    NAME            of models/NAME and models/NAME-PHASE, which `homing fetch NAME` brought home, and of the newest run
                    of that name under $HOMING_HOME/runs the one of the last phase; else the run that runs/NAME.yaml
                    gives another name; else a folder of that name here. Where it is a run and a folder, that is said
    (left out)      the newest in models/ and of the runs that were begun in this folder; which one, is said

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
from homing.config import home, run_files
from homing.config.models import MODELS, manifest_in
from homing.config.names import nearest
from homing.config.projects import begun_elsewhere, file_called, is_still_theirs, name_meant
from homing.errors import DataError, UsageError
from homing.wire import codec, names
from homing.wire.checkpoint import CheckpointManifest, Pointer, figure_of
from homing.wire.run import Run

__all__ = ["MODELS", "Chosen", "choose_in_run", "find_model"]

PHASES = ("pretrain", "mid", "sft", "rl")  # in the order in which a model goes through them
_SHOWN = 5
_RUN_ID = r"{name}-\d{{8}}-\d{{6}}(-\w+)?"


@dataclass(frozen=True)
class Chosen:
    folder: Path
    why: str = ""  # where it is not the last one, and nobody asked for it by name


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
        if (
            run is not None
            and "/" not in run
            and phase is not None
            and checkpoint is None
            and phase != _phase_of(folder)
        ):
            raise _nothing_of(run, phase)
        if checkpoint is not None or (phase is not None and phase != _phase_of(folder)):
            raise UsageError(
                what=f"{folder} is one checkpoint, so there is none to choose.",
                why="--checkpoint and --phase choose in a run directory, which holds several.",
                fix="Leave them out; homing fetch NAME --checkpoint STEP brings another one home.",
            )
        return folder
    chosen = choose_in_run(folder, checkpoint, phase)
    if chosen.why:
        talk.say(chosen.why)
    if checkpoint is None:
        _say_unfinished(folder, chosen.folder.parent)
    return chosen.folder


def _nothing_of(run: str, phase: str) -> UsageError:
    there = ", ".join(f"{_phase_of(each) or 'weights'} in {each}" for each in _fetched(run))
    return UsageError(
        what=f"{run} has nothing of the phase {phase} here.",
        why=f"At home of it: {there or 'nothing'}.",
        fix=f"Bring it home: homing fetch {run} --checkpoint {phase}:STEP   Or leave --phase out.",
    )


def _say_unfinished(run_dir: Path, phase_dir: Path) -> None:
    """An interrupted run is the newest of its name all the same: nobody should export it and take it for the whole."""
    last = manifest_in(phase_dir / names.step_dir(_steps(phase_dir)[-1]))
    if last is not None and not last.is_final:
        at = f"{last.phase} step {last.step:,}{_of(phase_dir, last)}"
        talk.say(f"{run_dir.name} is not finished: its last checkpoint is {at}.")


def _of(phase_dir: Path, last: CheckpointManifest) -> str:
    try:
        run = codec.loads(Run, (phase_dir / names.step_dir(last.step) / names.RUN).read_bytes())
    except (OSError, ValueError):
        return ""
    return next((f" of {phase.num_steps:,}" for phase in run.phases if phase.kind == last.phase), "")


def _find_folder(run: str | None, checkpoint: str | None, phase: str | None) -> Path:
    if run is None:
        return _newest()
    path = Path(run).expanduser()
    if "/" in run or run.startswith((".", "~")):
        return _need_folder(path)
    called = _runs_called(run)
    strangers = {each: theirs for each in called if (theirs := _stranger(run, each.name)) is not None}
    runs, fetched = [each for each in called if each not in strangers and _is_model(each)], _fetched(run)
    runs.sort(key=lambda each: is_still_theirs(each.name))  # stable: the newest stays first
    # A fetched folder holds one set of weights; a person who names a step or a phase means the run behind it.
    if phase is not None:
        found = _of_phase(runs, fetched, checkpoint, phase)
    else:
        found = None if checkpoint is not None else max([*fetched, *runs[:1]], key=_how_far, default=None)
    if taken := found or next(iter([*runs, *fetched]), None):
        if _is_model(path) and path.absolute() != taken.absolute():
            talk.say(f"{run} is a run and a folder here: {taken} is taken. The folder is ./{run}")
        _say_taken(run, taken, [*fetched, *runs[:1]])
        return taken
    if _is_model(path):
        return path
    file = run_files().get(run)
    if file is not None and (name := name_meant(file)) != run:
        talk.say(f"{file} is the run {name}.")
        return _find_folder(name, checkpoint, phase)
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


def _stranger(name: str, run_id: str) -> Path | None:
    """Where a run was begun that only shares its name with a run file here."""
    theirs = begun_elsewhere(run_id) if run_id != name else None
    return theirs if theirs is not None and file_called(name) is not None else None


def _fetched(name: str) -> list[Path]:
    """What lies in models/: NAME, and later phases of it, which fetch puts beside it as NAME-PHASE."""
    manifests = {MODELS / f"{name}-{phase}": (name, phase) for phase in PHASES}
    beside = [folder for folder, wanted in manifests.items() if _is_checkpoint(folder) and _names_in(folder) == wanted]
    return [folder for folder in (MODELS / name, *beside) if _is_model(folder)]


def _names_in(folder: Path) -> tuple[str, str]:
    manifest = manifest_in(folder)
    return (manifest.run_name, manifest.phase) if manifest is not None else ("", "")


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


def _of_phase(runs: list[Path], fetched: list[Path], checkpoint: str | None, phase: str) -> Path | None:
    """The newest run that has the phase, else what was fetched of it. Told where a newer run is passed over."""
    found = next((run for run in runs if _steps(run / names.CHECKPOINTS / phase)), None)
    if found is None and checkpoint is None:
        found = next((folder for folder in fetched if _is_checkpoint(folder) and _phase_of(folder) == phase), None)
    if found is not None and runs and found != runs[0]:
        talk.say(f"{runs[0].name} has nothing of {phase}: taken from {found}")
    return found


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
    if own:
        talk.say(f"{own[-1]}: the newest model of this folder.")
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
