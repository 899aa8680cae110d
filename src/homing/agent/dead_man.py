"""The dead-man: the second guard on the instance, a process that needs nothing of the agent.

    until the limit    starts an agent that died again, some times, with pauses
    none helps         pushes what there is, then ends billing after a grace
    the limit is near  ends billing, after the agent has had its turn and before the guard at home has

It ends the machine in the same way as the agent, and tries for ever: what is still here to try has not been ended.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import List

from homing.agent.end import note_end, try_to_end
from homing.agent.limits import Limits, last_beat_at
from homing.wire import names
from homing.wire.boot import Boot
from homing.wire.codec import dumps
from homing.wire.event import Event, Outcome
from homing.wire.limit import DEAD_MAN
from homing.world import World

log = logging.getLogger(__name__)
PAUSES_S = (2.0, 15.0, 60.0)  # before each restart of an agent; after the last one the run has failed
FORGET_S = 3600.0  # an agent that lived this long was started well
GRACE_S = 60.0
AGAIN_S = 20.0  # after an end that was accepted: whoever is still here was not ended
LAST_PUSH_S = 600.0
LONGEST_WAIT_S = 60.0


def argv_of(boot: Boot) -> List[str]:
    return [*boot.agent_argv[:-1], "--dead-man", *boot.agent_argv[-1:]]


def start(boot: Boot, world: World) -> None:
    """In a session of its own. One that is not needed finds the lock taken, and leaves."""
    env = {**world.environment(), names.MARK_ENV: boot.mark}
    world.mkdir(os.path.join(boot.work_dir, names.RUN_DIR, names.LOGS))
    world.spawn(argv_of(boot), env, boot.work_dir, log_path(boot))


def log_path(boot: Boot) -> str:
    return os.path.join(boot.work_dir, names.RUN_DIR, names.LOGS, "dead-man.log")


class DeadMan:
    def __init__(self, boot: Boot, world: World) -> None:
        self.boot, self.world = boot, world
        self.limits = Limits(boot, world, last_beat_at(boot, world))
        self.tick_s = min(1.0, boot.heartbeat_s)
        self._alone_since = -1.0  # on the monotonic clock; negative while an agent lives

    def run(self) -> None:
        tries = 0
        while True:
            try:
                why = self.why_end()
                if why:
                    self._event("dead_man_ends", why)
                    problem = try_to_end(self.boot, self.world, log_path(self.boot), lambda: self.world.sleep(0.1))
                    tries += 1
                    if problem:
                        self._event("end_billing_failed", f"STILL BILLING: the dead-man's try {tries}: {problem}")
                        self.world.sleep(min(self.tick_s * 2 ** min(tries, 10), LONGEST_WAIT_S))
                    else:
                        note_end(self.boot, self.world)
            except Exception:  # an ill disk must not take the last guard on this machine down
                log.exception("the dead-man goes on")
            self.world.sleep(self.tick_s)

    def why_end(self) -> str:
        """The sentence to end with now, or "". Starts a dead agent again on the way."""
        self.limits.follow()
        # First: an end that was accepted and did nothing must not hold us off here.
        if self.limits.left_s(DEAD_MAN) <= 0:
            return f"The {self.limits.nearest()[1]} is near and nobody else has ended this instance."
        ended_at = self._read_numbers(names.BILLING_ENDED)[:1]
        if ended_at:
            is_over = abs(self.world.now() - ended_at[0]) >= AGAIN_S
            return "Its end was accepted, and yet this machine is still here." if is_over else ""
        if self.world.is_locked(os.path.join(self.boot.work_dir, names.AGENT_LOCK)):
            self._alone_since = -1.0
            return ""
        if self._alone_since < 0:
            self._alone_since = self.world.monotonic()
        return self._revive(self.world.monotonic() - self._alone_since)

    def _revive(self, alone_s: float) -> str:
        count = self._restarts()
        if count < len(PAUSES_S):
            if alone_s >= PAUSES_S[count]:
                self.world.write(self._path(names.RESTARTS), f"{count + 1} {self.world.now()}".encode())
                self._event("agent_restarted", f"The agent died. Restart {count + 1} of {len(PAUSES_S)}.")
                env = {**self.world.environment(), names.MARK_ENV: self.boot.mark}
                self.world.spawn(self.boot.agent_argv, env, self.boot.work_dir, log_path(self.boot))
                self._alone_since = -1.0
            return ""
        if alone_s < max(GRACE_S, self.boot.keep_on_failure_s):
            return ""
        self._push_failure()
        return f"The agent died {count + 1} times; the run has failed."

    def _restarts(self) -> int:
        numbers = self._read_numbers(names.RESTARTS)
        return int(numbers[0]) if len(numbers) == 2 and self.world.now() - numbers[1] <= FORGET_S else 0

    def _push_failure(self) -> None:
        """As the agent would have: the reason and what was trained go up before the machine goes."""
        outcome = Outcome("failed", "The agent on the instance died again and again.", 1, t=self.world.now())
        with contextlib.suppress(OSError):  # on a full disk it ends all the same
            self.world.create(self._path(names.RUN_DIR, names.OUTCOME), dumps(outcome).encode())
        hidden = self.boot.end_billing.header_env.values()
        env = {name: value for name, value in self.world.environment().items() if name not in hidden}
        spare_s = min(LAST_PUSH_S, self.limits.left_s(DEAD_MAN))
        self.world.run([*self.boot.sync_argv, "--once"], max(1.0, spare_s), {**env, **self.boot.env})

    def _read_numbers(self, name: str) -> List[float]:
        try:
            return [float(word) for word in self.world.read(self._path(name)).split()]
        except (OSError, ValueError):
            return []

    def _event(self, kind: str, text: str) -> None:
        log.warning("%s: %s", kind, text)
        event = Event(self.world.now(), "dead-man", kind, text)
        try:
            self.world.append(self._path(names.RUN_DIR, names.EVENTS), (dumps(event) + "\n").encode())
        except OSError:
            log.exception("events cannot be written")

    def _path(self, *parts: str) -> str:
        return os.path.join(self.boot.work_dir, *parts)
