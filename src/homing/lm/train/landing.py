"""Decides on landings: if time or money will run out, training ends earlier, but still completes the decay.

    measured durations -> Pace -> steps that still fit before the deadline -> Pilot -> Landing(begin, end) or none

    |-- warmup ---|------ peak rate ------|\\ decay \\|  evaluate, save, sample  |
    0                                   begin      end                       deadline

The deadline is known from the first step, so the decay can begin as late as possible and still keep its planned share
of the run. Before the decay begins, the end moves in either direction as the measured speed changes. Afterwards it
moves only to an earlier step, because steps at a lowered learning rate cannot be undone. Only a cosine decay can also
be extended. This module only decides; the loop acts on its decisions.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from dataclasses import dataclass

import torch

from homing.lm.train.optim.schedule import Landing, lr_scale
from homing.units import format_duration
from homing.wire.run_json import Phase

__all__ = ["LandingChange", "Pace", "Pilot", "Rates", "describe_change"]

_WINDOW = 50  # number of recent steps from which the current speed is computed
_RECENT = 15  # number of recent steps for the estimate shown to users; small, so that it follows changes in speed
_ENOUGH = 2  # number of measured steps needed for any decision; the first step includes compiling and never counts
_SURE = 5  # number of measured steps needed before an early end is announced to users
_DOUBT = 1.25  # safety factor for the duration of the work after the last step, because the last save may be slow
# Seconds added to the duration of the work after the last step, to allow for a slow disk and for deleting old
# checkpoints. They must exceed the reserve of `ControlRequests.stop`, which would otherwise cut the landing short.
_SPARE_S = 3.0
# Safety factor for the step time, used until the decay begins. If steps turn out slower than measured, the decay, once
# begun, would have to be shortened and would become steeper. This factor makes that less likely.
_STEP_DOUBT = 1.03
# Evaluation time per token as a share of training time per token, as assumed for deadlines: evaluation has no backward
# pass, but its batches are smaller.
_FORWARD_SHARE = 0.5
# Evaluation time per token as a share of training time per token, as assumed for the estimate shown to users:
# evaluation has no backward pass, which takes twice as long as the forward pass.
_LIKELY_SHARE = 1 / 3
_REMEMBERED = 4  # number of recent durations stored for each kind of work: evaluation, save, sampling
_DISK_BYTES_PER_S = 50e6  # assumed until a save is measured: the speed of a slow disk, with fsync and reading back
_RAISED_S = 20.0  # if a deadline moves by more than this, the user changed it; new estimates move it by less


@dataclass
class Rates:
    """This machine's disk, copy and sampling speeds, passed on from phase to phase.

    Each save and each sampling updates these rates; the defaults are typical of rented machines. They are used to
    estimate likely durations; for deadlines, `Pace` uses more pessimistic values.
    """

    disk_bytes_per_s: float = 400e6  # rate of writing, syncing and hashing a checkpoint
    copy_bytes_per_s: float = 4e9  # rate of copying a checkpoint to host memory; training waits only for this copy
    # time for one sampled token to pass through one layer, without CUDA graphs (benchmarks/results/rl.json)
    layer_s: float = 1.5e-3

    @classmethod
    def usual_on(cls, device: torch.device) -> Rates:
        """Return typical rates for a device. On CUDA, sampling replays CUDA graphs (benchmarks/results/decode.json)."""
        return cls(layer_s=2e-4) if device.type == "cuda" else cls()


class _Seen:
    """The recent durations of one kind of work: evaluation, save or sampling."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def likely_s(self, guess: float) -> float:
        """Return the likely next duration. `guess` is an estimate that was made before anything was measured.

        The first evaluation, save or sampling also allocates buffers and loads kernels and may take ten times as long.
        Therefore a single measurement is averaged geometrically with the guess. Later the median is used instead.
        """
        if len(self._seconds) == 1 and guess > 0:
            return math.sqrt(guess * self._seconds[0])
        return statistics.median([guess, *self._seconds])


