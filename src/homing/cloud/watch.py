"""Heartbeats, metrics and events to what a person sees, until the run ends.

    store --poll--> Report(line | event | sample | alert | problem)  ...  Report(end)

A failed poll is told once and tried again. Whoever watches also guards: the same round that `homing guard` makes, over
this one run, ends it at its limit and goes on elsewhere when its machine is taken away. Leaving off changes nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from homing.cloud import meter
from homing.cloud.ahead import Planned, ahead, planned
from homing.cloud.destroy import open_lines, still_billing
from homing.cloud.guard import guard_pass
from homing.cloud.home import LAUNCH_NOTE, Home
from homing.cloud.ledger import LedgerLine, RunRow
from homing.cloud.signs import Tail, read_document
from homing.cloud.speed import remember
from homing.cloud.status import Status, last_step, look, newest_figures, progress_line, say_figures
from homing.cloud.timing import measure_trip
from homing.errors import HomingError, StillBilling, UsageError
from homing.store import Store, run_key
from homing.units import format_duration
from homing.wire import codec, names
from homing.wire.codec import WireError
from homing.wire.control import Heartbeat
from homing.wire.event import Event, Metric, Outcome
from homing.wire.run import Run

__all__ = [
    "DEFAULT_EVERY_S",
    "Report",
    "check_interval",
    "planned_usd",
    "remember_speed",
    "to_finish",
    "trip_usd",
    "watch",
]

DEFAULT_EVERY_S = 10.0
_POLL_S = 2.0  # signs of the end are looked for this often, whatever the interval of lines
_REFRESH_S = 10.0  # the provider is asked this often
_ALERTS = ("alert", "limit_warning", "preempted", "end_billing_failed")  # events that are more than news
_EVALUATING = "evaluating"  # how far it is, again and again
_FIRST_EVENTS = 20  # of the past, when a watch begins
_FIRST_SAMPLES = 5


@dataclass(frozen=True)
class Report:
    kind: str  # line | event | sample | alert | problem | end
    text: str
    data: dict[str, Any] = field(default_factory=dict)


def check_interval(every_s: float) -> float:
    if not 1 <= every_s <= 86400:
        raise UsageError(
            what=f"{every_s:g} s is no interval to watch at.", why="It may be 1 second to 1 day.", fix="--every 30"
        )
    return every_s


def watch(home: Home, run: RunRow, *, every_s: float = DEFAULT_EVERY_S) -> Iterator[Report]:
    """Ends with a Report `end`, or with StillBilling when nobody is left who could end the instance."""
    return _Watch(home, run, check_interval(every_s)).reports()


def to_finish(status: Status, home: Home) -> Decimal | None:
    """Dollars that the rest of the phase would take, by the trainer's own count; None where that is not known."""
    beat = status.signs.heartbeat if status.signs else None
    if beat is None or not status.lines:
        return None
    # To the planned end: that of a landing is no end of the plan.
    seconds = beat.eta_s if beat.end_step is None else beat.plan_s
    return None if seconds is None else meter.cost(Decimal(status.lines[-1].rate_usd_per_hour), seconds)


def planned_usd(home: Home, run: RunRow, phases: Sequence[str]) -> Decimal | None:
    """Dollars that these phases take by the plan, on the machine that the run had; None where its papers are not at
    home."""
    return _planned(home, run, lambda parts: [seconds for name, seconds in parts if name in phases])


def trip_usd(home: Home, run: RunRow) -> Decimal | None:
    """Likewise, what every attempt takes beside its phases: to boot, to start, and to come home."""
    return _planned(home, run, lambda parts: [parts[0][1], parts[-1][1]])


def _planned(home: Home, run: RunRow, choose: Callable[[list[tuple[str, float]]], list[float]]) -> Decimal | None:
    plan = planned(home, run)
    return None if plan is None else meter.cost(plan.rate_usd_per_hour, sum(choose(plan.parts)))


