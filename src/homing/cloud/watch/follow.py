"""Watches a run: turns its heartbeats, metrics and events into reports for the user, until the run ends.

    store --poll--> Report(head | line | event | sample | alert | problem | curve)  ...  Report(end)

A failed poll is reported once and retried. Watching also guards the run: it makes the same passes as `homing guard`,
but only over this run. These passes end the run at its limit and relaunch it after a preemption. When the user stops
watching, the run continues.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, TypeVar

from homing.cloud.ask_providers import ask_store
from homing.cloud.destroy import open_lines, still_billing
from homing.cloud.guard.guard_pass import guard_pass
from homing.cloud.home import LEDGER, Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.plan.speed import remember_speed
from homing.cloud.reconcile.inventory import is_lost
from homing.cloud.reconcile.lost_ledger import read_lost
from homing.cloud.reconcile.reconcile import unread
from homing.cloud.reconcile.run_status import (
    Status,
    check_interval,
    guards_on_instance,
    look,
    newest_beat,
    newest_pushed,
    reached,
)
from homing.cloud.watch.progress import Planned, ahead, planned, progress_line
from homing.cloud.watch.run_output import EventFeed, Report
from homing.errors import HomingError, IntegrityError, NotChecked, StillBilling, StoreError
from homing.units import format_duration
from homing.wire import codec
from homing.wire.codec import WireError
from homing.wire.control_files import Heartbeat

__all__ = ["DEFAULT_EVERY_S", "Report", "watch"]

T = TypeVar("T")
DEFAULT_EVERY_S = 10.0
_POLL_S = 2.0  # maximum seconds between polls, regardless of the interval between printed lines
_BLIND_S = 300.0  # how long to wait for an unreadable store once the run has no billing instance
_REFRESH_S = 10.0  # seconds between queries to the provider


def watch(home: Home, run: RunRow, *, every_s: float = DEFAULT_EVERY_S, is_curve: bool = False) -> Iterator[Report]:
    """Yield reports, the last of which has kind `end`. Raises StillBilling if an instance is not confirmed gone.

    With `is_curve`, reports of kind `curve` bring the points of the loss curve, from the first step on.
    """
    return _Watch(home, run, check_interval(every_s), is_curve=is_curve).reports()


class _Watch:
    def __init__(self, home: Home, run: RunRow, every_s: float, *, is_curve: bool = False) -> None:
        self.home, self.run, self.every_s, self.is_curve = home, run, every_s, is_curve
        self.store = home.store_of(run)
        self.feed = EventFeed(self.store, run.id, is_curve=is_curve)
        self.headed = ""  # mark of the machine that the last `head` report was about
        self.interrupted_by = ""
        self.plans: dict[str, Planned | None] = {}  # maps the mark of a machine to the plan for it
        self.last_line = ""
        self.last_shown: tuple[str, int] | None = None  # phase and step of the last line shown
        self.problem = self.lost_problem = ""
        self.refresh_problems: list[str] = []
        self.is_stale_reported = self.is_waiting_reported = False
        self.line_due = self.refresh_due = self.lost_due = home.world.monotonic()
        self.ending_since: float | None = None
        self.blind_since: float | None = None  # when the store became unreadable, by the boot clock

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
                    yield Report("problem", f"{problem} Retrying.")
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
            return  # already reported; do not wait for the store again, because this process must also enforce limits
        status = look(self.home, self.run)
        if status.problem:
            raise StoreError(status.problem)
        yield from self._new_reports(status)
        yield from self._alert(status)
        yield from self._head(status)
        yield from self._line(status, now)
        if status.reports is not None and status.reports.outcome is not None and self.ending_since is None:
            self.ending_since = now

    def _new_reports(self, status: Status) -> Iterator[Report]:
        fresh = self.feed.copy()
        reports = self._ask(lambda: list(fresh.reports(status.lines, status.at)))
        self.feed = fresh
        if self.is_curve:
            yield from fresh.curve_points()
        yield from reports

    def _ask(self, question: Callable[[], T]) -> T:
        """Query the store with a deadline, because this process cannot enforce the limit while a query hangs."""
        return ask_store(self.run.store, question, f"The store of {self.run.id}", self.home.world)

    def _guard(self) -> Iterator[Report]:
        said: list[str] = []
        made = guard_pass(self.home, only=self.run.id, notify=said.append)
        was_live, self.run = self.run.is_live, self.home.ledger.run(self.run.id) or self.run
        for problem in made.problems:
            if problem not in self.refresh_problems and not isinstance(problem, NotChecked):
                yield Report("problem", f"{problem} Retrying.")
        self.refresh_problems = made.problems
        for text in [*said, *made.done, *made.alerts]:
            yield Report("alert", text.removeprefix(f"{self.run.id}: "))
        left = open_lines(self.home, self.run)
        if made.may_bill and left:
            raise still_billing(self.home, left)
        if self.run.is_live and not was_live:
            self.ending_since = None  # the run has resumed in a new attempt

    def _head(self, status: Status) -> Iterator[Report]:
        """Report the machine's rate and guards, the newest checkpoint, and the loss, once per machine."""
        beat = status.reports.heartbeat if status.reports else None
        line = status.lines[-1] if status.lines else None
        if line is None or beat is None or not status.run.is_live or line.mark == self.headed:
            return
        pushed = self._ask(lambda: newest_pushed(self.home, self.run))
        self.headed = line.mark
        limit = "no limit" if status.limit_usd is None else f"limit {meter.show_usd(status.limit_usd)}"
        if status.limit_usd is not None and status.most_usd is not None and status.most_usd < status.limit_usd:
            limit += f", at most {meter.show_usd(status.most_usd)} within its time limit"
        parts = [
            f"attempt {line.attempt} on {line.provider} {line.offer}",
            f"{meter.show_usd(Decimal(line.rate_usd_per_hour))}/h, {limit}",
            f"guards on the instance: {guards_on_instance(self.home, line, beat)}",
            f"safe in the store: {pushed or 'no checkpoint yet'}",
        ]
        if learned := self.feed.learned():
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
        line = progress_line(status, beat, self.feed.figures.get(beat.phase) if beat else None, self._plan(status))
        if line != self.last_line:
            self.line_due = now + self.every_s
            self.last_line, self.last_shown = line, _where(status, beat)
            yield Report("line", line, self._line_data(status))

    def _plan(self, status: Status) -> Planned | None:
        """Return the plan for the current machine. It is computed only once per machine."""
        mark = status.lines[-1].mark if status.lines else ""
        if mark not in self.plans:
            self.plans[mark] = planned(self.home, self.run)
        return self.plans[mark]

    def _beat(self, status: Status) -> Heartbeat | None:
        return newest_beat(status, self.feed.metric)

    def _line_data(self, status: Status) -> dict[str, Any]:
        beat = self._beat(status)
        found = ahead(status, beat, self._plan(status))
        line = status.lines[-1] if status.lines else None
        return {
            "run": self.run.id,
            "name": self.run.name,
            "state": self.run.state,
            "phases": [{"phase": phase, "num_steps": steps} for phase, steps in status.steps.items()],
            "attempt": line.attempt if line else None,
            "provider": line.provider if line else "",
            "offer": line.offer if line else "",
            "rate_usd_per_hour": line.rate_usd_per_hour if line else None,
            "began_at": self.run.created_at,
            "heartbeat": codec.dump(beat) if beat else None,
            "figures": self.feed.figures.get(beat.phase, {}) if beat else {},
            "spend_usd": str(status.spend_usd),
            "spend_limit_usd": self.run.spend_limit_usd,
            "ahead": dataclasses.asdict(found) if found else None,
            "heartbeat_age_s": status.heartbeat_age_s,
            "guards": guards_on_instance(self.home, line, beat) if line and beat else None,
            "problems": [problem for problem in self.refresh_problems if not isinstance(problem, NotChecked)],
        }

    def _alert(self, status: Status) -> Iterator[Report]:
        age_s = status.heartbeat_age_s
        is_stale = status.is_silent and status.is_billing
        if is_stale and not self.is_stale_reported:
            said = f"No heartbeat for {format_duration(age_s or 0.0)}: the agent may be dead or cut off. Still billing."
            yield Report("alert", f"{said} To end it: homing destroy {self.run.id}")
        self.is_stale_reported = is_stale
        if (
            status.run.state == "launching"
            and not any(line.created_at for line in status.lines)
            and not self.is_waiting_reported
        ):
            self.is_waiting_reported = True
            said = "Nothing has been created yet. If no `homing launch` is working on this run any more, close it:"
            yield Report("alert", f"{said} homing destroy {self.run.id}")

    def _is_over(self) -> bool:
        run = self.home.ledger.run(self.run.id)
        if run is None or run.is_live or open_lines(self.home, run):
            return False
        if run.is_interrupted and self.interrupted_by != run.reason:
            # Another process may have noticed the end of the run before our own guard pass did. So make another pass,
            # which may resume the run.
            self.interrupted_by, self.refresh_due = run.reason, self.home.world.monotonic()
            return False
        self.run = run
        return True

    def _check_lost(self) -> Iterator[Report]:
        """Raise IntegrityError, to end the watch, if the ledger has lost the run and no instance of the run is billing.

        If a provider still lists an instance, the next pass restores the instance's line and the run's limit.
        Providers that do not answer are queried again.
        """
        now = self.home.world.monotonic()
        if now < self.lost_due:
            return
        self.lost_due = now + _REFRESH_S
        try:
            if not is_lost(self.home, self.run):
                return
        except StillBilling as exc:
            if exc.what != self.lost_problem:
                yield Report("problem", f"{exc.what} {exc.why.splitlines()[0]} Retrying.")
            self.lost_problem = exc.what
            return
        lost = dataclasses.replace(read_lost(self.home, self.run.id), store=self.run.store)
        raise IntegrityError(
            what=f"{self.run.id} disappeared from the ledger, and no provider lists an instance for it.",
            why=f"{self.home.path / LEDGER} was removed or replaced while you were watching the run.",
            fix=f"Restore the run from its store: {lost.adopt}",
        )

    def _check_blind(self) -> None:
        """Raise StoreError, to end the watch, if the store has been unreadable for a while and no instance is billing.

        Only the store shows how the run ended, and it may never become readable again.
        """
        blind = next((text for text in [*self.refresh_problems, self.problem] if _is_unread(text, self.run)), "")
        now = self.home.world.boottime()
        if not blind or open_lines(self.home, self.run):
            self.blind_since = None
            return
        self.blind_since = now if self.blind_since is None else self.blind_since
        if now - self.blind_since >= _BLIND_S:
            raise StoreError(
                what=f"The instance that ran {self.run.id} is gone, and it is unknown how the run ended.",
                why=blind,
                fix=f"Restore access to the run's store, then: homing status {self.run.name}",
            )

    def _last_words(self) -> Iterator[Report]:
        """Report what arrived between the last poll and the end, then how the run ended."""
        status = look(self.home, self.run)
        try:
            yield from self._new_reports(status)
            # Print another line only if the step is new. The spend has changed too, but the caller prints it anyway.
            if not self.last_line or self.last_shown != _where(status, self._beat(status)):
                self.line_due = self.home.world.monotonic()
                yield from self._line(status, self.line_due)
            if learned := self.feed.learned():
                yield Report("event", learned)
            remember_speed(self.home, self.run, self.store)
        except (HomingError, WireError, OSError) as exc:
            yield Report("problem", f"Could not read the last events: {str(exc).splitlines()[0]}")
        yield Report("end", f"{self.run.state}: {self.run.reason}", status.to_dict())


def _where(status: Status, beat: Heartbeat | None) -> tuple[str, int] | None:
    return None if beat is None else (reached(status, beat).phase, reached(status, beat).step)


def _is_unread(problem: str, run: RunRow) -> bool:
    return problem.startswith((unread(run), "Could not read the store:"))
