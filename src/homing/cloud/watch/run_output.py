"""Reads the output of a run while it trains: new events, validations and samples since the last poll, and its logs.

    events.jsonl, metrics.jsonl, samples/ --EventFeed.reports--> Report(event | sample | alert), in order
    logs of trainer, agent and sync       --read_log, follow-->  lines

The directory of a rented run is in the store; that of a run trained on this computer is in $HOMING_HOME. The feed uses
no clock and no provider, and gets costs only from the ledger's lines. A log that is being followed loses no lines while
the store is unreachable.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from homing.cloud.contact.heartbeats import Tail, read_reports
from homing.cloud.contact.read_metrics import MetricLog
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import ADOPTED, LedgerLine, RunRow
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.reconcile.inventory import is_lost
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import BY_REWARD, newest_figures, say_figures
from homing.errors import HomingError, StoreError, UsageError
from homing.store import Store, run_key
from homing.wire import codec, file_names
from homing.wire.codec import WireError
from homing.wire.event_lines import Event, Metric
from homing.world import World

__all__ = ["PROGRAMS", "EventFeed", "Report", "boot_log", "check_program", "follow", "follow_tail", "read_log"]

_ALERTS = ("alert", "limit_warning", "preempted", "end_billing_failed")  # events that need attention
_EVALUATING = "evaluating"  # the kind of event that repeatedly reports the progress of an evaluation
_FIRST_EVENTS = 20  # how many past events to show when a watch begins
_FIRST_SAMPLES = 5
_WHOLE_SAMPLES = 35  # past samples on a page about the whole run; each is one request to the store
_FIRST_VALIDATIONS = 5
PROGRAMS = ("trainer", "agent", "sync")
LAST_PUSH_S = 180.0  # how long to wait for the last log lines after a run has ended
_EVERY_S = 2.0


@dataclass(frozen=True)
class Report:
    kind: str  # head | line | event | sample | alert | problem | curve | end
    text: str
    data: dict[str, Any] = field(default_factory=dict)


class EventFeed:
    def __init__(self, store: Store, run_id: str, *, is_curve: bool = False) -> None:
        """Read a run's output. With `is_curve`, for a page about the whole run, keep everything, not just the newest.

        A watch that begins late shows only the last few events and samples; a page shows those of the whole run.
        """
        self._is_whole = is_curve
        self._store, self._run_id = store, run_id
        self._events = Tail(store, run_key(run_id, file_names.EVENTS))
        self._metrics = MetricLog(store, run_key(run_id, file_names.METRICS), is_curve=is_curve)
        self.fresh: list[Metric] = []  # the metrics that were new at the last call
        self._samples: set[str] = set()
        self._reported: set[tuple[float, str, str, str]] = set()  # events by identity
        self._times: dict[str, float] = {}  # time of each sample, by path
        self._is_first = True
        self.metric: Metric | None = None  # the newest metric with a loss
        self.first: dict[str, Metric] = {}  # maps a phase to its first metric with a meaningful loss
        self.measured: dict[str, Metric] = {}  # maps a phase to the metric of its last evaluation
        self.figures: dict[str, dict[str, float]] = {}  # maps a phase to the metrics that only this phase has

    def copy(self) -> EventFeed:
        """Return a copy of the feed. If reading with it fails or takes too long, the original is unchanged."""
        made = copy.copy(self)
        made._events, made._metrics = copy.copy(self._events), copy.copy(self._metrics)
        made._samples, made._reported, made._times = set(self._samples), set(self._reported), dict(self._times)
        made.first, made.measured = dict(self.first), dict(self.measured)
        made.figures = {phase: dict(own) for phase, own in self.figures.items()}
        return made

    def reports(self, lines: Sequence[LedgerLine] = (), now: float = 0.0) -> Iterator[Report]:
        """Yield what has happened since the last call, in order, as reports.

        `lines` are a rented run's attempts. `now` is the time up to which their costs are computed.
        """
        # When a watch of a resumed run begins, each earlier attempt is reported in one line.
        is_condensed = self._is_first and len(lines) > 1 and not self._is_whole
        since = lines[-1].intent_at if is_condensed else -math.inf
        found = [*self._new_metrics(since), *self._new_events(lines, since, now)]
        yield from (report for _, report in sorted([*found, *self._new_samples(since)], key=lambda pair: pair[0]))

    def curve_points(self) -> Iterator[Report]:
        """Yield one report with the points of the curve that were new at the last call of `reports`, if any.

        A point is the phase, the step, the loss (in rl the reward), the held-out loss and its bits per byte.
        """
        points = [
            (
                metric.phase,
                metric.step,
                metric.more.get("reward") if metric.phase == BY_REWARD else metric.loss,
                metric.val_loss if metric.phase != BY_REWARD else metric.more.get("val_reward"),
                metric.val_bits_per_byte,
            )
            for metric in self.fresh
        ]
        if points:
            yield Report("curve", "", {"points": points})

    def learned(self) -> str:
        """Summarize the newest phase: `loss 6.419 at step 10, 4.520 at step 150, held-out 4.608`, or "" if unknown."""
        last = self.metric
        first = self.first.get(last.phase) if last is not None else None
        if first is None or last is None or first.step == last.step:
            return ""
        measured = self.measured.get(last.phase)
        held_out = f", held-out {measured.val_loss:.3f}" if measured is not None else ""
        return f"loss {first.loss:.3f} at step {first.step:,}, {last.loss:.3f} at step {last.step:,}{held_out}"

    def _new_events(self, lines: Sequence[LedgerLine], since: float, now: float) -> Iterator[tuple[float, Report]]:
        events = self._events.documents(Event)
        if since > -math.inf:
            yield from self._past(events, lines, now)
            events = [event for event in events if event.t >= since]
        if self._is_first:  # of the past events, show only the last few, and no file transfers
            events = [event for event in events if event.source != "sync"]
            events = events if self._is_whole else events[-_FIRST_EVENTS:]
        self._is_first = False
        for place, event in enumerate(events):
            mark = _mark(event)
            if mark in self._reported:  # a new attempt's file also contains the events of earlier attempts
                continue
            self._reported.add(mark)
            if event.kind == "sampled":
                self._times[str(event.data.get("path"))] = event.t
                continue  # not shown, because the sample itself is shown instead
            if event.kind == "evaluated":
                continue  # not shown, because the result of the evaluation is shown instead
            if event.kind == _EVALUATING and self._is_passed(event, events[place + 1 :]):
                continue
            where = f"step {event.step:,} | " if event.step is not None else ""
            kind = "alert" if event.kind in _ALERTS else "event"
            said = f"{_late(event, lines)}{where}{event.source}: {event.text}{_dollars(event, lines)}"
            yield event.t, Report(kind, said, codec.dump(event))

    def _past(self, events: list[Event], lines: Sequence[LedgerLine], now: float) -> Iterator[tuple[float, Report]]:
        since = -math.inf
        for line, following in itertools.pairwise([line for line in lines if not line.is_duplicate]):
            own = [event for event in events if since <= event.t < following.intent_at]
            since = following.intent_at
            self._reported |= {_mark(event) for event in own}
            self._times |= {str(event.data.get("path")): event.t for event in own if event.kind == "sampled"}
            steps = [event.step for event in own if event.step is not None]
            spend = meter.line_spend(line, now)
            reached = f"up to step {steps[-1]:,}" if steps else "before its first step"
            data = {"attempt": line.attempt, "step": steps[-1] if steps else 0, "spend_usd": str(spend)}
            said = f"attempt {line.attempt} ended: {reached}, {meter.at_most(line)}{meter.show_usd(spend)}"
            yield line.intent_at, Report("event", said, data)

    def _is_passed(self, event: Event, later: Sequence[Event]) -> bool:
        """Return True if a newer event reports this evaluation's progress or end. Only the newest one is shown."""
        last = self.measured.get(event.phase)
        is_over = last is not None and last.step >= (event.step or 0)
        return is_over or any(each.kind == _EVALUATING for each in later)

    def _new_samples(self, since: float) -> Iterator[tuple[float, Report]]:
        prefix = run_key(self._run_id, file_names.SAMPLES) + "/"
        entries = self._store.list(prefix)
        if not self._samples:  # of the past samples, show only the last few, because a long run has hundreds
            self._samples.update(entry.key for entry in entries[:-_FIRST_SAMPLES])
            if self._is_whole:  # and some from all over the run, to compare them
                past = entries[:-_FIRST_SAMPLES]
                stride = math.ceil(len(past) / _WHOLE_SAMPLES) or 1
                self._samples.difference_update(entry.key for entry in past[::stride])
        if since > -math.inf:
            self._samples.update(entry.key for entry in entries if self._sampled_at(entry.key[len(prefix) :]) < since)
        for entry in entries:
            if entry.key not in self._samples:
                text = self._store.read(entry.key).decode("utf-8", "replace")
                self._samples.add(entry.key)
                name = entry.key[len(prefix) :]
                yield self._sampled_at(name), Report("sample", text.strip(), {"name": name, "text": text})

    def _sampled_at(self, name: str) -> float:
        return self._times.get(f"{file_names.SAMPLES}/{name}", math.inf)

    def _new_metrics(self, since: float) -> Iterator[tuple[float, Report]]:
        found = self.fresh = self._metrics.fresh()
        for metric in found:
            own = self.figures.setdefault(metric.phase, {})
            own |= newest_figures([metric])
            if metric.loss is not None:
                self.metric = metric
                if metric.phase != BY_REWARD:
                    self.first.setdefault(metric.phase, metric)
        measured = [metric for metric in found if metric.val_loss is not None]
        self.measured |= {metric.phase: metric for metric in measured}
        fresh = [metric for metric in measured if metric.t >= since]
        for metric in fresh[-_FIRST_VALIDATIONS:] if self._is_first else fresh:
            yield metric.t, Report("event", _validation(metric), codec.dump(metric))


