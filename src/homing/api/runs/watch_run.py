"""Follow a run until it ends, as `homing watch` and `Run.watch()` do.

restart trackers requested earlier -> reports -> record the result of a smoke run -> notices: what to do next

While a run is followed, its limits are enforced: see `homing.cloud.watch.follow`.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

from homing.api import notices
from homing.api.extras import export_hint
from homing.api.lookup.find_models import MODELS
from homing.api.lookup.find_runs import find_any, is_stranger, name_here, open_home, usd
from homing.api.lookup.local_runs import Trained, look_again, watch_here
from homing.api.lookup.status import next_words
from homing.api.tracking import begin, following, go_on, wanted
from homing.cloud.artifacts.checkpoints import place_of
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.ledger.meter import as_limit, at_most, cost
from homing.cloud.reconcile.run_status import Status, has_checkpoint, look
from homing.cloud.watch.follow import DEFAULT_EVERY_S, Report, watch
from homing.cloud.watch.progress import planned_usd, to_finish, trip_usd
from homing.config.home_and_run_files import launch_again, manifest_in
from homing.wire import codec, file_names
from homing.wire.guard_timing import LAND, reserve_s
from homing.wire.run_json import Run

__all__ = ["Watched", "watch_run"]


class Watched:
    """The reports of one run, as an iterator that ends when the run ends."""

    def __init__(self, home: Home, run: RunRow | Trained, every_s: float, *, is_curve: bool = False) -> None:
        self.run = run
        self.typed = run.run if isinstance(run, Trained) else name_here(run)  # the name or id that selects the run here
        self.exit_code = 0  # the run's exit code, once it has ended
        self._reports = self._follow(home, every_s, is_curve)

    def __iter__(self) -> Iterator[Report]:
        return self._reports

    def _follow(self, home: Home, every_s: float, is_curve: bool) -> Iterator[Report]:
        if isinstance(self.run, Trained):
            yield from watch_here(home, self.run, every_s=every_s, is_curve=is_curve)
            self.run = look_again(home, self.run)
            notices.say(self.run.next_words)
            self.exit_code = self.run.exit_code
            return
        yield from watch(home, self.run, every_s=every_s, is_curve=is_curve)
        self.run = home.ledger.run(self.run.id) or self.run
        _note_smoke(home, self.run)
        _say_next(home, self.run)
        self.exit_code = self.run.exit_code or 0


def watch_run(
    run: str | None = None,
    *,
    every_s: float = DEFAULT_EVERY_S,
    trackers: Sequence[str] = (),
    tracker_name: str | None = None,
    is_curve: bool = False,
    home: Home | None = None,
) -> Watched:
    """Return the reports of a run from now until its end. `trackers`: names of trackers to log to as well.

    `is_curve`: also report the points of the loss curve, from the first step on, for a live view.

    After the last report, record the result of a smoke run, and emit notices with the spend and the next commands.
    """
    trackers = wanted(list(trackers), wandb=False, verb="watch")
    with open_home(home) as opened:
        row = find_any(opened, run)
        is_here = isinstance(row, Trained)
        run_id, store = (row.run, "") if isinstance(row, Trained) else (row.id, row.store)
        if row.is_live:
            go_on(opened.path, run_id, opened.world)
        run_dir = str(opened.run_dir(run_id)) if is_here else ""
        for each in trackers:
            begin(following(each, opened.path, run_id, tracker_name, store=store, run_dir=run_dir), opened.world)
        return Watched(opened, row, every_s, is_curve=is_curve)


def _note_smoke(home: Home, run: RunRow) -> None:
    """If this was a smoke run, record whether its run file passed. The run's folder has a copy of the run file.

    If the instance was lost, record nothing, because the loss of an instance says nothing about the run file.
    """
    folder = home.run_dir(run.id)
    has_ended = run.state == "done" or (run.state == "failed" and not run.is_interrupted)
    if has_ended and home.world.exists(folder / LAUNCH_NOTE):
        try:
            if json.loads(home.world.read(folder / LAUNCH_NOTE)).get("is_smoke"):
                from homing.config.resolve.smoke_profile import mark_smoke

                mark_smoke(folder / file_names.RUN_FILE, is_passed=run.state == "done", figures={"run": run.id})
        except (OSError, ValueError, AttributeError) as exc:
            notices.say(f"warning: the result of the smoke run could not be saved: {exc}")


def _say_next(home: Home, run: RunRow) -> None:
    status, name = look(home, run), name_here(run)
    notices.say(f"Spent {at_most(*status.lines)}{usd(status.spend_usd)}; billing ended.")
    if run.state == "done":
        notices.say(f"Training complete. {_what_to_do_with_it(home, run)}")
    elif run.state == "failed":
        notices.say(next_words(status, name, has_checkpoint=has_checkpoint(home, run)))
    else:
        steps = _steps_by_phase(home, run)
        where = _stopped_where(status, steps)
        if not has_checkpoint(home, run):
            notices.say(f"Stopped {where}. No checkpoint reached the store. Start over: {launch_again(run.name)}")
            return
        notices.say(f"Stopped {where}. Fetch what it trained: homing fetch {name}")
        notices.say(f"To finish: {_how_to_finish(home, status, list(steps))}")


def _what_to_do_with_it(home: Home, run: RunRow) -> str:
    """Return how to fetch a finished run's model, or where the model is and how to use it."""
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
    """Return where `homing fetch` stores the model: models/NAME, or another folder if that one is taken."""
    if is_stranger(run):
        return MODELS / run.id
    return place_of(home, run, last, MODELS) if last else MODELS / run.name