def remember_speed(home: Home, run: RunRow, store: Store) -> None:
    """What plan will say next time. A run without its papers at home teaches nothing."""
    folder = home.run_dir(run.id)
    try:
        resolved = codec.loads(Run, home.world.read(folder / names.RUN))
        offer = json.loads(home.world.read(folder / LAUNCH_NOTE))["offer"]
        metrics = Tail(store, run_key(run.id, names.METRICS)).documents(Metric)
        speeds: dict[str, list[float]] = {}
        for metric in metrics:
            if metric.tokens_per_s:
                speeds.setdefault(metric.phase, []).append(metric.tokens_per_s)
        middle = {phase: sorted(seen)[len(seen) // 2] for phase, seen in speeds.items() if len(seen) >= 3}
        if middle:
            trip = _trip(home, run, store)
            remember(resolved, offer["device"], offer["num_gpus"], middle, home, provider=offer["provider"], trip=trip)
    except (OSError, ValueError, KeyError, TypeError, HomingError):
        return  # a cache of hints: it must not fail the verb that has done its work


def _trip(home: Home, run: RunRow, store: Store) -> dict[str, float] | None:
    """Of the last attempt, if it came to a good end: how long it took beside its steps."""
    last, outcome = home.ledger.lines(run.id)[-1], read_document(store, run_key(run.id, names.OUTCOME), Outcome)
    if outcome is None or outcome.state == "failed" or last.created_at is None or last.destroyed_at is None:
        return None
    events = Tail(store, run_key(run.id, names.EVENTS)).documents(Event)
    trip = measure_trip(events, outcome, last.created_at, last.destroyed_at)
    return dataclasses.asdict(trip) if trip is not None else None


class _Watch:
    def __init__(self, home: Home, run: RunRow, every_s: float) -> None:
        self.home, self.run, self.every_s = home, run, every_s
        self.store = home.store_of(run)
        self.events = Tail(self.store, run_key(run.id, names.EVENTS))
        self.metrics = Tail(self.store, run_key(run.id, names.METRICS))
        self.samples: set[str] = set()
        self.metric: Metric | None = None
        self.figures: dict[str, dict[str, float]] = {}  # by phase, what it alone has
        self.evaluated: dict[str, int] = {}  # by phase, the step of its last evaluation
        self.told: set[tuple[float, str, str, str]] = set()  # events, by all that tells one from another
        self.is_first = True
        self.interrupted_by = ""
        self.plans: dict[str, Planned | None] = {}  # by mark
        self.times: dict[str, float] = {}  # of samples, by their path
        self.last_line = ""
        self.last_told: tuple[str, int] | None = None  # phase and step of that line
        self.problem = ""
        self.refresh_problems: list[str] = []
        self.is_told_stale = self.is_told_waiting = False
        self.line_due = self.refresh_due = home.world.monotonic()
        self.ending_since: float | None = None

    def reports(self) -> Iterator[Report]:
        while True:
            try:
                yield from self._poll()
                self.problem = ""
            except StillBilling:
                raise
            except (HomingError, WireError, OSError) as exc:
                problem = (str(exc) or type(exc).__name__).splitlines()[0]
                if problem != self.problem:
                    yield Report("problem", f"{problem} Trying again.")
                self.problem = problem
            if self._is_over():
                yield from self._last_words()
                return
            self.home.world.sleep(min(self.every_s, _POLL_S))

    def _poll(self) -> Iterator[Report]:
        now = self.home.world.monotonic()
        is_ending = self.ending_since is not None
        if is_ending or now >= self.refresh_due:
            self.refresh_due = now + _REFRESH_S
            yield from self._guard()
        status = look(self.home, self.run)
        yield from self._news(status.lines)
        yield from self._alert(status)
        yield from self._line(status, now)
        if status.signs is not None and status.signs.outcome is not None and self.ending_since is None:
            self.ending_since = now

    def _guard(self) -> Iterator[Report]:
        told: list[str] = []
        made = guard_pass(self.home, only=self.run.id, tell=told.append)
        was_live, self.run = self.run.is_live, self.home.ledger.run(self.run.id) or self.run
        for problem in made.problems:
            if problem not in self.refresh_problems:
                yield Report("problem", f"{problem} Trying again.")
        self.refresh_problems = made.problems
        for text in [*told, *made.done, *made.alerts]:
            yield Report("alert", text.removeprefix(f"{self.run.id}: "))
        left = open_lines(self.home, self.run)
        if made.may_bill and left:
            raise still_billing(self.home, left)
        if self.run.is_live and not was_live:
            self.ending_since = None  # it goes on in another attempt

    def _news(self, lines: list[LedgerLine]) -> Iterator[Report]:
        """Events, validations and samples since the last look, in the order in which they happened."""
        # A watch that begins with a run that went on tells each attempt that is over in one line.
        since = lines[-1].intent_at if self.is_first and len(lines) > 1 else -math.inf
        news = [*self._new_metrics(since), *self._new_events(lines, since)]
        yield from (report for _, report in sorted([*news, *self._new_samples(since)], key=lambda pair: pair[0]))

    def _new_events(self, lines: list[LedgerLine], since: float) -> Iterator[tuple[float, Report]]:
        events = self.events.documents(Event)
        if since > -math.inf:
            yield from self._past(events, lines)
            events = [event for event in events if event.t >= since]
        if self.is_first:  # of the past only the last, and nothing of its transfers
            events = [event for event in events if event.source != "sync"][-_FIRST_EVENTS:]
        self.is_first = False
        for place, event in enumerate(events):
            mark = _mark(event)
            if mark in self.told:  # the next attempt begins the file anew with what it found of it
                continue
            self.told.add(mark)
            if event.kind == "sampled":
                self.times[str(event.data.get("path"))] = event.t
                continue  # the sample itself is shown
            if event.kind == _EVALUATING and self._is_passed(event, events[place + 1 :]):
                continue
            where = f"step {event.step:,} | " if event.step is not None else ""
            kind = "alert" if event.kind in _ALERTS else "event"
            said = f"{_late(event, lines)}{where}{event.source}: {event.text}{_dollars(event, lines)}"
            yield event.t, Report(kind, said, codec.dump(event))

    def _past(self, events: list[Event], lines: list[LedgerLine]) -> Iterator[tuple[float, Report]]:
        since = -math.inf
        for line, following in itertools.pairwise([line for line in lines if not line.is_twin]):
            own = [event for event in events if since <= event.t < following.intent_at]
            since = following.intent_at
            self.told |= {_mark(event) for event in own}
            self.times |= {str(event.data.get("path")): event.t for event in own if event.kind == "sampled"}
            steps = [event.step for event in own if event.step is not None]
            spend = meter.line_spend(line, self.home.world.now())
            reached = f"up to step {steps[-1]:,}" if steps else "before its first step"
            data = {"attempt": line.attempt, "step": steps[-1] if steps else 0, "spend_usd": str(spend)}
            said = f"attempt {line.attempt} is over: {reached}, {meter.at_most(line)}{meter.show_usd(spend)}"
            yield line.intent_at, Report("event", said, data)

    def _is_passed(self, event: Event, later: Sequence[Event]) -> bool:
        """Whether the same evaluation has come further since, or to its end: only the newest count is news."""
        is_over = self.evaluated.get(event.phase, -1) >= (event.step or 0)
        return is_over or any(each.kind == _EVALUATING for each in later)

    def _new_samples(self, since: float) -> Iterator[tuple[float, Report]]:
        prefix = run_key(self.run.id, names.SAMPLES) + "/"
        entries = self.store.list(prefix)
        if not self.samples:  # of the past only the last ones; a long run has hundreds
            self.samples.update(entry.key for entry in entries[:-_FIRST_SAMPLES])
        if since > -math.inf:
            self.samples.update(entry.key for entry in entries if self._sampled_at(entry.key[len(prefix) :]) < since)
        for entry in entries:
            if entry.key not in self.samples:
                text = self.store.read(entry.key).decode("utf-8", "replace")
                self.samples.add(entry.key)
                name = entry.key[len(prefix) :]
                yield self._sampled_at(name), Report("sample", text.strip(), {"name": name, "text": text})

    def _sampled_at(self, name: str) -> float:
        return self.times.get(f"{names.SAMPLES}/{name}", math.inf)

    def _new_metrics(self, since: float) -> Iterator[tuple[float, Report]]:
        for metric in self.metrics.documents(Metric):
            own = self.figures.setdefault(metric.phase, {})
            own |= newest_figures([metric])
            if metric.val_loss is not None:
                self.evaluated[metric.phase] = metric.step
                if metric.t >= since:
                    yield metric.t, Report("event", _validation(metric), codec.dump(metric))
            if metric.loss is not None:
                self.metric = metric

    def _line(self, status: Status, now: float) -> Iterator[Report]:
        if now < self.line_due:
            return
        beat = self._beat(status)
        line = progress_line(status, beat, self.figures.get(beat.phase) if beat else None, self._plan(status))
        if line != self.last_line:
            self.line_due = now + self.every_s
            self.last_line, self.last_told = line, _where(status, beat)
            yield Report("line", line, self._line_data(status))

    def _plan(self, status: Status) -> Planned | None:
        """Made once for each machine."""
        mark = status.lines[-1].mark if status.lines else ""
        if mark not in self.plans:
            self.plans[mark] = planned(self.home, self.run)
        return self.plans[mark]

    def _beat(self, status: Status) -> Heartbeat | None:
        """The heartbeat with the newest metric laid over it, which is newer by up to one beat."""
        beat = status.signs.heartbeat if status.signs else None
        metric = self.metric
        if beat is None or metric is None:
            return beat
        # Steps of two phases say nothing about which came first; their times do.
        is_older = metric.step < beat.step if beat.phase in ("", metric.phase) else metric.t < beat.t
        if is_older:
            return beat
        return dataclasses.replace(
            beat,
            phase=metric.phase,
            step=metric.step,
            num_steps=metric.num_steps,
            end_step=metric.end_step,
            step_s=metric.step_s if metric.step_s is not None else beat.step_s,
            loss=metric.loss,
            tokens_per_s=metric.tokens_per_s or beat.tokens_per_s,
            mfu=metric.mfu if metric.mfu is not None else beat.mfu,
            eta_s=beat.eta_s if metric.eta_s is None and metric.phase == beat.phase else metric.eta_s,
            plan_s=metric.plan_s,
        )

    def _line_data(self, status: Status) -> dict[str, Any]:
        beat = self._beat(status)
        found = ahead(status, beat, self._plan(status))
        return {
            "run": self.run.id,
            "state": self.run.state,
            "heartbeat": codec.dump(beat) if beat else None,
            "figures": self.figures.get(beat.phase, {}) if beat else {},
            "spend_usd": str(status.spend_usd),
            "spend_limit_usd": self.run.spend_limit_usd,
            "ahead": dataclasses.asdict(found) if found else None,
            "heartbeat_age_s": status.heartbeat_age_s,
        }

    def _alert(self, status: Status) -> Iterator[Report]:
        age_s = status.heartbeat_age_s
        is_stale = status.is_silent and status.is_billing
        if is_stale and not self.is_told_stale:
            said = f"No heartbeat for {format_duration(age_s or 0.0)}: the agent may be dead or cut off, and it bills."
            yield Report("alert", f"{said} To end it: homing destroy {self.run.id}")
        self.is_told_stale = is_stale
        if (
            status.run.state == "launching"
            and not any(line.created_at for line in status.lines)
            and not self.is_told_waiting
        ):
            self.is_told_waiting = True
            said = "Nothing is created yet. If no `homing launch` is at work on it any more, close it:"
            yield Report("alert", f"{said} homing destroy {self.run.id}")

    def _is_over(self) -> bool:
        run = self.home.ledger.run(self.run.id)
        if run is None or run.is_live or open_lines(self.home, run):
            return False
        if run.is_interrupted and self.interrupted_by != run.reason:
            # Another homing may have noticed it before our own round did: look once more whether it can go on.
            self.interrupted_by, self.refresh_due = run.reason, self.home.world.monotonic()
            return False
        self.run = run
        return True

    def _last_words(self) -> Iterator[Report]:
        """What came in between the last look and the end, then how it ended."""
        status = look(self.home, self.run)
        try:
            yield from self._news(status.lines)
            # By now the dollars have changed, and whoever shows this says them anyway: only a new step is news.
            if not self.last_line or self.last_told != _where(status, self._beat(status)):
                self.line_due = self.home.world.monotonic()
                yield from self._line(status, self.line_due)
            remember_speed(self.home, self.run, self.store)
        except (HomingError, WireError, OSError) as exc:
            yield Report("problem", f"The last lines could not be read: {str(exc).splitlines()[0]}")
        yield Report("end", f"{self.run.state}: {self.run.reason}", status.to_dict())


def _where(status: Status, beat: Heartbeat | None) -> tuple[str, int] | None:
    return None if beat is None else (beat.phase, last_step(status, beat))


def _mark(event: Event) -> tuple[float, str, str, str]:
    return (event.t, event.source, event.kind, event.text)


def _late(event: Event, lines: list[LedgerLine]) -> str:
    """What an attempt that is over has said may come in when the next one is under way: it is not of this one."""
    if len(lines) < 2 or event.source == "home" or event.t >= lines[-1].intent_at:
        return ""
    of = [line.attempt for line in lines if line.intent_at <= event.t]
    return f"of attempt {of[-1] if of else lines[0].attempt}: "


def _dollars(event: Event, lines: list[LedgerLine]) -> str:
    """The trainer knows seconds only; what finishing would have cost is said here."""
    needs_s = event.data.get("needs_s")
    if event.source != "trainer" or not isinstance(needs_s, float) or not lines:
        return ""
    dollars = meter.show_usd(meter.cost(Decimal(lines[-1].rate_usd_per_hour), needs_s))
    return f" Finishing the plan from here would cost about {dollars} more."


def _validation(metric: Metric) -> str:
    at = f"validation at step {metric.step:,}: "
    held_out = {name: value for name, value in metric.more.items() if name.startswith("val_")}
    if "val_reward" in held_out:  # then the loss is only what is missing from it
        return at + ", ".join([f"reward {held_out['val_reward']:.3f}", *say_figures(held_out)])
    bits = metric.val_bits_per_byte
    return f"{at}loss {metric.val_loss:.3f}" + (f", {bits:.3f} bits per byte" if bits is not None else "")
