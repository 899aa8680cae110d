"""Defines how many times a call is tried and how long to wait between tries. Used wherever calls are retried."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from homing.world.machine import Machine

__all__ = ["Retries"]


@dataclass(frozen=True)
class Retries:
    """A retry policy: a number of attempts, with capped exponential backoff between them."""

    tries: int
    first_s: float
    longest_s: float = math.inf

    def attempts(self, world: Machine) -> Iterator[bool]:
        """Yield once per try, and pause between tries. The yielded value is True for the last try."""
        for number in range(1, self.tries + 1):
            yield number == self.tries
            if number < self.tries:
                world.sleep(self.pause_s(number))

    def pause_s(self, failures: int, asked_s: float | None = None) -> float:
        """Return the pause after this many consecutive failures, or a longer one if the server asked for it."""
        own_s = self.first_s * 2.0 ** min(failures - 1, 32)
        return min(max(own_s, asked_s or 0.0), self.longest_s)
