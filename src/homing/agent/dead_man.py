"""The dead-man: the second guard on the instance, a process that needs nothing of the agent.

    until the limit    starts an agent that died again, some times, with pauses
    none helps         pushes what there is, then ends billing after a grace
    the limit is near  ends billing, after the agent has had its turn and before the guard at home has

It ends the machine in the same way as the agent, and tries for ever: what is still here to try has not been ended.
"""

from __future__ import annotations

import contextlib
import logging
from typing import List

from homing.agent.end import end_billing, pause_s
from homing.agent.folder import Folder
from homing.agent.limits import Limits
from homing.wire import instance as names
from homing.wire.event import Outcome
from homing.wire.limit import DEAD_MAN

log = logging.getLogger(__name__)
SOURCE = "dead-man"  # of its events; also its log
PAUSES_S = (2.0, 15.0, 60.0)  # before each restart of an agent; after the last one the run has failed
FORGET_S = 3600.0  # an agent that lived this long was started well
GRACE_S = 60.0
QUICK_TRIES = 20  # that failed, without growing pauses: the limit is seconds away
AGAIN_S = 20.0  # after an end that was accepted: whoever is still here was not ended
LAST_PUSH_S = 600.0


def start(folder: Folder) -> None:
    """In a session of its own. One that is not needed finds the lock taken, and leaves."""
    *command, boot_path = folder.boot.agent_argv
    folder.world.mkdir(folder.run_path(names.LOGS))
    folder.start([*command, "--dead-man", boot_path], SOURCE)


class DeadMan:
    def __init__(self, folder: Folder) -> None:
        self.folder, self.boot, self.world = folder, folder.boot, folder.world
        self.limits = Limits(folder)
        self.tick_s = min(1.0, self.boot.heartbeat_s)
        self._alone_since = -1.0  # on the monotonic clock; negative while an agent lives
        # How often it was started again, and when last: on disk for a later dead-man, and here, for a disk may be full.
        self._restarts = [*self._read_numbers(names.RESTARTS), 0.0, 0.0][:2]

    def run(self) -> None:
        failed = 0  # in a row: an end that was accepted and did nothing is no reason to be slower
        while True:
            try:
                why = self.why_end()
                if why:
                    self.folder.event("dead_man_ends", why)
                    is_refused = end_billing(self.folder, failed + 1, lambda: self.world.sleep(0.1))
                    failed = failed + 1 if is_refused else 0
                    self.world.sleep(pause_s(max(0, failed - QUICK_TRIES), self.tick_s) if failed else 0.0)
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
            is_over = abs(self.world.boottime() - ended_at[0]) >= AGAIN_S
            return "Its end was accepted, and yet this machine is still here." if is_over else ""
        if self.world.is_locked(self.folder.path(names.AGENT_LOCK)):
            self._alone_since = -1.0
            return ""
        if self._alone_since < 0:
            self._alone_since = self.world.monotonic()
        return self._revive(self.world.monotonic() - self._alone_since)

    def _revive(self, alone_s: float) -> str:
        count = int(self._restarts[0]) if self.world.boottime() - self._restarts[1] <= FORGET_S else 0
        if count < len(PAUSES_S):
            if alone_s >= PAUSES_S[count]:
                self._restarts, self._alone_since = [count + 1, self.world.boottime()], -1.0
                with contextlib.suppress(OSError):
                    self.world.write(self.folder.path(names.RESTARTS), " ".join(map(str, self._restarts)).encode())
                self.folder.event("agent_restarted", f"The agent died. Restart {count + 1} of {len(PAUSES_S)}.")
                self.folder.start(self.boot.agent_argv, SOURCE)
            return ""
        if alone_s < max(GRACE_S, self.boot.keep_on_failure_s):
            return ""
        self._push_failure()
        return f"The agent died {count + 1} times; the run has failed."

    def _push_failure(self) -> None:
        """As the agent would have: the reason and what was trained go up before the machine goes."""
        if self.folder.read(names.OUTCOME, Outcome) is None:
            reason = "The agent on the instance died again and again."
            self.folder.write(names.OUTCOME, Outcome("failed", reason, 1, t=self.world.now()))
        hidden = self.boot.end_billing.header_env.values()
        env = {name: value for name, value in self.world.environment().items() if name not in hidden}
        spare_s = min(LAST_PUSH_S, self.limits.left_s(DEAD_MAN))
        self.world.run([*self.boot.sync_argv, "--once"], max(1.0, spare_s), {**env, **self.boot.env})

    def _read_numbers(self, name: str) -> List[float]:
        try:
            return [float(word) for word in self.world.read(self.folder.path(name)).split()]
        except (OSError, ValueError):
            return []
