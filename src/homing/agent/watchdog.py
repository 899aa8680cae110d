"""What the trainer has done, what looks wrong, and why it should stop now. It decides nothing; supervise acts."""

from __future__ import annotations

import math
import os
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple, Type

from homing.agent.limits import Limits
from homing.wire import names
from homing.wire.boot import Boot
from homing.wire.codec import WireError, loads
from homing.wire.event import Event, Metric
from homing.wire.limit import END, LAND
from homing.world import World

STALL_FLOOR_S = 120.0
STALL_AFTER_STEPS = 10  # compiling and warming up come first
MAX_GAPS, MAX_LOSSES = 50, 200
SYNC_PROGRESS = ("input_fetched", "checkpoint_pushed")
WARN_AT = (0.8, 0.6)  # of a limit; the highest that was passed is told, once
DIVERGED_LINES = 10  # metric lines in a row without a loss, or with one far above what was usual
SLOW_SHARE, SLOW_AFTER_STEPS, SLOW_AFTER_S = 1 / 3, 20, 600.0


class Watchdog(Limits):
    def __init__(self, boot: Boot, world: World, run_dir: str, known_until: float) -> None:
        super().__init__(boot, world, known_until)
        self._run_dir = run_dir
        self._offsets: Dict[str, int] = {}
        self._phases: List[str] = []
        self._gaps_s: List[float] = []  # between the last metric lines
        self.metric: Optional[Metric] = None
        self.furthest: Tuple[int, int] = (0, 0)  # phase by order of appearance, step; never goes back
        self._push_s = boot.push_s  # of a checkpoint: as planned, until one was measured
        self.told: Set[str] = set()  # keys of what was said once and for all, also by an agent before this one
        self.begin()

    def why_stop(self) -> str:
        """The sentence to stop with, or "" while all limits hold."""
        quiet_s, idle_s = self._world.monotonic() - self._touched, self._boot.idle_limit_s
        if self.left_s(LAND) <= 0:
            return f"The {self.nearest()[1]} is near: ${self.spend():.4f} spent in {self.elapsed_s():.0f} s."
        return f"Nothing new for {quiet_s:.0f} s; the idle limit is {idle_s:g} s." if 0 < idle_s <= quiet_s else ""

    def land_s(self) -> float:
        """Until all of the trainer's work must be on disk, so that there is time to push it before END. Twice: the
        weights travel again as the model, and all of it is read back."""
        return min(self.left_s(LAND), self.left_s(END) - self._boot.home_s - 2 * self._push_s)

    def why_stalled(self) -> str:
        num_steps, usual_s = self._num_steps(), _middle(self._gaps_s)
        quiet_s, factor = self._world.monotonic() - self._touched, self._boot.stall_factor
        if factor <= 0 or num_steps < STALL_AFTER_STEPS or quiet_s < max(STALL_FLOOR_S, factor * usual_s):
            return ""
        return f"The trainer is stuck: no step for {quiet_s:.0f} s, where {usual_s:.1f} s is usual."

    def alarms(self) -> Iterator[Tuple[str, str, str]]:
        """Kind, key and sentence of what a person should hear once."""
        share = max(float(self.spend() / self.spend_limit) if self.spend_limit else 0.0,
                    self.elapsed_s() / (self.time_limit_s or math.inf))  # fmt: skip
        for passed in [at for at in WARN_AT if share >= at][:1]:
            limit = self.nearest()[1]
            text = f"{share:.0%} of a limit is used up: ${self.spend():.2f} in {self.elapsed_s():.0f} s; the {limit}."
            yield "limit_warning", f"{passed} of {self.spend_limit}, {self.time_limit_s:g} s", text
        if self._num_bad >= DIVERGED_LINES:
            text = f"The loss has left its course: {self._num_bad} lines in a row without a usual loss"
            yield "divergence", f"divergence of {self._boot.mark}", f"{text} ({_middle(self._losses):.3f})."
        planned, speed = self._boot.planned_tokens_per_s, _middle(self._speeds)
        is_known = self._num_steps() >= SLOW_AFTER_STEPS or self._world.monotonic() - self._begun >= SLOW_AFTER_S
        if is_known and 0 < speed < planned * SLOW_SHARE:
            text = f"This machine is slow: {speed:.0f} tokens/s, where {planned:.0f} were planned."
            yield "slow", f"slow {self._boot.mark}", text

    def begin(self) -> None:
        """A trainer starts now: what comes from here on is its own, and loading takes its time."""
        self._first: Optional[Metric] = None
        self._losses: List[float] = []
        self._speeds: List[float] = []
        self._num_bad = 0
        self.read()
        self._first, self._losses, self._speeds, self._num_bad = None, [], [], 0
        self._begun = self._world.monotonic()
        self._touch()

    def read(self) -> None:
        """Progress is a line with a new step, an event of the trainer, or something that reached us or the store."""
        for event in self._new_lines(names.EVENTS, Event):
            self.told.add(str(event.data.get("key")))
            if event.kind == "checkpoint_pushed" and event.data.get("seconds"):
                self._push_s = float(event.data["seconds"])
            # A skipped step is no progress: a run of them must not hold the watchdog off.
            if (event.source == "trainer" and event.kind != "step_skipped") or event.kind in SYNC_PROGRESS:
                self._touch()
        for metric in self._new_lines(names.METRICS, Metric):
            last, self.metric = self.metric, metric
            is_same_phase = last is not None and last.phase == metric.phase
            if self._first is None or not is_same_phase:
                self._first, self._losses, self._speeds = metric, [], []
            self._judge(metric)
            if last is not None and is_same_phase and metric.step > last.step:
                self._gaps_s = [*self._gaps_s[1 - MAX_GAPS :], max(0.0, metric.t - last.t)]
            if metric.phase not in self._phases:
                self._phases.append(metric.phase)
            self.furthest = max(self.furthest, (self._phases.index(metric.phase), metric.step))
            if last is None or not is_same_phase or metric.step != last.step:
                self._touch()

    def _judge(self, metric: Metric) -> None:
        loss, usual = metric.loss, _middle(self._losses)
        is_far = loss is not None and len(self._losses) >= DIVERGED_LINES and loss > max(2 * usual, usual + 1)
        self._num_bad = self._num_bad + 1 if loss is None or is_far else 0
        if loss is not None and not is_far:
            self._losses = [*self._losses[1 - MAX_LOSSES :], loss]
        if metric.tokens_per_s and self._num_steps() <= 2 * SLOW_AFTER_STEPS:
            self._speeds.append(metric.tokens_per_s)

    def _num_steps(self) -> int:
        return self.metric.step - self._first.step if self.metric and self._first else 0

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


def _middle(values: List[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0
