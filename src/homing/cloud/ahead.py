"""What is still to come of a run: until when it trains, and what it will have cost when billing ends.

the phase that it is in          the trainer's own count, in its heartbeat
the phases after it, and home    the plan, on the machine that it has
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING

from homing.cloud import meter
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import RunRow
from homing.cloud.providers.base import Offer
from homing.cloud.speed import estimate
from homing.cloud.timing import timing_of
from homing.wire import codec, names
from homing.wire.control import Heartbeat
from homing.wire.run import Run

if TYPE_CHECKING:
    from homing.cloud.status import Status

__all__ = ["Ahead", "Planned", "ahead", "planned"]


@dataclass(frozen=True)
class Planned:
    rate_usd_per_hour: Decimal
    parts: list[tuple[str, float]]  # seconds: to boot and start, each phase by its name, the way home


@dataclass(frozen=True)
class Ahead:
    eta_s: float  # until it is trained: all of it, or where nothing is known of later phases the one that it is in
    is_whole: bool = True
    end_usd: Decimal | None = None  # spend when billing ends; None where it cannot be told


def planned(home: Home, run: RunRow) -> Planned | None:
    """As the plan of now has it, for the machine of the newest attempt; None where its papers are not at home."""
    folder = home.run_dir(run.id)
    try:
        resolved = codec.loads(Run, home.world.read(folder / names.RUN))
        note = json.loads(home.world.read(folder / LAUNCH_NOTE))["offer"]
        offer = Offer(**{**note, "rate_usd_per_hour": Decimal(note["rate_usd_per_hour"])})
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError):
        return None
    timing = timing_of(resolved, offer, estimate(resolved, offer, home, may_probe=False), home)
    return Planned(offer.rate_usd_per_hour, timing.parts(resolved))


def ahead(status: Status, beat: Heartbeat | None, plan: Planned | None) -> Ahead | None:
    """None where nothing is being trained, or nothing of it is measured yet."""
    if beat is None or beat.eta_s is None or beat.state != "training" or not status.run.is_live:
        return None
    later = status.phases[status.phases.index(beat.phase) + 1 :] if beat.phase in status.phases else ()
    if plan is None or not status.lines:
        return Ahead(beat.eta_s, is_whole=not later)
    seconds = dict(plan.parts[1:-1])
    eta_s = beat.eta_s + sum(seconds[phase] for phase in later)
    # Of what is rented now: a spot machine may have another rate than the plan's.
    rate = Decimal(status.lines[-1].rate_usd_per_hour)
    return Ahead(eta_s, end_usd=status.spend_usd + meter.cost(rate, eta_s + plan.parts[-1][1]))
