"""The life of an instance, from the first heartbeat to the end of billing.

    end leftovers -> furnish -> fetch inputs -> train (restart a crash, obey limits and requests)
    -> outcome -> push -> end billing

Whatever fails on the way, the last three still happen: a failure is an outcome too, and costs no more than its limit.
Trainer and sync are processes of their own, found again by their mark after this agent was killed and restarted.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import signal
from typing import Any, Callable, Dict, List, Optional, Set

from homing.agent import dead_man, end
from homing.agent.folder import Folder
from homing.agent.watchdog import Watchdog
from homing.wire import instance as names
from homing.wire.control import Control, Heartbeat, Request, Use
from homing.wire.event import Outcome
from homing.wire.limit import END, KILL

log = logging.getLogger(__name__)
LOG_OF = {"watch": "sync"}  # role -> the name of its log, where they differ
CHILD_ENV = "HOMING_CHILD"  # <mark>/<role>, on the agent's own children only: what a later agent may end
STATES = {names.EXIT_DONE: "done", names.EXIT_STOPPED: "stopped"}
MAX_RESTARTS = 2
PUSH_LIMIT_S = 86400.0  # where neither money nor time is limited
BROKEN_PUSH_S = 30.0  # after a failed bootstrap: what pushes may not be there
GUARD_S, CONTROL_S = 10.0, 15.0  # how often each is looked at
CONTROL_CHANGE_S = 2.0  # a landing time that moved by less is not written anew
DEAD_MAN_START_S = 5.0


class Agent:
    def __init__(self, folder: Folder) -> None:
        self.folder, self.boot, self.world, self._event = folder, folder.boot, folder.world, folder.event
        self.world.mkdir(folder.run_path(names.LOGS))
        self.dog = Watchdog(folder)
        self.tick_s = min(1.0, self.boot.heartbeat_s)
        self.state, self.problem, self.is_pushed, self.is_leaving = "booting", "", False, False
        self.stop_reason, self.stall, self.is_preempted, self.serial = "", "", False, 0
        self.is_superseded = False  # another instance has the run's lease: nothing of ours may reach the store
        self.children: Dict[str, int] = {}  # role -> pid
        self.watchers: Dict[str, List[str]] = {}  # role -> what goes on beside the trainer, once it can be started
        self._due: Dict[str, float] = {}  # what is done every so often -> when next
        self._asked_at, self._is_told, self.has_dead_man, self._push_limit_s = math.inf, False, False, PUSH_LIMIT_S
        self._told_control: Optional[Control] = None

    def preempt(self, reason: str) -> None:
        """From a signal handler: only remembers; the loop acts on it within a tick."""
        if self.is_leaving:  # the command that ends billing is at work, and we are among the processes it ends
            raise SystemExit(0)
        self.is_preempted, self.stop_reason = True, self.stop_reason or reason

    def run(self) -> int:
        try:
            outcome = self._train()
        except Exception as exc:
            log.exception("the agent failed")
            outcome = self._outcome(names.EXIT_FAILED, f"The agent failed: {type(exc).__name__}: {exc}")
        # Written before the first heartbeat that says "pushing", from which on home believes what it reads; and again
        # after the children, for a trainer that this agent could not wait for may have written its own.
        self.outcome = outcome
        write = self._write_outcome
        for part in (write, self._end_children, write, self._tell_outcome, self._push, self._keep, self._say_goodbye):
            try:
                part()
            except Exception:
                log.exception("the end goes on without this part")
        self._end_billing()
        return self.outcome.exit_code

    # --- training ---

    def _train(self) -> Outcome:
        # The first heartbeat tells home which guards live, so the second one gets its moment to start.
        is_late = self._after(DEAD_MAN_START_S)
        while self.boot.agent_argv and not self._sees_dead_man() and not is_late():
            self.world.sleep(0.1)
        self._beat()
        earlier = self.folder.read(names.OUTCOME, Outcome)
        self._end_leftovers()
        if earlier is not None and earlier.t >= self.boot.started_at and not _is_open(earlier):
            return earlier  # an agent before us got that far; only the end is left to do
        failed = self._furnish() if self.boot.furnish_argv else None
        if failed is not None:
            return failed
        self.watchers = {"watch": [*self.boot.sync_argv, "--watch"], "lookout": self.boot.lookout_argv}
        self.state = "fetching"
        if not self._sync_until_done("--fetch", self._must_stop, "The inputs could not be fetched"):
            if self.dog.alarm and not self.is_preempted:  # what is missing or wrong there is so for every other machine
                tail = self.folder.log_tail("sync")
                return self._outcome(names.EXIT_FAILED, self.stop_reason, is_final=True, log_tail=tail)
            return self._outcome(names.EXIT_STOPPED, self.stop_reason)
        self.state, restarts = "training", 0
        while True:
            reached, outcome = self.dog.furthest, self._run_trainer()
            is_hopeless = restarts == MAX_RESTARTS or outcome.is_final or self.dog.furthest <= reached
            is_hopeless = is_hopeless or bool(self.dog.why_unsaved())
            is_ended = outcome.state != "failed" and not _is_open(outcome)
            if is_ended or self.stop_reason or is_hopeless:
                return outcome
            restarts += 1
            self._event("trainer_restarted", f"{outcome.reason} Restart {restarts} of {MAX_RESTARTS}.")

    def _furnish(self) -> Optional[Outcome]:
        """How the run ends if this machine cannot train."""
        code = self._run_child("bootstrap", self.boot.furnish_argv, self._must_stop)
        if code == 0 or self.stop_reason:
            return self._outcome(names.EXIT_STOPPED, self.stop_reason) if self.stop_reason else None
        self._push_limit_s = BROKEN_PUSH_S
        words = f"The bootstrap ended with {code}. {self.folder.log_tail('bootstrap')}".strip()
        failed = self.folder.read(names.OUTCOME, Outcome) or self._outcome(code, words)
        log.error("%s", failed.reason)
        return failed

    def _end_leftovers(self) -> None:
        """Children of an agent that was killed. SIGTERM lets a trainer save; ours then goes on from there."""
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
            self._event("leftovers_ended", f"Processes {sorted(ended)} of an earlier agent here were told to end.")

    def _run_trainer(self) -> Outcome:
        """One life of the trainer, told in its own words where it left some that fit its exit code."""
        self.world.remove(self.folder.run_path(names.OUTCOME))
        self.stall, self._asked_at, self._is_told, self._told_control = "", math.inf, False, None
        self._control()
        self.dog.begin()
        code = self._run_child("trainer", self.boot.trainer_argv, self._is_grace_over)
        self.dog.read()
        if self.stall and not self.stop_reason and code != names.EXIT_DONE:
            return self._outcome(names.EXIT_FAILED, self.stall)
        if code < 0 and self.stop_reason:
            self._event("trainer_killed", f"The trainer was ended by signal {-code}; its last checkpoint counts.")
            code = names.EXIT_STOPPED
        own = self.folder.read(names.OUTCOME, Outcome)
        if own is not None and own.state == STATES.get(code, "failed"):
            return own
        last = self.folder.log_tail("trainer").splitlines()[-1:] if code == names.EXIT_FAILED else []
        words = f"The trainer ended with {code}" + (f": {last[0]}" if last else ".")
        return self._outcome(code, self.stop_reason or words)

    def _must_stop(self) -> bool:
        """Looks at every limit, once and for all: what is found stays the reason."""
        if self.dog.is_taken and not self.is_superseded:  # before its words are taken for those of a limit
            self.preempt(self.dog.alarm)
        if not self.stop_reason and not self.stall:
            self.stop_reason = self.dog.why_stop()
            unsaved = "" if self.stop_reason else self.dog.why_unsaved()
            self.stall = "" if self.stop_reason else unsaved or self.dog.why_stalled()
            if unsaved:  # also to where the provider looks: the store is the way that is closed
                log.error("%s", unsaved)
            if self.stop_reason or self.stall:
                kind = "unsaved" if unsaved else "stalled" if self.stall else "limit_reached"
                use = self.folder.read(names.USE, Use) or Use()
                self._event(kind, self.stop_reason or self.stall, use=use.shares)
        return bool(self.stop_reason or self.stall)

    def _is_grace_over(self) -> bool:
        """Asks the trainer to stop when it must, then insists; True when only SIGKILL is left."""
        if not self._must_stop() or self.is_superseded:
            return self.is_superseded
        now, why = self.world.monotonic(), self.stop_reason or self.stall
        if math.isinf(self._asked_at):
            self._asked_at = now
            self._event("stop_asked", f"The trainer is asked to save and stop: {why}")
            self._control(is_stop=True, reason=why)
        waited_s, grace_s = now - self._asked_at, self.boot.stop_grace_s
        if not self._is_told and (self.is_preempted or waited_s >= grace_s / 2):
            self._is_told = self.world.signal(self.children["trainer"], signal.SIGTERM, is_group=True)
        return waited_s >= grace_s or self.dog.left_s(KILL) <= 0

    def _outcome(self, code: int, reason: str, **more: Any) -> Outcome:
        at = (self.dog.metric.phase, self.dog.metric.step) if self.dog.metric else ("", 0)
        return Outcome(STATES.get(code, "failed"), reason, code if code in STATES else 1, *at, self.world.now(), **more)

    # --- the end: each part goes on without the others ---

    def _end_children(self) -> None:
        self.state = "pushing"
        for role, pid in list(self.children.items()):
            is_late = self._after(self.boot.stop_grace_s if role == "trainer" else 5.0, KILL)
            self.world.signal(pid, signal.SIGTERM, is_group=True)
            end.wait(self.world, pid, is_late, self._tick)
            del self.children[role]

    def _write_outcome(self) -> None:
        self.folder.write(names.OUTCOME, self._amended(self.outcome))

    def _tell_outcome(self) -> None:
        told = self._amended(self.outcome)
        if told.is_preempted:
            self._event("preempted", f"{self.stop_reason or told.reason} The run can go on elsewhere.")
        elif _is_open(told):
            self._event("interrupted", f"Nobody asked for this stop: {told.reason} The run can go on elsewhere.")
        self._event(f"run_{told.state}", told.reason, log_tail=told.log_tail)

    def _amended(self, outcome: Outcome) -> Outcome:
        """With what the trainer cannot know: whether anybody asked for the stop. One that nobody asked for is not
        final: the run goes on elsewhere."""
        is_preempted = (self.is_preempted or outcome.is_preempted) and outcome.state != "done"
        is_asked_stop = outcome.state == "stopped" and bool(self.stop_reason) and not is_preempted
        is_final = outcome.is_final or outcome.state == "done" or is_asked_stop
        tail = (outcome.log_tail or self.folder.log_tail("trainer")) if outcome.state == "failed" else ""
        return dataclasses.replace(outcome, is_final=is_final, is_preempted=is_preempted, log_tail=tail)

    def _push(self) -> None:
        is_late, problem = self._after(self._push_limit_s, END), "The last push is not verified"
        is_tried = self._after(BROKEN_PUSH_S)  # a store that refuses for good is tried a last time, not to the limit

        def is_over() -> bool:
            return self.is_superseded or is_late() or (is_tried() and bool(self.dog.why_unsaved()))

        self.is_pushed = self._sync_until_done("--once", is_over, problem)
        if self.is_pushed:
            self._event("pushed", "Everything worth keeping is in the store, verified by reading it back.")
            return
        unsaved = "No time is left to push: only what pushed.json names is in the store."
        self._event("ended_unsaved", self.dog.why_unsaved() or unsaved)
        if self.outcome.state == "done" and not self.is_superseded:
            # Not done: nobody could fetch it. Another attempt goes on from the newest checkpoint in the store.
            why = f"The final model could not be verified in the store: {self.dog.why_unsaved() or self.problem}"
            log.error("%s", why)
            self.outcome = self._outcome(names.EXIT_FAILED, why)
            self._write_outcome()
            self._tell_outcome()

    def _keep(self) -> None:
        """For a person to look at; log and outcome are in the store by now. Any wish to stop ends it."""
        outcome = self.outcome
        if outcome.state != "failed" or self.boot.keep_on_failure_s <= 0 or self.stop_reason:
            return
        self.state, is_late = "kept", self._after(self.boot.keep_on_failure_s, KILL)
        self._event("kept", f"It failed and stays for {self.boot.keep_on_failure_s:g} s, inside its limit.")
        while not is_late() and not self.stop_reason:
            self._tick()
        self._end_children()

    def _say_goodbye(self) -> None:
        """The last heartbeat must be in the store before billing ends: afterwards there is no machine to send it."""
        # Inside the limit, unless ending has failed: then money goes anyway, and home must hear of it.
        spare_s = end.END_TRY_S if self.state == "ending" else min(end.END_TRY_S, self.dog.left_s(END / 2))
        self.state = "ending" if self.state == "ending" else "ended"
        self._beat()
        if spare_s > 0:
            self._sync("--once", self._after(spare_s))

    def _end_billing(self) -> None:
        """Until it worked, for ever: an agent that gives up leaves a machine that bills and nobody on it."""
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
                log.exception("ending billing failed and is tried again")
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
        """A notice that the machine will be taken, the other guard, and those who watch beside us."""
        if self.dog.is_taken:
            self.preempt(self.dog.alarm)
        if "trainer" in self.children and math.isinf(self._asked_at) and self._is_due("control", CONTROL_S):
            self._control()
        if self.boot.agent_argv and self._is_due("guard", GUARD_S) and not self._sees_dead_man():
            self._event("dead_man_restarted", "The dead-man is not there and is started again.")
            dead_man.start(self.folder)
        for role, argv in self.watchers.items():
            is_again = self._code_of(role) is not None
            if argv and (is_again or role not in self.children) and self._is_due(role, 10 * self.tick_s):
                if is_again:
                    log_name = LOG_OF.get(role, role)
                    self._event(f"{log_name}_restarted", f"The {log_name} process ended and is started again.")
                self._start(role, argv)

    def _sees_dead_man(self) -> bool:
        self.has_dead_man = self.world.is_locked(self.folder.path(names.DEAD_MAN_LOCK))
        return self.has_dead_man

    def _check_superseded(self, code: Optional[int]) -> None:
        if code == names.EXIT_SUPERSEDED and not self.is_superseded:
            self.is_superseded, self.stop_reason = True, "superseded: a newer lease names another instance."

    def _obey(self) -> None:
        request = self.folder.read(names.REQUEST, Request)
        if request is None or request.serial <= self.serial:
            return
        self.serial = request.serial
        asked = request.reason.rstrip(".") or "new limits"
        self._event("request_taken", f"Request {request.serial} from home: {asked}.")
        try:
            self.dog.change(request)
            limit = None if self.dog.spend_limit is None else str(self.dog.spend_limit)
            told = Request(request.serial, False, "", limit, self.dog.time_limit_s, age_s=self.dog.elapsed_s())
            self.folder.write(names.LIMITS, told)
        except ArithmeticError:
            self._event("request_refused", f"Request {request.serial}: {request.spend_limit_usd!r} is no amount.")
        if request.stop:
            self.stop_reason = self.stop_reason or request.reason or "A stop was asked for from home."
        elif "trainer" in self.children and math.isinf(self._asked_at):
            self._control()

    def _beat(self) -> None:
        boot, dog, metric = self.boot, self.dog, self.dog.metric
        use = self.folder.read(names.USE, Use) or Use()
        told: Dict[str, Any] = {"problem": self.problem, "is_pushed": self.is_pushed, "use": use.shares}
        told.update(has_dead_man=self.has_dead_man, time_limit_s=dog.time_limit_s)
        told.update(trainer_pid=self.children.get("trainer"), last_progress_at=dog.progress_at)
        if metric is not None:
            shown = "phase step num_steps end_step step_s eta_s plan_s loss mfu tokens_per_s"
            told.update({name: getattr(metric, name) for name in shown.split()})
        head = (self.world.now(), boot.mark, boot.attempt, self.state, boot.started_at, boot.rate_usd_per_hour)
        limit = None if dog.spend_limit is None else str(dog.spend_limit)
        self.folder.write(names.HEARTBEAT, Heartbeat(*head, f"{dog.spend():.6f}", limit, **told))

    def _control(self, is_stop: bool = False, reason: str = "") -> None:
        """land_by from the first moment: a landing is planned from the start, not when time runs out."""
        left_s, name = self.dog.land_s(), self.dog.nearest()[1]
        land_by = None if math.isinf(left_s) else self.world.boottime() + left_s
        known = self._told_control
        if known and not is_stop and land_by and known.land_by and abs(land_by - known.land_by) < CONTROL_CHANGE_S:
            return
        self._told_control = Control(is_stop, reason or f"The {name} is near.", land_by)
        self.folder.write(names.CONTROL, self._told_control)

    # --- children ---

    def _start(self, role: str, argv: List[str]) -> int:
        hidden = [*self.boot.end_billing.header_env.values()]  # the key that ends billing is the agent's alone
        hidden += [] if role in ("watch", "sync") else self.boot.secret_names  # nobody else reaches the store
        env = {**self.boot.env, CHILD_ENV: f"{self.boot.mark}/{role}"}
        self.children[role] = self.folder.start(argv, LOG_OF.get(role, role), hidden, **env)
        return self.children[role]

    def _code_of(self, role: str) -> Optional[int]:
        """Of a child that has ended; None while it runs or was never started."""
        return self.world.poll(self.children[role]) if role in self.children else None

    def _run_child(self, role: str, argv: List[str], is_over: Callable[[], bool]) -> int:
        code = end.wait(self.world, self._start(role, argv), is_over, self._tick)
        # What it started and left behind would hold the card against the next one.
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
        """Tries again, waiting longer each time; False when `is_over` came first."""
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
    """A stop of which nobody has said that it was asked for: the trainer's own word, before an agent has amended it."""
    return outcome.state == "stopped" and not outcome.is_final and not outcome.is_preempted