class Pace:
    """Measures and estimates how long each part of the work takes on this machine.

    Parts that have not been measured yet are estimated: pessimistically for deadlines, realistically for users
    (`to_go_s`).
    `sampled_layers` is the number of layer evaluations in one sampling pass (tokens x layers).
    """

    def __init__(
        self,
        phase: Phase,
        *,
        checkpoint_bytes: int,
        can_evaluate: bool = True,
        sampled_layers: int = 0,
        rates: Rates | None = None,
    ) -> None:
        self._phase, self._can_evaluate = phase, can_evaluate
        self._checkpoint_bytes, self._sampled_layers = checkpoint_bytes, sampled_layers
        self._rates = rates or Rates()
        # Estimates use the rates from the start of the phase; measurements change only `_rates`.
        self._rates_at_start = dataclasses.replace(self._rates)
        # In rl, the first of every `updates_per_rollout` steps generates the samples for all of them, so the
        # speed is measured over whole groups of these steps.
        self._round = phase.rl.updates_per_rollout if phase.rl else 1
        self._steps: deque[float] = deque(maxlen=max(_WINDOW, 3 * self._round))
        self._known_step_s = self._step_s = self._recent_s = 0.0
        self._eval_s: float | None = None
        self._save_s: float | None = None
        self._sample_s: float | None = None
        self._evals, self._saves, self._holds, self._samples = _Seen(), _Seen(), _Seen(), _Seen()
        self._guessed_save_s = checkpoint_bytes / _DISK_BYTES_PER_S

    def know(self, step_s: float) -> None:
        """Use a checkpoint's step duration until the first step on this machine has been measured."""
        self._known_step_s = step_s

    def step(self, seconds: float) -> None:
        self._steps.append(seconds)
        ordered = sorted(self._steps)
        rest = ordered[: max(1, len(ordered) - 1)]
        self._step_s = max(ordered[len(ordered) // 2], sum(rest) / len(rest))
        self._recent_s = self._median_of_recent()

    def _median_of_recent(self) -> float:
        recent, size = list(self._steps)[-max(_RECENT, 3 * self._round) :], self._round
        rounds = [statistics.fmean(recent[end - size : end]) for end in range(len(recent), size - 1, -size)]
        return statistics.median(rounds) if rounds else statistics.fmean(recent)

    def evaluated(self, seconds: float) -> None:
        self._eval_s = seconds
        self._evals.add(seconds)

    def saved(self, seconds: float) -> None:
        self._save_s = seconds
        self._saves.add(seconds)
        if seconds > 0 and self._checkpoint_bytes:
            self._rates.disk_bytes_per_s = self._checkpoint_bytes / seconds

    def held(self, seconds: float) -> None:
        """Record how long training waited for a save that is written in the background."""
        self._holds.add(seconds)
        if seconds > 0 and self._checkpoint_bytes:
            self._rates.copy_bytes_per_s = self._checkpoint_bytes / seconds

    def sampled(self, seconds: float) -> None:
        self._sample_s = seconds
        self._samples.add(seconds)
        if seconds > 0 and self._sampled_layers:
            self._rates.layer_s = seconds / self._sampled_layers

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    @property
    def is_measured(self) -> bool:
        """Whether a save has been measured and, if the phase has evaluations, an evaluation as well."""
        return self._save_s is not None and (self._eval_s is not None or not self._can_evaluate)

    @property
    def last_step_s(self) -> float:
        return self._steps[-1] if self._steps else 0.0

    @property
    def step_s(self) -> float:
        """The expected mean duration of the next steps, in seconds; 0 if unknown.

        The mean is used because many durations are added up. It excludes the slowest step, because a single pause of
        the machine would distort it.
        """
        return self._step_s if self._steps else self._known_step_s

    @property
    def eval_s(self) -> float:
        return self._guessed_eval_s(self.step_s, _FORWARD_SHARE) if self._eval_s is None else self._eval_s

    def _guessed_eval_s(self, step_s: float, share: float) -> float:
        steps = self._phase.eval_tokens / max(1, self._phase.batch_tokens)
        return steps * step_s * share if self._can_evaluate else 0.0

    @property
    def save_s(self) -> float:
        return self._guessed_save_s if self._save_s is None else self._save_s

    @property
    def sample_s(self) -> float:
        return max(self.step_s, self._guessed_sample_s) if self._sample_s is None else self._sample_s

    @property
    def _guessed_sample_s(self) -> float:
        # Assume the speed without CUDA graphs, because capturing them may fail. If sampling is known to be even
        # slower, assume that speed.
        return self._sampled_layers * max(self._rates.layer_s, Rates.layer_s)

    @property
    def finish_s(self) -> float:
        """A pessimistic estimate of how many seconds pass from the end of the last step until the phase is complete."""
        return _DOUBT * (self.eval_s + self.save_s + self.sample_s) + _SPARE_S

    def to_go_s(self, step: int, end_step: int) -> float | None:
        """Return the likely number of seconds until the phase is complete, or None if unknown.

        `step` is a step that has already been taken and evaluated. The estimate includes the remaining steps and every
        evaluation, save and sampling that is due. It is shown to users; landings use the pessimistic `needs_s`.
        """
        step_s = self._recent_s if self._steps else self._known_step_s
        if not step_s:
            return None
        phase, rates = self._phase, self._rates_at_start
        eval_s = self._evals.likely_s(self._guessed_eval_s(step_s, _LIKELY_SHARE))
        # Only the last save makes training wait until the checkpoint is on disk.
        last_save = self._saves.likely_s(self._checkpoint_bytes / rates.disk_bytes_per_s)
        held_s = self._holds.likely_s(self._checkpoint_bytes / rates.copy_bytes_per_s)
        sample_s = self._samples.likely_s(self._sampled_layers * rates.layer_s)
        evals = _num_due(step + 1, end_step, phase.eval_every)
        saves = _num_due(step, end_step, phase.save_every)
        # There is an evaluation before each planned checkpoint. If one is due at that step anyway, count it only once.
        if phase.eval_every and phase.save_every:
            evals += _num_due(step + 1, end_step, phase.save_every)
            evals -= _num_due(step + 1, end_step, math.lcm(phase.eval_every, phase.save_every))
        samples = _num_due(step, end_step, phase.sample_every)
        seconds = (end_step - step) * step_s + evals * eval_s + saves * held_s + samples * sample_s
        seconds += eval_s if end_step > step else 0.0
        by_time = self._saves_by_time(seconds, end_step - step)
        seconds += by_time * held_s
        if not phase.sample_every:  # if no sampling interval is set, every save is followed by sampling
            seconds += (saves + by_time) * sample_s
        return seconds + last_save + sample_s

    def _saves_by_time(self, seconds: float, num_steps: int) -> float:
        """Return how many saves take place because `save_every_s` seconds have passed since the previous save.

        If saves are also planned by step, they may come so often that no such save takes place between them.
        """
        phase = self._phase
        if not phase.save_every_s or not num_steps:
            return 0.0
        if not phase.save_every:
            return seconds / phase.save_every_s
        between_s = seconds / num_steps * phase.save_every
        return num_steps / phase.save_every * math.floor(between_s / phase.save_every_s)

    def needs_s(self, num_steps: int) -> float:
        """Return how many seconds `num_steps` more steps and all work after the last step will take.

        The estimate is pessimistic, for use with deadlines: it assumes that training waits for every save.
        """
        return num_steps * self._each_s + self.finish_s

    def affordable(self, seconds: float, *, doubt: float = 1.0) -> int:
        """Return how many more steps fit into `seconds`, together with all work after the last step.

        The result is negative if there is not even enough time for the work after the last step.
        """
        return int((seconds - self.finish_s) // (self._each_s * doubt))

    @property
    def _each_s(self) -> float:
        phase, step_s = self._phase, max(self.step_s, 1e-6)
        saves = 1 / phase.save_every if phase.save_every else 0.0
        saves += step_s / phase.save_every_s if phase.save_every_s else 0.0
        evals = 1 / phase.eval_every if phase.eval_every else 0.0
        if phase.eval_every and phase.save_every and phase.save_every % phase.eval_every:
            evals += 1 / phase.save_every  # there is an evaluation before each planned checkpoint
        samples = 1 / phase.sample_every if phase.sample_every else saves
        return step_s + evals * self.eval_s + saves * self.save_s + samples * self.sample_s


def _num_due(first: int, end: int, every: int) -> int:
    """Return the number of multiples of `every` in [first, end), or 0 if `every` is 0."""
    return max(0, (end - 1) // every - (first - 1) // every) if every else 0


@dataclass(frozen=True)
class LandingChange:
    """A decision by `Pilot` about the landing, with the numbers that the event about it reports."""

    kind: str  # planned | started | moved | called_off
    end_step: int
    begin_step: int
    needs_s: float  # how many more seconds the full plan would take, including all later phases
    left_s: float


def describe_change(change: LandingChange, phase: Phase, why: str) -> str:
    """Return a message for the user that states the decision and how long the full plan would take."""
    of = f"{change.end_step:,} of {phase.num_steps:,}"
    needs, left = format_duration(change.needs_s), format_duration(change.left_s)
    if change.kind == "planned":
        said = (
            f"Training will end early, at step {of}, to finish before {why}. "
            f"The learning rate decays from about step {change.begin_step:,}."
        )
    elif change.kind == "started":
        said = f"Landing: the learning rate decays from now to step {of}, to finish before {why}."
    elif change.kind == "moved":
        said = f"Training (landing) now ends at step {of}, because the time per step has changed."
    else:
        return "The early end is cancelled: the limit was raised, and training continues as planned."
    return f"{said} Time left: {left}; finishing the plan would take {needs}."


class Pilot:
    """Decides when the learning rate of a phase must decay early.

    `later_tokens` is the total number of tokens in all later phases; a share of the time is reserved for these phases.
    """

    def __init__(self, phase: Phase, pace: Pace, *, later_tokens: int = 0, num_later: int = 0) -> None:
        self._phase, self._pace = phase, pace
        self._later_tokens, self._num_later = later_tokens, num_later
        self._announced: float | None = None  # deadline in effect when an early end of training was last announced
        self._deadline: float | None = None  # deadline in effect when the landing began

    def look(
        self, step: int, landing: Landing | None, warm_from: int, left_s: float | None, now: float
    ) -> tuple[Landing | None, LandingChange | None]:
        """Return the landing to use from now on, and the change to report; either may be None.

        `left_s` is the number of seconds until the deadline, or None if there is none.
        """
        if landing is None and (left_s is None or self._pace.num_steps < _ENOUGH):
            return None, None
        deadline = None if left_s is None else now + left_s
        if landing is not None:
            self._deadline = self._deadline if self._deadline is not None else deadline
            is_raised = deadline is None or (self._deadline is not None and deadline > self._deadline + _RAISED_S)
            if is_raised and self.is_worth_going_on(step, landing, left_s):
                self._deadline = None
                return None, self._change("called_off", step, self._phase.num_steps, left_s)
            if left_s is None or self._pace.num_steps < _ENOUGH:
                return landing, None
        assert left_s is not None, "without a deadline there is nothing to decide"
        last = self._last_step(step, left_s, doubt=_STEP_DOUBT if landing is None else 1.0)
        if landing is not None:
            return self._move(step, landing, last, left_s)
        if last >= self._phase.num_steps:
            return None, None
        begin = self._begin_of(last, warm_from)
        if step < begin:
            return None, self._announce(step, begin, last, left_s, deadline)
        if last <= step:
            # No further step fits, so there are no steps in which to decay. The deadline itself will stop the run.
            return None, None
        self._deadline = deadline
        scale = lr_scale(self._phase.schedule, step, self._phase.num_steps, None, warm_from)
        begun = Landing(begin_step=step, begin_scale=scale, end_step=last, step_s=self._pace.step_s)
        return begun, self._change("started", step, last, left_s)

    def is_worth_going_on(self, step: int, landing: Landing, left_s: float | None) -> bool:
        """Return whether to cancel a landing that has begun or is complete.

        The result is True only if the steps gained outweigh the decay that is undone. It is never True after a crash
        during a landing, because less time is left than before.
        """
        if left_s is None:
            return True
        self._pace.know(landing.step_s)
        last = self._last_step(step, left_s)
        undone, rest = landing.end_step - landing.begin_step, max(0, landing.end_step - step)
        return last >= self._phase.num_steps or last - step > 2 * rest + undone

    def needs_s(self, step: int) -> float:
        """Return how many more seconds the full plan takes, assuming that all phases take equally long per token."""
        pace, phase = self._pace, self._phase
        later_steps = self._later_tokens / phase.batch_tokens
        return pace.needs_s(phase.num_steps - step) + later_steps * pace.step_s + self._num_later * pace.finish_s

    def _last_step(self, step: int, left_s: float, *, doubt: float = 1.0) -> int:
        """Return the last step that fits before the deadline if later phases are shortened by the same factor."""
        planned = self._phase.num_steps
        more = self._pace.affordable(left_s - self._num_later * self._pace.finish_s, doubt=doubt)
        later_steps = self._later_tokens / self._phase.batch_tokens
        part = (step + more) / (planned + later_steps)
        return min(step + more, int(part * planned)) if later_steps else step + more

    def _begin_of(self, last: int, warm_from: int) -> int:
        """Return the step at which the decay begins if training ends at `last`.

        The decay keeps its planned share of the steps, except that a cosine decay always begins when the warmup ends.
        If a landing was cancelled, only the steps after the cancellation count. The warmup is shortened only if it
        would take more than half of the steps that count.
        """
        schedule, length = self._phase.schedule, last - warm_from
        warm = warm_from + min(schedule.warmup_steps, length // 2)
        if schedule.kind == "cosine":
            return warm
        decay = round(length * schedule.decay_steps / max(1, self._phase.num_steps))
        # Begin the decay early enough to leave time for one evaluation, one save and one sampling before step `last`.
        # Otherwise these could use up all the time set aside for the decay.
        pause = math.ceil((self._pace.eval_s + self._pace.save_s + self._pace.sample_s) / max(self._pace.step_s, 1e-6))
        return min(last - 1 - pause, max(warm, last - decay))

    def _move(self, step: int, landing: Landing, last: int, left_s: float) -> tuple[Landing, LandingChange | None]:
        rest = landing.end_step - step
        # A cosine decay begins at the first decision, when little has been measured. Therefore, unlike other decays, it
        # can also be extended to a later step.
        is_further = self._phase.schedule.kind == "cosine" and last - step > 1.1 * rest > 0
        if last >= landing.end_step and not is_further:
            return landing, None
        last = max(step, min(last, self._phase.num_steps))
        if last == landing.end_step:
            return landing, None
        # Move the curve's start, so that the stretched or compressed curve passes through the current learning rate.
        begin = (
            last - (last - step) * (landing.end_step - landing.begin_step) / rest if rest > 0 else landing.begin_step
        )
        return dataclasses.replace(landing, begin_step=begin, end_step=last), self._change("moved", step, last, left_s)

    def _announce(
        self, step: int, begin: int, last: int, left_s: float, deadline: float | None
    ) -> LandingChange | None:
        is_sure = self._pace.num_steps >= _SURE and (self._pace.is_measured or step >= begin / 2)
        if not is_sure or deadline is None:
            return None
        if self._announced is not None and abs(deadline - self._announced) <= _RAISED_S:
            return None
        self._announced = deadline
        return LandingChange("planned", last, begin, self.needs_s(step), left_s)

    def _change(self, kind: str, step: int, last: int, left_s: float | None) -> LandingChange:
        return LandingChange(kind, last, step, self.needs_s(step), left_s if left_s is not None else 0.0)
