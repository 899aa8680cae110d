"""Computes how a run's time is spent on one offer, how many steps a limit allows, and the smallest useful limit.

    create | arrive | start | steps, evaluations, saves | finish | push | home | the guards' reserve | limit
             boot,    load,                               last      last         end
             inputs   compile                             save      checkpoint   billing

Each figure is measured (by the newest run on the same device, stored with the speeds), computed from sizes, or assumed,
and `text` says which. Assumed times err on the long side, because a limit that launch accepts must be enough to push a
finished model to the store.

Preemptions add time (`odds_of`):

    per preemption   the steps since the last checkpoint, on average half the interval between two checkpoints
                     + another machine: boot, inputs, the checkpoint from the store, load and compile
    how often        as the provider reports; without a report, once in twenty hours is assumed for spot, combined with
                     what the ledger shows for that offer. The lost time is made up on machines that may also be
                     preempted

If the provider gives notice of a preemption, those steps are saved, but the estimate does not rely on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from homing.cloud.artifacts.hub_weights import hub_files, is_from_hub
from homing.cloud.home import Home
from homing.cloud.plan.speed import FORWARD_SHARE, Pace, Speed, Trip, recall
from homing.cloud.providers.base import Offer
from homing.config.estimate.memory import training_memory
from homing.units import format_bytes, format_duration
from homing.wire.guard_timing import END, LAND, reserve_s
from homing.wire.run_json import Phase, Run

__all__ = [
    "Odds",
    "Timing",
    "checkpoint_bytes",
    "odds_of",
    "pushing",
    "timing_of",
]

# These times are assumed until they have been measured in a run on the same device.
_START_S = 20.0  # time that the trainer needs to load torch and the data
_COMPILE_S = 100.0  # additional time on a GPU, to compile the model
_HOME_S = 20.0  # time to verify the push, report the end, and make the call that ends billing
_PUSH_BYTES_PER_S = {"file": 100e6}  # for a local disk; network stores use the next line (200 Mbit/s)
_NETWORK_BYTES_PER_S = 25e6
_DISK_BYTES_PER_S = 50e6  # speed of a save with fsync and verification
_BYTES_PER_TOKEN = 4  # upper bound: a shard stores each token in at most this many bytes
_BYTES_PER_WEIGHT = 4  # upper bound: a weight is stored in at most this many bytes

_FINISH_DOUBT, _FINISH_SPARE_S = 1.25, 5.0  # the trainer's reserve for its final evaluation, save and sample
_MEASURED_DOUBT, _DOUBT = 1.5, 2.0  # safety factors for measured and for unmeasured speeds and times
_LEAST_STEPS = 20  # enough steps to measure the run's speed and to decay the learning rate
# The agent must start to end billing at least this long before the limit, so that it acts before the next guard.
_END_S = 3.0
ASSUMED_HOURS = 20.0  # average time until a spot machine is preempted, assumed until more is known
_TAKEN = "preempted"  # if an instance was preempted, its note in the ledger begins with this


@dataclass(frozen=True)
class Timing:
    arrive_s: float
    start_s: float
    tokens_per_s: float  # speed of the first phase
    save_s: float
    push_s: float  # time to push a checkpoint to the store
    home_s: float
    doubt: float  # safety factor: the run may take this many times as long as planned
    text: str
    # Maps the kind of a phase to its speed. A phase that is missing here trains at tokens_per_s.
    paces: dict[str, Pace] = field(default_factory=dict)
    # Safety factor that reserves apply to home_s; 1 if home_s is assumed, because assumed times are already generous.
    home_doubt: float = 1.0

    @property
    def home_reserve_s(self) -> float:
        return self.home_doubt * self.home_s

    def whole_s(self, run: Run) -> float:
        """Return the planned seconds from the create call until the instance is gone."""
        work = sum(self._steps_s(phase, phase.num_steps) for phase in run.phases)
        return self.arrive_s + self.start_s + work + self._finish_s(run) + _way_home_s(self.home_s, self.push_s)

    def parts(self, run: Run) -> list[tuple[str, float]]:
        """Return the planned seconds of each part of the run: boot and startup, each phase, final push and shutdown."""
        phases = [(p.kind, self._steps_s(p, p.num_steps) + self._finish_phase_s(p)) for p in run.phases]
        way_home = ("home", _way_home_s(self.home_s, self.push_s))
        return [("boot and start", self.arrive_s + self.start_s), *phases, way_home]

    def least_s(self, run: Run) -> float:
        """Return the shortest time limit that still yields a finished model, after warm-up, a few steps and decay."""
        work = sum(self._steps_s(phase, _least_steps(phase)) for phase in run.phases) + self.start_s
        return self._with_reserve(self.doubt * (self.arrive_s + work) + self._finish_s(run))

    def enough_s(self, run: Run) -> float:
        """Return a time limit that is enough for the whole run even in the pessimistic case."""
        return self._with_reserve(self.doubt * self.whole_s(run))

    def steps_in(self, run: Run, allowed_s: float) -> tuple[int, float]:
        """Return how many of the planned steps fit into `allowed_s`, and when the last of them ends."""
        land_s = allowed_s - self._kept_s(allowed_s) - self._finish_s(run)
        work_s = sum(self._steps_s(phase, phase.num_steps) for phase in run.phases)
        planned = sum(phase.num_steps for phase in run.phases)
        part = max(0.0, min(1.0, (land_s - self.arrive_s - self.start_s) / max(work_s, 1e-9)))
        return int(planned * part), self.arrive_s + self.start_s + part * work_s

    def _steps_s(self, phase: Phase, num_steps: int) -> float:
        num_evals = num_steps // phase.eval_every if phase.eval_every else 0
        num_saves = num_steps // phase.save_every if phase.save_every else 0
        trained = num_steps * self.step_s(phase)
        return trained + num_evals * self._eval_s(phase) + num_saves * self.save_s

    def step_s(self, phase: Phase) -> float:
        return phase.batch_tokens / self._pace(phase).tokens_per_s

    def _eval_s(self, phase: Phase) -> float:
        return phase.eval_tokens / self._pace(phase).eval_tokens_per_s

    def _pace(self, phase: Phase) -> Pace:
        return self.paces.get(phase.kind) or Pace(self.tokens_per_s, self.tokens_per_s / FORWARD_SHARE)

    def _finish_s(self, run: Run) -> float:
        return sum(self._finish_phase_s(phase) for phase in run.phases)

    def _finish_phase_s(self, phase: Phase) -> float:
        """Return the seconds for the phase's last evaluation, save and sample. Sampling takes about one step's time."""
        seconds = self._eval_s(phase) + self.save_s + self.step_s(phase)
        return _FINISH_DOUBT * self.doubt * seconds + _FINISH_SPARE_S

    def _kept_s(self, allowed_s: float) -> float:
        """Return how much of a limit is reserved for the guards and for pushing the results and ending billing."""
        end_s = reserve_s(END, allowed_s) + _way_home_s(self.home_reserve_s, self.push_s)
        return max(reserve_s(LAND, allowed_s), end_s)

    def _with_reserve(self, work_s: float) -> float:
        """Return the limit that leaves this much time for work, given that the guards' reserve grows with the limit."""
        allowed = work_s
        for _ in range(100):
            kept_s = self._kept_s(allowed)
            if allowed - kept_s >= work_s and reserve_s(END, allowed) >= _END_S:
                return allowed
            allowed = max(allowed + 1.0, work_s + kept_s)
        raise AssertionError(f"no limit keeps {work_s} s for work")


