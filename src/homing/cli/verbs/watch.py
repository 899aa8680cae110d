"""`homing watch`: show steps, loss, speed, samples and spend as they arrive, until the run ends.

On a terminal this is a live view (`homing.cli.watch_screen`). With --plain, --json, -q or -v, or if stdout is not a
terminal that can be redrawn, it is one line after another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from homing.api import notices
from homing.api.runs.watch_run import Watched, watch_run
from homing.cli import output
from homing.cli.options import Json, RunName, TrackerName, Trackers, Wandb
from homing.cloud.watch.follow import DEFAULT_EVERY_S, Report
from homing.errors import UsageError
from homing.units import parse_duration

__all__ = ["command"]

_LIVE_EVERY_S = 2.0  # the live view is redrawn in place, so it can be newer than printed lines
# Kind of report -> the prefix that is printed before it.
_BEGINNINGS = {"head": "", "line": "", "event": "  ", "sample": "", "alert": "! ", "problem": "warning: ", "end": ""}


def command(
    run: RunName = None,
    every: Annotated[
        str | None,
        typer.Option(
            "--every",
            metavar="TIME",
            help="Minimum time between lines or updates, such as 30s or 2m; default: 10s"
            " for lines, 2s for the live view.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print one line after another instead of the live view.")
    ] = False,
    tracker: Trackers = None,
    wandb: Wandb = False,
    run_name: TrackerName = None,
    json_: Json = False,
) -> None:
    """Follow a run until it ends: steps, loss, speed, samples and spend.

    Exit code 0: done, 1: failed, 5: stopped by a limit.
    """
    is_live = not plain and _can_redraw()
    try:
        every_s = parse_duration(every) if every else _LIVE_EVERY_S if is_live else DEFAULT_EVERY_S
    except ValueError as exc:
        raise UsageError(what=f"--every: {exc}.", fix="For example: --every 30") from exc
    trackers = [*(tracker or []), *["wandb"] * wandb]
    watched = watch_run(run, every_s=every_s, trackers=trackers, tracker_name=run_name, is_curve=is_live)
    try:
        if is_live:
            _show_live(watched)
        else:
            for report in watched:
                _show(report)
    except KeyboardInterrupt:
        output.say(f"Stopped watching; {watched.run.name} keeps running. Stop it: homing stop {watched.typed}")
        raise typer.Exit(130) from None
    if watched.exit_code:
        raise typer.Exit(watched.exit_code)


def _can_redraw() -> bool:
    """Return True if stdout is a terminal with cursor movements, and none of --json, -q and -v asks for lines."""
    is_wanted = not (output.is_json() or output.is_quiet() or output.is_verbose())
    return is_wanted and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def _show_live(watched: Watched) -> None:
    # Imported here because rich takes longer to load than a printed line.
    from homing.cli.watch_screen import WatchScreen, on_screen

    screen = WatchScreen(watched.run.name, watched.typed)
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        screen.note(text)

    try:
        with on_screen(screen), notices.listening(note), _logging_to(note):
            for report in watched:
                screen.take(report)
    finally:
        for line in screen.summary():
            print(_folded(line, shutil.get_terminal_size().columns), flush=True)
        for text in notes:
            output.say(text)


@contextlib.contextmanager
def _logging_to(note: Callable[[str], None]) -> Iterator[None]:
    """Send log records to `note` instead of stderr, where the next refresh of the screen would overwrite them."""
    root = logging.getLogger()
    before, handler = root.handlers[:], _Notes(note)
    root.handlers[:] = [handler]
    try:
        yield
    finally:
        root.handlers[:] = before


class _Notes(logging.Handler):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self._note(self.format(record))


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
