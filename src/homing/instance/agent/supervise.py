"""The supervisor: takes an instance from the first heartbeat to the end of billing.

    end leftover processes -> bootstrap -> fetch inputs -> train (restart after a crash, obey limits and requests)
    -> outcome -> push -> end billing

The last three steps happen even if an earlier one fails, so that a failed run costs no more than its limit. The trainer
and sync are separate processes. A restarted agent finds leftover ones by the mark in their environment variables."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import signal
from typing import Any, Callable, Dict, List, Optional, Set

from homing.instance.agent import dead_man
from homing.instance.agent import end_billing as end
from homing.instance.agent.folder import Folder
from homing.instance.agent.watchdog import Watchdog
from homing.wire import instance_file_names as names
from homing.wire.control_files import Control, Heartbeat, Request, Use
from homing.wire.event_lines import Outcome
from homing.wire.guard_timing import END, KILL

log = logging.getLogger(__name__)
LOG_OF = {"watch": "sync"}  # role of a child process -> name of its log, if different from the role
# Environment variable with the value <mark>/<role>, set only for the agent's children; a later agent kills only those.
CHILD_ENV = "HOMING_CHILD"
STATES = {names.EXIT_DONE: "done", names.EXIT_STOPPED: "stopped"}
MAX_RESTARTS = 2
PUSH_LIMIT_S = 86400.0  # time limit for the last push if the run has neither a spend limit nor a time limit
BROKEN_PUSH_S = 30.0  # time limit for the last push after a failed bootstrap, when sync may not be installed
GUARD_S, CONTROL_S = 10.0, 15.0  # seconds between checks for a live dead-man, and between updates of control.json
CONTROL_CHANGE_S = 2.0  # control.json is not rewritten if the landing time changed by less than this many seconds
DEAD_MAN_START_S = 5.0


class Agent:
    def __init__(self, folder: Folder) -> None:
        self.folder, self.boot, self.world, self._event = folder, folder.boot, folder.world, folder.event
        self.world.mkdir(folder.run_path(names.LOGS))
        self.dog = Watchdog(folder)
        self.tick_s = min(1.0, self.boot.heartbeat_s)
        self.state, self.problem, self.is_pushed, self.is_leaving = "booting", "", False, False
        self.stop_reason, self.stall, self.is_preempted, self.serial = "", "", False, 0
        # True if another instance holds the run's lease; this instance must then not push anything else to the store
        self.is_superseded = False
        self.children: Dict[str, int] = {}  # role -> pid
        self.watchers: Dict[str, List[str]] = {}  # role -> command to run alongside the trainer
        self._due: Dict[str, float] = {}  # periodic task -> when it is next due
        self._asked_at, self._is_signalled, self.has_dead_man, self._push_limit_s = math.inf, False, False, PUSH_LIMIT_S
        self._last_control: Optional[Control] = None

    def preempt(self, reason: str) -> None:
        """Record a preemption; may run in a signal handler. The main loop reacts to the record within one tick."""
        if self.is_leaving:  # the command that ends billing is running, and it also terminates this process
            raise SystemExit(0)
        self.is_preempted, self.stop_reason = True, self.stop_reason or reason

    def run(self) -> int:
        try:
            outcome = self._train()
        except Exception as exc:
            log.exception("the agent failed")
            outcome = self._outcome(names.EXIT_FAILED, f"The agent failed: {type(exc).__name__}: {exc}")
        # Write the outcome before the first "pushing" heartbeat, after which the user's computer relies on it. Write it
        # again after the child processes have ended, because a trainer that was still running may have overwritten it.
        self.outcome = outcome
        write = self._write_outcome
        for part in (write, self._end_children, write, self._report_outcome, self._push, self._keep, self._say_goodbye):
            try:
                part()
            except Exception:
                log.exception("a shutdown step failed; continuing with the next one")
        self._end_billing()
        return self.outcome.exit_code

    # --- training ---

    def _train(self) -> Outcome:
        # The first heartbeat reports which guards are running, so give the dead-man time to start.
        is_late = self._after(DEAD_MAN_START_S)
        while self.boot.agent_argv and not self._sees_dead_man() and not is_late():
            self.world.sleep(0.1)
        self._beat()
        earlier = self.folder.read(names.OUTCOME, Outcome)
        self._end_leftovers()
        if earlier is not None and earlier.t >= self.boot.started_at and not _is_open(earlier):
            return earlier  # an earlier agent finished training, so only the shutdown is left
        failed = self._bootstrap() if self.boot.bootstrap_argv else None
        if failed is not None:
            return failed
        self.watchers = {"watch": [*self.boot.sync_argv, "--watch"], "lookout": self.boot.lookout_argv}
        self.state = "fetching"
        if not self._sync_until_done("--fetch", self._must_stop, "The inputs could not be fetched"):
            # With missing or wrong inputs, the run would fail on every other machine too, so this outcome is final.
            if self.dog.alarm and not self.is_preempted:
                tail = self.folder.log_tail("sync")
                return self._outcome(names.EXIT_FAILED, self.stop_reason, is_final=True, log_tail=tail)
            return self._outcome(names.EXIT_STOPPED, self.stop_reason)
        self.state, restarts = "training", 0
        while True:
            reached, outcome = self.dog.furthest, self._run_trainer()
            is_fatal = restarts == MAX_RESTARTS or outcome.is_final or self.dog.furthest <= reached
            is_fatal = is_fatal or bool(self.dog.why_unsaved())
            is_ended = outcome.state != "failed" and not _is_open(outcome)
            if is_ended or self.stop_reason or is_fatal:
                return outcome
            restarts += 1
            self._event("trainer_restarted", f"{outcome.reason} Restart {restarts} of {MAX_RESTARTS}.")

    def _bootstrap(self) -> Optional[Outcome]:
        """Run the bootstrap; return None if it succeeded, else the outcome that ends the run."""
        code = self._run_child("bootstrap", self.boot.bootstrap_argv, self._must_stop)
        if code == 0 or self.stop_reason:
            return self._outcome(names.EXIT_STOPPED, self.stop_reason) if self.stop_reason else None
        self._push_limit_s = BROKEN_PUSH_S
        words = f"The bootstrap exited with code {code}. {self.folder.log_tail('bootstrap')}".strip()
        failed = self.folder.read(names.OUTCOME, Outcome) or self._outcome(code, words)
        log.error("%s", failed.reason)
        return failed

    def _end_leftovers(self) -> None:
        """Stop the child processes of an earlier agent that was killed.

        SIGTERM lets the earlier trainer save a checkpoint, from which the new trainer resumes."""
        is_grace_over, is_over = (self._after(self.boot.stop_grace_s + more) for more in (0.0, end.UNKILLABLE_S))
        ended: Set[int] = set()
        while not is_over():
            left = [process.pid for process, _ in self.world.marked(CHILD_ENV, self.boot.mark + "/")]
            is_late = is_grace_over() or self.dog.left_s(KILL) <= 0
            for pid in left if is_late else set(left) - ended:
                self.world.signal(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            ended.update(left)
            if not left:
                break
            self._tick()
        if ended:
            self._event("leftovers_ended", f"Stopped processes {sorted(ended)} of an earlier agent.")

    def _run_trainer(self) -> Outcome:
        """Run the trainer once and return its outcome; the outcome it wrote counts only if it matches the exit code."""
        self.world.remove(self.folder.run_path(names.OUTCOME))
        self.stall, self._asked_at, self._is_signalled, self._last_control = "", math.inf, False, None
        self._control()
        self.dog.begin()
        code = self._run_child("trainer", self.boot.trainer_argv, self._is_grace_over)
        self.dog.read()
        if self.stall and not self.stop_reason and code != names.EXIT_DONE:
            return self._outcome(names.EXIT_FAILED, self.stall)
        if code < 0 and self.stop_reason:
            self._event(
                "trainer_killed",
                f"The trainer was killed by signal {-code}; the run continues from its last checkpoint.",
            )
            code = names.EXIT_STOPPED
        own = self.folder.read(names.OUTCOME, Outcome)
        if own is not None and own.state == STATES.get(code, "failed"):
            return own
        last = self.folder.log_tail("trainer").splitlines()[-1:] if code == names.EXIT_FAILED else []
        words = f"The trainer ended with exit code {code}" + (f": {last[0]}" if last else ".")
        return self._outcome(code, self.stop_reason or words)

    def _must_stop(self) -> bool:
        """Return True if training must stop, and store the first reason found."""
        # Check for a preemption first, so that it is not treated as a limit.
        if self.dog.is_taken and not self.is_superseded:
            self.preempt(self.dog.alarm)
        if not self.stop_reason and not self.stall:
            self.stop_reason = self.dog.why_stop()
            unsaved = "" if self.stop_reason else self.dog.why_unsaved()
            self.stall = "" if self.stop_reason else unsaved or self.dog.why_stalled()
            if unsaved:  # the store is unavailable, so also log to stderr, which the provider collects
                log.error("%s", unsaved)
            if self.stop_reason or self.stall:
                kind = "unsaved" if unsaved else "stalled" if self.stall else "limit_reached"
                use = self.folder.read(names.USE, Use) or Use()
                self._event(kind, self.stop_reason or self.stall, use=use.shares)
        return bool(self.stop_reason or self.stall)

    def _is_grace_over(self) -> bool:
        """If training must stop, ask the trainer to stop, then send SIGTERM; return True when SIGKILL is due."""
        if not self._must_stop() or self.is_superseded:
            return self.is_superseded
        now, why = self.world.monotonic(), self.stop_reason or self.stall
        if math.isinf(self._asked_at):
            self._asked_at = now
            self._event("stop_asked", f"Asking the trainer to save and stop: {why}")
            self._control(is_stop=True, reason=why)
        waited_s, grace_s = now - self._asked_at, self.boot.stop_grace_s
        if not self._is_signalled and (self.is_preempted or waited_s >= grace_s / 2):
            self._is_signalled = self.world.signal(self.children["trainer"], signal.SIGTERM, is_group=True)
        return waited_s >= grace_s or self.dog.left_s(KILL) <= 0

    def _outcome(self, code: int, reason: str, **more: Any) -> Outcome:
        at = (self.dog.metric.phase, self.dog.metric.step) if self.dog.metric else ("", 0)
        return Outcome(STATES.get(code, "failed"), reason, code if code in STATES else 1, *at, self.world.now(), **more)

    # --- shutdown: each part runs even if the others fail ---

    def _end_children(self) -> None:
        self.state = "pushing"
        for role, pid in list(self.children.items()):
            is_late = self._after(self.boot.stop_grace_s if role == "trainer" else 5.0, KILL)
            self.world.signal(pid, signal.SIGTERM, is_group=True)
            end.wait(self.world, pid, is_late, self._tick)
            del self.children[role]

    def _write_outcome(self) -> None:
        self.folder.write(names.OUTCOME, self._amended(self.outcome))

    def _report_outcome(self) -> None:
        final = self._amended(self.outcome)
        if final.is_preempted:
            self._event("preempted", f"{self.stop_reason or final.reason} The run can resume on another instance.")
        elif _is_open(final):
            self._event(
                "interrupted", f"This stop was not requested: {final.reason} The run can resume on another instance."
            )
        self._event(f"run_{final.state}", final.reason, log_tail=final.log_tail)

    def _amended(self, outcome: Outcome) -> Outcome:
        """Return the outcome, adding what the trainer cannot know, such as whether the stop was requested.

        A stop that was not requested is not final, because the run resumes on another instance."""
        is_preempted = (self.is_preempted or outcome.is_preempted) and outcome.state != "done"
        is_asked_stop = outcome.state == "stopped" and bool(self.stop_reason) and not is_preempted
        is_final = outcome.is_final or outcome.state == "done" or is_asked_stop
        tail = (outcome.log_tail or self.folder.log_tail("trainer")) if outcome.state == "failed" else ""
        return dataclasses.replace(outcome, is_final=is_final, is_preempted=is_preempted, log_tail=tail)

    def _push(self) -> None:
        is_late, problem = self._after(self._push_limit_s, END), "The last push is not verified"
        is_tried = self._after(BROKEN_PUSH_S)  # time for one last try if the store refuses every push

        def is_over() -> bool:
            return self.is_superseded or is_late() or (is_tried() and bool(self.dog.why_unsaved()))

        self.is_pushed = self._sync_until_done("--once", is_over, problem)
        if self.is_pushed:
            self._event("pushed", "All results are in the store, verified by reading them back.")
            return
        unsaved = "No time left to push. The newest checkpoint in the store is the one that pushed.json names."
        self._event("ended_unsaved", self.dog.why_unsaved() or unsaved)
        if self.outcome.state == "done" and not self.is_superseded:
            # A run is not done until its model is in the store. The next attempt resumes from the newest checkpoint.
            why = f"The final model could not be verified in the store: {self.dog.why_unsaved() or self.problem}"
            log.error("%s", why)
            self.outcome = self._outcome(names.EXIT_FAILED, why)
            self._write_outcome()
            self._report_outcome()

    def _keep(self) -> None:
        """Keep a failed instance alive for inspection. Its log and outcome are already in the store.

        Any stop request ends this wait."""
        outcome = self.outcome
        if outcome.state != "failed" or self.boot.keep_on_failure_s <= 0 or self.stop_reason:
            return
        self.state, is_late = "kept", self._after(self.boot.keep_on_failure_s, KILL)
        self._event(
            "kept", f"The run failed; the instance is kept for {self.boot.keep_on_failure_s:g} s, within its limit."
        )
        while not is_late() and not self.stop_reason:
            self._tick()
        self._end_children()

    def _say_goodbye(self) -> None:
        """Push a last heartbeat before billing ends, because afterwards the instance no longer exists."""
        # Stay within the limit. But if ending billing failed, push anyway: billing continues, and the user must know.
        spare_s = end.END_TRY_S if self.state == "ending" else min(end.END_TRY_S, self.dog.left_s(END / 2))
        self.state = "ending" if self.state == "ending" else "ended"
        self._beat()
        if spare_s > 0:
            self._sync("--once", self._after(spare_s))

    def _end_billing(self) -> None:
        """Try to end billing until it succeeds. Never give up, or the instance would keep billing without an agent."""
        for tries in itertools.count(1):
            try:
                self.is_leaving = self.boot.end_billing.kind == "command"
                self.problem = end.end_billing(self.folder, tries, self._tick)
                self.is_leaving = False
                if not self.problem:
                    return
                self.state = "ending"
                self._say_goodbye()
            except Exception:
                self.is_leaving = False
                log.exception("ending billing failed; retrying")
            self.world.sleep(end.pause_s(tries, self.tick_s))

    # --- each tick ---

    def _tick(self) -> None:
        self.dog.read()
        self._obey()
        self._check_superseded(self._code_of("watch"))
        is_working = self.state in ("booting", "fetching", "training", "kept")
        if is_working and not self.is_preempted and not self.is_superseded:
            self._look_around()
        if self._is_due("beat", self.boot.heartbeat_s):
            self._beat()
        self.world.sleep(self.tick_s)

    def _is_due(self, what: str, every_s: float) -> bool:
        now = self.world.monotonic()
        if now < self._due.get(what, -math.inf):
            return False
        self._due[what] = now + every_s
        return True

    def _look_around(self) -> None:
        """Check for a preemption notice, update control.json, and restart the dead-man, sync and lookout if needed."""
        if self.dog.is_taken:
            self.preempt(self.dog.alarm)
        if "trainer" in self.children and math.isinf(self._asked_at) and self._is_due("control", CONTROL_S):
            self._control()
        if self.boot.agent_argv and self._is_due("guard", GUARD_S) and not self._sees_dead_man():
            self._event("dead_man_restarted", "The dead-man process is not running; restarting it.")
            dead_man.start(self.folder)
        for role, argv in self.watchers.items():
            is_again = self._code_of(role) is not None
            if argv and (is_again or role not in self.children) and self._is_due(role, 10 * self.tick_s):
                if is_again:
                    log_name = LOG_OF.get(role, role)
                    self._event(f"{log_name}_restarted", f"The {log_name} process exited; restarting it.")
                self._start(role, argv)

    def _sees_dead_man(self) -> bool:
        self.has_dead_man = self.world.is_locked(self.folder.path(names.DEAD_MAN_LOCK))
        return self.has_dead_man

    def _check_superseded(self, code: Optional[int]) -> None:
        if code == names.EXIT_SUPERSEDED and not self.is_superseded:
            self.is_superseded, self.stop_reason = True, "superseded: a newer lease belongs to another instance."

    def _obey(self) -> None:
        request = self.folder.read(names.REQUEST, Request)
        if request is None or request.serial <= self.serial:
            return
        self.serial = request.serial
        asked = request.reason.rstrip(".") or "new limits"
        self._event("request_taken", f"Received request {request.serial}: {asked}.")
        try:
            self.dog.change(request)
            limit = None if self.dog.spend_limit is None else str(self.dog.spend_limit)
            in_force = Request(request.serial, False, "", limit, self.dog.time_limit_s, age_s=self.dog.elapsed_s())
            self.folder.write(names.LIMITS, in_force)
        except ArithmeticError:
            self._event("request_refused", f"Request {request.serial}: invalid amount {request.spend_limit_usd!r}.")
        if request.stop:
            self.stop_reason = self.stop_reason or request.reason or "A stop was requested."
        elif "trainer" in self.children and math.isinf(self._asked_at):
            self._control()

    def _beat(self) -> None:
        boot, dog, metric = self.boot, self.dog, self.dog.metric
        use = self.folder.read(names.USE, Use) or Use()
        fields: Dict[str, Any] = {"problem": self.problem, "is_pushed": self.is_pushed, "use": use.shares}
        fields.update(has_dead_man=self.has_dead_man, time_limit_s=dog.time_limit_s)
        fields.update(trainer_pid=self.children.get("trainer"), last_progress_at=dog.progress_at)
        if metric is not None:
            shown = "phase step num_steps end_step step_s eta_s plan_s loss mfu tokens_per_s"
            fields.update({name: getattr(metric, name) for name in shown.split()})
        head = (self.world.now(), boot.mark, boot.attempt, self.state, boot.started_at, boot.rate_usd_per_hour)
        limit = None if dog.spend_limit is None else str(dog.spend_limit)
        self.folder.write(names.HEARTBEAT, Heartbeat(*head, f"{dog.spend():.6f}", limit, **fields))

    def _control(self, is_stop: bool = False, reason: str = "") -> None:
        """Write control.json for the trainer.

        Set `land_by` from the start, so that the trainer can plan its early end (landing) before time runs out."""
        left_s, name = self.dog.land_s(), self.dog.nearest()[1]
        land_by = None if math.isinf(left_s) else self.world.boottime() + left_s
        known = self._last_control
        if known and not is_stop and land_by and known.land_by and abs(land_by - known.land_by) < CONTROL_CHANGE_S:
            return
        self._last_control = Control(is_stop, reason or f"The {name} is near.", land_by)
        self.folder.write(names.CONTROL, self._last_control)

    # --- children ---

    def _start(self, role: str, argv: List[str]) -> int:
        hidden = [*self.boot.end_billing.header_env.values()]  # only the agent gets the key that ends billing
        hidden += [] if role in ("watch", "sync") else self.boot.secret_names  # only sync gets the store's keys
        env = {**self.boot.env, CHILD_ENV: f"{self.boot.mark}/{role}"}
        self.children[role] = self.folder.start(argv, LOG_OF.get(role, role), hidden, **env)
        return self.children[role]

    def _code_of(self, role: str) -> Optional[int]:
        """Return the exit code of a child that has ended, or None if it is running or was never started."""
        return self.world.poll(self.children[role]) if role in self.children else None

    def _run_child(self, role: str, argv: List[str], is_over: Callable[[], bool]) -> int:
        code = end.wait(self.world, self._start(role, argv), is_over, self._tick)
        # Also kill the processes that the child left behind, because they would still occupy the GPU.
        self.world.signal(self.children.pop(role), signal.SIGKILL, is_group=True)
        return code

    def _after(self, seconds: float, share: Optional[float] = None) -> Callable[[], bool]:
        moment = self.world.monotonic() + seconds
        return lambda: self.world.monotonic() > moment or (share is not None and self.dog.left_s(share) <= 0)

    def _sync(self, flag: str, is_over: Callable[[], bool]) -> int:
        try:
            return self._run_child("sync", [*self.boot.sync_argv, flag], is_over)
        except OSError:
            log.exception("sync could not be started")
            return 127

    def _sync_until_done(self, flag: str, is_over: Callable[[], bool], what: str) -> bool:
        """Run sync until it succeeds, with growing pauses; return False if `is_over` returns True first."""
        tries = 0
        while not is_over():
            code, tries = self._sync(flag, is_over), tries + 1
            self._check_superseded(code)
            self.problem = f"{what} (try {tries}, exit code {code}; logs/sync.log)." if code else ""
            if code == 0:
                return True
            self._event("sync_failed", self.problem)
            is_time = self._after(end.pause_s(tries, self.tick_s))
            while not is_time() and not is_over():
                self._tick()
        return False


def _is_open(outcome: Outcome) -> bool:
    """Return True if the outcome says that the run stopped without a stop request and without a preemption."""
    return outcome.state == "stopped" and not outcome.is_final and not outcome.is_preempted
