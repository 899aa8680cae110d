"""What was spent and how long is left, by boot.json and the last word of home; for the agent and the dead-man alike."""

from __future__ import annotations

import contextlib
from decimal import Decimal
from typing import Optional, Tuple

from homing.agent.folder import Folder
from homing.wire import instance as names
from homing.wire.control import Heartbeat, Request
from homing.wire.limit import allowed_s, reserve_s


def last_beat_at(folder: Folder) -> float:
    """When an agent of this instance last wrote: time that has passed for certain, whatever the clock says now."""
    beat, boot = folder.read(names.HEARTBEAT, Heartbeat), folder.boot
    if beat is None or beat.mark != boot.mark:
        return 0.0
    try:
        # By its dollars too: a clock that is behind home's would put the heartbeat itself before the beginning.
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
            # Home's clock said when billing began, and this one may be behind it: never less than nothing has passed.
            known_until = max(self._world.now(), last_beat_at(folder))
            known = max(0.0, known_until - self._boot.started_at), self._world.boottime()
        self._before_s, self._began = known
        self._write_clock()
        self.follow()

    def elapsed_s(self) -> float:
        """Since billing began. Only the first start asks for the time of day, which may be set either way later."""
        return self._before_s + self._world.boottime() - self._began

    def _read_clock(self) -> Optional[Tuple[float, float]]:
        """What the first agent or dead-man of this machine found: seconds since billing began, and when that was by
        the boot clock. None where there was none, or the machine has started again since."""
        try:
            before, began, started, boot_id = self._world.read(self._folder.path(names.CLOCK)).decode().split(" ")
            is_ours = float(started) == self._boot.started_at and boot_id == self._world.boot_id()
            return (float(before), float(began)) if is_ours and float(began) <= self._world.boottime() else None
        except (OSError, ValueError):
            return None

    def _write_clock(self) -> None:
        words = (self._before_s, self._began, self._boot.started_at, self._world.boot_id())
        with contextlib.suppress(OSError):  # an ill disk: a later agent goes by the time of day
            self._world.write(self._folder.path(names.CLOCK), " ".join(map(str, words)).encode())

    def spend(self) -> Decimal:
        return Decimal(self._boot.spent_before_usd) + self._rate * Decimal(str(self.elapsed_s())) / 3600

    def follow(self) -> None:
        """The limits that the agent last wrote down; those of boot.json where there are none or they are damaged."""
        limit_usd, self.time_limit_s = self._boot.spend_limit_usd, self._boot.time_limit_s
        self.spend_limit = None if limit_usd is None else Decimal(limit_usd)
        with contextlib.suppress(ArithmeticError):
            self.change(self._folder.read(names.LIMITS, Request) or Request(serial=0))

    def change(self, request: Request) -> None:
        """All of it or nothing: ArithmeticError where the amount is none."""
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
        """Seconds from the beginning of billing to the nearer limit, and what a person calls it."""
        allowed = allowed_s(self._rate, self.spend_limit, Decimal(self._boot.spent_before_usd), self.time_limit_s)
        is_time = 0 < self.time_limit_s == allowed
        return allowed, f"time limit of {self.time_limit_s:g} s" if is_time else f"spend limit of ${self.spend_limit}"

    def left_s(self, share: float) -> float:
        """Seconds until that point of wire/limit.py; negative when it is past, infinite without a limit."""
        allowed, _ = self.nearest()
        return allowed - reserve_s(share, allowed, self._boot.stop_grace_s) - self.elapsed_s()
