"""`homing logs`: print the logs of trainer, agent and sync."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup.find_runs import find_any, open_home
from homing.api.lookup.local_runs import Trained, log_of
from homing.cli import output
from homing.cli.options import Json, RunName
from homing.cloud.home import Home
from homing.cloud.watch.run_output import boot_log, follow, read_log
from homing.wire import file_names

__all__ = ["command"]


def command(
    run: RunName = None,
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="Log to show: trainer, agent or sync.")] = "trainer",
    is_following: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until the run ends.")] = False,
    json_: Json = False,
) -> None:
    """Print the log of the trainer, agent or sync; -f follows it until the run ends."""

    def warn(text: str) -> None:
        output.say(f"warning: {text}")

    with open_home() as home:
        row = find_any(home, run)
        if isinstance(row, Trained):
            is_kept = False
            for line in log_of(home, row, program, is_following=is_following, notify=warn):
                is_kept = True
                _show(line)
            if not is_kept:
                _say_none_kept(home, row)
            return
        if is_following:
            for line in follow(home, row, program, notify=warn):
                _show(line)
            return
        lines = read_log(home, row, program)
        for line in lines:
            _show(line)
        if not lines:
            output.say(f"The {program} of {row.id} has written nothing to the store yet.")
            early = boot_log(home, row)
            if early:
                output.say(f"Output of the startup command on the instance:\n{early.rstrip()}")


def _say_none_kept(home: Home, run: Trained) -> None:
    folder = home.run_dir(run.run)
    output.say(f"{run.run} has no log: its trainer has written nothing yet, or an older homing started it.")
    output.say(f"Metrics: {folder / file_names.METRICS}   Events: {folder / file_names.EVENTS}")


def _show(line: str) -> None:
    if output.is_json():
        output.emit("log/1", {"line": line})
    else:
        print(line, flush=True)
