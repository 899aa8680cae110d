"""`homing watch`: print steps, loss, speed, samples and spend as they come, until the run ends."""

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

from homing.api.extras import export_hint
from homing.api.lookup.find_models import MODELS
from homing.api.lookup.find_runs import find_any, is_stranger, name_here, open_home, usd
from homing.api.lookup.local_runs import Trained, look_again, watch_here
from homing.api.tracking import begin, following, go_on, wanted
from homing.cli import output, terminal
from homing.cli.options import Json, RunName, TrackerName, Trackers, Wandb
from homing.cloud.artifacts.fetch import place_of
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.ledger.meter import as_limit, at_most, cost
from homing.cloud.reconcile.run_status import Status, look, newest_pushed
from homing.cloud.watch.follow import DEFAULT_EVERY_S, Report, watch
from homing.cloud.watch.progress import planned_usd, to_finish, trip_usd
from homing.config.paths import manifest_in
from homing.errors import HomingError, UsageError
from homing.units import parse_duration
from homing.wire import codec, file_names
from homing.wire.guard_order import LAND, reserve_s
from homing.wire.run_json import Run

__all__ = ["command"]

# Prefix of each kind of report; metrics lines and the head line have none.
_BEGINNINGS = {"head": "", "line": "", "event": "  ", "sample": "", "alert": "! ", "problem": "warning: ", "end": ""}


