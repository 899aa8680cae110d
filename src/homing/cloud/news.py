"""What a run directory tells since the last look, wherever it lies: events, validations and samples, as they happened.

    events.jsonl, metrics.jsonl, samples/ --News.reports--> Report(event | sample | alert)

Of a rented run it lies in the store, of one that is trained on this computer in the home. Knows no clock and no
provider; of money only what the ledger's lines say.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from homing.cloud import meter
from homing.cloud.ledger import LedgerLine
from homing.cloud.metric_log import MetricLog
from homing.cloud.signs import Tail
from homing.cloud.status import BY_REWARD, newest_figures, say_figures
from homing.store import Store, run_key
from homing.wire import codec, names
from homing.wire.event import Event, Metric

__all__ = ["News", "Report"]

_ALERTS = ("alert", "limit_warning", "preempted", "end_billing_failed")  # events that are more than news
_EVALUATING = "evaluating"  # how far it is, again and again
_FIRST_EVENTS = 20  # of the past, when a watch begins
_FIRST_SAMPLES = 5
_FIRST_VALIDATIONS = 5


@dataclass(frozen=True)
class Report:
    kind: str  # head | line | event | sample | alert | problem | end
    text: str
    data: dict[str, Any] = field(default_factory=dict)


class News:
    def __init__(self, store: Store, run_id: str, *, is_curve: bool = False) -> None:
        """`is_curve`: `fresh` gets what a curve of the whole run needs, not only what tells how it stands."""
        self._store, self._run_id = store, run_id
        self._events = Tail(store, run_key(run_id, names.EVENTS))
        self._metrics = MetricLog(store, run_key(run_id, names.METRICS), is_curve=is_curve)
        self.fresh: list[Metric] = []  # the metrics of the last look
        self._samples: set[str] = set()
        self._told: set[tuple[float, str, str, str]] = set()  # events, by all that tells one from another
        self._times: dict[str, float] = {}  # of samples, by their path
        self._is_first = True
        self.metric: Metric | None = None  # the newest that has a loss
        self.first: dict[str, Metric] = {}  # by phase, the first that has a loss which tells something
        self.measured: dict[str, Metric] = {}  # by phase, the last evaluation
        self.figures: dict[str, dict[str, float]] = {}  # by phase, what it alone has

    def copy(self) -> News:
        """To look with: a look that fails halfway, or is late, has then told and forgotten nothing."""
        made = copy.copy(self)
        made._events, made._metrics = copy.copy(self._events), copy.copy(self._metrics)
        made._samples, made._told, made._times = set(self._samples), set(self._told), dict(self._times)
        made.first, made.measured = dict(self.first), dict(self.measured)
        made.figures = {phase: dict(own) for phase, own in self.figures.items()}
        return made

    def reports(self, lines: Sequence[LedgerLine] = (), now: float = 0.0) -> Iterator[Report]:
        """Since the last look, in the order in which they happened. `lines`: the attempts of a rented run, `now`: until
        when the last of them has cost."""
        # A watch that begins with a run that went on tells each attempt that is over in one line.
        since = lines[-1].intent_at if self._is_first and len(lines) > 1 else -math.inf
        news = [*self._new_metrics(since), *self._new_events(lines, since, now)]
        yield from (report for _, report in sorted([*news, *self._new_samples(since)], key=lambda pair: pair[0]))

    def learned(self) -> str:
        """`loss 6.419 at step 10, 4.520 at step 150, held-out 4.608`, of the newest phase; "" where it says nothing."""
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
        if self._is_first:  # of the past only the last, and nothing of its transfers
            events = [event for event in events if event.source != "sync"][-_FIRST_EVENTS:]
        self._is_first = False
        for place, event in enumerate(events):
            mark = _mark(event)
            if mark in self._told:  # the next attempt begins the file anew with what it found of it
                continue
            self._told.add(mark)
            if event.kind == "sampled":
                self._times[str(event.data.get("path"))] = event.t
                continue  # the sample itself is shown
            if event.kind == "evaluated":
                continue  # what came of it is shown
            if event.kind == _EVALUATING and self._is_passed(event, events[place + 1 :]):
                continue
            where = f"step {event.step:,} | " if event.step is not None else ""
            kind = "alert" if event.kind in _ALERTS else "event"
            said = f"{_late(event, lines)}{where}{event.source}: {event.text}{_dollars(event, lines)}"
            yield event.t, Report(kind, said, codec.dump(event))

    def _past(self, events: list[Event], lines: Sequence[LedgerLine], now: float) -> Iterator[tuple[float, Report]]:
        since = -math.inf
        for line, following in itertools.pairwise([line for line in lines if not line.is_twin]):
            own = [event for event in events if since <= event.t < following.intent_at]
            since = following.intent_at
            self._told |= {_mark(event) for event in own}
            self._times |= {str(event.data.get("path")): event.t for event in own if event.kind == "sampled"}
            steps = [event.step for event in own if event.step is not None]
            spend = meter.line_spend(line, now)
            reached = f"up to step {steps[-1]:,}" if steps else "before its first step"
            data = {"attempt": line.attempt, "step": steps[-1] if steps else 0, "spend_usd": str(spend)}
            said = f"attempt {line.attempt} is over: {reached}, {meter.at_most(line)}{meter.show_usd(spend)}"
            yield line.intent_at, Report("event", said, data)

    def _is_passed(self, event: Event, later: Sequence[Event]) -> bool:
        """Whether the same evaluation has come further since, or to its end: only the newest count is news."""
        last = self.measured.get(event.phase)
        is_over = last is not None and last.step >= (event.step or 0)
        return is_over or any(each.kind == _EVALUATING for each in later)

    def _new_samples(self, since: float) -> Iterator[tuple[float, Report]]:
        prefix = run_key(self._run_id, names.SAMPLES) + "/"
        entries = self._store.list(prefix)
        if not self._samples:  # of the past only the last ones; a long run has hundreds
            self._samples.update(entry.key for entry in entries[:-_FIRST_SAMPLES])
        if since > -math.inf:
            self._samples.update(entry.key for entry in entries if self._sampled_at(entry.key[len(prefix) :]) < since)
        for entry in entries:
            if entry.key not in self._samples:
                text = self._store.read(entry.key).decode("utf-8", "replace")
                self._samples.add(entry.key)
                name = entry.key[len(prefix) :]
                yield self._sampled_at(name), Report("sample", text.strip(), {"name": name, "text": text})

    def _sampled_at(self, name: str) -> float:
        return self._times.get(f"{names.SAMPLES}/{name}", math.inf)

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
        told = [metric for metric in measured if metric.t >= since]
        for metric in told[-_FIRST_VALIDATIONS:] if self._is_first else told:
            yield metric.t, Report("event", _validation(metric), codec.dump(metric))


def _mark(event: Event) -> tuple[float, str, str, str]:
    return (event.t, event.source, event.kind, event.text)


def _late(event: Event, lines: Sequence[LedgerLine]) -> str:
    """What an attempt that is over has said may come in when the next one is under way: it is not of this one."""
    if len(lines) < 2 or event.source == "home" or event.t >= lines[-1].intent_at:
        return ""
    of = [line.attempt for line in lines if line.intent_at <= event.t]
    return f"of attempt {of[-1] if of else lines[0].attempt}: "


def _dollars(event: Event, lines: Sequence[LedgerLine]) -> str:
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
