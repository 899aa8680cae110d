"""Runs that `homing train` started on this computer: they have a folder, but no instance and no ledger entry.

A local run directory has the layout of a store (`store_here`), so the code that reads rented runs also reads
local ones.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from homing.cloud.contact.heartbeats import Tail
from homing.cloud.home import Home
from homing.cloud.reconcile.run_status import check_interval, how_far, newest_in
from homing.cloud.watch.run_output import EventFeed, Report, check_program, follow_tail
from homing.errors import HomingError, LimitReached, RunFailed, UsageError
from homing.store import FileStore, run_key
from homing.units import format_bytes, format_duration
from homing.wire import codec, file_names
from homing.wire.control_files import Control
from homing.wire.event_lines import Metric, Outcome
from homing.wire.run_json import Run
from homing.world import World

__all__ = [
    "STARTED",
    "Trained",
    "ask_to_stop",
    "hold",
    "is_limit",
    "log_of",
    "look_again",
    "newest_saved",
    "progress_of",
    "store_here",
    "trained_here",
    "wait_for_stop",
    "watch_here",
]

T = TypeVar("T")

# Locked by `homing train` while it runs, because the trainer takes its own lock only after torch is loaded.
STARTED = "train.json"
ENDING_S = 10.0  # maximum time from when the trainer writes its outcome until it exits
_LOOK_S, _PAUSE_S = 1.0, 0.05
_END_BYTES = 1 << 16  # longer than any line of metrics


@dataclass(frozen=True)
class Trained:
    run: str
    name: str
    state: str  # training | unfinished, or the state of its outcome: done, stopped, failed
    phase: str
    step: int | None
    num_steps: int | None
    began_at: float
    reason: str = ""  # the trainer's message about why it ended
    again: str = ""  # the command that resumes it
    exit_code: int = 0  # exit code of a verb that watches the run until it ends
    phases: tuple[str, ...] = ()
    has_checkpoint: bool = True  # False if the run has ended without one
    ended_at: float | None = None  # when the trainer wrote its outcome

    @property
    def is_live(self) -> bool:
        return self.state == "training"

    @property
    def steps(self) -> str:
        return f"{self.step:,}/{self.num_steps:,}" if self.step and self.num_steps else ""

    @property
    def where(self) -> str:
        """How far training has come, according to the trainer, which writes its first metrics only after some steps."""
        if self.steps:
            return f"{self.phase} step {self.steps}"
        return "before its first metrics" if self.step is None else "before its first step"

    @property
    def next_words(self) -> str:
        run = self.run
        if self.is_live:
            return f"Watch it: homing watch {run}   Logs: homing logs {run} -f   Stop it: homing stop {run}"
        if self.state == "done":
            return f"Chat with it: homing chat {run}   Evaluate it: homing eval {run}"
        why = "" if self.state == "stopped" else f"See why: homing logs {run}   "
        return f"{why}Resume: {self.again}" if self.has_checkpoint else f"{why}Start over: {self.again}"

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "is_trained_here": True, "is_billing": False}


def trained_here(home: Home, known: set[str]) -> list[Trained]:
    """Return the runs trained here, newest first. If a run's record is unreadable, its name is that of its folder."""
    world, folder = home.world, home.path / "runs"
    ids = world.listdir(folder) if world.is_dir(folder) else []
    begun = [(world.modified_at(folder / each / file_names.TRAINER_LOCK), each) for each in ids
             if each not in known and world.exists(folder / each / file_names.TRAINER_LOCK)]  # fmt: skip
    return [_look_at(home, run_id, at) for at, run_id in sorted(begun, reverse=True)]


def look_again(home: Home, run: Trained) -> Trained:
    """Return the current state of the same run."""
    return _look_at(home, run.run, run.began_at)


def store_here(home: Home) -> FileStore:
    return FileStore(str(home.path), home.world, create=False)


