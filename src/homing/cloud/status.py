"""One run, now: its state, its instances, its dollars, and what it last said. What status, watch and runs print."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from homing.cloud import heard, meter
from homing.cloud.ahead import Ahead, Planned, ahead
from homing.cloud.ask import ask_store
from homing.cloud.fetch import phases_of
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine, RunRow
from homing.cloud.metric_log import MetricLog
from homing.cloud.signs import Signs, read_signs
from homing.errors import HomingError, UsageError
from homing.store import Store, pace_of, run_key
from homing.units import format_count, format_duration
from homing.wire import codec, names
from homing.wire.codec import WireError
from homing.wire.control import Heartbeat
from homing.wire.event import Metric
from homing.wire.run import Run

__all__ = [
    "BY_REWARD",
    "STALE_S",
    "Status",
    "billing_lines",
    "cause",
    "check_interval",
    "dump_line",
    "figures_of",
    "how_far",
    "look",
    "newest_beat",
    "newest_figures",
    "newest_in",
    "newest_pushed",
    "progress_line",
    "reached",
    "say_figures",
]

STALE_S = 60.0  # a heartbeat this old is told as old, in a store that may be written to at any time
BY_REWARD = "rl"  # the phase whose loss says nothing
_PASS = "val_pass_at_"


@dataclass(frozen=True)
class Status:
    run: RunRow
    lines: list[LedgerLine]
    signs: Signs | None  # None: the store could not be read
    spend_usd: Decimal
    heartbeat_age_s: float | None
    problem: str = ""
    at: float = 0.0  # when this was looked at
    phases: tuple[str, ...] = ()  # of the run, in their order; none where its record is not at home
    steps: Mapping[str, int] = field(default_factory=dict)  # by phase, as planned

    @property
    def limit_usd(self) -> Decimal | None:
        return None if self.run.spend_limit_usd is None else Decimal(self.run.spend_limit_usd)

    @property
    def is_billing(self) -> bool:
        return bool(billing_lines(self.lines))

    @property
    def is_silent(self) -> bool:
        """Alive by the ledger, and longer without a word than its store's pace explains."""
        late_s = STALE_S + 2 * pace_of(self.run.store)
        return self.run.is_live and self.heartbeat_age_s is not None and self.heartbeat_age_s > late_s

    def to_dict(self) -> dict[str, Any]:
        heartbeat = self.signs.heartbeat if self.signs else None
        outcome = self.signs.outcome if self.signs else None
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
            "is_at_most": any(line.is_at_most for line in self.lines),  # spend_usd, by a receipt that is an upper bound
            "spend_limit_usd": self.run.spend_limit_usd,
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
    """`flag`: the option of the verb that it was given by."""
    if not 1 <= every_s <= 86400:
        raise UsageError(
            what=f"{flag}: invalid interval: {every_s:g} s.",
            why="It may be 1 second to 1 day.",
            fix=f"{flag} 30",
        )
    return every_s


def look(home: Home, run: RunRow, lines: list[LedgerLine] | None = None) -> Status:
    """Reads the ledger and the store. Blindness is a problem in the answer, not an empty answer. `lines`: its attempts,
    where the caller has just read them."""
    lines = home.ledger.lines(run.id) if lines is None else lines
    now = home.world.now()
    signs, problem = None, ""
    try:
        last, name = lines[-1] if lines else None, f"The store of {run.id}"
        signs = ask_store(run.store, lambda: read_signs(home.store_of(run), run.id, last), name, home.world)
    except (HomingError, WireError, OSError) as exc:
        if any(line.created_at is not None for line in lines):
            problem = f"The store could not be read: {cause(exc)}"
    beat = signs.heartbeat if signs else None
    age_s = heard.age_s(home, run.id, beat) if beat else None
    steps = _steps(home, run)
    return Status(run, lines, signs, meter.total_spend(lines, now), age_s, problem, now, tuple(steps), steps)


def cause(exc: Exception) -> str:
    """What happened and why, in one line: that a store cannot be read is of no use without the reason."""
    told = [exc.what, exc.why] if isinstance(exc, HomingError) else [str(exc) or type(exc).__name__]
    return " ".join(text.splitlines()[0] for text in told if text)


def _steps(home: Home, run: RunRow) -> dict[str, int]:
    try:
        record = codec.loads(Run, home.world.read(home.run_dir(run.id) / names.RUN))
    except (OSError, ValueError):
        return {}
    return {phase.kind: phase.num_steps for phase in record.phases}


def billing_lines(lines: list[LedgerLine]) -> list[LedgerLine]:
    """Those that cost money or may: a create call was begun and no provider has shown the end."""
    return [line for line in lines if line.destroyed_at is None and line.created_at is not None]


def newest_beat(status: Status, metric: Metric | None) -> Heartbeat | None:
    """The heartbeat with the newest metric laid over it, which is newer by up to one beat."""
    beat = status.signs.heartbeat if status.signs else None
    if beat is None or metric is None:
        return beat
    # Steps of two phases say nothing about which came first; their times do.
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
    """The newest whole checkpoint in the store, `pretrain step 1,200`; "" where there is none. Raises when blind."""
    store = home.store_of(run)
    return newest_in(store, run.id, lambda: phases_of(store, run))