def timing_of(run: Run, offer: Offer, speed: Speed, home: Home) -> Timing:
    scheme = run.store.split(":")[0]
    known = recall(run, offer, home)
    is_measured = speed.source == "measured" and known is not None
    push_bytes_per_s = _PUSH_BYTES_PER_S.get(scheme, _NETWORK_BYTES_PER_S)
    hub_bytes = sum(file.num_bytes for file in hub_files(run, home.world))
    pushed_bytes = _input_bytes(run, is_base_sent=not hub_bytes)
    size = checkpoint_bytes(run)
    trip = Trip(
        arrive_s=offer.boot_s + pushed_bytes / push_bytes_per_s + hub_bytes / _NETWORK_BYTES_PER_S,
        start_s=_START_S + (_COMPILE_S if offer.num_gpus and run.train.compile != "off" else 0.0),
        home_s=_HOME_S,
        push_bytes_per_s=push_bytes_per_s,
    )
    trip = Trip(**known) if known is not None else trip
    push_s = size / trip.push_bytes_per_s
    from_hub = f" with {format_bytes(hub_bytes)} from the Hub" if hub_bytes else ""
    text = (
        f"{format_duration(trip.arrive_s)} to boot{from_hub}, {format_duration(trip.start_s)} to the first step,"
        f" {format_bytes(size)} per checkpoint at {format_bytes(int(trip.push_bytes_per_s))}/s,"
        f" {format_duration(_way_home_s(trip.home_s, push_s))} to push the model and end billing;"
        f" {'measured' if known is not None else 'assumed'}"
    )
    return Timing(
        arrive_s=trip.arrive_s,
        start_s=trip.start_s,
        tokens_per_s=speed.tokens_per_s,
        save_s=size / _DISK_BYTES_PER_S,
        push_s=push_s,
        home_s=trip.home_s,
        doubt=_MEASURED_DOUBT if is_measured else _DOUBT,
        text=text,
        paces=dict(speed.phases),
        home_doubt=_MEASURED_DOUBT if known is not None else 1.0,
    )


