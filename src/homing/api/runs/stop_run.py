"""Stop a run at its next step, with a checkpoint, as `homing stop` and `Run.stop()` do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from homing.api import notices
from homing.api.lookup import local_runs
from homing.api.lookup.find_runs import find_any, name_here, open_home
from homing.api.lookup.local_runs import Trained
from homing.api.lookup.status import next_words
from homing.cloud.guard.change_limit_or_stop import STOP_TIMEOUT_S, ask_to_stop, wait_for_stop
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import Status, has_checkpoint

__all__ = ["Stopped", "StoppedWaiting", "stop_run"]


class StoppedWaiting(KeyboardInterrupt):
    """Raised on Ctrl-C while waiting for the run to end. The stop request remains in effect.

    The message says how to continue waiting.
    """


@dataclass(frozen=True)
class Stopped:
    """The stop request and, if the caller waited for the run to end, its final state."""

    run: RunRow | Trained
    typed: str  # the name or id that selects the run in this folder
    serial: int | None = None  # number of the stop request in the store; None for a run on this computer
    status: Status | None = None  # set for a rented run that has ended
    next_words: str = ""  # the next commands; "" if the run has not ended

    @property
    def is_stopped(self) -> bool:
        return not self.run.is_live if isinstance(self.run, Trained) else self.status is not None

    def to_dict(self) -> dict[str, Any]:
        if isinstance(self.run, Trained):
            return {**self.run.to_dict(), "is_stopped": self.is_stopped}
        after = {} if self.status is None else self.status.to_dict()
        return {"run": self.run.id, "serial": self.serial, "is_stopped": self.is_stopped, **after}


def stop_run(run: str, *, wait: bool = True, timeout_s: float = STOP_TIMEOUT_S, home: Home | None = None) -> Stopped:
    """Ask the run to save a checkpoint and end. With `wait`, return once training and billing have ended."""
    with open_home(home) as opened:
        refresh(opened)
        row = find_any(opened, run, changes="stop {}")
        if isinstance(row, Trained):
            local_runs.ask_to_stop(opened, row)
            asked = Stopped(row, row.run)
        else:
            asked = Stopped(row, name_here(row), ask_to_stop(opened, row))
        if not wait:
            return asked
        try:
            return _wait(opened, asked, timeout_s)
        except KeyboardInterrupt as interrupt:
            watch = f"Watch it stop: homing watch {asked.typed}"
            raise StoppedWaiting(f"Stopped waiting; the stop request remains active. {watch}") from interrupt


def _wait(home: Home, asked: Stopped, timeout_s: float) -> Stopped:
    if isinstance(asked.run, Trained):
        return replace(asked, run=local_runs.wait_for_stop(home, asked.run, timeout_s=timeout_s))
    status = wait_for_stop(home, asked.run, timeout_s=timeout_s, notify=lambda text: notices.say(f"  {text}"))
    words = next_words(status, asked.typed, has_checkpoint=has_checkpoint(home, status.run))
    return replace(asked, status=status, next_words=words)
