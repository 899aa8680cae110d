"""Computes the progress of a run: what is done, how much longer it will train, and what it will cost in total.

current phase                                   from the trainer's own estimate in its heartbeat
later phases, final push and end of billing     from the plan for the current machine
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.plan.speed import estimate
from homing.cloud.plan.timing import timing_of
from homing.cloud.providers.base import Offer
from homing.cloud.reconcile.run_status import Status, how_far, reached
from homing.units import format_duration
from homing.wire import codec, file_names
from homing.wire.control_files import Heartbeat
from homing.wire.run_json import Run

__all__ = ["Ahead", "Planned", "ahead", "planned", "planned_usd", "progress_line", "to_finish", "trip_usd"]


@dataclass(frozen=True)
class Planned:
    rate_usd_per_hour: Decimal
    # seconds for boot and start, for each phase by name, and for pushing the results and ending billing
    parts: list[tuple[str, float]]


@dataclass(frozen=True)
class Ahead:
    eta_s: float  # seconds until all phases end, or only the current one if the time for later ones is unknown
    is_whole: bool = True
    end_usd: Decimal | None = None  # total spend when billing ends; None if unknown


def planned(home: Home, run: RunRow) -> Planned | None:
    """Return the plan for the newest attempt's machine, or None if the run's documents are not on this computer."""
    folder = home.run_dir(run.id)
    try:
        resolved = codec.loads(Run, home.world.read(folder / file_names.RUN))
        note = json.loads(home.world.read(folder / LAUNCH_NOTE))["offer"]
        offer = Offer(**{**note, "rate_usd_per_hour": Decimal(note["rate_usd_per_hour"])})
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError):
        return None
    timing = timing_of(resolved, offer, estimate(resolved, offer, home, may_probe=False), home)
    return Planned(offer.rate_usd_per_hour, timing.parts(resolved))


def planned_usd(home: Home, run: RunRow, phases: Sequence[str]) -> Decimal | None:
    """Return the planned cost of these phases on the run's machine, or None if the run's files are not here."""
    return _planned(home, run, lambda parts: [seconds for name, seconds in parts if name in phases])


def trip_usd(home: Home, run: RunRow) -> Decimal | None:
    """Return the planned cost of an attempt outside its phases: boot, start, pushing the results and ending billing."""
    return _planned(home, run, lambda parts: [parts[0][1], parts[-1][1]])


def _planned(home: Home, run: RunRow, choose: Callable[[list[tuple[str, float]]], list[float]]) -> Decimal | None:
    plan = planned(home, run)
    return None if plan is None else meter.cost(plan.rate_usd_per_hour, sum(choose(plan.parts)))


def ahead(status: Status, beat: Heartbeat | None, plan: Planned | None) -> Ahead | None:
    """Return the predicted time and total cost, or None if nothing is training or nothing has been measured yet."""
    if beat is None or beat.eta_s is None or beat.state != "training" or not status.run.is_live:
        return None
    later = status.phases[status.phases.index(beat.phase) + 1 :] if beat.phase in status.phases else ()
    if plan is None or not status.lines:
        return Ahead(beat.eta_s, is_whole=not later)
    seconds = dict(plan.parts[1:-1])
    eta_s = beat.eta_s + sum(seconds[phase] for phase in later)
    # Use the current machine's rate, because a spot machine's rate may differ from the one in the plan.
    rate = Decimal(status.lines[-1].rate_usd_per_hour)
    return Ahead(eta_s, end_usd=status.spend_usd + meter.cost(rate, eta_s + plan.parts[-1][1]))


def to_finish(status: Status) -> Decimal | None:
    """Return the cost of finishing the current phase, from the trainer's own estimate, or None if it is unknown."""
    beat = status.reports.heartbeat if status.reports else None
    if beat is None or not status.lines:
        return None
    # If the run is landing (ending early), `eta_s` is the time to the early end, so use the time to the planned end.
    seconds = beat.eta_s if beat.end_step is None else beat.plan_s
    return None if seconds is None else meter.cost(Decimal(status.lines[-1].rate_usd_per_hour), seconds)


def progress_line(
    status: Status,
    beat: Heartbeat | None,
    figures: Mapping[str, float] | None = None,
    plan: Planned | None = None,
) -> str:
    """Return a progress line with, in this order: phase, step, loss (in rl the reward), speed, cost, time left.

    Only the cost is always shown. With `plan`, the time left and the final cost cover all phases. If the run is not
    training, its state is shown instead of the time.
    """
    beat = None if beat is None else reached(status, beat)
    parts = [] if beat is None else how_far(beat, status.phases, figures)
    if beat is not None and "gpu" in beat.use and status.run.is_live:
        parts.append(f"GPU {beat.use['gpu']:.0%}, GPU memory {beat.use.get('gpu_memory', 0.0):.0%}")
    found = ahead(status, beat, plan)
    spent = meter.at_most(*status.lines) + meter.show_spend(status.spend_usd, status.most_usd)
    parts.append(spent + _at_the_end(status, found))
    if found is not None:
        parts.append(f"eta {format_duration(found.eta_s)}" + ("" if found.is_whole else " for this phase"))
    elif beat is not None and beat.state != "training" and status.run.is_live:
        parts.append(beat.state)
    elif beat is not None and not beat.num_steps and status.run.is_live:
        parts.append("training, no metrics yet")
    return " | ".join(parts)


def _at_the_end(status: Status, found: Ahead | None) -> str:
    """Return the predicted final cost. It may exceed the limit until the trainer notices and plans to end early."""
    if found is None or found.end_usd is None:
        return ""
    is_over = status.limit_usd is not None and found.end_usd > status.limit_usd
    return f", about {meter.show_usd(found.end_usd)} " + ("to finish, over the limit" if is_over else "at the end")
