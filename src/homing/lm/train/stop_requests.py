"""Checks, between steps, for requests to end training early: signals, control.json and the time limit.

    SIGINT, SIGTERM     from a person at the terminal, or from an agent that was notified of a preemption
    control.json        written by the agent: stop, or land_by, the time by which the last checkpoint must be on disk
    time_limit_s        the trainer's own wall-clock limit

All have the same effect: the trainer finishes the step, saves a checkpoint and exits with 75. A second SIGINT makes it
exit immediately, without a checkpoint. land_by and time_limit_s are deadlines known in advance (`left_s`), so a landing
(an early decay of the learning rate) can finish before them. If it does not, `stop` ends training.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from homing.errors import Interrupted, RunFailed
from homing.units import format_duration
from homing.wire import codec, file_names
from homing.wire.control_files import Control, boot_clock_s

__all__ = ["ControlRequests", "FatalError", "Stop"]

# How many seconds longer the last save may take than the previous save, because the disk is slow or old checkpoints are
# being deleted.
_SAVE_SPARE_S = 2.0


@dataclass(frozen=True)
class Stop:
    kind: str  # signal | control | land_by | time_limit | landed
    reason: str

    @property
    def is_landed(self) -> bool:
        """Whether training ended earlier than planned but completed its learning rate decay: the model is finished."""
        return self.kind == "landed"

    @property
    def is_limit(self) -> bool:
        """Whether money or time has run out, so that another attempt would stop immediately."""
        return self.kind in ("land_by", "time_limit", "landed")


class FatalError(RunFailed):
    """A failure that would occur again if the run were started again."""


class ControlRequests:
    """Collects requests to stop training.

    Create it before importing torch, so that no signal is lost and the time limit includes the import.
    """

    def __init__(self, run_dir: Path, *, time_limit_s: float = 0.0) -> None:
        self.started = time.monotonic()
        self.time_limit_s = time_limit_s
        self._path = run_dir / file_names.CONTROL
        self._signal = 0
        self._seen: tuple[int, int] | None = None
        self._control = Control()
        self.problem = ""  # why control.json cannot be read, or ""; an event reports this, and the file is ignored

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Turn signals into stop requests inside this context; restore the previous handlers afterwards."""
        before = {number: signal.signal(number, self._notice) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _notice(self, number: int, frame: FrameType | None) -> None:
        if self._signal == number == signal.SIGINT:
            raise Interrupted(
                what="Training was interrupted twice and stopped immediately, without saving a checkpoint.",
                fix="Run the same command again to resume from the last checkpoint.",
            )
        self._signal = number

    def stop(self, *, save_s: float = 0.0) -> Stop | None:
        """Return a reason to stop now, or None.

        `save_s` is the number of seconds until a checkpoint requested at the next check would be on disk. The call
        costs one `stat` of control.json.
        """
        if self._signal:
            return Stop("signal", f"{signal.Signals(self._signal).name} was received.")
        control = self._read()
        if control.stop:
            return Stop("control", control.reason or "A stop was requested.")
        if control.land_by is not None and boot_clock_s() + save_s + _SAVE_SPARE_S >= control.land_by:
            return Stop("land_by", control.reason or "The deadline for the last checkpoint is near.")
        if self.time_limit_s and time.monotonic() - self.started >= self.time_limit_s:
            limit = format_duration(self.time_limit_s)
            return Stop("time_limit", f"The time limit of {limit} (train.time_limit) was reached.")
        return None

    def left_s(self) -> float | None:
        """Return the seconds until the nearest deadline, or None if there is none. The call costs one `stat`."""
        return min((left for left, _ in self._moments()), default=None)

    def why(self) -> str:
        """Return a description of the nearest deadline, which names the limit that sets it."""
        return min(self._moments(), default=(0.0, "the limit"))[1]

    def _moments(self) -> list[tuple[float, str]]:
        """Return a list of (seconds left, description), one for each deadline."""
        control, found = self._read(), []
        if control.land_by is not None:
            said = control.reason.removesuffix(" is near.").removeprefix("The ")
            found.append((control.land_by - boot_clock_s(), f"the {said or 'limit'}"))
        if self.time_limit_s:
            limit = f"the time limit of {format_duration(self.time_limit_s)} (train.time_limit)"
            found.append((self.time_limit_s - (time.monotonic() - self.started), limit))
        return found

    def _read(self) -> Control:
        try:
            stat = os.stat(self._path)
        except OSError:
            return Control()
        mark = (stat.st_mtime_ns, stat.st_ino)
        if mark != self._seen:
            try:
                self._control, self.problem = codec.loads(Control, self._path.read_bytes()), ""
            except (OSError, ValueError) as exc:
                self._control, self.problem = Control(), str(exc)
            self._seen = mark
        return self._control