def _steps_by_phase(home: Home, run: RunRow) -> dict[str, int]:
    """Return the steps of each phase in training order; empty if its run.json is not on this computer."""
    try:
        resolved = codec.loads(Run, home.world.read(home.run_dir(run.id) / file_names.RUN))
    except (OSError, codec.WireError):
        return {}
    return {phase.kind: phase.num_steps for phase in resolved.phases}


def _stopped_where(status: Status, steps: dict[str, int]) -> str:
    beat, outcome = (status.reports.heartbeat, status.reports.outcome) if status.reports else (None, None)
    # Prefer the trainer's outcome, which is newer: the heartbeat learns of a new step or phase only from the metrics.
    if outcome is not None and outcome.phase in steps and (outcome.step or outcome.phase != next(iter(steps))):
        in_phase = f"in {outcome.phase} " if len(steps) > 1 else ""
        return f"{in_phase}at step {outcome.step:,} of {steps[outcome.phase]:,}"
    if beat is None or not beat.num_steps:
        return "before its first step"
    return f"at step {beat.step:,} of {beat.num_steps:,}"


def _how_to_finish(home: Home, status: Status, phases: list[str]) -> str:
    """Return the command that finishes the run, with a higher limit if the current one seems too low.

    If the remaining cost cannot be estimated, `homing launch` reports the minimum limit.
    """
    again = f"homing launch {name_here(status.run)} --resume"
    measured, planned = _rest(home, status, phases)
    if (measured is None and planned is None) or not status.lines:
        return again
    # A resumed run boots and pushes again. The plan's part of the cost gets a larger margin than the measured part,
    # because it is less exact.
    by_plan = (planned or Decimal(0)) + (trip_usd(home, status.run) or Decimal(0))
    rest = (measured or Decimal(0)) + by_plan
    enough = (measured or Decimal(0)) * Decimal("1.2") + by_plan * Decimal("1.5")
    whole = status.spend_usd + enough + cost(Decimal(status.lines[-1].rate_usd_per_hour), reserve_s(LAND, math.inf))
    if status.limit_usd is not None and whole <= status.limit_usd:
        return f"about {usd(rest)} more, within its limit of {usd(status.limit_usd)}: {again}"
    return f"about {usd(rest)} more: {again} --spend-limit {as_limit(whole)}"


def _rest(home: Home, status: Status, phases: list[str]) -> tuple[Decimal | None, Decimal | None]:
    """Return the remaining cost of the current phase (the trainer's estimate) and of later phases (the plan's)."""
    beat, outcome = (status.reports.heartbeat, status.reports.outcome) if status.reports else (None, None)
    # Prefer the trainer's outcome, which is newer: the heartbeat learns of a new phase only from its first metrics.
    at = outcome.phase if outcome is not None and outcome.phase in phases else beat.phase if beat is not None else ""
    measured = to_finish(status) if beat is not None and beat.phase in ("", at) else None
    first = phases.index(at) + (measured is not None) if at in phases else 0
    left = phases[first:] if at in phases or measured is None else []
    return measured, planned_usd(home, status.run, left) if left else None
