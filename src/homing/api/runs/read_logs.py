"""The log of a run's trainer, agent or sync process, line by line, as `homing logs` prints it."""

from __future__ import annotations

from collections.abc import Iterator

from homing.api import notices
from homing.api.lookup.find_runs import find_any, open_home
from homing.api.lookup.local_runs import Trained, log_of
from homing.cloud.home import Home
from homing.cloud.watch.run_output import boot_log, follow, read_log
from homing.wire import file_names

__all__ = ["read_logs"]


def read_logs(
    run: str | None = None, program: str = "trainer", *, is_following: bool = False, home: Home | None = None
) -> Iterator[str]:
    """Yield the lines of a log; with `is_following` until the run ends. If the log is empty, notices explain why."""
    with open_home(home) as opened:
        row, is_empty = find_any(opened, run), True
        if isinstance(row, Trained):
            lines = log_of(opened, row, program, is_following=is_following, notify=_warn)
        elif is_following:
            lines = follow(opened, row, program, notify=_warn)
        else:
            lines = iter(read_log(opened, row, program))
        for line in lines:
            is_empty = False
            yield line
        if is_empty and isinstance(row, Trained):
            folder = opened.run_dir(row.run)
            notices.say(f"{row.run} has no log, because its trainer has written nothing yet.")
            notices.say(f"Metrics: {folder / file_names.METRICS}   Events: {folder / file_names.EVENTS}")
        elif is_empty and not isinstance(row, Trained) and not is_following:
            notices.say(f"The {program} of {row.id} has written nothing to the store yet.")
            if early := boot_log(opened, row):
                notices.say(f"Output of the startup command on the instance:\n{early.rstrip()}")


def _warn(text: str) -> None:
    notices.say(f"warning: {text}")
