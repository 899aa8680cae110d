"""The clock by which limits count: it goes on while a machine sleeps, and setting the time of day does not move it.

All processes of one machine read the same value, so it may stand in a file that one writes and another reads. It starts
again when the machine does. Python 3.8, for it travels with the agent.
"""

import time

# Linux. CLOCK_MONOTONIC goes on during sleep on macOS; elsewhere it is the nearest there is.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def boot_clock_s() -> float:
    """Seconds since some moment that stays the same until this machine starts again."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