def hold(run_dir: Path, again: str, world: World) -> bool:
    """Lock the run for `homing train` until it ends, and record `again`, the command that resumes it.

    Return False if another process holds the lock.
    """
    # Retry for a while: a reader may hold the lock briefly, or the previous trainer may still write its last lines.
    path, patience_s = run_dir / STARTED, ENDING_S if world.exists(run_dir / file_names.OUTCOME) else _LOOK_S
    deadline = world.monotonic() + patience_s
    while not world.lock(path):
        if world.monotonic() >= deadline:
            return False
        world.sleep(_PAUSE_S)
    # Remove what the previous attempt left: its outcome, and the stop request that may have ended it. Files that are
    # written from now on belong to this attempt.
    world.remove(run_dir / file_names.OUTCOME)
    world.remove(run_dir / file_names.CONTROL)
    # Written in place, not replaced, because the lock is on this file.
    path.write_text(json.dumps({"schema": "homing.started/1", "again": again}), encoding="utf-8")
    if not world.exists(run_dir / file_names.TRAINER_LOCK):
        world.append(run_dir / file_names.TRAINER_LOCK, b"")  # marks the run as trained here
    return True


def is_limit(outcome: Outcome) -> bool:
    """Return whether the run was stopped by its own limit, such as train.time_limit, and not by a person."""
    return outcome.state == "stopped" and "limit" in outcome.reason


def _look_at(home: Home, run_id: str, began_at: float) -> Trained:
    folder = home.run_dir(run_id)
    run, outcome = _read(home, folder / file_names.RUN, Run), _read(home, folder / file_names.OUTCOME, Outcome)
    # A running trainer has no outcome yet. If there is an outcome, do not probe the lock, because a trainer that is
    # starting needs it.
    state = outcome.state if outcome is not None else "training" if _is_at_work(folder) else "unfinished"
    steps = {phase.kind: phase.num_steps for phase in run.phases} if run is not None else {}
    phase, step = (outcome.phase, outcome.step) if outcome is not None else _last_line(home, folder)
    name = run.name if run is not None else run_id
    return Trained(
        run_id,
        name,
        state,
        phase,
        step,
        steps.get(phase),
        began_at,
        reason=outcome.reason if outcome is not None else "",
        again=_again(home, folder) or f"homing train {name}",
        exit_code=_exit_code(state, outcome),
        phases=tuple(steps),
        has_checkpoint=state in ("training", "done") or _has_checkpoint(folder),
        ended_at=outcome.t or None if outcome is not None else None,
    )


def _has_checkpoint(folder: Path) -> bool:
    """Return True if a complete checkpoint exists: its manifest is written last."""
    return any((folder / file_names.CHECKPOINTS).glob(f"*/step-*/{file_names.MANIFEST}"))


def _exit_code(state: str, outcome: Outcome | None) -> int:
    if outcome is not None and is_limit(outcome):
        return LimitReached.exit_code
    return RunFailed.exit_code if state in ("failed", "unfinished") else 0