def command(
    run: RunName = None,
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Minimum time between lines: 30, 30s, 2m.")
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
            output.say(f"Stopped watching; {row.name} keeps running. Stop it: homing stop {called}")
            raise typer.Exit(130) from None
        code = _end_here(home, row) if isinstance(row, Trained) else _end(home, row)
        if code:
            raise typer.Exit(code)


def _reports(home: Home, run: RunRow | Trained, every_s: float) -> Iterator[Report]:
    return watch_here(home, run, every_s=every_s) if isinstance(run, Trained) else watch(home, run, every_s=every_s)


def _end_here(home: Home, run: Trained) -> int:
    ended = look_again(home, run)
    output.say(ended.next_words)
    return ended.exit_code


def _end(home: Home, run: RunRow) -> int:
    ended = home.ledger.run(run.id) or run
    _note_smoke(home, ended)
    _say_next(home, ended)
    return ended.exit_code or 0


def _show(report: Report) -> None:
    output.emit("watch/1", {"kind": report.kind, "text": report.text, "data": report.data})
    if output.is_json():
        return
    if report.kind == "sample":
        print("".join(f"    {terminal.safe(line)}\n" for line in report.text.splitlines()), end="", flush=True)
    elif report.kind == "problem":
        output.say(f"{_BEGINNINGS[report.kind]}{report.text}")
    elif report.kind in ("head", "line") and sys.stdout.isatty():
        print(_folded(report.text, shutil.get_terminal_size().columns), flush=True)
    else:
        print(f"{_BEGINNINGS[report.kind]}{report.text}", flush=True)


def _folded(line: str, width: int) -> str:
    """Wrap the line before a bar, not inside a figure, if the terminal is too narrow."""
    first, *rest = line.split(" | ")
    rows = [first]
    for part in rest:
        if len(rows[-1]) + len(part) + 3 <= width:
            rows[-1] += f" | {part}"
        else:
            rows.append(f"    | {part}")
    return "\n".join(rows)


def _note_smoke(home: Home, run: RunRow) -> None:
    """Record the result of a smoke run for its run file, which has a copy in the run's folder.

    A lost instance proves nothing.
    """
    folder = home.run_dir(run.id)
    has_ended = run.state == "done" or (run.state == "failed" and not run.is_interrupted)
    if has_ended and home.world.exists(folder / LAUNCH_NOTE):
        try:
            if json.loads(home.world.read(folder / LAUNCH_NOTE)).get("is_smoke"):
                from homing.config.resolve.smoke_profile import mark_smoke

                mark_smoke(folder / file_names.RUN_FILE, is_passed=run.state == "done", figures={"run": run.id})
        except (OSError, ValueError, AttributeError) as exc:
            output.say(f"warning: the result of the smoke run could not be saved: {exc}")


def _say_next(home: Home, run: RunRow) -> None:
    status, name = look(home, run), name_here(run)
    output.say(f"Spent {at_most(*status.lines)}{usd(status.spend_usd)}; billing ended.")
    if run.state == "done":
        output.say(f"Training complete. {_what_to_do_with_it(home, run)}")
    elif run.state == "failed":
        output.say(f"See why: homing logs {name}   Resume from its last checkpoint: homing launch {name} --resume")
    else:
        steps = _steps_by_phase(home, run)
        where = _stopped_where(status, steps)
        output.say(f"Stopped {where}. {_learned(home, run)}")
        output.say(f"To finish: {_how_to_finish(home, status, list(steps))}")


def _learned(home: Home, run: RunRow) -> str:
    try:
        is_saved = newest_pushed(home, run) != ""
    except HomingError:  # the store does not answer now; a later fetch reports it
        is_saved = True
    return f"Fetch what it trained: homing fetch {name_here(run)}" if is_saved else "No checkpoint reached the store."


def _what_to_do_with_it(home: Home, run: RunRow) -> str:
    """For a finished run: how to fetch it, or where it is and how to use it."""
    last = next(reversed(_steps_by_phase(home, run)), "")
    place = _place(home, run, last)
    model = run.name if place == MODELS / run.name else shlex.quote(str(place))
    fetch = f"homing fetch {name_here(run)}"
    there = manifest_in(place)
    if there is None or there.run_id != run.id:
        return f"Fetch it: {fetch}   then: homing chat {model}"
    at = f"{there.phase} step {there.step:,}"
    if not there.is_final or there.phase != last:
        return f"{place} has {at}; fetch the latest: {fetch}"
    return f"Model saved in {place} ({at}). Chat with it: homing chat {model}   {export_hint(model)}"


def _place(home: Home, run: RunRow, last: str) -> Path:
    """Return where `homing fetch` stores the model: the folder of its name, or another if that name is taken."""
    if is_stranger(run):
        return MODELS / run.id
    return place_of(home, run, last, MODELS) if last else MODELS / run.name


def _steps_by_phase(home: Home, run: RunRow) -> dict[str, int]:
    """Return the steps of each phase in training order; empty if the run's record is not at home."""
    try:
        resolved = codec.loads(Run, home.world.read(home.run_dir(run.id) / file_names.RUN))
    except (OSError, codec.WireError):
        return {}
    return {phase.kind: phase.num_steps for phase in resolved.phases}


def _stopped_where(status: Status, steps: dict[str, int]) -> str:
    beat, outcome = (status.reports.heartbeat, status.reports.outcome) if status.reports else (None, None)
    # The trainer's outcome is newer: the heartbeat learns of a step or a new phase only from the metrics.
    if outcome is not None and outcome.phase in steps and (outcome.step or outcome.phase != next(iter(steps))):
        in_phase = f"in {outcome.phase} " if len(steps) > 1 else ""
        return f"{in_phase}at step {outcome.step:,} of {steps[outcome.phase]:,}"
    if beat is None or not beat.num_steps:
        return "before its first step"
    return f"at step {beat.step:,} of {beat.num_steps:,}"


def _how_to_finish(home: Home, status: Status, phases: list[str]) -> str:
    """Return the command that finishes the run, with a sufficient limit if its own is not, as far as can be estimated.

    If nothing can be estimated, launch names the minimum.
    """
    again = f"homing launch {name_here(status.run)} --resume"
    measured, planned = _rest(home, status, phases)
    if (measured is None and planned is None) or not status.lines:
        return again
    # It boots and pushes again. A plan may be off by more than the trainer's own estimate.
    by_plan = (planned or Decimal(0)) + (trip_usd(home, status.run) or Decimal(0))
    rest = (measured or Decimal(0)) + by_plan
    enough = (measured or Decimal(0)) * Decimal("1.2") + by_plan * Decimal("1.5")
    whole = status.spend_usd + enough + cost(Decimal(status.lines[-1].rate_usd_per_hour), reserve_s(LAND, math.inf))
    if status.limit_usd is not None and whole <= status.limit_usd:
        return f"about {usd(rest)} more, within its limit of {usd(status.limit_usd)}: {again}"
    return f"about {usd(rest)} more: {again} --spend-limit {as_limit(whole)}"


def _rest(home: Home, status: Status, phases: list[str]) -> tuple[Decimal | None, Decimal | None]:
    """Return the remaining dollars: of the current phase by the trainer's estimate, and of later phases by the plan."""
    beat, outcome = (status.reports.heartbeat, status.reports.outcome) if status.reports else (None, None)
    # The trainer's outcome is newer: the heartbeat learns of a new phase only from its first metrics.
    at = outcome.phase if outcome is not None and outcome.phase in phases else beat.phase if beat is not None else ""
    measured = to_finish(status) if beat is not None and beat.phase in ("", at) else None
    first = phases.index(at) + (measured is not None) if at in phases else 0
    left = phases[first:] if at in phases or measured is None else []
    return measured, planned_usd(home, status.run, left) if left else None
