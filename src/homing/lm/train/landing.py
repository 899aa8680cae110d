"""When time or money will not reach the planned end: an earlier one, chosen so that a finished model comes out of it.

    measured times -> Pace -> how many more steps fit before the deadline -> Pilot -> Landing(begin, end) or none

    |-- warm-up --|------ peak rate ------|\\ decay \\|  evaluate, save, sample  |
    0                                   begin      end                       deadline

The deadline is known from the first step, so the decay begins as late as it can and still be as long a part of the run
as was planned. Before it begins the end moves either way with the measured speed; afterwards only to an earlier step,
because rates that were lowered are steps that were spent. It decides; the loop acts.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import deque
from dataclasses import dataclass

import torch

from homing.lm.train.schedule import Landing, lr_scale
from homing.units import format_duration
from homing.wire.run import Phase

__all__ = ["Pace", "Pilot", "Rates", "Turn", "turn_text"]

_WINDOW = 50  # steps: speed is that of now, not that of the beginning
_RECENT = 15  # steps for what people are told: those of before a speed-up are soon forgotten
_ENOUGH = 2  # measured steps before anything is decided; the first of all compiles and is never counted
_SURE = 5  # measured steps before the end is foretold to people
_DOUBT = 1.25  # on what happens once, at the end: the last save may be the slowest
_SPARE_S = 3.0  # beside it, for retention and a slow disk; more than `Wishes.stop` keeps, which would cut the landing
_STEP_DOUBT = 1.03  # on the time of a step, before the decay begins: moving the end in the decay costs a steeper tail
_FORWARD_SHARE = 0.5  # of a step's time per token: an evaluation has no backward pass, but smaller batches
_LIKELY_SHARE = 1 / 3  # of it, for what people are told: forward alone, of forward and twice as much backward
_REMEMBERED = 4  # evaluations, saves, samples each
_DISK_BYTES_PER_S = 50e6  # a slow disk with its fsync and the reading back, until a save was measured
_RAISED_S = 20.0  # a deadline that moved by more was changed by a person, not by an estimate


@dataclass
class Rates:
    """Of this machine, from one phase to the next: as the newest save and sample showed them, and until then what is
    usual where people rent. For what is likely; a deadline reckons with worse."""

    disk_bytes_per_s: float = 400e6  # a checkpoint written, synced and hashed
    copy_bytes_per_s: float = 4e9  # of it to host memory, which is all that training waits for
    layer_s: float = 1.5e-3  # of one sampled token in one layer, kernel by kernel (benchmarks/results/rl.json)

    @classmethod
    def usual_on(cls, device: torch.device) -> Rates:
        """On CUDA a sampled token is one captured graph (benchmarks/results/decode.json), with the capture of it."""
        return cls(layer_s=2e-4) if device.type == "cuda" else cls()


class _Seen:
    """How long one kind of work took, each time."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def likely_s(self, guess: float) -> float:
        """The first of its kind also sets up what stays (buffers, kernels) and may take ten times as long, so what is
        likely is then between it and the guess, by factors; and where others followed it no longer counts."""
        if len(self._seconds) == 1 and guess > 0:
            return math.sqrt(guess * self._seconds[0])
        return statistics.median([guess, *self._seconds])