def _again(home: Home, folder: Path) -> str:
    """Return the command that resumes the run; "" if an older homing version or the trainer alone started it."""
    try:
        return str(json.loads(home.world.read(folder / STARTED))["again"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _last_line(home: Home, folder: Path) -> tuple[str, int | None]:
    """Return the phase and step last reported by a trainer that has not ended."""
    path = folder / file_names.METRICS
    try:
        # Read only the end of the file: a dashboard does this every few seconds, and a long run's file is large.
        last = codec.loads(Metric, home.world.read(path, max(0, home.world.size(path) - _END_BYTES)).splitlines()[-1])
    except (OSError, IndexError, codec.WireError):
        return "", None
    return last.phase, last.step


def _read(home: Home, path: Path, cls: type[T]) -> T | None:
    try:
        return codec.loads(cls, home.world.read(path))
    except (OSError, codec.WireError):
        return None


def _is_at_work(folder: Path) -> bool:
    """Return whether a trainer, or the `homing train` that started it, is running. Each holds a lock while it runs.

    The lock of `homing train` is checked first: probing the trainer's lock could make a starting trainer fail.
    """
    return any(_is_held(folder / name) for name in (STARTED, file_names.TRAINER_LOCK))


def _is_held(path: Path) -> bool:
    try:
        with open(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


STOP_REASON = "Stopped from another terminal."  # of a run that `homing stop` ended
_POLL_S = 2.0
_STOP_POLL_S = 0.5
_NO_WORD = "no trainer is running, and the last one left no error message."


def watch_here(home: Home, run: Trained, *, every_s: float, is_curve: bool = False) -> Iterator[Report]:
    """Yield reports of the run. The last one, of kind `end`, follows once no trainer is running any more.

    With `is_curve`, reports of kind `curve` bring the points of the loss curve, from the first step on.
    """
    check_interval(every_s)
    feed, last, due = EventFeed(store_here(home), run.run, is_curve=is_curve), "", home.world.monotonic()
    is_first = True
    while True:
        # Check the state before reading the files, so that everything written up to the end is read.
        run = look_again(home, run)
        reports = list(feed.reports())
        if is_curve:
            yield from feed.curve_points()
        yield from reports
        if is_first and run.is_live:
            saved = f"saved: {newest_saved(home, run) or 'no checkpoint yet'}"
            parts = ["training on this computer, not billing", saved, feed.learned()]
            yield Report("head", " | ".join(filter(None, parts)), run.to_dict())
        is_first = False
        line = progress_of(run, feed)
        if line != last and (home.world.monotonic() >= due or not run.is_live):
            last, due = line, home.world.monotonic() + every_s
            yield Report("line", line, _data(run, feed))
        if not run.is_live:
            if learned := feed.learned():
                yield Report("event", learned)
            yield Report("end", f"{run.state}: {run.reason or _NO_WORD}", run.to_dict())
            return
        home.world.sleep(min(every_s, _POLL_S))


def progress_of(run: Trained, feed: EventFeed) -> str:
    """Return the progress line, ordered as for a rented run. During training, it includes GPU memory and ETA."""
    metric = feed.metric
    if metric is None or metric.phase != run.phase:  # nothing reported for this phase yet
        return run.where
    parts = how_far(
        dataclasses.replace(metric, step=max(metric.step, run.step or 0)), run.phases, feed.figures[metric.phase]
    )
    if run.is_live and metric.memory_bytes:
        parts.append(f"GPU memory {format_bytes(metric.memory_bytes)}")
    if run.is_live and metric.eta_s is not None:
        is_last = metric.phase == run.phases[-1] if run.phases else True
        parts.append(f"eta {format_duration(metric.eta_s)}" + ("" if is_last else " of this phase"))
    return " | ".join(parts)


def _data(run: Trained, feed: EventFeed) -> dict[str, Any]:
    metric = codec.dump(feed.metric) if feed.metric is not None else None
    return {**run.to_dict(), "metric": metric, "figures": feed.figures.get(run.phase, {})}


def newest_saved(home: Home, run: Trained) -> str:
    """Return the newest complete checkpoint, such as `pretrain step 1,200`; "" if there is none."""
    return newest_in(store_here(home), run.run, lambda: list(run.phases))


def log_of(
    home: Home, run: Trained, program: str, *, is_following: bool, notify: Callable[[str], None]
) -> Iterator[str]:
    """Yield the lines of the trainer's log, which is the only log of a local run."""
    check_program(program, run.run)
    if program != "trainer":
        raise UsageError(
            what=f"{run.run} has no {program} log.",
            why=f"It was trained on this computer, and the {program} process runs only on rented instances.",
            fix=f"homing logs {run.run}",
        )
    tail = Tail(store_here(home), run_key(run.run, file_names.LOGS, f"{program}.log"))
    if not is_following:
        return iter(tail.lines())
    return follow_tail(tail, lambda: not look_again(home, run).is_live, home.world, notify)


def ask_to_stop(home: Home, run: Trained) -> None:
    if not run.is_live:
        raise UsageError(
            what=f"{run.run} is not training: it is {run.state}.", why=run.reason or _NO_WORD, fix=run.next_words
        )
    control = Control(stop=True, reason=STOP_REASON)
    home.world.write(home.run_dir(run.run) / file_names.CONTROL, codec.dumps(control).encode())


def wait_for_stop(home: Home, run: Trained, *, timeout_s: float) -> Trained:
    deadline = home.world.monotonic() + timeout_s
    while (run := look_again(home, run)).is_live:
        if home.world.monotonic() >= deadline:
            raise HomingError(
                what=f"{run.run} did not stop within {format_duration(timeout_s)}.",
                why=f"The trainer reads requests after each step. Progress: {run.where}. The request remains active.",
                fix=f"homing watch {run.run}   or end it without a checkpoint: press Ctrl-C twice in its terminal",
            )
        home.world.sleep(_STOP_POLL_S)
    return run
