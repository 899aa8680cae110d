"""Runs that `homing train` began on this computer: they have a folder, no instance, and no place in the ledger."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from homing.cloud.home import Home
from homing.wire import codec, names
from homing.wire.event import Metric, Outcome
from homing.wire.run import Run

__all__ = ["Trained", "trained_here"]

T = TypeVar("T")


@dataclass(frozen=True)
class Trained:
    run: str
    name: str
    state: str  # training | unfinished, or as its outcome says: done, stopped, failed
    phase: str
    step: int | None
    num_steps: int | None
    began_at: float

    @property
    def steps(self) -> str:
        return f"{self.step:,}/{self.num_steps:,}" if self.step is not None and self.num_steps else ""


def trained_here(home: Home, known: set[str]) -> list[Trained]:
    """Newest first. One whose record cannot be read is listed all the same, by its folder."""
    world, folder = home.world, home.path / "runs"
    ids = world.listdir(folder) if world.is_dir(folder) else []
    begun = [(world.modified_at(folder / each / names.TRAINER_LOCK), each) for each in ids
             if each not in known and world.exists(folder / each / names.TRAINER_LOCK)]  # fmt: skip
    return [_look_at(home, run_id, at) for at, run_id in sorted(begun, reverse=True)]


def _look_at(home: Home, run_id: str, began_at: float) -> Trained:
    folder = home.run_dir(run_id)
    run, outcome = _read(home, folder / names.RUN, Run), _read(home, folder / names.OUTCOME, Outcome)
    # A trainer at work has no outcome yet: only then is its lock touched, which a trainer that begins needs.
    state = outcome.state if outcome is not None else "training" if _is_at_work(folder) else "unfinished"
    steps = {phase.kind: phase.num_steps for phase in run.phases} if run is not None else {}
    phase, step = (outcome.phase, outcome.step) if outcome is not None else _last_line(home, folder)
    return Trained(run_id, run.name if run is not None else run_id, state, phase, step, steps.get(phase), began_at)


def _last_line(home: Home, folder: Path) -> tuple[str, int | None]:
    """How far a trainer is that has not ended: as far as it has told."""
    try:
        last = codec.loads(Metric, home.world.read(folder / names.METRICS).splitlines()[-1])
    except (OSError, IndexError, codec.WireError):
        return "", None
    return last.phase, last.step


def _read(home: Home, path: Path, cls: type[T]) -> T | None:
    try:
        return codec.loads(cls, home.world.read(path))
    except (OSError, codec.WireError):
        return None


def _is_at_work(folder: Path) -> bool:
    """A trainer holds its lock for as long as it lives."""
    try:
        with open(folder / names.TRAINER_LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
