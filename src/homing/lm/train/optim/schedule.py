"""Learning-rate schedules: the rate over a phase, as a fraction of its peak.

    wsd        /‾‾‾‾‾‾\\    linear warmup, constant, linear decay
    cosine     /‾‾--..__   linear warmup, half a cosine down to the floor, then the floor
    constant   /‾‾‾‾‾‾‾    linear warmup, constant

A landing ends training early: the rate decays from its current value to the floor, in the shape of the schedule's own
decay. Steps are counted from 0. The rate of the first warmup step is not zero, because that would waste the step; for
the same reason the floor is reached one step after the last step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from homing.wire.run_json import Schedule

__all__ = ["Landing", "lr_scale"]


@dataclass(frozen=True)
class Landing:
    """A decay of the learning rate that ends training earlier than planned.

    It is part of the training state, so that a resumed trainer ends at the same step.
    """

    # The step at which the decay curve starts. It may be fractional after the end has moved, because the new curve must
    # pass through the current learning rate.
    begin_step: float
    begin_scale: float  # learning rate at begin_step, as a fraction of the peak
    end_step: int
    step_s: float = 0.0  # duration of a step when the landing began; a resumed trainer starts with this estimate


def lr_scale(
    schedule: Schedule, step: int, num_steps: int, landing: Landing | None = None, warm_from: int = 0
) -> float:
    """Return the learning rate of a step as a fraction of the peak, in [0, 1].

    If warmup and decay overlap, as in a very short run, the lower rate is used. `warm_from` is the step at which the
    warmup begins: 0, or the step at which training continued after a landing.
    """
    # Allow a tolerance of half a step, because rounding may put the start of a moved curve just after this step.
    if landing is not None and step >= landing.begin_step - 0.5:
        return _landing(schedule, step, landing)
    warmup = min(1.0, (step - warm_from + 1) / schedule.warmup_steps) if schedule.warmup_steps > 0 else 1.0
    return min(warmup, _after_warmup(schedule, step, num_steps))


def _landing(schedule: Schedule, step: int, landing: Landing) -> float:
    if schedule.kind == "constant" or schedule.decay_steps <= 0:
        return landing.begin_scale
    length = max(1.0, landing.end_step - landing.begin_step)
    left = min(1.0, max(0.0, (landing.end_step - step) / length))
    if schedule.kind == "cosine":
        left = 0.5 * (1.0 - math.cos(math.pi * left))
    # A landing that begins during the warmup may start from a rate that is already below the floor.
    floor = min(schedule.floor, landing.begin_scale)
    return floor + (landing.begin_scale - floor) * left


def _after_warmup(schedule: Schedule, step: int, num_steps: int) -> float:
    if schedule.kind == "constant" or schedule.decay_steps <= 0:
        return 1.0
    if schedule.kind == "wsd":
        left = min(1.0, max(0.0, (num_steps - step) / schedule.decay_steps))
    elif schedule.kind == "cosine":
        done = min(1.0, max(0.0, (step - schedule.warmup_steps) / schedule.decay_steps))
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    else:
        raise AssertionError(f"unknown schedule {schedule.kind!r}")
    return schedule.floor + (1.0 - schedule.floor) * left
