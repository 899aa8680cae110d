"""A pace that depends on no clock, so that landings come at the same step each time, and a clock of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from homing.lm.train.landing import Pace

__all__ = ["Clock", "SteadyPace"]


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


class Clock:
    """Replaces the module `time` for the trainer: it advances only when a test says that something takes time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    perf_counter = monotonic = time

    def takes(self, seconds: float, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **settings: Any) -> Any:
            self.now += seconds
            return work(*args, **settings)

        return timed
