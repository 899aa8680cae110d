"""`homing watch`: print steps, loss, speed, samples and spend as they arrive, until the run ends."""

from __future__ import annotations

import shutil
import sys
from typing import Annotated

import typer

from homing.api.runs.watch_run import watch_run
from homing.cli import output
from homing.cli.options import Json, RunName, TrackerName, Trackers, Wandb
from homing.cloud.watch.follow import DEFAULT_EVERY_S, Report
from homing.errors import UsageError
from homing.units import parse_duration

__all__ = ["command"]

# Kind of report -> the prefix that is printed before it.
_BEGINNINGS = {"head": "", "line": "", "event": "  ", "sample": "", "alert": "! ", "problem": "warning: ", "end": ""}


def command(
    run: RunName = None,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Minimum time between output lines, such as 30s or 2m.")
    ] = f"{DEFAULT_EVERY_S:g}",
    tracker: Trackers = None,
    wandb: Wandb = False,
    run_name: TrackerName = None,
    json_: Json = False,
) -> None:
    """Follow a run until it ends: steps, loss, speed, samples and spend.

    Exit code 0: done, 1: failed, 5: stopped by a limit.
    """
    try:
        every_s = parse_duration(every)
    except ValueError as exc:
        raise UsageError(what=f"--every: {exc}.", fix="For example: --every 30") from exc
    trackers = [*(tracker or []), *["wandb"] * wandb]
    watched = watch_run(run, every_s=every_s, trackers=trackers, tracker_name=run_name)
    try:
        for report in watched:
            _show(report)
    except KeyboardInterrupt:
        output.say(f"Stopped watching; {watched.run.name} keeps running. Stop it: homing stop {watched.typed}")
        raise typer.Exit(130) from None
    if watched.exit_code:
        raise typer.Exit(watched.exit_code)


def _show(report: Report) -> None:
    output.emit("watch/1", {"kind": report.kind, "text": report.text, "data": report.data})
    if output.is_json():
        return
    if report.kind == "sample":
        print("".join(f"    {output.safe(line)}\n" for line in report.text.splitlines()), end="", flush=True)
    elif report.kind == "problem":
        output.say(f"{_BEGINNINGS[report.kind]}{report.text}")
    elif report.kind in ("head", "line") and sys.stdout.isatty():
        print(_folded(report.text, shutil.get_terminal_size().columns), flush=True)
    else:
        print(f"{_BEGINNINGS[report.kind]}{report.text}", flush=True)


def _folded(line: str, width: int) -> str:
    """If the terminal is too narrow, wrap the line between two fields, not inside one."""
    first, *rest = line.split(" | ")
    rows = [first]
    for part in rest:
        if len(rows[-1]) + len(part) + 3 <= width:
            rows[-1] += f" | {part}"
        else:
            rows.append(f"    | {part}")
    return "\n".join(rows)
