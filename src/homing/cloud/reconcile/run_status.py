"""Reads the status of one run for `homing status`, `watch` and `runs`: state, instances, spend and last reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from homing.cloud.ask_providers import ask_store, cause
from homing.cloud.contact import heartbeats
from homing.cloud.contact.heartbeats import RunReports, phases_of, read_reports
from homing.cloud.contact.read_metrics import MetricLog
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.providers.base import can_end_itself
from homing.errors import HomingError, UsageError
from homing.store import Store, pace_of, run_key
from homing.units import format_count
from homing.wire import codec, file_names
from homing.wire.codec import WireError
from homing.wire.control_files import Heartbeat
from homing.wire.event_lines import Metric
from homing.wire.run_json import Run

__all__ = [
    "BY_REWARD",
    "STALE_S",
    "Status",
    "check_interval",
    "dump_line",
    "figures_of",
    "guards_on_instance",
    "has_checkpoint",
    "how_far",
    "look",
    "newest_beat",
    "newest_figures",
    "newest_in",
    "newest_pushed",
    "reached",
    "say_figures",
]

STALE_S = 60.0  # a heartbeat counts as stale if it is older than this plus twice the store's write interval
BY_REWARD = "rl"  # the kind of phase that shows its reward, because its loss is meaningless
_PASS = "val_pass_at_"


@dataclass(frozen=True)
class Status:
    run: RunRow
    lines: list[LedgerLine]
    reports: RunReports | None  # None if the store could not be read
    spend_usd: Decimal
    heartbeat_age_s: float | None
    problem: str = ""
    at: float = 0.0  # the time at which this status was read
    phases: tuple[str, ...] = ()  # the run's phases, in order; empty if its run.json is not on this computer
    steps: Mapping[str, int] = field(default_factory=dict)  # planned steps by phase
    time_limit_s: float = 0.0  # of each attempt, set by the user or by homing; 0: none, or unknown on this computer

    @property
    def limit_usd(self) -> Decimal | None:
        return None if self.run.spend_limit_usd is None else Decimal(self.run.spend_limit_usd)

    @property
    def most_usd(self) -> Decimal | None:
        """Return the most that a live run can cost: its spend limit, or less if its time limit is reached first.

        The time limit counts from the start of the current instance. A relaunch starts it again, and the spend limit
        then bounds the total.
        """
        if self.limit_usd is None or not self.run.is_live or not self.lines or self.lines[-1].destroyed_at is not None:
            return self.limit_usd
        *earlier, last = self.lines
        before = meter.total_spend(earlier, self.at)
        return meter.worst_case(Decimal(last.rate_usd_per_hour), self.limit_usd, self.time_limit_s, before)

    @property
    def is_billing(self) -> bool:
        return bool(meter.billing_lines(self.lines))

    @property
    def is_silent(self) -> bool:
        """Return True if the run is live in the ledger but its heartbeat is stale (see STALE_S)."""
        late_s = STALE_S + 2 * pace_of(self.run.store)
        return self.run.is_live and self.heartbeat_age_s is not None and self.heartbeat_age_s > late_s

    def to_dict(self) -> dict[str, Any]:
        heartbeat = self.reports.heartbeat if self.reports else None
        outcome = self.reports.outcome if self.reports else None
        return {
            "run": self.run.id,
            "name": self.run.name,
            "state": self.run.state,
            "reason": self.run.reason,
            "exit_code": self.run.exit_code,
            "created_at": self.run.created_at,
            "ended_at": self.run.ended_at,
            "store": self.run.store,
            "spend_usd": str(self.spend_usd),
            "is_at_most": any(line.is_at_most for line in self.lines),  # True if spend_usd includes an upper bound
            "spend_limit_usd": self.run.spend_limit_usd,
            "most_usd": None if self.most_usd is None else str(self.most_usd),  # less, if the time limit comes first
            "is_billing": self.is_billing,
            "fetched_step": self.run.fetched_step,
            "heartbeat": codec.dump(heartbeat) if heartbeat else None,
            "heartbeat_age_s": self.heartbeat_age_s,
            "outcome": codec.dump(outcome) if outcome else None,
            "instances": [dump_line(line) for line in self.lines],
            "problem": self.problem,
            "phases": list(self.phases),
        }


def check_interval(every_s: float, flag: str = "--every") -> float:
    """Return the interval if it is valid, otherwise raise UsageError. `flag` is the option that sets it."""
    if not 1 <= every_s <= 86400:
        raise UsageError(
            what=f"Invalid interval for {flag}: {every_s:g} s.",
            why="Use a value from 1 second to 1 day.",
            fix=f"For example: {flag} 30",
        )
    return every_s


def look(home: Home, run: RunRow, lines: list[LedgerLine] | None = None) -> Status:
    """Read the run's status from the ledger and the store. If the store cannot be read, `problem` says so.

    `lines` are the run's attempts, if the caller has just read them.
    """
    lines = home.ledger.lines(run.id) if lines is None else lines
    now = home.world.now()
    reports, problem = None, ""
    try:
        last, name = lines[-1] if lines else None, f"The store of {run.id}"
        reports = ask_store(run.store, lambda: read_reports(home.store_of(run), run.id, last), name, home.world)
    except (HomingError, WireError, OSError) as exc:
        if any(line.created_at is not None for line in lines):
            problem = f"Could not read the store: {cause(exc)}"
    beat = reports.heartbeat if reports else None
    age_s = heartbeats.age_s(home, run.id, beat) if beat else None
    record = _record(home, run)
    steps = {phase.kind: phase.num_steps for phase in record.phases} if record else {}
    time_limit_s = record.limits.time_s if record else 0.0
    spend = meter.total_spend(lines, now)
    return Status(run, lines, reports, spend, age_s, problem, now, tuple(steps), steps, time_limit_s)


def _record(home: Home, run: RunRow) -> Run | None:
    try:
        return codec.loads(Run, home.world.read(home.run_dir(run.id) / file_names.RUN))
    except (OSError, ValueError):
        return None


def guards_on_instance(home: Home, line: LedgerLine, beat: Heartbeat) -> str:
    """Return which of homing's processes guard the instance, and whether they can end its billing."""
    alive = "agent and dead-man" if beat.has_dead_man else "agent only"
    try:
        provider = home.provider_of(line)
    except (HomingError, OSError):
        return f"{alive}; {line.provider} is not set up here, so it is unknown whether they can end billing"
    if can_end_itself(provider):
        return alive
    own = f" {provider.name}'s own limit and a local guard can." if provider.guard else " Only a local guard can."
    return f"{alive} save and push within the limit, but cannot end billing.{own}"


