"""Starts, moves, cancels and completes landings (ending training early), as decided by `landing.Pilot`.

`landing` only computes; this module turns its decisions into training state and messages. It stores no training state:
the loop passes the state in and gets the new one back.
"""

from __future__ import annotations

import dataclasses
import time

from homing.lm.train.checkpoints.checkpoint_files import TrainState
from homing.lm.train.landing import Pace, Pilot, describe_change
from homing.lm.train.metrics import Notify
from homing.lm.train.stop_requests import ControlRequests, Stop
from homing.wire.run_json import Phase

__all__ = ["LandingController", "cancel_landing"]

# Report that the end has moved only if it moved by more than this fraction; reporting small moves would fill the log.
_MIN_REPORTED_CHANGE = 0.05


class LandingController:
    def __init__(self, phase: Phase, later: list[Phase], pace: Pace, requests: ControlRequests, notify: Notify) -> None:
        self.phase, self.pace, self.requests, self.notify = phase, pace, requests, notify
        later_tokens = sum(other.num_steps * other.batch_tokens for other in later)
        self.pilot = Pilot(phase, pace, later_tokens=later_tokens, num_later=len(later))
        self._reported_end = 0  # the end step that was reported most recently

    def resume(self, state: TrainState) -> tuple[bool, TrainState]:
        """Decide whether a resumed run continues a landing from its checkpoint.

        Return whether the phase is over, and the state to use. The phase is over if the landing is complete and there
        is no time for a longer run.
        """
        landing = state.landing
        if landing is None:
            return False, state
        if self.pilot.is_worth_going_on(state.step, landing, self.requests.left_s()):
            text = f"Training no longer ends early at step {landing.end_step:,}: there is now time to continue."
            self.notify("landing_called_off", text, notice=True, end_step=landing.end_step)
            return False, cancel_landing(state)
        return state.step >= landing.end_step, state

    def look(self, state: TrainState) -> TrainState:
        """Return the state, with a landing started, moved or cancelled if the time until the deadline requires it."""
        left_s = self.requests.left_s()
        landing, change = self.pilot.look(state.step, state.landing, state.warm_from, left_s, time.monotonic())
        if change and change.kind == "called_off":
            state = cancel_landing(state)
        elif landing != state.landing:
            state = dataclasses.replace(state, landing=landing)
        if change and (
            change.kind != "moved" or abs(change.end_step - self._reported_end) > _MIN_REPORTED_CHANGE * change.end_step
        ):
            self._reported_end = change.end_step
            data = dataclasses.asdict(change) | {"num_steps": self.phase.num_steps, "step_s": self.pace.step_s}
            data.pop("kind")
            self.notify(
                f"landing_{change.kind}", describe_change(change, self.phase, self.requests.why()), notice=True, **data
            )
        return state

    def landed(self, step: int) -> Stop:
        of, why = self.phase.num_steps, self.requests.why()
        # On the user's machine, homing checks whether this text contains the word "limit". Therefore the text must
        # contain it regardless of which deadline caused the landing.
        reason = (
            f"Landed at step {step:,} of {of:,}, within the limit ({why}): the model is finished, but was trained for "
            "fewer steps than planned."
        )
        self.notify("landed", reason, notice=True, end_step=step, num_steps=of, needs_s=self.pilot.needs_s(step))
        return Stop("landed", reason)


def cancel_landing(state: TrainState) -> TrainState:
    """Return the state with its landing cancelled and a new warmup from the current step.

    Training continues from the current weights, so no work is lost (docs/development/log.md). The learning rate warms
    up again, because the optimizer has adapted to small steps.
    """
    return dataclasses.replace(state, landing=None, warm_from=state.step)
