"""The learning rate over a phase, as a fraction of its peak.

    wsd        /‾‾‾‾‾‾\\    linear warm-up, constant, linear tail
    cosine     /‾‾--..__   linear warm-up, half a cosine down to the floor, then the floor
    constant   /‾‾‾‾‾‾‾    linear warm-up, constant

A landing is an earlier tail: from wherever the rate stands, in the schedule's own shape, to the floor at a nearer end.
Steps count from 0. The first step of a warm-up is not zero (it would be a step for nothing), and the floor is what
the tail reaches at its end, one past the last step, for the same reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from homing.wire.run import Schedule

__all__ = ["Landing", "lr_scale"]


@dataclass(frozen=True)
class Landing:
    """An end before the planned one. Part of the training state: a resumed trainer must land at the same place."""

    begin_step: float  # whole at first; once the end has moved, where the curve through the rate of then would begin
    begin_scale: float  # the rate there, as a fraction of the peak
    end_step: int
    step_s: float = 0.0  # how long a step took then: what a resumed trainer knows of its speed before its first step


def lr_scale(
    schedule: Schedule, step: int, num_steps: int, landing: Landing | None = None, warm_from: int = 0
) -> float:
    """In [0, 1]. Where warm-up and tail overlap, as in a very short run, the lower of the two counts.

    `warm_from` is where the warm-up begins: 0, or where a landed run went on.
    """
    # A half: where the curve was drawn anew it begins here but for the last digits.
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
    floor = min(schedule.floor, landing.begin_scale)  # in the midst of a warm-up it may be lower already
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
