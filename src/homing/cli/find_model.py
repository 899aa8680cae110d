"""RUN, as a person types it, to one checkpoint folder.

    a folder        a checkpoint, an export, anybody's model, or a run directory with checkpoints/ in it
    ./models/NAME   what `homing fetch NAME` brought home
    NAME            the newest run of that name under $HOMING_HOME/runs
    (left out)      the newest of all of these

In a run directory the last phase counts, and in it the best checkpoint, or the latest where none was evaluated; the
person may ask for others. Reads the disk and nothing else: no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from homing.config import home
from homing.errors import DataError, UsageError
from homing.wire import codec, names
from homing.wire.checkpoint import Pointer

__all__ = ["MODELS", "find_model"]

MODELS = Path("models")
PHASES = ("pretrain", "mid", "sft", "rl")  # in the order in which a model goes through them
_RUN_ID = r"{name}-\d{{8}}-\d{{6}}(-\w+)?"


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
            what=f"There is no phase {phase!r}.", why=f"The phases are {', '.join(PHASES)}.", fix="--phase pretrain"
        )
    folder = _find_folder(run, wants_one=checkpoint is not None or phase is not None)
    if _is_checkpoint(folder):
        if checkpoint is not None or phase is not None:
            raise UsageError(
                what=f"{folder} is one checkpoint, so there is none to choose.",
                why="--checkpoint and --phase choose in a run directory, which holds several.",
                fix="Leave them out; homing fetch NAME --checkpoint STEP brings another one home.",
            )
        return folder
    return _in_run_dir(folder, checkpoint, phase)


def _find_folder(run: str | None, *, wants_one: bool) -> Path:
    if run is None:
        return _newest()
    path = Path(run).expanduser()
    looks_like_path = "/" in run or run.startswith((".", "~"))
    fetched, runs = MODELS / run, _runs_called(run)
    if looks_like_path or (path.is_dir() and (_is_checkpoint(path) or _is_run_dir(path))):
        return _need_folder(path)
    # models/NAME holds one set of weights; a person who names a step or a phase means the run behind it.
    candidates = [*runs, fetched] if wants_one else [fetched, *runs]
    for candidate in candidates:
        if _is_checkpoint(candidate) or _is_run_dir(candidate):
            return candidate
    raise DataError(
        what=f"There is no trained model called {run!r} here.",
        why=f"Looked for the folders {run}, {fetched} and {home() / 'runs' / run}-*.",
        fix=f"homing fetch {run} brings it home; homing runs lists what there is.",
    )


def _newest() -> Path:
    runs = home() / "runs"
    found = [path for parent in (MODELS, runs) if parent.is_dir() for path in parent.iterdir()]
    found = [path for path in found if _is_checkpoint(path) or _is_run_dir(path)]
    if not found:
        raise DataError(
            what="There is no trained model here yet.",
            why=f"Looked in ./{MODELS} and {runs}.",
            fix="homing quickstart makes one; homing fetch RUN brings one home.",
        )
    return max(found, key=lambda path: (path.stat().st_mtime, path.name))


def _runs_called(name: str) -> list[Path]:
    """Run directories of that name, or with that id, newest first: the id carries the time."""
    parent = home() / "runs"
    if not parent.is_dir():
        return []
    is_run = re.compile(_RUN_ID.format(name=re.escape(name)) + "|" + re.escape(name)).fullmatch
    return sorted((path for path in parent.iterdir() if path.is_dir() and is_run(path.name)), reverse=True)


def _need_folder(path: Path) -> Path:
    if not path.is_dir():
        raise DataError(
            what=f"There is no folder {path}.",
            why="A path must be a checkpoint or a run directory.",
            fix="homing runs lists what there is.",
        )
    if not _is_checkpoint(path) and not _is_run_dir(path):
        raise DataError(
            what=f"{path} holds no model.",
            why=f"It has neither {names.WEIGHTS} nor {names.CHECKPOINTS}/ with a checkpoint in it.",
            fix="homing runs lists what there is.",
        )
    return path


def _is_checkpoint(path: Path) -> bool:
    """Or anybody's model: weights in one file, or in several that an index names, or an adapter alone."""
    wanted = (names.WEIGHTS, f"{names.WEIGHTS}.index.json", names.ADAPTER)
    return any((path / name).is_file() for name in wanted)


def _is_run_dir(path: Path) -> bool:
    return any(_is_checkpoint(step) for step in (path / names.CHECKPOINTS).glob("*/step-*"))


def _in_run_dir(run_dir: Path, checkpoint: str | None, phase: str | None) -> Path:
    checkpoints = run_dir / names.CHECKPOINTS
    by_phase = {p: _steps(checkpoints / p) for p in PHASES if _steps(checkpoints / p)}
    chosen = phase or next((p for p in reversed(PHASES) if p in by_phase), "")
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
    return checkpoints / chosen / names.step_dir(step)


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
    if not path.is_file():
        return None
    try:
        return codec.loads(Pointer, path.read_bytes()).step
    except codec.WireError as exc:
        raise DataError(
            what=f"{path} cannot be read.", why=str(exc), fix="Name a step instead: --checkpoint STEP"
        ) from exc
