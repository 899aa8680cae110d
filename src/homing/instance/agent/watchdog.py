"""Limits: computes the spend and the time left. Watchdog: reads progress and decides whether training should stop.

The limits come from boot.json, and later from the newest control request that the agent accepted. The agent, the
dead-man and the monitor all use class Limits. The watchdog only decides; the supervisor acts."""

from __future__ import annotations

import contextlib
from decimal import Decimal
from typing import List, Optional, Tuple

from homing.instance.agent.folder import Folder
from homing.wire import instance_file_names as names
from homing.wire.codec import MOST_LIMIT_USD, MOST_USD, read_figure
from homing.wire.control_files import Heartbeat, Request
from homing.wire.event_lines import Event, Metric
from homing.wire.guard_timing import END, LAND, allowed_s, reserve_s


def last_beat_at(folder: Folder) -> float:
    """Return a time at which an earlier agent on this instance was certainly running, or 0 if there is no record.

    The result is a lower bound on the current time, even if the clock was set back."""
    beat, boot = folder.read(names.HEARTBEAT, Heartbeat), folder.boot
    if beat is None or beat.mark != boot.mark:
        return 0.0
    spend = read_figure(beat.spend_usd, MOST_USD)
    if spend is None:
        return beat.t
    try:
        # Use the recorded spend too: started_at comes from another clock, so the heartbeat's time may precede it.
        dollars = spend - Decimal(boot.spent_before_usd)
        return max(beat.t, boot.started_at + float(dollars / Decimal(boot.rate_usd_per_hour) * 3600))
    except ArithmeticError:
        return beat.t


class Limits:
    def __init__(self, folder: Folder) -> None:
        self._folder, self._boot, self._world = folder, folder.boot, folder.world
        self._rate = Decimal(self._boot.rate_usd_per_hour)
        known = self._read_clock()
        if known is None:
            # `started_at` comes from another clock. This clock may be behind it, but elapsed time must not be negative.
            known_until = max(self._world.now(), last_beat_at(folder))
            known = max(0.0, known_until - self._boot.started_at), self._world.boottime()
        self._before_s, self._began = known
        self._write_clock()
        self.follow()

    def elapsed_s(self) -> float:
        """Return the seconds since billing began.

        Only the first process reads the wall clock, because the clock may later be set forward or back."""
        return self._before_s + self._world.boottime() - self._began

    def _read_clock(self) -> Optional[Tuple[float, float]]:
        """Return the clock values that the first agent or dead-man recorded after this boot, or None.

        The values are the number of seconds billed so far and the boot-clock time of that measurement. Return None if
        nothing was recorded or the instance has rebooted since."""
        try:
            before, began, started, boot_id = self._world.read(self._folder.path(names.CLOCK)).decode().split(" ")
            is_ours = float(started) == self._boot.started_at and boot_id == self._world.boot_id()
            return (float(before), float(began)) if is_ours and float(began) <= self._world.boottime() else None
        except (OSError, ValueError):
            return None

    def _write_clock(self) -> None:
        words = (self._before_s, self._began, self._boot.started_at, self._world.boot_id())
        with contextlib.suppress(OSError):  # if the write fails, a later agent falls back to the wall clock
            self._world.write(self._folder.path(names.CLOCK), " ".join(map(str, words)).encode())

    def spend(self) -> Decimal:
        return Decimal(self._boot.spent_before_usd) + self._rate * Decimal(str(self.elapsed_s())) / 3600

    def follow(self) -> None:
        """Load the limits that the agent last wrote, or those of boot.json if the file is missing or damaged."""
        limit_usd, self.time_limit_s = self._boot.spend_limit_usd, self._boot.time_limit_s
        self.spend_limit = None if limit_usd is None else Decimal(limit_usd)
        with contextlib.suppress(ArithmeticError):
            self.change(self._folder.read(names.LIMITS, Request) or Request(serial=0))

    def change(self, request: Request) -> None:
        """Apply all new limits or none. Raise ArithmeticError if the spend limit is not a plausible number."""
        if request.spend_limit_usd is not None:
            spend = read_figure(request.spend_limit_usd, MOST_LIMIT_USD, least=-MOST_LIMIT_USD)
            if spend is None:
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
        """Return the seconds from the start of billing to the nearer limit, and that limit's name for messages."""
        allowed = allowed_s(self._rate, self.spend_limit, Decimal(self._boot.spent_before_usd), self.time_limit_s)
        is_time = 0 < self.time_limit_s == allowed
        return allowed, f"time limit of {self.time_limit_s:g} s" if is_time else f"spend limit of ${self.spend_limit}"

    def left_s(self, share: float) -> float:
        """Return the seconds until a guard must act: negative if it is overdue, infinite if there are no limits.

        `share` identifies the guard; it is one of the constants in wire/guard_timing.py, such as END."""
        allowed, _ = self.nearest()
        return allowed - reserve_s(share, allowed, self._boot.stop_grace_s) - self.elapsed_s()