class Pace:
    """How long each part of the work takes here. What was not seen yet is guessed from what was, rather too long where
    a deadline asks, and as is likely where people do (`to_go_s`). `sampled_layers`: how many layers the tokens of one
    sampling pass, one after the other."""

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
        self._rates_at_start = dataclasses.replace(self._rates)  # for guesses; those of now are what was seen since
        # In rl the first of so many steps samples for all of them: only together they say how fast it goes.
        self._round = phase.rl.updates_per_rollout if phase.rl else 1
        self._steps: deque[float] = deque(maxlen=max(_WINDOW, 3 * self._round))
        self._known_step_s = self._step_s = self._recent_s = 0.0
        self._eval_s: float | None = None
        self._save_s: float | None = None
        self._sample_s: float | None = None
        self._evals, self._saves, self._holds, self._samples = _Seen(), _Seen(), _Seen(), _Seen()
        self._guessed_save_s = checkpoint_bytes / _DISK_BYTES_PER_S

    def know(self, step_s: float) -> None:
        """From a checkpoint: good until the first step here was measured."""
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
        """By a save that is written while training goes on: what training waited for it."""
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
        """Nothing in it is a guess any more."""
        return self._save_s is not None and (self._eval_s is not None or not self._can_evaluate)

    @property
    def last_step_s(self) -> float:
        return self._steps[-1] if self._steps else 0.0

    @property
    def step_s(self) -> float:
        """What the next steps will take on average. The mean, for a sum is wanted; the one worst step is left out, for
        a pause of the machine is no speed. 0 while nothing is known."""
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
        # Kernel by kernel, where nothing slower was seen: a graph may fail to be captured.
        return self._sampled_layers * max(self._rates.layer_s, Rates.layer_s)

    @property
    def finish_s(self) -> float:
        """From the end of the last step until nothing is left to do."""
        return _DOUBT * (self.eval_s + self.save_s + self.sample_s) + _SPARE_S

    def to_go_s(self, step: int, end_step: int) -> float | None:
        """From `step`, taken and evaluated, until nothing of the phase is left to do: the steps, and the evaluations,
        saves and samples that fall due until then, each counted. None while no step was measured.

        What is likely, for people; `needs_s` is what a landing reckons with, and has doubts."""
        step_s = self._recent_s if self._steps else self._known_step_s
        if not step_s:
            return None
        phase, rates = self._phase, self._rates_at_start
        eval_s = self._evals.likely_s(self._guessed_eval_s(step_s, _LIKELY_SHARE))
        # The last one alone is waited for to its end.
        last_save = self._saves.likely_s(self._checkpoint_bytes / rates.disk_bytes_per_s)
        held_s = self._holds.likely_s(self._checkpoint_bytes / rates.copy_bytes_per_s)
        sample_s = self._samples.likely_s(self._sampled_layers * rates.layer_s)
        evals = _num_due(step + 1, end_step, phase.eval_every)
        saves = _num_due(step, end_step, phase.save_every)
        if phase.eval_every and phase.save_every:  # a planned checkpoint is measured first; those of both count once
            evals += _num_due(step + 1, end_step, phase.save_every)
            evals -= _num_due(step + 1, end_step, math.lcm(phase.eval_every, phase.save_every))
        samples = _num_due(step, end_step, phase.sample_every)
        seconds = (end_step - step) * step_s + evals * eval_s + saves * held_s + samples * sample_s
        seconds += eval_s if end_step > step else 0.0
        by_time = self._saves_by_time(seconds, end_step - step)
        seconds += by_time * held_s
        if not phase.sample_every:  # then one with each checkpoint
            seconds += (saves + by_time) * sample_s
        return seconds + last_save + sample_s

    def _saves_by_time(self, seconds: float, num_steps: int) -> float:
        """Each save begins the time anew, so between two that are planned there may be no time for one."""
        phase = self._phase
        if not phase.save_every_s or not num_steps:
            return 0.0
        if not phase.save_every:
            return seconds / phase.save_every_s
        between_s = seconds / num_steps * phase.save_every
        return num_steps / phase.save_every * math.floor(between_s / phase.save_every_s)

    def needs_s(self, num_steps: int) -> float:
        """So many more steps and all that comes after the last one, with each save as if training stood still for it:
        rather too long, for a deadline."""
        return num_steps * self._each_s + self.finish_s

    def affordable(self, seconds: float, *, doubt: float = 1.0) -> int:
        """How many more steps fit, with all that comes after the last one; negative: not even that does."""
        return int((seconds - self.finish_s) // (self._each_s * doubt))

    @property
    def _each_s(self) -> float:
        phase, step_s = self._phase, max(self.step_s, 1e-6)
        saves = 1 / phase.save_every if phase.save_every else 0.0
        saves += step_s / phase.save_every_s if phase.save_every_s else 0.0
        evals = 1 / phase.eval_every if phase.eval_every else 0.0
        if phase.eval_every and phase.save_every and phase.save_every % phase.eval_every:
            evals += 1 / phase.save_every  # a planned checkpoint is measured first
        samples = 1 / phase.sample_every if phase.sample_every else saves
        return step_s + evals * self.eval_s + saves * self.save_s + samples * self.sample_s


def _num_due(first: int, end: int, every: int) -> int:
    """How often something is due every so many steps, from `first` on and before `end`; 0 steps mean never."""
    return max(0, (end - 1) // every - (first - 1) // every) if every else 0


@dataclass(frozen=True)
class Turn:
    """What was decided at one look, for the event that says so."""

    kind: str  # planned | started | moved | called_off
    end_step: int
    begin_step: int
    needs_s: float  # what the plan would still take, all phases and their ends
    left_s: float


def turn_text(turn: Turn, phase: Phase, why: str) -> str:
    """One sentence or two for people: what was decided and what the plan would have needed."""
    of = f"{turn.end_step:,} of {phase.num_steps:,}"
    needs, left = format_duration(turn.needs_s), format_duration(turn.left_s)
    if turn.kind == "planned":
        said = f"Step {of} is the last that fits before {why}; the rate falls from about step {turn.begin_step:,} on."
    elif turn.kind == "started":
        said = f"Landing: the rate falls from here to step {of}, the last that fits before {why}."
    elif turn.kind == "moved":
        said = f"The landing now ends at step {of}: steps take another time than they did."
    else:
        return "The landing is called off: the limit was raised, and training goes on as planned."
    return f"{said} {left} are left; finishing the plan would take {needs}."


class Pilot:
    """Of one phase. `later_tokens` are those of the phases after it, which get their share of what is left."""

    def __init__(self, phase: Phase, pace: Pace, *, later_tokens: int = 0, num_later: int = 0) -> None:
        self._phase, self._pace = phase, pace
        self._later_tokens, self._num_later = later_tokens, num_later
        self._foretold: float | None = None  # the deadline for which the end was told
        self._deadline: float | None = None  # the one that the landing was begun for

    def look(
        self, step: int, landing: Landing | None, warm_from: int, left_s: float | None, now: float
    ) -> tuple[Landing | None, Turn | None]:
        """The landing from here on, and what changed. `left_s`: until the deadline, None without one."""
        if landing is None and (left_s is None or self._pace.num_steps < _ENOUGH):
            return None, None
        deadline = None if left_s is None else now + left_s
        if landing is not None:
            self._deadline = self._deadline if self._deadline is not None else deadline
            is_raised = deadline is None or (self._deadline is not None and deadline > self._deadline + _RAISED_S)
            if is_raised and self.is_worth_going_on(step, landing, left_s):
                self._deadline = None
                return None, self._turn("called_off", step, self._phase.num_steps, left_s)
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
            return None, self._foretell(step, begin, last, left_s, deadline)
        if last <= step:
            return None, None  # not one more step fits: there is nothing to land with, and the deadline itself stops it
        self._deadline = deadline
        scale = lr_scale(self._phase.schedule, step, self._phase.num_steps, None, warm_from)
        begun = Landing(begin_step=step, begin_scale=scale, end_step=last, step_s=self._pace.step_s)
        return begun, self._turn("started", step, last, left_s)

    def is_worth_going_on(self, step: int, landing: Landing, left_s: float | None) -> bool:
        """Whether to give up a landing, begun or done: only for steps that outweigh the decay that would be undone.

        A trainer that crashed in its landing has less time than before and never finds this true.
        """
        if left_s is None:
            return True
        self._pace.know(landing.step_s)
        last = self._last_step(step, left_s)
        undone, rest = landing.end_step - landing.begin_step, max(0, landing.end_step - step)
        return last >= self._phase.num_steps or last - step > 2 * rest + undone

    def needs_s(self, step: int) -> float:
        """To finish as planned, from this step on, the later phases at this one's speed per token."""
        pace, phase = self._pace, self._phase
        later_steps = self._later_tokens / phase.batch_tokens
        return pace.needs_s(phase.num_steps - step) + later_steps * pace.step_s + self._num_later * pace.finish_s

    def _last_step(self, step: int, left_s: float, *, doubt: float = 1.0) -> int:
        """The last step that fits. Where phases follow, all are made shorter by the same part."""
        planned = self._phase.num_steps
        more = self._pace.affordable(left_s - self._num_later * self._pace.finish_s, doubt=doubt)
        later_steps = self._later_tokens / self._phase.batch_tokens
        part = (step + more) / (planned + later_steps)
        return min(step + more, int(part * planned)) if later_steps else step + more

    def _begin_of(self, last: int, warm_from: int) -> int:
        """The same part of the shorter run decays as was planned of the whole; cosine decays all the way. What came
        before a landing that was left behind does not count, and a warm-up is not cut off, unless it is most of it."""
        schedule, length = self._phase.schedule, last - warm_from
        warm = warm_from + min(schedule.warmup_steps, length // 2)
        if schedule.kind == "cosine":
            return warm
        decay = round(length * schedule.decay_steps / max(1, self._phase.num_steps))
        # At least as long as an evaluation and a save, which would else jump over all of it between two looks.
        pause = math.ceil((self._pace.eval_s + self._pace.save_s + self._pace.sample_s) / max(self._pace.step_s, 1e-6))
        return min(last - 1 - pause, max(warm, last - decay))

    def _move(self, step: int, landing: Landing, last: int, left_s: float) -> tuple[Landing, Turn | None]:
        rest = landing.end_step - step
        # Cosine decays from the first look on, when little was measured yet: it alone may also go further again.
        is_further = self._phase.schedule.kind == "cosine" and last - step > 1.1 * rest > 0
        if last >= landing.end_step and not is_further:
            return landing, None
        last = max(step, min(last, self._phase.num_steps))
        if last == landing.end_step:
            return landing, None
        # The same curve, drawn in or out so that it goes through the rate of now: begun as much earlier or later.
        begin = (
            last - (last - step) * (landing.end_step - landing.begin_step) / rest if rest > 0 else landing.begin_step
        )
        return dataclasses.replace(landing, begin_step=begin, end_step=last), self._turn("moved", step, last, left_s)

    def _foretell(self, step: int, begin: int, last: int, left_s: float, deadline: float | None) -> Turn | None:
        is_sure = self._pace.num_steps >= _SURE and (self._pace.is_measured or step >= begin / 2)
        if not is_sure or deadline is None:
            return None
        if self._foretold is not None and abs(deadline - self._foretold) <= _RAISED_S:
            return None
        self._foretold = deadline
        return Turn("planned", last, begin, self.needs_s(step), left_s)

    def _turn(self, kind: str, step: int, last: int, left_s: float | None) -> Turn:
        return Turn(kind, last, step, self.needs_s(step), left_s if left_s is not None else 0.0)
