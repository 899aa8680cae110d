"""Spend so far and time left until each limit, for the agent, the dead-man and the lookout.

The limits come from boot.json, then from the latest control request that the agent accepted."""

from __future__ import annotations

import contextlib
from decimal import Decimal
from typing import Optional, Tuple

from homing.instance.agent.folder import Folder
from homing.wire import instance_names as names
from homing.wire.control_files import Heartbeat, Request
from homing.wire.guard_order import allowed_s, reserve_s


def last_beat_at(folder: Folder) -> float:
    """Return a time at which an earlier agent of this instance was certainly running, or 0.

    It bounds the elapsed time from below, whatever the clock says now."""
    beat, boot = folder.read(names.HEARTBEAT, Heartbeat), folder.boot
    if beat is None or beat.mark != boot.mark:
        return 0.0
    try:
        # Use the recorded spend as well: if this clock is behind home's, the heartbeat's own time may precede
        # started_at.
        dollars = Decimal(beat.spend_usd) - Decimal(boot.spent_before_usd)
        return max(beat.t, boot.started_at + float(dollars / Decimal(boot.rate_usd_per_hour) * 3600))
    except ArithmeticError:
        return beat.t


class Limits:
    def __init__(self, folder: Folder) -> None:
        self._folder, self._boot, self._world = folder, folder.boot, folder.world
        self._rate = Decimal(self._boot.rate_usd_per_hour)
        known = self._read_clock()
        if known is None:
            # `started_at` is home's clock, and this clock may be behind it: the elapsed time is never negative.
            known_until = max(self._world.now(), last_beat_at(folder))
            known = max(0.0, known_until - self._boot.started_at), self._world.boottime()
        self._before_s, self._began = known
        self._write_clock()
        self.follow()

    def elapsed_s(self) -> float:
        """Return the seconds since billing began.

        Only the first start reads the wall clock, which may be adjusted later in either direction."""
        return self._before_s + self._world.boottime() - self._began

    def _read_clock(self) -> Optional[Tuple[float, float]]:
        """Return what the first agent or dead-man since this boot recorded, or None.

        The values are the seconds billed by then and the boot-clock time of that moment. None if nothing was recorded
        or the instance has rebooted since."""
        try:
            before, began, started, boot_id = self._world.read(self._folder.path(names.CLOCK)).decode().split(" ")
            is_ours = float(started) == self._boot.started_at and boot_id == self._world.boot_id()
            return (float(before), float(began)) if is_ours and float(began) <= self._world.boottime() else None
        except (OSError, ValueError):
            return None

    def _write_clock(self) -> None:
        words = (self._before_s, self._began, self._boot.started_at, self._world.boot_id())
        with contextlib.suppress(OSError):  # disk error: a later agent falls back to the wall clock
            self._world.write(self._folder.path(names.CLOCK), " ".join(map(str, words)).encode())

    def spend(self) -> Decimal:
        return Decimal(self._boot.spent_before_usd) + self._rate * Decimal(str(self.elapsed_s())) / 3600

    def follow(self) -> None:
        """Load the limits that the agent last wrote, or those of boot.json if there are none or they are damaged."""
        limit_usd, self.time_limit_s = self._boot.spend_limit_usd, self._boot.time_limit_s
        self.spend_limit = None if limit_usd is None else Decimal(limit_usd)
        with contextlib.suppress(ArithmeticError):
            self.change(self._folder.read(names.LIMITS, Request) or Request(serial=0))

    def change(self, request: Request) -> None:
        """Apply new limits, all or nothing; raises ArithmeticError if the amount is not a finite number."""
        if request.spend_limit_usd is not None:
            spend = Decimal(request.spend_limit_usd)
            if not spend.is_finite():
                raise ArithmeticError(request.spend_limit_usd)
            self.spend_limit = spend
        if request.time_limit_s is not None:
            self.time_limit_s = request.time_limit_s
        if request.age_s is not None:
            before_s = request.age_s - (self._world.boottime() - self._began)
            if before_s > self._before_s:
                self._before_s = before_s
                self._write_clock()

    def nearest(self) -> Tuple[float, str]:
        """Return the seconds from the start of billing to the nearer limit, and the name of that limit for messages."""
        allowed = allowed_s(self._rate, self.spend_limit, Decimal(self._boot.spent_before_usd), self.time_limit_s)
        is_time = 0 < self.time_limit_s == allowed
        return allowed, f"time limit of {self.time_limit_s:g} s" if is_time else f"spend limit of ${self.spend_limit}"

    def left_s(self, share: float) -> float:
        """Return the seconds until that point before the limit: negative if past, infinite without limits.

        `share` is one of the constants in wire/guard_order.py."""
        allowed, _ = self.nearest()
        return allowed - reserve_s(share, allowed, self._boot.stop_grace_s) - self.elapsed_s()
