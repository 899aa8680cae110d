"""The clock that limits are measured with: it keeps running during sleep, and setting the wall clock does not move it.

All processes of one machine read the same value, so one may write it to a file and another read it. It restarts when
the machine reboots. Python 3.8, because it ships with the agent."""

import time

# Linux. On macOS CLOCK_MONOTONIC runs during sleep; elsewhere it is the closest available.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def boot_clock_s() -> float:
    """Return the seconds since a fixed moment that stays the same until the machine reboots."""
    return time.monotonic() if _CLOCK is None else time.clock_gettime(_CLOCK)
