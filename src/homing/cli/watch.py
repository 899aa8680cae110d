"""`homing watch`: steps, loss, speed, samples and dollars, as they come, until the run ends."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import typer

from homing.cli import talk, terminal
from homing.cli.control import find_any, open_home, usd
from homing.cli.extras import export_hint
from homing.cli.find_model import MODELS
from homing.cli.find_run import is_stranger, name_here
from homing.cli.options import Json, RunName, TrackerName, Trackers, Wandb
from homing.cli.tracking import begin, following, go_on, wanted
from homing.cli.trained_here import Trained, look_again
from homing.cli.watch_here import watch_here
from homing.cloud.fetch import place_of
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import RunRow
from homing.cloud.meter import as_limit, at_most, cost
from homing.cloud.status import Status, look, newest_pushed
from homing.cloud.watch import DEFAULT_EVERY_S, Report, planned_usd, to_finish, trip_usd, watch
from homing.config.models import manifest_in
from homing.errors import HomingError, UsageError
from homing.units import parse_duration
from homing.wire import codec, names
from homing.wire.limit import LAND, reserve_s
from homing.wire.run import Run

__all__ = ["command"]

# How each kind of report begins; a line of numbers stands for itself, and so does the one that tells of its machine.
_BEGINNINGS = {"head": "", "line": "", "event": "  ", "sample": "", "alert": "! ", "problem": "warning: ", "end": ""}


def command(
    run: RunName = None,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="A line at most so often: 30, 30s, 2m.")
    ] = f"{DEFAULT_EVERY_S:g}",
    tracker: Trackers = None,
    wandb: Wandb = False,
    run_name: TrackerName = None,
    json_: Json = False,
) -> None:
    """Steps, loss, speed, samples and dollars, until the run ends. Exit code 0 done, 1 failed, 5 stopped by a limit."""
    try:
        every_s = parse_duration(every)
    except ValueError as exc:
        raise UsageError(what=f"--every: {exc}.", fix="--every 30") from exc
    trackers = wanted(tracker, wandb=wandb, verb="watch")
    with open_home() as home:
        row = find_any(home, run)
        if isinstance(row, Trained):
            run_id, store, run_dir, called = row.run, "", str(home.run_dir(row.run)), row.run
        else:
            run_id, store, run_dir, called = row.id, row.store, "", name_here(row)
        if row.is_live:
            go_on(home.path, run_id, home.world)
        for each in trackers:
            begin(following(each, home.path, run_id, run_name, store=store, run_dir=run_dir), home.world)
        try:
            for report in _reports(home, row, every_s):
                _show(report)
        except KeyboardInterrupt:
            talk.say(f"No longer watched; {row.name} goes on. Stop it: homing stop {called}")
            raise typer.Exit(130) from None
        code = _end_here(home, row) if isinstance(row, Trained) else _end(home, row)
        if code:
            raise typer.Exit(code)


def _reports(home: Home, run: RunRow | Trained, every_s: float) -> Iterator[Report]:
    return watch_here(home, run, every_s=every_s) if isinstance(run, Trained) else watch(home, run, every_s=every_s)


def _end_here(home: Home, run: Trained) -> int:
    ended = look_again(home, run)
    talk.say(ended.next_words)
    return ended.exit_code


def _end(home: Home, run: RunRow) -> int:
    ended = home.ledger.run(run.id) or run
    _note_smoke(home, ended)
    _say_next(home, ended)
    return ended.exit_code or 0


def _show(report: Report) -> None:
    talk.emit("watch/1", {"kind": report.kind, "text": report.text, "data": report.data})
    if talk.is_json():
        return
    if report.kind == "sample":
        print("".join(f"    {terminal.safe(line)}\n" for line in report.text.splitlines()), end="", flush=True)
    elif report.kind == "problem":
        talk.say(f"{_BEGINNINGS[report.kind]}{report.text}")
    elif report.kind in ("head", "line") and sys.stdout.isatty():
        print(_folded(report.text, shutil.get_terminal_size().columns), flush=True)
    else:
        print(f"{_BEGINNINGS[report.kind]}{report.text}", flush=True)


def _folded(line: str, width: int) -> str:
    """Broken before a bar, and not in the middle of a figure, where the terminal is narrower than the line."""
    first, *rest = line.split(" | ")
    rows = [first]
    for part in rest:
        if len(rows[-1]) + len(part) + 3 <= width:
            rows[-1] += f" | {part}"
        else:
            rows.append(f"    | {part}")
    return "\n".join(rows)


def _note_smoke(home: Home, run: RunRow) -> None:
    """A smoke run speaks for its run file, whose text lies beside it. A machine that was lost says nothing of it."""
    folder = home.run_dir(run.id)
    has_ended = run.state == "done" or (run.state == "failed" and not run.is_interrupted)
    if has_ended and home.world.exists(folder / LAUNCH_NOTE):
        try:
            if json.loads(home.world.read(folder / LAUNCH_NOTE)).get("is_smoke"):
                from homing.config import mark_smoke

                mark_smoke(folder / names.RUN_FILE, is_passed=run.state == "done", figures={"run": run.id})
        except (OSError, ValueError, AttributeError) as exc:
            talk.say(f"warning: how the smoke profile ended could not be noted: {exc}")


def _say_next(home: Home, run: RunRow) -> None:
    status, name = look(home, run), name_here(run)
    talk.say(f"Spent {at_most(*status.lines)}{usd(status.spend_usd)}; billing has ended.")
    if run.state == "done":
        talk.say(f"Training complete. {_what_to_do_with_it(home, run)}")
    elif run.state == "failed":
        talk.say(f"Why: homing logs {name}   Go on from its last checkpoint: homing launch {name} --resume")
    else:
        steps = _steps_by_phase(home, run)
        where = _stopped_where(status, steps)
        talk.say(f"Stopped {where}. {_learned(home, run)}")
        talk.say(f"To the end: {_how_to_finish(home, status, list(steps))}")


def _learned(home: Home, run: RunRow) -> str:
    try:
        is_saved = newest_pushed(home, run) != ""
    except HomingError:  # the store does not answer now; whoever fetches later hears it from there
        is_saved = True
    return f"What it has learned: homing fetch {name_here(run)}" if is_saved else "No checkpoint came to the store."


def _what_to_do_with_it(home: Home, run: RunRow) -> str:
    """Of a run that is done: to fetch it, or where it lies and how to use it."""
    last = next(reversed(_steps_by_phase(home, run)), "")
    place = _place(home, run, last)
    model = run.name if place == MODELS / run.name else shlex.quote(str(place))
    fetch = f"homing fetch {name_here(run)}"
    there = manifest_in(place)
    if there is None or there.run_id != run.id:
        return f"Fetch it: {fetch}   then: homing chat {model}"
    at = f"{there.phase} step {there.step:,}"
    if not there.is_final or there.phase != last:
        return f"{place} has {at} of it; the last: {fetch}"
    return f"The model is in {place} ({at}). Talk to it: homing chat {model}   {export_hint(model)}"


def _place(home: Home, run: RunRow, last: str) -> Path:
    """Where `homing fetch` puts it: the folder of its name, or one beside another run of that name."""
    if is_stranger(run):
        return MODELS / run.id
    return place_of(home, run, last, MODELS) if last else MODELS / run.name


def _steps_by_phase(home: Home, run: RunRow) -> dict[str, int]:
    """In the order in which they are trained; empty where the run's papers are not at home."""
    try:
        resolved = codec.loads(Run, home.world.read(home.run_dir(run.id) / names.RUN))
    except (OSError, codec.WireError):
        return {}
    return {phase.kind: phase.num_steps for phase in resolved.phases}