STALL_FLOOR_S, MAX_GAPS = 120.0, 50
STALL_AFTER_STEPS = 10  # the first steps are slow because of compilation and warm-up
SYNC_PROGRESS = ("input_fetching", "input_fetched", "checkpoint_pushed")


class Watchdog(Limits):
    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self._phases: List[str] = []
        self._gaps_s: List[float] = []  # seconds between recent metric lines
        self._first: Optional[Metric] = None  # the first metric of the current trainer in the current phase
        self.metric: Optional[Metric] = None
        self.furthest: Tuple[int, int] = (0, 0)  # (index of the phase, step); never decreases
        # the monitor's reason to stop training, and whether that reason is a preemption
        self.alarm, self.is_taken = "", False
        self._refused_at: Optional[float] = None  # boot-clock time at which the store began to refuse every push
        self._refusal = ""
        self._push_s = self._boot.push_s  # time to push a checkpoint; the planned value until one has been measured
        self.begin()

    def why_stop(self) -> str:
        """Return the reason to stop training, or "" if no limit has been reached and there is no alarm."""
        quiet_s, idle_s = self._world.monotonic() - self._touched, self._boot.idle_limit_s
        if self.left_s(LAND) <= 0:
            return f"The {self.nearest()[1]} is near: ${self.spend():.4f} spent in {self.elapsed_s():.0f} s."
        if 0 < idle_s <= quiet_s:
            return f"No progress for {quiet_s:.0f} s; the idle limit is {idle_s:g} s."
        return self.alarm

    def why_unsaved(self) -> str:
        """Return why the results of further training could not be saved, or "" if they could."""
        limit_s = self._boot.unsaved_limit_s
        refused_s = 0.0 if self._refused_at is None else self._world.boottime() - self._refused_at
        if self._refused_at is None or not 0 < limit_s <= refused_s:
            return ""
        return f"{self._refusal} This has lasted {refused_s:.0f} s; limits.unsaved is {limit_s:g} s."

    def land_s(self) -> float:
        """Return the seconds until the trainer must have everything on disk, so that the push ends before billing does.

        The push time is doubled, because the weights are pushed again as the model, and every file is read back."""
        return min(self.left_s(LAND), self.left_s(END) - self._boot.home_s - 2 * self._push_s)

    def why_stalled(self) -> str:
        num_steps = self.metric.step - self._first.step if self.metric and self._first else 0
        usual_s = sorted(self._gaps_s)[len(self._gaps_s) // 2] if self._gaps_s else 0.0
        quiet_s, factor = self._world.monotonic() - self._touched, self._boot.stall_factor
        if factor <= 0 or num_steps < STALL_AFTER_STEPS or quiet_s < max(STALL_FLOOR_S, factor * usual_s):
            return ""
        return f"The trainer is stuck: no step for {quiet_s:.0f} s, normally one every {usual_s:.1f} s."

    def begin(self) -> None:
        """Reset progress tracking for a trainer that starts now: ignore earlier steps and restart the idle timer."""
        self.read()
        self._first = None
        self._touch()

    def read(self) -> None:
        """Read new events and metrics.

        Progress is a metric line with a new step, an event from the trainer, or a transferred input or checkpoint."""
        for event in self._folder.new_lines(names.EVENTS, Event):
            if event.kind == "checkpoint_pushed" and event.data.get("seconds"):
                self._push_s = float(event.data["seconds"])
            if event.kind == names.STORE_REFUSES and event.data.get("refused") == self._boot.mark:
                self._refused_at = self._world.boottime() if self._refused_at is None else self._refused_at
                self._refusal = event.text
            elif event.kind in (names.PUSH_RECOVERED, "checkpoint_pushed", "pushed"):
                self._refused_at = None
            if event.data.get("stops") == self._boot.mark:
                self.alarm, self.is_taken = event.text, event.kind == "preemption_notice"
            # A skipped step does not count as progress, so that the watchdog notices a series of skipped steps.
            if (event.source == "trainer" and event.kind != "step_skipped") or event.kind in SYNC_PROGRESS:
                self._touch()
        for metric in self._folder.new_lines(names.METRICS, Metric):
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