def newest_beat(status: Status, metric: Metric | None) -> Heartbeat | None:
    """Return the heartbeat, updated with the newest metric if the metric is newer than the heartbeat.

    A metric can be newer by up to one heartbeat interval.
    """
    beat = status.reports.heartbeat if status.reports else None
    if beat is None or metric is None:
        return beat
    # Steps in different phases cannot be compared, but times can.
    is_older = metric.step < beat.step if beat.phase in ("", metric.phase) else metric.t < beat.t
    if is_older:
        return beat
    return replace(
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


def newest_pushed(home: Home, run: RunRow) -> str:
    """Return the newest complete checkpoint in the store, formatted like `pretrain step 1,200`; "" if none.

    Raises if the store cannot be read.
    """
    store = home.store_of(run)
    return newest_in(store, run.id, lambda: phases_of(store, run))


def has_checkpoint(home: Home, run: RunRow) -> bool:
    """Return False if no checkpoint of the run is in its store. If the store does not respond, assume that one is."""
    try:
        return newest_pushed(home, run) != ""
    except (HomingError, OSError):
        return True


def newest_in(store: Store, run_id: str, phases: Callable[[], list[str]]) -> str:
    prefix = run_key(run_id, file_names.CHECKPOINTS) + "/"
    parts = [entry.key[len(prefix) :].split("/") for entry in store.list(prefix)]
    # The manifest is pushed last, so if it is in the store, the checkpoint is complete.
    whole = [
        (part[0], file_names.parse_step(part[1])) for part in parts if len(part) == 3 and part[2] == file_names.MANIFEST
    ]
    order = {phase: number for number, phase in enumerate(phases() if whole else [])}
    found = [(order.get(phase, -1), step, phase) for phase, step in whole if step is not None]
    return f"{max(found)[2]} step {max(found)[1]:,}" if found else ""


def dump_line(line: LedgerLine) -> dict[str, Any]:
    return {**codec.dump(line), "is_at_most": line.is_at_most}


def figures_of(home: Home, run: RunRow, beat: Heartbeat | None) -> dict[str, float]:
    """Return the metrics that only the current phase has, such as the reward in rl.

    Heartbeats do not contain them. Raises if the store cannot be read.
    """
    if beat is None or beat.phase != BY_REWARD:
        return {}
    metrics = MetricLog(home.store_of(run), run_key(run.id, file_names.METRICS), is_curve=False).fresh()
    return newest_figures(metric for metric in metrics if metric.phase == beat.phase)


def newest_figures(metrics: Iterable[Metric]) -> dict[str, float]:
    """Merge the metrics in order. The values from an evaluation are kept until the next one."""
    figures: dict[str, float] = {}
    for metric in metrics:
        figures |= metric.more
    return figures


def say_figures(figures: Mapping[str, float]) -> list[str]:
    """Format the figures, such as `reward 0.250` or (for an evaluation) `held-out pass@1 0.100, pass@4 0.300`."""
    said = [f"reward {figures['reward']:.3f}"] if "reward" in figures else []
    passed = sorted((int(name[len(_PASS) :]), share) for name, share in figures.items() if name.startswith(_PASS))
    return said + ([f"held-out {', '.join(f'pass@{k} {share:.3f}' for k, share in passed)}"] if passed else [])


def how_far(seen: Heartbeat | Metric, phases: Sequence[str], figures: Mapping[str, float] | None = None) -> list[str]:
    """Return the parts of a status line that the trainer reports, without those that are still unknown.

    Status lines of rented runs and of local runs both use them.
    """
    parts = []
    if len(phases) > 1 and seen.phase in phases:
        parts.append(f"{seen.phase} {phases.index(seen.phase) + 1}/{len(phases)}")
    if seen.num_steps:
        landing = "" if seen.end_step is None else f", landing at {seen.end_step:,}"
        at = f"step {seen.step:,}/{seen.num_steps:,}" if seen.step else f"before the first of {seen.num_steps:,} steps"
        parts.append(at + landing)
    if seen.phase == BY_REWARD:
        parts += say_figures(figures or {})
    elif seen.loss is not None:
        parts.append(f"loss {seen.loss:.3f}")
    if seen.tokens_per_s is not None:
        parts.append(f"{format_count(seen.tokens_per_s)} tok/s")
    if seen.mfu is not None:
        parts.append(f"mfu {seen.mfu:.0%}")
    return parts


def reached(status: Status, beat: Heartbeat) -> Heartbeat:
    """Return the heartbeat with the step and phase from the trainer's outcome, if that is further along.

    A heartbeat takes its step and phase only from metrics lines, which are written only every few steps.
    """
    outcome = status.reports.outcome if status.reports else None
    if outcome is None:
        return beat
    if outcome.phase == beat.phase:
        return replace(beat, step=max(beat.step, outcome.step))
    order = list(status.steps)
    if outcome.phase not in order or (beat.phase in order and order.index(beat.phase) > order.index(outcome.phase)):
        return beat
    blank = replace(beat, loss=None, tokens_per_s=None, mfu=None, end_step=None)
    return replace(blank, phase=outcome.phase, step=outcome.step, num_steps=status.steps[outcome.phase])
