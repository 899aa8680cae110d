"""The learning rate over a phase, as a fraction of its peak.

    wsd        /‾‾‾‾‾‾\\    linear warm-up, constant, linear tail: a landing is only an earlier tail
    cosine     /‾‾--..__   linear warm-up, half a cosine down to the floor, then the floor
    constant   /‾‾‾‾‾‾‾    linear warm-up, constant

Steps count from 0. The first step of a warm-up is not zero (it would be a step for nothing), and the floor is what
the tail reaches at `num_steps`, one past the last step, for the same reason.
"""

from __future__ import annotations

import math

from homing.wire.run import Schedule

__all__ = ["lr_scale"]


def lr_scale(schedule: Schedule, step: int, num_steps: int) -> float:
    """In [0, 1]. Where warm-up and tail overlap, as in a very early landing, the lower of the two counts."""
    warmup = min(1.0, (step + 1) / schedule.warmup_steps) if schedule.warmup_steps > 0 else 1.0
    return min(warmup, _after_warmup(schedule, step, num_steps))


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