def newest_in(store: Store, run_id: str, phases: Callable[[], list[str]]) -> str:
    prefix = run_key(run_id, names.CHECKPOINTS) + "/"
    parts = [entry.key[len(prefix) :].split("/") for entry in store.list(prefix)]
    # The manifest is pushed last: with it in the store the checkpoint is whole.
    whole = [(part[0], names.parse_step(part[1])) for part in parts if len(part) == 3 and part[2] == names.MANIFEST]
    order = {phase: number for number, phase in enumerate(phases() if whole else [])}
    found = [(order.get(phase, -1), step, phase) for phase, step in whole if step is not None]
    return f"{max(found)[2]} step {max(found)[1]:,}" if found else ""


def dump_line(line: LedgerLine) -> dict[str, Any]:
    return {**codec.dump(line), "is_at_most": line.is_at_most}


def figures_of(home: Home, run: RunRow, beat: Heartbeat | None) -> dict[str, float]:
    """What the phase alone has, such as the reward of rl, which no heartbeat carries. Raises when blind."""
    if beat is None or beat.phase != BY_REWARD:
        return {}
    metrics = MetricLog(home.store_of(run), run_key(run.id, names.METRICS), is_curve=False).fresh()
    return newest_figures(metric for metric in metrics if metric.phase == beat.phase)


def newest_figures(metrics: Iterable[Metric]) -> dict[str, float]:
    """Of metrics in their order; those of the last evaluation stay until the next."""
    figures: dict[str, float] = {}
    for metric in metrics:
        figures |= metric.more
    return figures


def say_figures(figures: Mapping[str, float]) -> list[str]:
    """`reward 0.250`, and of the last evaluation `held-out pass@1 0.100, pass@4 0.300`; each only where it is known."""
    said = [f"reward {figures['reward']:.3f}"] if "reward" in figures else []
    passed = sorted((int(name[len(_PASS) :]), share) for name, share in figures.items() if name.startswith(_PASS))
    return said + ([f"held-out {', '.join(f'pass@{k} {share:.3f}' for k, share in passed)}"] if passed else [])


def progress_line(
    status: Status,
    beat: Heartbeat | None,
    figures: Mapping[str, float] | None = None,
    plan: Planned | None = None,
) -> str:
    """Fixed order, money always on it; of several phases the one that it is at, and which of how many that is. In rl,
    whose loss says nothing, the reward stands in its place. With the plan it tells the end of all phases; while it does
    not train, what it does instead."""
    beat = None if beat is None else reached(status, beat)
    parts = [] if beat is None else how_far(beat, status.phases, figures)
    if beat is not None and "gpu" in beat.use and status.run.is_live:
        parts.append(f"card {beat.use['gpu']:.0%}, its memory {beat.use.get('gpu_memory', 0.0):.0%}")
    found = ahead(status, beat, plan)
    spent = meter.at_most(*status.lines) + meter.show_spend(status.spend_usd, status.limit_usd)
    parts.append(spent + _at_the_end(status, found))
    if found is not None:
        parts.append(f"eta {format_duration(found.eta_s)}" + ("" if found.is_whole else " of this phase"))
    elif beat is not None and beat.state != "training" and status.run.is_live:
        parts.append(beat.state)
    elif beat is not None and not beat.num_steps and status.run.is_live:
        parts.append("training, before its first line of numbers")
    return " | ".join(parts)


def how_far(told: Heartbeat | Metric, phases: Sequence[str], figures: Mapping[str, float] | None = None) -> list[str]:
    """The part of the line that the trainer knows, rented or not; each only where it is known."""
    parts = []
    if len(phases) > 1 and told.phase in phases:
        parts.append(f"{told.phase} {phases.index(told.phase) + 1}/{len(phases)}")
    if told.num_steps:
        landing = "" if told.end_step is None else f", landing at {told.end_step:,}"
        at = f"step {told.step:,}/{told.num_steps:,}" if told.step else f"before the first of {told.num_steps:,} steps"
        parts.append(at + landing)
    if told.phase == BY_REWARD:
        parts += say_figures(figures or {})
    elif told.loss is not None:
        parts.append(f"loss {told.loss:.3f}")
    if told.tokens_per_s is not None:
        parts.append(f"{format_count(told.tokens_per_s)} tok/s")
    if told.mfu is not None:
        parts.append(f"mfu {told.mfu:.0%}")
    return parts


def reached(status: Status, beat: Heartbeat) -> Heartbeat:
    """With what a trainer that has ended says of where: a heartbeat knows of a step, and of a new phase, from lines of
    numbers alone, which come every few steps, and the first may never have come."""
    outcome = status.signs.outcome if status.signs else None
    if outcome is None:
        return beat
    if outcome.phase == beat.phase:
        return replace(beat, step=max(beat.step, outcome.step))
    order = list(status.steps)
    if outcome.phase not in order or (beat.phase in order and order.index(beat.phase) > order.index(outcome.phase)):
        return beat
    blank = replace(beat, loss=None, tokens_per_s=None, mfu=None, end_step=None)
    return replace(blank, phase=outcome.phase, step=outcome.step, num_steps=status.steps[outcome.phase])


def _at_the_end(status: Status, found: Ahead | None) -> str:
    """The trainer lands before the limit as soon as it sees that it must; until then the plan may be above it."""
    if found is None or found.end_usd is None:
        return ""
    is_over = status.limit_usd is not None and found.end_usd > status.limit_usd
    return f", about {meter.show_usd(found.end_usd)} " + ("to finish, which is more" if is_over else "at the end")