def _mark(event: Event) -> tuple[float, str, str, str]:
    return (event.t, event.source, event.kind, event.text)


def _late(event: Event, lines: Sequence[LedgerLine]) -> str:
    """Return the prefix for an event from an earlier attempt that arrives during a later one, otherwise ""."""
    if len(lines) < 2 or event.source == "home" or event.t >= lines[-1].intent_at:
        return ""
    of = [line.attempt for line in lines if line.intent_at <= event.t]
    return f"from attempt {of[-1] if of else lines[0].attempt}: "


def _dollars(event: Event, lines: Sequence[LedgerLine]) -> str:
    """Return a sentence with the cost of finishing the plan, for a trainer event that contains only the time."""
    needs_s = event.data.get("needs_s")
    if event.source != "trainer" or not isinstance(needs_s, float) or not lines:
        return ""
    dollars = meter.show_usd(meter.cost(Decimal(lines[-1].rate_usd_per_hour), needs_s))
    return f" Finishing the full plan would cost about {dollars} more."


def _validation(metric: Metric) -> str:
    at = f"validation at step {metric.step:,}: "
    held_out = {name: value for name, value in metric.more.items() if name.startswith("val_")}
    if "val_reward" in held_out:  # in rl, show the reward, because the loss is just pass_reward minus the reward
        return at + ", ".join([f"reward {held_out['val_reward']:.3f}", *say_figures(held_out)])
    bits = metric.val_bits_per_byte
    return f"{at}loss {metric.val_loss:.3f}" + (f", {bits:.3f} bits per byte" if bits is not None else "")


