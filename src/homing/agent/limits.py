"""What was spent and how long is left, by boot.json and the last word of home; for the agent and the dead-man alike."""

from __future__ import annotations

import os
from decimal import Decimal
from typing import Tuple

from homing.wire import names
from homing.wire.boot import Boot
from homing.wire.codec import WireError, loads
from homing.wire.control import Heartbeat, Request
from homing.wire.limit import allowed_s, reserve_s
from homing.world import World


def last_beat_at(boot: Boot, world: World) -> float:
    """When an agent of this instance last wrote: time that has passed for certain, whatever the clock says now."""
    try:
        beat = loads(Heartbeat, world.read(os.path.join(boot.work_dir, names.RUN_DIR, names.HEARTBEAT)))
        # By its dollars too: a clock that is behind home's would put the heartbeat itself before the beginning.
        dollars = Decimal(beat.spend_usd) - Decimal(boot.spent_before_usd)
        counted_s = float(dollars / Decimal(boot.rate_usd_per_hour) * 3600)
    except (OSError, WireError, ArithmeticError):
        return 0.0
    return max(beat.t, boot.started_at + counted_s) if beat.mark == boot.mark else 0.0


class Limits:
    def __init__(self, boot: Boot, world: World, known_until: float) -> None:
        """`known_until` is the time of an earlier agent's last heartbeat: a clock set back does not undo it."""
        self._boot, self._world, self._rate = boot, world, Decimal(boot.rate_usd_per_hour)
        # Home's clock said when billing began, and this one may be behind it: never less than nothing has passed.
        self._before_s = max(0.0, max(world.now(), known_until) - boot.started_at)
        self._began = world.monotonic()
        self.follow()

    def elapsed_s(self) -> float:
        """Since billing began. The wall clock may jump either way; the larger of the two clocks counts."""
        by_wall = self._world.now() - self._boot.started_at
        return max(by_wall, self._before_s + self._world.monotonic() - self._began)

    def spend(self) -> Decimal:
        return Decimal(self._boot.spent_before_usd) + self._rate * Decimal(str(self.elapsed_s())) / 3600

    def follow(self) -> None:
        """The limits that the agent last wrote down; those of boot.json where there are none or they are damaged."""
        boot = self._boot
        self.spend_limit = None if boot.spend_limit_usd is None else Decimal(boot.spend_limit_usd)
        self.time_limit_s = boot.time_limit_s
        try:
            path = os.path.join(boot.work_dir, names.RUN_DIR, names.LIMITS)
            self.change(loads(Request, self._world.read(path)))
        except (OSError, WireError, ArithmeticError):
            return

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
            self._before_s = max(self._before_s, request.age_s - (self._world.monotonic() - self._began))

    def nearest(self) -> Tuple[float, str]:
        """Seconds from the beginning of billing to the nearer limit, and what a person calls it."""
        allowed = allowed_s(self._rate, self.spend_limit, Decimal(self._boot.spent_before_usd), self.time_limit_s)
        is_time = 0 < self.time_limit_s == allowed
        return allowed, f"time limit of {self.time_limit_s:g} s" if is_time else f"spend limit of ${self.spend_limit}"

    def left_s(self, share: float) -> float:
        """Seconds until that point of wire/limit.py; negative when it is past, infinite without a limit."""
        allowed, _ = self.nearest()
        return allowed - reserve_s(share, allowed, self._boot.stop_grace_s) - self.elapsed_s()
