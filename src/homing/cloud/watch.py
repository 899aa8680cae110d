"""Heartbeats, metrics and events to what a person sees, until the run ends.

    store --poll--> Report(head | line | event | sample | alert | problem)  ...  Report(end)

A failed poll is told once and tried again. Whoever watches also guards: the same round that `homing guard` makes, over
this one run, ends it at its limit and goes on elsewhere when its machine is taken away. Leaving off changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import Any, TypeVar

from homing.cloud import meter
from homing.cloud.ahead import Planned, ahead, planned
from homing.cloud.ask import ask_store
from homing.cloud.check_lost import is_lost
from homing.cloud.destroy import open_lines, still_billing
from homing.cloud.guard import guard_pass
from homing.cloud.home import LAUNCH_NOTE, LEDGER, Home
from homing.cloud.ledger import RunRow
from homing.cloud.lost import read_lost
from homing.cloud.metric_log import MetricLog
from homing.cloud.news import News, Report
from homing.cloud.reconcile import unread
from homing.cloud.signs import Tail, read_document
from homing.cloud.speed import remember
from homing.cloud.status import Status, check_interval, look, newest_beat, newest_pushed, progress_line, reached
from homing.cloud.timing import measure_trip
from homing.errors import HomingError, IntegrityError, StillBilling, StoreError
from homing.store import Store, run_key
from homing.units import format_duration
from homing.wire import codec, names
from homing.wire.codec import WireError
from homing.wire.control import Heartbeat
from homing.wire.event import Event, Outcome
from homing.wire.run import Run

__all__ = [
    "DEFAULT_EVERY_S",
    "Report",
    "check_interval",
    "newest_beat",
    "planned_usd",
    "remember_speed",
    "to_finish",
    "trip_usd",
    "watch",
]

T = TypeVar("T")
DEFAULT_EVERY_S = 10.0
_POLL_S = 2.0  # signs of the end are looked for this often, whatever the interval of lines
_BLIND_S = 300.0  # a store that cannot be read is waited for so long once nothing of the run bills
_REFRESH_S = 10.0  # the provider is asked this often


def watch(home: Home, run: RunRow, *, every_s: float = DEFAULT_EVERY_S) -> Iterator[Report]:
    """Ends with a Report `end`, or with StillBilling when nobody is left who could end the instance."""
    return _Watch(home, run, check_interval(every_s)).reports()


def to_finish(status: Status) -> Decimal | None:
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
        metrics = MetricLog(store, run_key(run.id, names.METRICS)).fresh()
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
        self.news = News(self.store, run.id)
        self.headed = ""  # the mark of the machine that was told of
        self.interrupted_by = ""
        self.plans: dict[str, Planned | None] = {}  # by mark
        self.last_line = ""
        self.last_told: tuple[str, int] | None = None  # phase and step of that line
        self.problem = self.lost_problem = ""
        self.refresh_problems: list[str] = []
        self.is_told_stale = self.is_told_waiting = False
        self.line_due = self.refresh_due = self.lost_due = home.world.monotonic()
        self.ending_since: float | None = None
        self.blind_since: float | None = None  # by the boot clock

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
            yield from self._check_lost()
            self._check_blind()
            self.home.world.sleep(min(self.every_s, _POLL_S))

    def _poll(self) -> Iterator[Report]:
        now = self.home.world.monotonic()
        is_ending = self.ending_since is not None
        if is_ending or now >= self.refresh_due:
            self.refresh_due = now + _REFRESH_S
            yield from self._guard()
        if any(text.startswith(unread(self.run)) for text in self.refresh_problems):
            return  # told by the round; it is not waited for again, for whoever watches is a guard too
        status = look(self.home, self.run)
        if status.problem:
            raise StoreError(status.problem)
        yield from self._news(status)
        yield from self._alert(status)
        yield from self._head(status)
        yield from self._line(status, now)
        if status.signs is not None and status.signs.outcome is not None and self.ending_since is None:
            self.ending_since = now

    def _news(self, status: Status) -> Iterator[Report]:
        fresh = self.news.copy()
        told = self._ask(lambda: list(fresh.reports(status.lines, status.at)))
        self.news = fresh
        yield from told

    def _ask(self, question: Callable[[], T]) -> T:
        """Of the store, with a deadline: while it hangs nobody here would look at the limit."""
        return ask_store(self.run.store, question, f"The store of {self.run.id}", self.home.world)

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

    def _head(self, status: Status) -> Iterator[Report]:
        """Once for each machine that is at work: its rate, who guards it, what of the run is safe, where it began."""
        beat = status.signs.heartbeat if status.signs else None
        line = status.lines[-1] if status.lines else None
        if line is None or beat is None or not status.run.is_live or line.mark == self.headed:
            return
        pushed = self._ask(lambda: newest_pushed(self.home, self.run))
        self.headed = line.mark
        limit = "no limit" if status.limit_usd is None else f"limit {meter.show_usd(status.limit_usd)}"
        parts = [
            f"attempt {line.attempt} on {line.provider} {line.offer}",
            f"{meter.show_usd(Decimal(line.rate_usd_per_hour))}/h, {limit}",
            "guarded there by agent and dead-man" if beat.has_dead_man else "guarded there by the agent alone",
            f"safe in the store: {pushed or 'no checkpoint yet'}",
        ]
        if learned := self.news.learned():
            parts.append(learned)
        data = {
            "run": self.run.id,
            "attempt": line.attempt,
            "provider": line.provider,
            "offer": line.offer,
            "rate_usd_per_hour": line.rate_usd_per_hour,
            "spend_limit_usd": self.run.spend_limit_usd,
            "has_dead_man": beat.has_dead_man,
            "pushed": pushed,
        }
        yield Report("head", " | ".join(parts), data)

    def _line(self, status: Status, now: float) -> Iterator[Report]:
        if now < self.line_due:
            return
        beat = self._beat(status)
        line = progress_line(status, beat, self.news.figures.get(beat.phase) if beat else None, self._plan(status))
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
        return newest_beat(status, self.news.metric)

    def _line_data(self, status: Status) -> dict[str, Any]:
        beat = self._beat(status)
        found = ahead(status, beat, self._plan(status))
        return {
            "run": self.run.id,
            "state": self.run.state,
            "heartbeat": codec.dump(beat) if beat else None,
            "figures": self.news.figures.get(beat.phase, {}) if beat else {},
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

    def _check_lost(self) -> Iterator[Report]:
        """Ends the watch when the ledger has lost the run and nothing of it bills. An instance that its provider still
        shows is written down again by the next round, with its limit; until the provider answers, it is asked again."""
        now = self.home.world.monotonic()
        if now < self.lost_due:
            return
        self.lost_due = now + _REFRESH_S
        try:
            if not is_lost(self.home, self.run):
                return
        except StillBilling as exc:
            if exc.what != self.lost_problem:
                yield Report("problem", f"{exc.what} {exc.why.splitlines()[0]} Trying again.")
            self.lost_problem = exc.what
            return
        lost = dataclasses.replace(read_lost(self.home, self.run.id), store=self.run.store)
        raise IntegrityError(
            what=f"The ledger has lost {self.run.id}, and no provider shows an instance of it.",
            why=f"{self.home.path / LEDGER} was removed or replaced while the run was watched.",
            fix=f"Restore the run from its store: {lost.adopt}",
        )

    def _check_blind(self) -> None:
        """Ends the watch when nothing of the run bills any more and its store has not been readable for a while: how it
        ended stands there alone, and nobody knows when it can be read again."""
        blind = next((text for text in [*self.refresh_problems, self.problem] if _is_unread(text, self.run)), "")
        now = self.home.world.boottime()
        if not blind or open_lines(self.home, self.run):
            self.blind_since = None
            return
        self.blind_since = now if self.blind_since is None else self.blind_since
        if now - self.blind_since >= _BLIND_S:
            raise StoreError(
                what=f"The instance of {self.run.id} is gone, and how the run ended is not known.",
                why=blind,
                fix=f"Mend the store, then: homing status {self.run.name}",
            )

    def _last_words(self) -> Iterator[Report]:
        """What came in between the last look and the end, then how it ended."""
        status = look(self.home, self.run)
        try:
            yield from self._news(status)
            # By now the dollars have changed, and whoever shows this says them anyway: only a new step is news.
            if not self.last_line or self.last_told != _where(status, self._beat(status)):
                self.line_due = self.home.world.monotonic()
                yield from self._line(status, self.line_due)
            if learned := self.news.learned():
                yield Report("event", learned)
            remember_speed(self.home, self.run, self.store)
        except (HomingError, WireError, OSError) as exc:
            yield Report("problem", f"The last lines could not be read: {str(exc).splitlines()[0]}")
        yield Report("end", f"{self.run.state}: {self.run.reason}", status.to_dict())


def _where(status: Status, beat: Heartbeat | None) -> tuple[str, int] | None:
    return None if beat is None else (reached(status, beat).phase, reached(status, beat).step)


def _is_unread(problem: str, run: RunRow) -> bool:
    return problem.startswith((unread(run), "The store could not be read:"))