# --- logs ---


def read_log(home: Home, run: RunRow, program: str = "trainer") -> list[str]:
    return _tail(home, run, program).lines(is_last=True)


def follow(
    home: Home, run: RunRow, program: str = "trainer", *, notify: Callable[[str], None] = lambda text: None
) -> Iterator[str]:
    """Yield log lines until the run has ended and its output is in the store.

    This may take a while after the end, because the last log lines may arrive in the store after the outcome.
    """
    ended_at: float | None = None

    def is_over() -> bool:
        nonlocal ended_at
        refresh(home)
        now = home.ledger.run(run.id)
        if now is None:
            return is_lost(home, run)
        if now.is_live:
            ended_at = None
            return False
        ended_at = home.world.monotonic() if ended_at is None else ended_at
        return home.world.monotonic() - ended_at >= LAST_PUSH_S or not _is_pushing(home, now)

    return follow_tail(_tail(home, run, program), is_over, home.world, notify)


def follow_tail(tail: Tail, ask: Callable[[], bool], world: World, notify: Callable[[str], None]) -> Iterator[str]:
    """Yield lines until `ask` returns True. A failed read keeps the file offset, so no line is lost or repeated."""
    said = ""
    while True:
        # Call `ask` before reading, so that the last read includes everything that was written before the end.
        is_over = False
        try:
            is_over = ask()
            yield from tail.lines(is_last=is_over)
            said = ""
        except (HomingError, WireError, OSError) as exc:
            problem = str(exc).splitlines()[0]
            if problem != said:
                notify(f"{problem} Retrying.")
            said, is_over = problem, False
        if is_over:
            return
        world.sleep(_EVERY_S)


def _is_pushing(home: Home, run: RunRow) -> bool:
    """Return True if the machine still exists and has not reported its final push."""
    lines = home.ledger.lines(run.id)
    if run.state == ADOPTED or not billing_lines(lines):
        return False
    beat = read_reports(home.store_of(run), run.id, lines[-1]).heartbeat
    return beat is None or not beat.is_pushed


def boot_log(home: Home, run: RunRow) -> str:
    """Return the boot log, from the store or the provider. If the instance died early, there is no other log."""
    with contextlib.suppress(StoreError):
        return home.store_of(run).read(run_key(run.id, file_names.LOGS, "boot.log")).decode("utf-8", "replace")
    lines = [line for line in home.ledger.lines(run.id) if line.instance_id is not None]
    if not lines:
        return ""
    last = lines[-1]
    assert last.instance_id is not None, last
    kept = home.kept_log(run.id, last.mark)
    if home.world.exists(kept):
        return home.world.read(kept).decode("utf-8", "replace")
    return home.provider_of(last).log(last.instance_id)


def check_program(program: str, run_id: str) -> None:
    if program not in PROGRAMS:
        raise UsageError(
            what=f"Unknown log: {program!r}.",
            why=f"Known: {', '.join(PROGRAMS)}.",
            fix=f"For example: homing logs {run_id} trainer",
        )


def _tail(home: Home, run: RunRow, program: str) -> Tail:
    check_program(program, run.id)
    return Tail(home.store_of(run), run_key(run.id, file_names.LOGS, f"{program}.log"))
