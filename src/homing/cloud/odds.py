"""What it costs that a machine may be taken away.

    each time   the steps since the last checkpoint, half of the way between two on average
                + another machine: boot, inputs, the checkpoint from the store, load and compile
    so often    as the offer says, for every hour that it runs, those hours included that this itself adds

A notice before the end would save the steps; it is not counted on, because it may not come.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from homing.cloud.providers.base import Offer
from homing.cloud.timing import Timing
from homing.wire.run import Phase, Run

__all__ = ["Odds", "odds_of"]


@dataclass(frozen=True)
class Odds:
    seconds: float  # from create to gone, with the times it is taken away; infinite: it would never get on
    num_interruptions: float  # expected
    lost_s: float  # each time


def odds_of(run: Run, offer: Offer, timing: Timing) -> Odds:
    whole_s = timing.whole_s(run)
    if offer.interruptions_per_hour <= 0:
        return Odds(whole_s, 0.0, 0.0)
    lost_s = _between_saves_s(run, timing) / 2 + timing.arrive_s + timing.push_s + timing.start_s
    share_lost = offer.interruptions_per_hour * lost_s / 3600
    if share_lost >= 1:
        return Odds(math.inf, math.inf, lost_s)
    seconds = whole_s / (1 - share_lost)
    return Odds(seconds, offer.interruptions_per_hour * seconds / 3600, lost_s)


def _between_saves_s(run: Run, timing: Timing) -> float:
    """In the phase where it is longest: what is lost there is what a person remembers."""
    return max(_gap_s(phase, timing) for phase in run.phases)


def _gap_s(phase: Phase, timing: Timing) -> float:
    steps = min(phase.save_every or phase.num_steps, phase.num_steps)
    by_steps_s = steps * phase.batch_tokens / timing.tokens_per_s
    return min(by_steps_s, phase.save_every_s) if phase.save_every_s else by_steps_s
