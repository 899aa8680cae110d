"""What was spent, what the trainer has done, and why it should stop now. It decides nothing; supervise acts.

0 ---------------- LAND ---------- KILL -------- END -- limit      the spend limit at this rate is a number of
  train            | stop, save    | push        | end billing     seconds, so money and time are one line, and
                   |<------------ reserve ------------->|          the nearer limit counts
"""

from __future__ import annotations

import math
import os
from decimal import Decimal
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type

from homing.wire import names
from homing.wire.boot import Boot
from homing.wire.codec import WireError, loads
from homing.wire.control import Request
from homing.wire.event import Event, Metric
from homing.world import World

LAND, KILL, END = 1.0, 0.5, 0.125  # shares of the reserve that are left at each point
PUSH_RESERVE_S = 120.0
END_FLOOR_S = 4.0
RESERVE_FRACTION = 0.1  # never more than this of the whole, so that a small limit still trains
STALL_FLOOR_S = 120.0
STALL_AFTER_STEPS = 10  # compiling and warming up come first
MAX_GAPS = 50
SYNC_PROGRESS = ("input_fetched", "checkpoint_pushed")


class Watchdog:
    def __init__(self, boot: Boot, world: World, run_dir: str, known_until: float) -> None:
        """`known_until` is the time of an earlier agent's last heartbeat: a clock set back does not undo it."""
        self._boot, self._world, self._run_dir = boot, world, run_dir
        # Home's clock said when billing began, and this one may be behind it: never less than nothing has passed.
        self._before_s = max(0.0, max(world.now(), known_until) - boot.started_at)
        self._began = world.monotonic()
        self.spend_limit = None if boot.spend_limit_usd is None else Decimal(boot.spend_limit_usd)
        self.time_limit_s, self._rate = boot.time_limit_s, Decimal(boot.rate_usd_per_hour)
        self._offsets: Dict[str, int] = {}
        self._phases: List[str] = []
        self._gaps_s: List[float] = []  # between the last metric lines
        self.metric: Optional[Metric] = None
        self.furthest: Tuple[int, int] = (0, 0)  # phase by order of appearance, step; never goes back
        self.begin()

    def elapsed_s(self) -> float:
        """Since billing began. The wall clock may jump either way; the larger of the two clocks counts."""
        by_wall = self._world.now() - self._boot.started_at
        return max(by_wall, self._before_s + self._world.monotonic() - self._began)

    def spend(self) -> Decimal:
        return Decimal(self._boot.spent_before_usd) + self._rate * Decimal(str(self.elapsed_s())) / 3600

    def change_limits(self, request: Request) -> None:
        if request.spend_limit_usd is not None:
            self.spend_limit = Decimal(request.spend_limit_usd)
        if request.time_limit_s is not None:
            self.time_limit_s = request.time_limit_s

    def nearest(self) -> Tuple[float, str]:
        """Seconds from the beginning of billing to the nearer limit, and what a person calls it."""
        found, rate = [(self.time_limit_s or math.inf, f"time limit of {self.time_limit_s:g} s")], self._rate
        if self.spend_limit is not None and rate > 0:
            dollars = max(Decimal(0), self.spend_limit - Decimal(self._boot.spent_before_usd))
            found.append((float(dollars / rate * 3600), f"spend limit of ${self.spend_limit}"))
        return min(found)

    def left_s(self, share: float) -> float:
        """Seconds until LAND, KILL or END; negative when it is past, infinite without a limit."""
        allowed_s, _ = self.nearest()
        reserve_s = min(self._boot.stop_grace_s + PUSH_RESERVE_S, allowed_s * RESERVE_FRACTION)
        # However small the limit, the end itself takes its seconds: to look, to kill, to start what ends billing.
        return allowed_s - max(reserve_s * share, min(END_FLOOR_S, reserve_s * KILL)) - self.elapsed_s()

    def why_stop(self) -> str:
        """The sentence to stop with, or "" while all limits hold."""
        quiet_s, idle_s = self._world.monotonic() - self._touched, self._boot.idle_limit_s
        if self.left_s(LAND) <= 0:
            return f"The {self.nearest()[1]} is near: ${self.spend():.4f} spent in {self.elapsed_s():.0f} s."
        return f"Nothing new for {quiet_s:.0f} s; the idle limit is {idle_s:g} s." if 0 < idle_s <= quiet_s else ""

    def why_stalled(self) -> str:
        num_steps = self.metric.step - self._first.step if self.metric and self._first else 0
        usual_s = sorted(self._gaps_s)[len(self._gaps_s) // 2] if self._gaps_s else 0.0
        quiet_s, factor = self._world.monotonic() - self._touched, self._boot.stall_factor
        if factor <= 0 or num_steps < STALL_AFTER_STEPS or quiet_s < max(STALL_FLOOR_S, factor * usual_s):
            return ""
        return f"The trainer is stuck: no step for {quiet_s:.0f} s, where {usual_s:.1f} s is usual."

    def begin(self) -> None:
        """A trainer starts now: what comes from here on is its own, and loading takes its time."""
        self._first: Optional[Metric] = None
        self.read()
        self._first = None
        self._touch()

    def read(self) -> None:
        """Progress is a line with a new step, an event of the trainer, or something that reached us or the store."""
        for event in self._new_lines(names.EVENTS, Event):
            # A skipped step is no progress: a run of them must not hold the watchdog off.
            if (event.source == "trainer" and event.kind != "step_skipped") or event.kind in SYNC_PROGRESS:
                self._touch()
        for metric in self._new_lines(names.METRICS, Metric):
            last, self.metric = self.metric, metric
            is_same_phase = last is not None and last.phase == metric.phase
            if self._first is None or not is_same_phase:
                self._first = metric
            if last is not None and is_same_phase and metric.step > last.step:
                self._gaps_s = [*self._gaps_s[1 - MAX_GAPS :], max(0.0, metric.t - last.t)]
            if metric.phase not in self._phases:
                self._phases.append(metric.phase)
            self.furthest = max(self.furthest, (self._phases.index(metric.phase), metric.step))
            if last is None or not is_same_phase or metric.step != last.step:
                self._touch()

    def _touch(self) -> None:
        self.progress_at, self._touched = self._world.now(), self._world.monotonic()

    def _new_lines(self, name: str, cls: Type[Any]) -> Iterator[Any]:
        """Whole lines since the last look; one that cannot be read is left out, it is not ours to judge."""
        path = os.path.join(self._run_dir, name)
        try:
            size, offset = self._world.size(path), self._offsets.get(name, 0)
            offset = 0 if size < offset else offset  # the trainer cut it back to its checkpoint
            data = self._world.read(path, offset, size - offset) if size > offset else b""
        except OSError:  # not there yet, or an ill disk, which must not take the watchdog down
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offsets[name] = offset + len(whole)
        for line in whole.splitlines():
            try:
                yield loads(cls, line)
            except WireError:
                continue
