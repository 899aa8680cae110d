"""How often a request is tried and how long to wait between two tries. Used wherever a call is repeated."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from homing.world.machine import Machine

__all__ = ["Retries"]


@dataclass(frozen=True)
class Retries:
    """Tries with a pause between them that doubles up to a maximum."""

    tries: int
    first_s: float
    longest_s: float = math.inf

    def attempts(self, world: Machine) -> Iterator[bool]:
        """Yield once per try, with a pause between two tries; the value says whether it is the last one."""
        for number in range(1, self.tries + 1):
            yield number == self.tries
            if number < self.tries:
                world.sleep(self.pause_s(number))

    def pause_s(self, failures: int, asked_s: float | None = None) -> float:
        """Return the pause after this many failures in a row, or a longer one that the server asked for."""
        own_s = self.first_s * 2.0 ** min(failures - 1, 32)
        return min(max(own_s, asked_s or 0.0), self.longest_s)
