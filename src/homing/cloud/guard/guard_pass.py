"""Makes one pass of the local guard, which repeatedly checks all runs in the ledger of this $HOMING_HOME.

    refresh -> per run:  limit near             destroy, later than the agent and dead-man would (wire/guard_timing.py);
                                                for a run adopted by another computer, its new owner's limit applies
                         ended but still bills  destroy
                         dead or preempted      destroy what is left, then relaunch on another offer (relaunch.py)
                         silent                 alert; destroy only an instance that never sent a heartbeat
                         in another account     reported as possibly billing; counted at its maximum cost
            -> report instances that belong to no known run, and retry destroys that were never confirmed

If a store cannot be read, its runs' machines may still be sending heartbeats, so the guard enforces only their limits.
A problem with one run never keeps the pass from checking the others. Several guards may run at the same time:
destroying an instance twice is harmless, only one relaunch succeeds, and the action log (contact/action_log.py) makes
sure that each event is reported once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from decimal import Decimal

from homing.cloud.contact import action_log, heartbeats
from homing.cloud.contact.home_guard import sign_in
from homing.cloud.destroy import end_duplicates
from homing.cloud.guard import relaunch
from homing.cloud.guard.limits_and_destroys import (
    TROUBLE,
    End,
    Pass,
    Terms,
    end_all,
    end_line,
    first_line,
    limits_of,
    owned_by,
    terms_of,
    things_of,
)
from homing.cloud.home import Home
from homing.cloud.launch.draft import waits_for_home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import ADOPTED, LOST, LedgerLine, RunRow
from homing.cloud.ledger.meter import billing_lines, follow_clock
from homing.cloud.providers.base import Instance
from homing.cloud.reconcile.inventory import kept_key
from homing.cloud.reconcile.receipt import left_at_most
from homing.cloud.reconcile.reconcile import refresh, unread
from homing.cloud.reconcile.renting_account import is_elsewhere
from homing.cloud.reconcile.run_status import Status, look
from homing.errors import HomingError, LimitReached, NotOwner, StillBilling
from homing.store import pace_of
from homing.units import format_duration
from homing.wire.guard_timing import GUARD

__all__ = ["DEFAULT_EVERY_S", "Pass", "guard_pass", "wait_for_next"]

DEFAULT_EVERY_S = 60.0
STALE_S = 300.0  # alert if no heartbeat has arrived for this long
DEAD_S = 60.0  # destroy a machine only after homing's processes have been missing from it for this long
LAUNCH_S = 1800.0  # maximum duration of a launch; do not relaunch if another run will reach a limit within this time
_LATE_S = 60.0  # ignore limits that passed longer ago than this, because they have already been handled
_FRESH_S = 1.0  # how long ledger data is reused within a pass
_NAP_S = 60.0

Say = Callable[[str], None]


def guard_pass(
    home: Home,
    *,
    only: str | None = None,
    every_s: float | None = None,
    is_once: bool = False,
    background_pid: int = 0,
    notify: Say = lambda text: None,
) -> Pass:
    """Make one pass and return what it found and did.

    `only` restricts the pass to the run with this id, as `homing watch` does. `every_s`, if given, is the interval
    between passes, and the pass records that this guard is on duty.
    """
    made, notify = Pass(), _unfailing(notify)
    try:
        made.alerts += follow_clock(home)
        made.by = _soonest(home, only)
        made.problems += refresh(home, by=made.by, silent=made.silent, reached=made.reached)
    except TROUBLE as exc:  # for example, the disk is full; the instances in the ledger are still guarded
        made.problems.append(first_line(exc))
    if every_s is not None:
        try:
            sign_in(home, every_s, is_once=is_once, reached=made.reached, background_pid=background_pid)
        except OSError as exc:
            made.problems.append(f"Could not record that this guard is running: {exc}")
    # Runs that another computer has adopted come last, because reading their limits from the store may be slow. Ended
    # runs without open lines are skipped, because there may be thousands.
    runs, within = [run for run in home.ledger.unfinished_runs() if only in (None, run.id)], list[RunRow]()
    for is_given_away in (False, True):
        # Enforce limits before relaunching, because a relaunch takes as long as a launch.
        own = [run for run in runs if (run.state == ADOPTED) is is_given_away]
        lines = home.ledger.lines_of(run.id for run in own)
        within += [run for run in own if _is_well(home, run, lines[run.id], made, notify, _Round.is_within_limit)]
        end_all(home, made)
    read_at = -math.inf
    for number, run in enumerate(within):
        # Read the lines of all runs in one query, because there may be many runs. Read them again if a slow provider or
        # a launch has taken some time.
        if home.world.monotonic() - read_at > _FRESH_S:
            lines = home.ledger.lines_of(each.id for each in within[number:])
            read_at = home.world.monotonic()
        _is_well(home, run, lines[run.id], made, notify, _Round.look)
    if only is None:
        _look_at_the_rest(home, made)
    return made


def _soonest(home: Home, only: str | None) -> float:
    """Return when, according to the ledger, the first run reaches a limit. Providers must answer before that time.

    Storage costs, and limits set by a run's new owner, are unknown until a provider or store answers.
    """
    now, moments = home.world.now(), [math.inf]
    runs = [run for run in home.ledger.unfinished_runs() if only in (None, run.id) and run.state != ADOPTED]
    lines_of = home.ledger.lines_of(run.id for run in runs)
    for run in runs:
        lines = lines_of[run.id]
        if billing_lines(lines):
            with contextlib.suppress(*TROUBLE):  # the limit check itself reports these errors
                limit = None if run.spend_limit_usd is None else Decimal(run.spend_limit_usd)
                time_s = limits_of(home, run).time_s
                moments.append(meter.moment(GUARD, left_at_most(home, lines), limit, time_s, now))
    return min(moment for moment in moments if moment > now - _LATE_S)


def _is_well(
    home: Home, run: RunRow, lines: list[LedgerLine], made: Pass, notify: Say, part: Callable[[_Round], bool]
) -> bool:
    """Run one part of the pass for one run, and record its errors so that they do not affect other runs."""
    try:
        return part(_Round(home, run, lines, made, notify))
    except NotOwner as exc:
        made.problems.append(exc.what)
    except StillBilling as exc:
        made.may_bill.append(f"{run.id}: {exc.why}")
    except TROUBLE as exc:
        made.problems.append(f"{run.id}: {first_line(exc)}")
    return False


def wait_for_next(home: Home, made: Pass, every_s: float) -> None:
    """Sleep for `every_s` seconds until the next pass, or less if a run reaches a limit earlier."""
    now = home.world.now()
    by = min(now + every_s, made.next_at)
    left_s = by - now
    while left_s > _NAP_S:  # time during which the laptop is suspended does not count in sleep(), so check the clock
        home.world.sleep(_NAP_S)
        left_s = min(left_s - _NAP_S, by - home.world.now())
    home.world.sleep(max(0.0, left_s))


def _unfailing(notify: Say) -> Say:
    """Wrap `notify` so that a closed terminal or a full disk cannot keep the guard from destroying instances."""

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            notify(text)

    return say


def _look_at_the_rest(home: Home, made: Pass) -> None:
    """Report our instances that belong to no run, and retry destroys that were requested but not confirmed."""
    lines = [line for line in home.ledger.open_lines() if not line.run_id]
    unknown = [line for line in lines if line.run_name == "?"]  # the user has chosen to keep all the other instances
    for line in unknown:
        where = f"{line.provider} {line.instance_id or line.mark} at {_usd(line.rate_usd_per_hour)}/h"
        made.may_bill.append(f"{where} was created by homing but belongs to no known run. Resolve it: homing reconcile")
    made.may_bill += [
        f"{line.provider} {line.instance_id or line.mark}: its row in the ledger is damaged"
        f" ({', '.join(line.damaged)}), so its limit may not be enforced: homing destroy {line.run_id or line.mark}"
        for line in home.ledger.open_lines()
        if line.damaged and line.created_at is not None
    ]
    waiting = [line for line in home.ledger.unconfirmed() if line not in unknown and line.created_at is not None]
    for line in waiting:
        if home.world.now() >= made.next_at:  # a run has reached a limit, and the next pass handles that first
            made.may_bill.append(f"{line.mark}: the provider has not confirmed that this instance was destroyed.")
            continue
        try:
            end_line(home, line, made)
            made.done.append(f"{line.mark} is gone: the provider has now confirmed that it was destroyed.")
        except StillBilling as exc:
            if not any(line.mark in said for said in made.may_bill):
                made.may_bill.append(f"{line.mark}: {exc.why}")
        except TROUBLE as exc:
            made.may_bill.append(f"{line.mark}: {first_line(exc)}")


class _Round:
    def __init__(self, home: Home, run: RunRow, lines: list[LedgerLine], made: Pass, notify: Say) -> None:
        self.home, self.run, self.lines, self.made, self.notify = home, run, lines, made, notify
        self.billing = billing_lines(self.lines)
        self.now = home.world.now()

    def look(self) -> bool:
        if self.run.state == ADOPTED:
            return True  # only the run's new owner handles missing heartbeats and relaunches
        if self.home.world.now() >= self.made.next_at:
            return True  # a run reached a limit during this pass; the next pass handles that first
        if self.billing and not self.run.is_live:
            self._check_ended()
        elif self.billing:
            self._check_alive()
        self._relaunch()
        return True

    # --- money and time ---

    def is_within_limit(self) -> bool:
        if not self.billing:
            return True
        terms = self._terms()
        limit, time_limit_s = terms.spend_limit_usd, terms.time_limit_s
        storage_rate, storage_usd = self._storage()
        left = None if limit is None else limit - storage_usd
        lines = [*terms.elsewhere, *self._counted()]
        due = meter.moment(GUARD, lines, left, time_limit_s, self.now, storage_rate)
        if self.now < due:
            self.made.next_at = min(self.made.next_at, due)
            self.made.due[self.run.id] = due
            return True
        said = ""
        with contextlib.suppress(*TROUBLE):  # the instance must be destroyed even if its spend cannot be computed
            spend = meter.total_spend(lines, self.now) + storage_usd
            said = f": spent {_usd(spend)} of {_usd(limit)}" if limit is not None else f": spent {_usd(spend)}"
            said += f", {format_duration(time_limit_s)} allowed" if time_limit_s else ""
        self._end(f"The local guard ended the run at its limit{said}.", "limit", code=LimitReached.exit_code)
        return False

    def _counted(self) -> list[LedgerLine]:
        """Return the run's ledger lines, with attempts in a different account counted at their maximum cost."""
        counted = left_at_most(self.home, self.lines)
        for line in self.billing:
            usd = next((each.spend_usd for each in counted if each.mark == line.mark and each.is_at_most), None)
            if usd is not None:
                text = f"{_where(line)} It counts as {_usd(usd)}, the most it can cost."
                self._alert(f"at-most-{line.mark}", text)
        return counted

    def _terms(self) -> Terms:
        terms = terms_of(self.home, self.run, self.lines)
        if terms.problem:
            limit = "none" if terms.spend_limit_usd is None else _usd(terms.spend_limit_usd)
            text = f"Could not read its new owner's limit: {terms.problem} Enforcing the last known limit: {limit}."
            self._alert(f"terms-{int(self.now // 3600)}", text)
        return terms

    def _storage(self) -> tuple[Decimal, Decimal]:
        """Return what this run's volumes cost: dollars per hour, and total dollars to date.

        If a provider does not answer, report it and count its volumes as zero.
        """
        rate, spent, marks = Decimal(0), Decimal(0), {line.mark for line in self.lines}
        for line in {line.provider: line for line in self.billing}.values():
            if line.mark in self.made.silent:
                continue  # this provider has already failed to answer; querying it again would block just as long
            try:
                owned = [each for each in things_of(self.home, line, self.made) if each.mark in marks]
            except TROUBLE as exc:
                self.made.problems.append(f"{self.run.id}: could not list its volumes: {first_line(exc)}")
                continue
            rate += sum((each.rate_usd_per_hour for each in owned), Decimal(0))
            ages = [(each, self.now - (each.created_at or self.now)) for each in owned]
            spent += sum((meter.cost(each.rate_usd_per_hour, age_s) for each, age_s in ages), Decimal(0))
        return rate, spent

    # --- liveness ---

    def _check_ended(self) -> None:
        """Destroy an instance that is still being billed after its run ended, unless it is being kept or is pushing.

        The agent first gets time to destroy the instance itself.
        """
        self.billing = self._here([line for line in self.billing if not self._is_kept(line)])
        if not self.billing:
            return
        waited_s = self.now - (self.run.ended_at or self.now)
        wants_time = self._wants_time()  # call it on every pass, because it records when a new heartbeat was first seen
        if (waited_s > meter.MARGIN_S and not wants_time) or self._waits_for_us():
            # Record that the guard destroys the instance, so that an interrupted run may still be resumed.
            for line in self.billing if self.run.is_interrupted else []:
                self._note(f"lost-{line.mark}", "lost", "The run's remaining resources are destroyed.")
            ago = f"{format_duration(waited_s)} after the run ended ({self.run.state})"
            self._end(f"The local guard ended the instance, which was still billing {ago}.", "late")
            end_all(self.home, self.made)

    def _waits_for_us(self) -> bool:
        line, reports = self.billing[-1], self._status().reports
        return reports is not None and waits_for_home(self.home.provider_of(line), line.mark, reports.heartbeat)

    def _is_kept(self, line: LedgerLine) -> bool:
        """Return True if the user chose in `homing reconcile` to keep the instance. If so, alert once an hour.

        A kept instance is destroyed only when it reaches its limit or when the user destroys it.
        """
        if not action_log.has(self.home, self.run.id, kept_key(line.mark)):
            return False
        spend = _usd(meter.line_spend(line, self.now))
        text = (
            f"{line.mark} is being kept, as you chose in reconcile, and has cost {spend} so far. To end it:"
            f" homing destroy {self.run.id}"
        )
        self._alert(f"kept-{line.mark}-{int(self.now // 3600)}", text)
        return True

    def _wants_time(self) -> bool:
        """Return True if the instance recently reported (by our clock) that it is being kept or is still pushing."""
        status = self._status()
        # No heartbeat is pushed while a large file of the last checkpoint is being uploaded, so an instance without
        # recent heartbeats may still be working.
        longer_s = max(STALE_S, limits_of(self.home, self.run).idle_s)
        if status.reports is None:  # the store cannot be read, but the machine may still be sending heartbeats
            state, quiet_s = heartbeats.last_word(self.home, self.run.id, self.billing[-1].mark)
            return state in ("kept", "pushing") and quiet_s < longer_s
        beat = status.reports.heartbeat
        if beat is None:
            return False
        quiet_s = heartbeats.quiet_s(self.home, self.run.id, beat) or 0.0
        return quiet_s < {"kept": STALE_S, "pushing": longer_s}.get(beat.state, 0.0)

    def _check_alive(self) -> None:
        if any(self.home.world.is_locked(self.home.launch_lock(line.mark)) for line in self.lines):
            return  # the launch in progress cleans up after itself; cleaning up here too could affect its next attempt
        for line in self.billing:
            if line is not self.lines[-1]:
                if self._is_kept(line):
                    continue
                if is_elsewhere(self.home, line):
                    # This instance cannot be destroyed from here, so only report it on every pass. The checks of the
                    # run's current instance continue.
                    self.made.may_bill.append(f"{self.run.id}: {_where(line)}")
                    continue
                # This instance belongs to an earlier attempt, so its end does not change the run's state.
                end_line(self.home, line, self.made)
                said = f"Destroyed {line.instance_id}: another instance has the same name." if line.is_duplicate else ""
                self.made.done.append(f"{self.run.id}: {said or f'{line.mark} appeared again and was destroyed.'}")
                continue
            if line.mark in self.made.silent:
                continue
            self.made.done += [f"{self.run.id}: {text}" for text in end_duplicates(self.home, line, self._owned(line))]
            instance = self._describe(line)
            if instance is not None and instance.state == "preempted":
                self._lose(line, f"{line.provider} took the run's instance away")
            elif instance is not None and instance.billing != "no" and not instance.is_running:
                self._note_dead(line, instance)
        lines = self.home.ledger.lines(self.run.id)
        if not billing_lines(lines):
            return
        status = self._status(lines)
        if status.reports is None:
            self._alert(f"blind-{int(self.now // 3600)}", f"{status.problem} Its limit is still enforced locally.")
        else:
            self._check_heartbeat(status)

    def _owned(self, line: LedgerLine) -> Callable[[], list[Instance]]:
        return lambda: owned_by(self.home, line, self.made)

    def _note_dead(self, line: LedgerLine, instance: Instance) -> None:
        """Alert that no homing process is running on the instance. Destroy it after DEAD_S without a heartbeat.

        The wait is needed because there may briefly be no process while one program hands over to the next.
        """
        status = self._status()
        beat = status.reports.heartbeat if status.reports else None
        key = f"dead-{line.mark}-{beat.t if beat else 0:.0f}"
        self._alert(key, f"The agent is no longer running on {line.mark}: {instance.detail}.")
        seen_at = action_log.when(self.home, self.run.id, key)
        if seen_at is not None and self.now - seen_at >= DEAD_S:
            self._lose(line, "the agent is no longer running on its instance")

    def _check_heartbeat(self, status: Status) -> None:
        """Alert if heartbeats are missing, but destroy an instance only if it has never sent a heartbeat.

        A machine that has sent heartbeats may be disconnected but still working, and its own guards are in a better
        position to judge.
        """
        line, beat = self.billing[-1], status.reports.heartbeat if status.reports else None
        quiet_s = heartbeats.quiet_s(self.home, self.run.id, beat) if beat is not None else None
        if quiet_s is None:  # a heartbeat seen for the first time is dated by its own timestamp only
            quiet_s = self.now - (beat.t if beat is not None else line.created_at or self.now)
        stale_s = STALE_S + 2 * pace_of(self.run.store)
        idle_s = max(limits_of(self.home, self.run).idle_s, stale_s)
        # Conclude that the instance never sent a heartbeat only if the launch is still waiting for the first one.
        # Otherwise, the store may have lost the heartbeat.
        if beat is None and self.run.state == "launching" and quiet_s >= idle_s:
            self._lose(line, f"its instance sent no heartbeat for {format_duration(quiet_s)}")
        elif quiet_s >= idle_s:
            text = (
                f"NO HEARTBEAT for {format_duration(quiet_s)}, and {line.provider} is still billing."
                " The instance is dead or cut off"
            )
            self._alert(f"mute-{line.mark}-{beat.t if beat else 0:.0f}", f"{text}: homing destroy {self.run.id}")
        elif quiet_s >= stale_s:
            text = f"No heartbeat for {format_duration(quiet_s)}: the agent may be dead or cut off. Still billing."
            self._alert(f"stale-{line.mark}-{beat.t if beat else 0:.0f}", text)

    def _relaunch(self) -> None:
        run = self.home.ledger.run(self.run.id) or self.run
        if run.is_live:
            return
        lines = self.home.ledger.lines(run.id)
        if not relaunch.is_wanted(self.home, run, lines):
            return
        others = [at for run_id, at in self.made.due.items() if run_id != run.id]
        if min(others, default=math.inf) - self.now < LAUNCH_S:
            text = "The relaunch is postponed: another run that is close to its limit needs this guard first."
            self._alert(f"waits-{lines[-1].mark}-limit", text)
            return
        try:
            said = relaunch.relaunch(self.home, run, self.notify)
        except StillBilling:
            raise
        except NotOwner as exc:
            self._alert(f"not-ours-{lines[-1].mark}", exc.what)
        except HomingError as exc:
            after = self.home.ledger.run(run.id)
            if after is None or not after.is_live:  # if the run is live, another guard relaunched it first
                self._alert(f"waits-{lines[-1].mark}-{exc.what}", f"Could not relaunch it yet: {exc.what}")
        else:
            if action_log.note(self.home, run.id, f"went-on-{lines[-1].mark}", "guard", said):
                self.made.done.append(f"{run.id}: {said}")

    # --- actions ---

    def _lose(self, line: LedgerLine, why: str) -> None:
        """Destroy what is left of a lost machine and mark the run as lost, so that it resumes from the store."""
        self._note(f"lost-{line.mark}", "lost", f"{why}; the guard is destroying it.")
        end_line(self.home, line, self.made)
        self.home.ledger.set_run(
            self.run.id, only_live=True, state="failed", reason=f"{LOST}{why}", exit_code=1, ended_at=self.now
        )
        self.made.done.append(f"{self.run.id}: the guard destroyed {line.mark}, because {why}.")

    def _end(self, text: str, key: str, code: int | None = None) -> None:
        here = self._here(self.billing)
        if not here and not self.run.is_live:
            return  # already reported, and this key cannot destroy any of its instances
        if not here:
            text += " Its instance is in another account, and only a key of that account can end it."
        ended = {"exit_code": code, "ended_at": self.now} if code is not None else {"ended_at": self.now}
        # Append the decision before reporting it, so that the instance is destroyed even if the report fails.
        self.made.ends.append(End(self.run, here, text, ended))
        marks = "-".join(line.mark for line in self.billing)
        self._note(f"{key}-{marks}", "guard_ends", text)
        self.notify(f"{self.run.id}: {text}")

    def _here(self, lines: list[LedgerLine]) -> list[LedgerLine]:
        """Return the lines whose instances this key can destroy. Report the others as possibly billing."""
        # An unreachable provider does not count as a different account.
        silent = self.made.silent
        here = [
            line for line in lines if line.billing == "yes" or line.mark in silent or not is_elsewhere(self.home, line)
        ]
        self.made.may_bill += [f"{self.run.id}: {_where(line)}" for line in lines if line not in here]
        return here

    def _alert(self, key: str, text: str) -> None:
        if self._note(key, "alert", text):
            self.made.alerts.append(f"{self.run.id}: {text}")

    def _note(self, key: str, kind: str, text: str) -> bool:
        """Add an entry to the action log; return True if it is new.

        If the disk is full, every entry counts as new, because a full disk must not keep the guard from destroying
        billing instances.
        """
        try:
            return action_log.note(self.home, self.run.id, key, kind, text)
        except OSError as exc:
            self.made.problems.append(f"{self.run.id}: could not write to its action log: {exc}")
            return True

    def _status(self, lines: list[LedgerLine] | None = None) -> Status:
        """Return the run's status from its store. `lines` are its attempts, if the caller has just read them.

        A store that did not answer earlier in this pass is not queried again.
        """
        problem = next((text for text in self.made.problems if text.startswith(unread(self.run))), "")
        if not problem:
            return look(self.home, self.run, lines)
        return Status(self.run, self.lines, None, meter.total_spend(self.lines, self.now), None, problem, self.now)

    def _describe(self, line: LedgerLine) -> Instance | None:
        if line.instance_id is None:
            return None
        try:
            return self.home.provider_of(line).describe(line.instance_id)
        except (HomingError, OSError) as exc:
            self.made.problems.append(f"{line.mark} could not be checked: {str(exc).splitlines()[0]}")
            return None


def _where(line: LedgerLine) -> str:
    return f"{line.mark} is in another account, {line.account}, and may be billing."


def _usd(amount: Decimal | str) -> str:
    return meter.show_usd(Decimal(amount))
