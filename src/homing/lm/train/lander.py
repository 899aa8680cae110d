"""What the pilot decides, done and told: a landing begun, moved, called off or left behind, and its end.

`landing` computes and knows no run; here its turns become the state of training and words for people. State goes in and
comes out: the loop holds it.
"""

from __future__ import annotations

import dataclasses
import time

from homing.lm.train.checkpoint import TrainState
from homing.lm.train.control import Stop, Wishes
from homing.lm.train.landing import Pace, Pilot, turn_text
from homing.lm.train.metrics import Tell
from homing.wire.run import Phase

__all__ = ["Lander", "go_on"]

_NEWS = 0.05  # of the end: one that moves by a step or two each time would fill the log


class Lander:
    def __init__(self, phase: Phase, later: list[Phase], pace: Pace, wishes: Wishes, tell: Tell) -> None:
        self.phase, self.pace, self.wishes, self.tell = phase, pace, wishes, tell
        later_tokens = sum(other.num_steps * other.batch_tokens for other in later)
        self.pilot = Pilot(phase, pace, later_tokens=later_tokens, num_later=len(later))
        self._told_end = 0  # the end of the landing that was told last

    def resume(self, state: TrainState) -> tuple[bool, TrainState]:
        """At a start. True: it has landed, and there is no time for anything better."""
        landing = state.landing
        if landing is None:
            return False, state
        if self.pilot.is_worth_going_on(state.step, landing, self.wishes.left_s()):
            text = f"The landing at step {landing.end_step:,} is left behind: there is time to go on."
            self.tell("landing_called_off", text, aloud=True, end_step=landing.end_step)
            return False, go_on(state)
        return state.step >= landing.end_step, state

    def look(self, state: TrainState) -> TrainState:
        """Whether the planned end still fits, by the speed measured here; else where training ends instead."""
        left_s = self.wishes.left_s()
        landing, turn = self.pilot.look(state.step, state.landing, state.warm_from, left_s, time.monotonic())
        if turn and turn.kind == "called_off":
            state = go_on(state)
        elif landing != state.landing:
            state = dataclasses.replace(state, landing=landing)
        if turn and (turn.kind != "moved" or abs(turn.end_step - self._told_end) > _NEWS * turn.end_step):
            self._told_end = turn.end_step
            told = dataclasses.asdict(turn) | {"num_steps": self.phase.num_steps, "step_s": self.pace.step_s}
            told.pop("kind")
            self.tell(f"landing_{turn.kind}", turn_text(turn, self.phase, self.wishes.why()), aloud=True, **told)
        return state

    def landed(self, step: int) -> Stop:
        of, why = self.phase.num_steps, self.wishes.why()
        # The word "limit" is what home tells a limit by, whoever set the deadline.
        reason = f"Landed at step {step:,} of {of:,}, inside the limit ({why}): a finished model, with less training."
        self.tell("landed", reason, aloud=True, end_step=step, num_steps=of, needs_s=self.pilot.needs_s(step))
        return Stop("landed", reason)


def go_on(state: TrainState) -> TrainState:
    """From the weights as they are: nothing trained is thrown away (docs/log.md, going on). The rate warms up anew, for
    the optimizer has got used to small steps."""
    return dataclasses.replace(state, landing=None, warm_from=state.step)