def _stopped_where(status: Status, steps: dict[str, int]) -> str:
    beat, outcome = (status.signs.heartbeat, status.signs.outcome) if status.signs else (None, None)
    # The last words of the trainer: the heartbeat knows of a step, and of a new phase, only from its lines of numbers.
    if outcome is not None and outcome.phase in steps and (outcome.step or outcome.phase != next(iter(steps))):
        in_phase = f"in {outcome.phase} " if len(steps) > 1 else ""
        return f"{in_phase}at step {outcome.step:,} of {steps[outcome.phase]:,}"
    if beat is None or not beat.num_steps:
        return "before its first step"
    return f"at step {beat.step:,} of {beat.num_steps:,}"


def _how_to_finish(home: Home, status: Status, phases: list[str]) -> str:
    """With a limit that is enough, as far as can be told, where its own is not; where nothing can be told, launch names
    the least that it takes."""
    again = f"homing launch {name_here(status.run)} --resume"
    measured, planned = _rest(home, status, phases)
    if (measured is None and planned is None) or not status.lines:
        return again
    # It boots again, and comes home again. A plan may be off by more than the count of the trainer itself.
    by_plan = (planned or Decimal(0)) + (trip_usd(home, status.run) or Decimal(0))
    rest = (measured or Decimal(0)) + by_plan
    enough = (measured or Decimal(0)) * Decimal("1.2") + by_plan * Decimal("1.5")
    whole = status.spend_usd + enough + cost(Decimal(status.lines[-1].rate_usd_per_hour), reserve_s(LAND, math.inf))
    if status.limit_usd is not None and whole <= status.limit_usd:
        return f"about {usd(rest)} more, inside its limit of {usd(status.limit_usd)}: {again}"
    return f"about {usd(rest)} more: {again} --spend-limit {as_limit(whole)}"


def _rest(home: Home, status: Status, phases: list[str]) -> tuple[Decimal | None, Decimal | None]:
    """Dollars of the phase that it was in, by the trainer's own count; and of those that it cannot tell of, by the
    plan."""
    beat, outcome = (status.signs.heartbeat, status.signs.outcome) if status.signs else (None, None)
    # The last words of the trainer: the heartbeat knows a new phase only from its first line of numbers on.
    at = outcome.phase if outcome is not None and outcome.phase in phases else beat.phase if beat is not None else ""
    measured = to_finish(status) if beat is not None and beat.phase in ("", at) else None
    first = phases.index(at) + (measured is not None) if at in phases else 0
    left = phases[first:] if at in phases or measured is None else []
    return measured, planned_usd(home, status.run, left) if left else None
