"""The dead-man: a second guard on the instance, in a process that does not depend on the agent.

    before the limit      restarts a dead agent a few times, with pauses in between
    if restarts fail      waits for a grace period, pushes everything trained so far, then ends billing
    close to the limit    ends billing, later than the agent would and earlier than a guard on the user's computer would

The dead-man ends billing as the agent does. It never stops trying, because while it runs, the instance exists."""

from __future__ import annotations

import contextlib
import logging
from typing import List

from homing.instance.agent.end_billing import end_billing, pause_s
from homing.instance.agent.folder import Folder
from homing.instance.agent.watchdog import Limits
from homing.wire import instance_file_names as names
from homing.wire.event_lines import Outcome
from homing.wire.guard_timing import DEAD_MAN

log = logging.getLogger(__name__)
SOURCE = "dead-man"  # the `source` field of the dead-man's events, and the name of its log
PAUSES_S = (2.0, 15.0, 60.0)  # pause before each restart of the agent; if the last restart fails, the run has failed
FORGET_S = 3600.0  # if the agent dies more than this long after its last restart, the restart count starts at 0 again
GRACE_S = 60.0
# Number of failed attempts to end billing before backoff starts. Early retries are fast: the limit is near.
QUICK_TRIES = 20
# Seconds to wait after the provider accepts a request to end billing. If this process is still running, try again.
AGAIN_S = 20.0
LAST_PUSH_S = 600.0


def start(folder: Folder) -> None:
    """Start the dead-man as a separate process. If one is already running, the new one sees its lock and exits."""
    *command, boot_path = folder.boot.agent_argv
    folder.world.mkdir(folder.run_path(names.LOGS))
    folder.start([*command, "--dead-man", boot_path], SOURCE)


class DeadMan:
    def __init__(self, folder: Folder) -> None:
        self.folder, self.boot, self.world = folder, folder.boot, folder.world
        self.limits = Limits(folder)
        self.tick_s = min(1.0, self.boot.heartbeat_s)
        self._alone_since = -1.0  # monotonic time when the agent was first found dead; negative while it is alive
        # Number of restarts, and boot-clock time of the last restart. Saved to disk for a dead-man that starts later.
        self._restarts = [*self._read_numbers(names.RESTARTS), 0.0, 0.0][:2]

    def run(self) -> None:
        # Number of requests to end billing that have failed in a row. A request that was accepted is not a failure.
        failed = 0
        while True:
            try:
                why = self.why_end()
                if why:
                    self.folder.event("dead_man_ends", why)
                    is_refused = end_billing(self.folder, failed + 1, lambda: self.world.sleep(0.1))
                    failed = failed + 1 if is_refused else 0
                    self.world.sleep(pause_s(max(0, failed - QUICK_TRIES), self.tick_s) if failed else 0.0)
            except Exception:  # an error, such as a full disk, must not take down the last guard on this instance
                log.exception("a dead-man check failed; continuing")
            self.world.sleep(self.tick_s)

    def why_end(self) -> str:
        """Return the reason to end billing now, or "" if there is none. Also restart the agent if it has died."""
        self.limits.follow()
        # Check the limit first, because this function returns early once a request to end billing was accepted.
        if self.limits.left_s(DEAD_MAN) <= 0:
            return f"The {self.limits.nearest()[1]} is near and this instance is still running."
        ended_at = self._read_numbers(names.BILLING_ENDED)[:1]
        if ended_at:
            is_over = abs(self.world.boottime() - ended_at[0]) >= AGAIN_S
            return "The request to end billing was accepted, but this instance is still running." if is_over else ""
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
        """Push the failure reason and everything trained so far, as the agent would have done before ending billing."""
        if self.folder.read(names.OUTCOME, Outcome) is None:
            reason = "The agent on the instance died repeatedly."
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
