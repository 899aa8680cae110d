"""A pace for landings that depends on no clock, so that they come at the same step each time."""

from __future__ import annotations

from typing import Any

from homing.lm.train.landing import Pace

__all__ = ["SteadyPace"]


class SteadyPace(Pace):
    """Every step takes a second, whatever the clock says; nothing else takes any time."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.saved(0.0)  # from the start: the first save ends, in its thread, some steps after it began

    def step(self, seconds: float) -> None:
        super().step(1.0)

    def evaluated(self, seconds: float) -> None:
        super().evaluated(0.0)

    def saved(self, seconds: float) -> None:
        super().saved(0.0)

    def sampled(self, seconds: float) -> None:
        super().sampled(0.0)