def _way_home_s(home_s: float, push_s: float) -> float:
    """Return the seconds to push the results and end billing, with up to two checkpoints still to upload."""
    return home_s + 2 * push_s


def pushing(run: Run) -> str:
    """Describe how much is pushed to the store before renting, and how long that takes.

    The amount is an upper bound, because objects that are already in the store are not pushed again.
    """
    per_s = _PUSH_BYTES_PER_S.get(run.store.partition(":")[0], _NETWORK_BYTES_PER_S)
    num_bytes = _input_bytes(run, is_base_sent=not any(map(is_from_hub, run.inputs)))
    lasts = format_duration(max(1.0, num_bytes / per_s))
    return f"at most {format_bytes(num_bytes)} of tokens and weights, about {lasts} at {format_bytes(int(per_s))}/s"


def _input_bytes(run: Run, *, is_base_sent: bool) -> int:
    """Return the number of bytes sent to the store and then to the instance: tokens and initial weights."""
    own = [phase.data.num_train_tokens + phase.data.num_val_tokens for phase in run.phases if phase.data]
    num_tokens = run.data.num_train_tokens + run.data.num_val_tokens + sum(own)
    num_starts = (run.base is not None and is_base_sent) + sum(bool(p.init_from) for p in run.phases)
    return num_tokens * _BYTES_PER_TOKEN + num_starts * run.sizes.num_params * _BYTES_PER_WEIGHT


def checkpoint_bytes(run: Run) -> int:
    """Return the size of a checkpoint: trained weights and optimizer state of the largest phase. The rest is small."""
    return max(training_memory(run, phase).checkpoint for phase in run.phases)


def _least_steps(phase: Phase) -> int:
    return min(phase.num_steps, max(_LEAST_STEPS, 2 * phase.schedule.warmup_steps))


# --- the expected cost of preemptions ---


@dataclass(frozen=True)
class Odds:
    seconds: float  # from the create call until the instance is gone; infinite if the run would never finish
    num_interruptions: float  # expected number of preemptions
    lost_s: float  # seconds lost per preemption
    per_hour: float = 0.0
    text: str = ""  # says where per_hour comes from


def odds_of(run: Run, offer: Offer, timing: Timing, home: Home) -> Odds:
    whole_s = timing.whole_s(run)
    per_hour, text = _per_hour(offer, home)
    if per_hour <= 0:
        return Odds(whole_s, 0.0, 0.0)
    lost_s = _between_saves_s(run, timing) / 2 + timing.arrive_s + timing.push_s + timing.start_s
    share_lost = per_hour * lost_s / 3600
    if share_lost >= 1:
        return Odds(math.inf, math.inf, lost_s, per_hour, text)
    seconds = whole_s / (1 - share_lost)
    return Odds(seconds, per_hour * seconds / 3600, lost_s, per_hour, text)


def _per_hour(offer: Offer, home: Home) -> tuple[float, str]:
    if offer.interruptions_per_hour:
        return offer.interruptions_per_hour, "as reported by the provider"
    if not offer.is_spot:
        return 0.0, ""
    num_taken, hours = _seen(offer, home)
    text = f"assumed: once every {ASSUMED_HOURS:g} h"
    if hours:
        text += f", and observed: {num_taken} in {hours:.1f} h"
    # The assumption counts as one observed preemption in ASSUMED_HOURS, so that actual ones gradually outweigh
    # it.
    return (num_taken + 1) / (hours + ASSUMED_HOURS), text


def _seen(offer: Offer, home: Home) -> tuple[int, float]:
    """Return how often instances of this offer were preempted, and how many hours they ran, according to the ledger."""
    if not home.has_ledger:
        return 0, 0.0
    lines = [line for line in home.ledger.lines() if (line.provider, line.offer) == (offer.provider, offer.name)]
    ended = [line for line in lines if line.created_at is not None and line.destroyed_at is not None]
    hours = sum((line.destroyed_at or 0.0) - (line.created_at or 0.0) for line in ended) / 3600
    return sum(line.note.startswith(_TAKEN) for line in ended), max(0.0, hours)


def _between_saves_s(run: Run, timing: Timing) -> float:
    """Return the longest interval between checkpoints in any phase. A preemption in that phase loses the most work."""
    return max(_gap_s(phase, timing) for phase in run.phases)


def _gap_s(phase: Phase, timing: Timing) -> float:
    steps = min(phase.save_every or phase.num_steps, phase.num_steps)
    by_steps_s = steps * timing.step_s(phase)
    return min(by_steps_s, phase.save_every_s) if phase.save_every_s else by_steps_s
