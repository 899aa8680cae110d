"""Expected cost of preemptions.

    per preemption   the steps since the last checkpoint, on average half the interval between two
                     + another machine: boot, inputs, the checkpoint from the store, load and compile
    how often        as the provider reports; without a report, once in twenty hours is assumed for spot, combined with
                     what this home has seen of that offer. Time lost to preemptions counts as exposed too

A notice before the end would save the steps; it is not counted on, because it may not come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from homing.cloud.home import Home
from homing.cloud.plan.timing import Timing
from homing.cloud.providers.base import Offer
from homing.wire.run_json import Phase, Run

__all__ = ["Odds", "odds_of"]

ASSUMED_HOURS = 20.0  # hours per preemption of a spot machine, as long as nothing else is known
_TAKEN = "preempted"  # prefix of the ledger's note for such an end


@dataclass(frozen=True)
class Odds:
    seconds: float  # from create to gone, including preemptions; infinite: it would never finish
    num_interruptions: float  # expected
    lost_s: float  # per preemption
    per_hour: float = 0.0
    text: str = ""  # where the figure comes from


def odds_of(run: Run, offer: Offer, timing: Timing, home: Home) -> Odds:
    whole_s = timing.whole_s(run)
    per_hour, text = _per_hour(offer, home)
    if per_hour <= 0:
        return Odds(whole_s, 0.0, 0.0)
    lost_s = _between_saves_s(run, timing) / 2 + timing.arrive_s + timing.push_s + timing.start_s
    share_lost = per_hour * lost_s / 3600
    if share_lost >= 1:
        return Odds(math.inf, math.inf, lost_s, per_hour, text)
    seconds = whole_s / (1 - share_lost)
    return Odds(seconds, per_hour * seconds / 3600, lost_s, per_hour, text)


def _per_hour(offer: Offer, home: Home) -> tuple[float, str]:
    if offer.interruptions_per_hour:
        return offer.interruptions_per_hour, "as reported by the provider"
    if not offer.is_spot:
        return 0.0, ""
    num_taken, hours = _seen(offer, home)
    text = f"assumed: once every {ASSUMED_HOURS:g} h"
    if hours:
        text += f", and observed: {num_taken} in {hours:.1f} h"
    # The assumption weighs as much as its own hours; observations take over as they accumulate.
    return (num_taken + 1) / (hours + ASSUMED_HOURS), text


def _seen(offer: Offer, home: Home) -> tuple[int, float]:
    """Return how often this home lost one of these to preemption, and in how many hours."""
    if not home.has_ledger:
        return 0, 0.0
    lines = [line for line in home.ledger.lines() if (line.provider, line.offer) == (offer.provider, offer.name)]
    ended = [line for line in lines if line.created_at is not None and line.destroyed_at is not None]
    hours = sum((line.destroyed_at or 0.0) - (line.created_at or 0.0) for line in ended) / 3600
    return sum(line.note.startswith(_TAKEN) for line in ended), max(0.0, hours)


def _between_saves_s(run: Run, timing: Timing) -> float:
    """Return the time between checkpoints in the phase where it is longest: a loss there hurts most."""
    return max(_gap_s(phase, timing) for phase in run.phases)


def _gap_s(phase: Phase, timing: Timing) -> float:
    steps = min(phase.save_every or phase.num_steps, phase.num_steps)
    by_steps_s = steps * timing.step_s(phase)
    return min(by_steps_s, phase.save_every_s) if phase.save_every_s else by_steps_s
