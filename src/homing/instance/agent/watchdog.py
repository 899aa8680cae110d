"""The watchdog: reads the trainer's progress and says why training should stop. It takes no action; supervise does."""

from __future__ import annotations

from typing import List, Optional, Tuple

from homing.instance.agent.folder import Folder
from homing.instance.agent.limits import Limits
from homing.wire import instance_names as names
from homing.wire.event_lines import Event, Metric
from homing.wire.guard_order import END, LAND

STALL_FLOOR_S, MAX_GAPS = 120.0, 50
STALL_AFTER_STEPS = 10  # compilation and warm-up come first
SYNC_PROGRESS = ("input_fetching", "input_fetched", "checkpoint_pushed")


class Watchdog(Limits):
    def __init__(self, folder: Folder) -> None:
        super().__init__(folder)
        self._phases: List[str] = []
        self._gaps_s: List[float] = []  # seconds between recent metric lines
        self._first: Optional[Metric] = None  # first metric of the current trainer in the current phase
        self.metric: Optional[Metric] = None
        self.furthest: Tuple[int, int] = (0, 0)  # (index of the phase by first appearance, step); never decreases
        self.alarm, self.is_taken = "", False  # the lookout's reason to stop; whether the instance is being preempted
        self._refused_at: Optional[float] = None  # boot-clock time since which the store has refused every push
        self._refusal = ""
        self._push_s = self._boot.push_s  # time to push a checkpoint: the planned value until one was measured
        self.begin()

    def why_stop(self) -> str:
        """Return the reason to stop, or "" while all limits hold."""
        quiet_s, idle_s = self._world.monotonic() - self._touched, self._boot.idle_limit_s
        if self.left_s(LAND) <= 0:
            return f"The {self.nearest()[1]} is near: ${self.spend():.4f} spent in {self.elapsed_s():.0f} s."
        if 0 < idle_s <= quiet_s:
            return f"No progress for {quiet_s:.0f} s; the idle limit is {idle_s:g} s."
        return self.alarm

    def why_unsaved(self) -> str:
        """Return why further training is useless because it cannot be saved, or ""."""
        limit_s = self._boot.unsaved_limit_s
        refused_s = 0.0 if self._refused_at is None else self._world.boottime() - self._refused_at
        if self._refused_at is None or not 0 < limit_s <= refused_s:
            return ""
        return f"{self._refusal} This has lasted {refused_s:.0f} s; limits.unsaved is {limit_s:g} s."

    def land_s(self) -> float:
        """Return the seconds until the trainer must have everything on disk, so that the push completes before END.

        The push time counts twice: the weights are pushed again as the model, and everything is read back for
        verification."""
        return min(self.left_s(LAND), self.left_s(END) - self._boot.home_s - 2 * self._push_s)

    def why_stalled(self) -> str:
        num_steps = self.metric.step - self._first.step if self.metric and self._first else 0
        usual_s = sorted(self._gaps_s)[len(self._gaps_s) // 2] if self._gaps_s else 0.0
        quiet_s, factor = self._world.monotonic() - self._touched, self._boot.stall_factor
        if factor <= 0 or num_steps < STALL_AFTER_STEPS or quiet_s < max(STALL_FLOOR_S, factor * usual_s):
            return ""
        return f"The trainer is stuck: no step for {quiet_s:.0f} s, normally {usual_s:.1f} s."

    def begin(self) -> None:
        """Note that a trainer starts now: only later steps are its own, and loading time is not idle time."""
        self.read()
        self._first = None
        self._touch()

    def read(self) -> None:
        """Read new events and metrics.

        Progress is a metric line with a new step, an event of the trainer, or an input or checkpoint that was
        transferred."""
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
            # A skipped step is not progress: a series of them must not keep the watchdog quiet.
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
