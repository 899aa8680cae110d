"""The guard at home: one pass over all runs of this home, again and again, from anywhere that has its ledger.

    refresh -> per run:  limit near             destroy, after agent and dead-man had their turn (wire/limit.py);
                                                also of a run given away: the limit that its new owner holds it to
                         ended and still bills  destroy
                         dead or taken away     destroy what is left, then go on elsewhere (relaunch.py)
                         silent                 alert; destroy only what has never said a word
                         in another account     told as what may bill; it counts as the most that it can cost
            -> what no run knows, and ends that nobody confirmed

A store that cannot be read is not a silent machine: then only the money counts. One run's trouble never keeps the
others from being looked at. Several guards may look at once: destroying twice is destroying once, a relaunch has one
winner, and the diary lets each thing be said once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from decimal import Decimal

from homing.cloud import diary, heard, meter, relaunch
from homing.cloud.clock import follow_clock
from homing.cloud.destroy import end_twins
from homing.cloud.guard_round import TROUBLE, End, Pass, end_all, end_line, owned_by, things_of, told
from homing.cloud.guards import sign_in
from homing.cloud.home import Home
from homing.cloud.ledger import ADOPTED, LOST, LedgerLine, RunRow
from homing.cloud.providers.base import Instance
from homing.cloud.receipt import left_at_most
from homing.cloud.reconcile import refresh, unread
from homing.cloud.status import Status, billing_lines, look
from homing.cloud.survey import kept_key
from homing.cloud.terms import Terms, limits_of, terms_of
from homing.cloud.unattended import waits_for_home
from homing.cloud.whose import is_elsewhere
from homing.errors import HomingError, LimitReached, NotOwner, StillBilling
from homing.store import pace_of
from homing.units import format_duration
from homing.wire.limit import GUARD

__all__ = ["DEFAULT_EVERY_S", "Pass", "guard_pass", "wait_for_next"]

DEFAULT_EVERY_S = 60.0
STALE_S = 300.0  # no heartbeat for so long is worth an alert
DEAD_S = 60.0  # a machine on which nothing of ours runs gets so long to be looked at twice
LAUNCH_S = 1800.0  # as long as a launch may take: no other run's limit may come while this guard is at it
_LATE_S = 60.0  # a limit that passed longer ago is nobody's hurry any more: what was to be done about it was tried
_FRESH_S = 1.0  # for so long what was read of the ledger is believed within a round
_NAP_S = 60.0

Say = Callable[[str], None]


def guard_pass(
    home: Home,
    *,
    only: str | None = None,
    every_s: float | None = None,
    is_once: bool = False,
    background_pid: int = 0,
    tell: Say = lambda text: None,
) -> Pass:
    """One round. `only` is the id of one run, as `watch` asks for; with `every_s` it signs in as a guard on duty."""
    made, tell = Pass(), _unfailing(tell)
    try:
        made.alerts += follow_clock(home)
        made.by = _soonest(home, only)
        made.problems += refresh(home, by=made.by, silent=made.silent, reached=made.reached)
    except TROUBLE as exc:  # a full disk: what is in the ledger is guarded all the same
        made.problems.append(told(exc))
    if every_s is not None:
        try:
            sign_in(home, every_s, is_once=is_once, reached=made.reached, background_pid=background_pid)
        except OSError as exc:
            made.problems.append(f"That this guard is on duty could not be written down: {exc}")
    # What another home owns comes last: what it may cost is read from its store, which may take a while.
    # Runs that have ended for good, with every line closed, need no look: there may be thousands.
    runs, within = [run for run in home.ledger.unfinished_runs() if only in (None, run.id)], list[RunRow]()
    for is_given_away in (False, True):
        # Money first: to go on elsewhere takes as long as a launch.
        own = [run for run in runs if (run.state == ADOPTED) is is_given_away]
        lines = home.ledger.lines_of(run.id for run in own)
        within += [run for run in own if _is_well(home, run, lines[run.id], made, tell, _Round.is_within_limit)]
        end_all(home, made)
    read_at = -math.inf
    for number, run in enumerate(within):
        # Together, for there may be many; again where somebody was waited for, or a launch has taken its minutes.
        if home.world.monotonic() - read_at > _FRESH_S:
            lines = home.ledger.lines_of(each.id for each in within[number:])
            read_at = home.world.monotonic()
        _is_well(home, run, lines[run.id], made, tell, _Round.look)
    if only is None:
        _look_at_the_rest(home, made)
    return made


def _soonest(home: Home, only: str | None) -> float:
    """When a limit needs this guard, by what is written here alone: so long the others may take to answer. What its
    volumes cost, or its new owner allows, is not known before somebody is asked."""
    now, moments = home.world.now(), [math.inf]
    runs = [run for run in home.ledger.unfinished_runs() if only in (None, run.id) and run.state != ADOPTED]
    lines_of = home.ledger.lines_of(run.id for run in runs)
    for run in runs:
        lines = lines_of[run.id]
        if billing_lines(lines):
            with contextlib.suppress(*TROUBLE):  # told when the limit itself is looked at
                limit = None if run.spend_limit_usd is None else Decimal(run.spend_limit_usd)
                time_s = limits_of(home, run).time_s
                moments.append(meter.moment(GUARD, left_at_most(home, lines), limit, time_s, now))
    return min(moment for moment in moments if moment > now - _LATE_S)


def _is_well(
    home: Home, run: RunRow, lines: list[LedgerLine], made: Pass, tell: Say, part: Callable[[_Round], bool]
) -> bool:
    """One part of a round over one run; its trouble is said and is nobody else's."""
    try:
        return part(_Round(home, run, lines, made, tell))
    except NotOwner as exc:
        made.problems.append(exc.what)
    except StillBilling as exc:
        made.may_bill.append(f"{run.id}: {exc.why}")
    except TROUBLE as exc:
        made.problems.append(f"{run.id}: {told(exc)}")
    return False


def wait_for_next(home: Home, made: Pass, every_s: float) -> None:
    """Until the next round: so long, or shorter where a limit comes before that."""
    now = home.world.now()
    by = min(now + every_s, made.next_at)
    left_s = by - now
    while left_s > _NAP_S:  # while a laptop's lid is closed no sleep goes on, and what it waited for may have come
        home.world.sleep(_NAP_S)
        left_s = min(left_s - _NAP_S, by - home.world.now())
    home.world.sleep(max(0.0, left_s))


def _unfailing(tell: Say) -> Say:
    """A terminal that was closed, or a log on a full disk, must keep nobody from ending what bills."""

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            tell(text)

    return say


def _look_at_the_rest(home: Home, made: Pass) -> None:
    """Ends that were asked for and not confirmed are tried again; what carries our mark and has no run is told."""
    lines = [line for line in home.ledger.open_lines() if not line.run_id]
    unknown = [line for line in lines if line.run_name == "?"]  # the others a person has decided to keep
    for line in unknown:
        where = f"{line.provider} {line.instance_id or line.mark} at {_usd(line.rate_usd_per_hour)}/h"
        made.may_bill.append(f"{where} carries our mark and belongs to no run: homing reconcile")
    made.may_bill += [
        f"{line.provider} {line.instance_id or line.mark}: its row in the ledger is damaged"
        f" ({', '.join(line.damaged)}), so its limit may not be held: homing destroy {line.run_id or line.mark}"
        for line in home.ledger.open_lines()
        if line.damaged and line.created_at is not None
    ]
    waiting = [line for line in home.ledger.unconfirmed() if line not in unknown and line.created_at is not None]
    for line in waiting:
        if home.world.now() >= made.next_at:  # the limit of a run has come meanwhile: the next round ends that first
            made.may_bill.append(f"{line.mark}: its end is not confirmed.")
            continue
        try:
            end_line(home, line, made)
            made.done.append(f"{line.mark} is gone; its end was asked for earlier.")
        except StillBilling as exc:
            if not any(line.mark in said for said in made.may_bill):
                made.may_bill.append(f"{line.mark}: {exc.why}")
        except TROUBLE as exc:
            made.may_bill.append(f"{line.mark}: {told(exc)}")


class _Round:
    def __init__(self, home: Home, run: RunRow, lines: list[LedgerLine], made: Pass, tell: Say) -> None:
        self.home, self.run, self.lines, self.made, self.tell = home, run, lines, made, tell
        self.billing = billing_lines(self.lines)
        self.now = home.world.now()

    def look(self) -> bool:
        if self.run.state == ADOPTED:
            return True  # whether it goes on, and what its silence means, is its new owner's to say
        if self.home.world.now() >= self.made.next_at:
            return True  # a limit has come while others were looked at, and the next round ends that first
        if self.billing and not self.run.is_live:
            self._check_ended()
        elif self.billing:
            self._check_alive()
        self._go_on()
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
        with contextlib.suppress(*TROUBLE):  # how much it is must not stand between a run and its end
            spend = meter.total_spend(lines, self.now) + storage_usd
            said = f": spent {_usd(spend)} of {_usd(limit)}" if limit is not None else f": spent {_usd(spend)}"
            said += f", {format_duration(time_limit_s)} allowed" if time_limit_s else ""
        self._end(f"The guard at home ends it at its limit{said}.", "limit", code=LimitReached.exit_code)
        return False

    def _counted(self) -> list[LedgerLine]:
        """What was left in another account as the launch after it counted it, and its agent does."""
        counted = left_at_most(self.home, self.lines)
        for line in self.billing:
            usd = next((each.spend_usd for each in counted if each.mark == line.mark and each.is_at_most), None)
            if usd is not None:
                text = f"{_where(line)} It counts as {_usd(usd)}, the most that it can cost."
                self._alert(f"at-most-{line.mark}", text)
        return counted

    def _terms(self) -> Terms:
        terms = terms_of(self.home, self.run, self.lines)
        if terms.problem:
            limit = "none" if terms.spend_limit_usd is None else _usd(terms.spend_limit_usd)
            text = (
                f"What its new owner allows could not be read: {terms.problem} The last known limit is held: {limit}."
            )
            self._alert(f"terms-{int(self.now // 3600)}", text)
        return terms

    def _storage(self) -> tuple[Decimal, Decimal]:
        """Volumes of this run: dollars per hour, and so far. Not known is said, and counts as nothing until it is."""
        rate, spent, marks = Decimal(0), Decimal(0), {line.mark for line in self.lines}
        for line in {line.provider: line for line in self.billing}.values():
            if line.mark in self.made.silent:
                continue  # told already; to ask it again would only take as long again
            try:
                owned = [each for each in things_of(self.home, line, self.made) if each.mark in marks]
            except TROUBLE as exc:
                self.made.problems.append(f"{self.run.id}: its volumes could not be listed: {told(exc)}")
                continue
            rate += sum((each.rate_usd_per_hour for each in owned), Decimal(0))
            ages = [(each, self.now - (each.created_at or self.now)) for each in owned]
            spent += sum((meter.cost(each.rate_usd_per_hour, age_s) for each, age_s in ages), Decimal(0))
        return rate, spent

    # --- life and death ---

    def _check_ended(self) -> None:
        """The outcome is in the store, so the agent had its time; one that keeps or still pushes tells so itself."""
        self.billing = self._here([line for line in self.billing if not self._is_kept(line)])
        if not self.billing:
            return
        waited_s = self.now - (self.run.ended_at or self.now)
        wants_time = self._wants_time()  # asked on every round: it learns from each
        if (waited_s > meter.MARGIN_S and not wants_time) or self._waits_for_us():
            for line in self.billing if self.run.is_interrupted else []:  # this end is no wish to be done with the run
                self._note(f"lost-{line.mark}", "lost", "What is left of it is destroyed.")
            said = f"{self.run.state} {format_duration(waited_s)} ago and still bills"
            self._end(f"The guard at home ends its machine: it was {said}.", "late")
            end_all(self.home, self.made)

    def _waits_for_us(self) -> bool:
        line, signs = self.billing[-1], self._status().signs
        return signs is not None and waits_for_home(self.home.provider_of(line), line.mark, signs.heartbeat)

    def _is_kept(self, line: LedgerLine) -> bool:
        """By a person, who told `homing reconcile` so: said aloud, and ended by its limit or by that person."""
        if not diary.has(self.home, self.run.id, kept_key(line.mark)):
            return False
        spend = _usd(meter.line_spend(line, self.now))
        text = f"{line.mark} is kept as you told reconcile, {spend} so far: homing destroy {self.run.id}"
        self._alert(f"kept-{line.mark}-{int(self.now // 3600)}", text)
        return True

    def _wants_time(self) -> bool:
        """It keeps or still pushes, and said so lately, by our own clock."""
        status = self._status()
        # While one large file of the last checkpoint travels, no heartbeat does: that is no idleness yet.
        longer_s = max(STALE_S, limits_of(self.home, self.run).idle_s)
        if status.signs is None:  # a store that cannot be read is no silent machine
            state, quiet_s = heard.last_word(self.home, self.run.id, self.billing[-1].mark)
            return state in ("kept", "pushing") and quiet_s < longer_s
        beat = status.signs.heartbeat
        if beat is None:
            return False
        quiet_s = heard.quiet_s(self.home, self.run.id, beat) or 0.0
        return quiet_s < {"kept": STALE_S, "pushing": longer_s}.get(beat.state, 0.0)

    def _check_alive(self) -> None:
        if any(self.home.world.is_locked(self.home.launch_lock(line.mark)) for line in self.lines):
            return  # its launch lives, waits for it and undoes itself; two would undo each other's next attempt
        for line in self.billing:
            if line is not self.lines[-1]:
                if self._is_kept(line):
                    continue
                if is_elsewhere(self.home, line):
                    # Told by every look; not ended from here, and no reason to leave the one that has the run alone.
                    self.made.may_bill.append(f"{self.run.id}: {_where(line)}")
                    continue
                # It was closed before a later one began, which has the run now; this one tells nothing about it.
                end_line(self.home, line, self.made)
                said = f"{line.instance_id} is ended: another has its mark too." if line.is_twin else ""
                self.made.done.append(f"{self.run.id}: {said or f'{line.mark} came back, and is destroyed.'}")
                continue
            if line.mark in self.made.silent:
                continue
            self.made.done += [f"{self.run.id}: {text}" for text in end_twins(self.home, line, self._owned(line))]
            instance = self._describe(line)
            if instance is not None and instance.state == "preempted":
                self._lose(line, f"{line.provider} has taken its machine away")
            elif instance is not None and instance.billing != "no" and not instance.is_running:
                self._note_dead(line, instance)
        lines = self.home.ledger.lines(self.run.id)
        if not billing_lines(lines):
            return
        status = self._status(lines)
        if status.signs is None:
            self._alert(f"blind-{int(self.now // 3600)}", f"{status.problem} Its limit is still guarded from here.")
        else:
            self._check_heartbeat(status)

    def _owned(self, line: LedgerLine) -> Callable[[], list[Instance]]:
        return lambda: owned_by(self.home, line, self.made)

    def _note_dead(self, line: LedgerLine, instance: Instance) -> None:
        """Seen twice without a word between: from one program of ours to the next there may be a moment with none."""
        status = self._status()
        beat = status.signs.heartbeat if status.signs else None
        key = f"dead-{line.mark}-{beat.t if beat else 0:.0f}"
        self._alert(key, f"Nothing of ours runs on {line.mark} any more: {instance.detail}.")
        seen_at = diary.when(self.home, self.run.id, key)
        if seen_at is not None and self.now - seen_at >= DEAD_S:
            self._lose(line, "nothing of ours runs on its machine any more")

    def _check_heartbeat(self, status: Status) -> None:
        """A machine that spoke once may be cut off and at work: its own guards know more, and home only shouts."""
        line, beat = self.billing[-1], status.signs.heartbeat if status.signs else None
        quiet_s = heard.quiet_s(self.home, self.run.id, beat) if beat is not None else None
        if quiet_s is None:  # of one that is new here only its own clock tells how old it is: good enough to shout
            quiet_s = self.now - (beat.t if beat is not None else line.created_at or self.now)
        stale_s = STALE_S + 2 * pace_of(self.run.store)
        idle_s = max(limits_of(self.home, self.run).idle_s, stale_s)
        # Only a launch that never saw a heartbeat proves that there was none: a store may have lost one.
        if beat is None and self.run.state == "launching" and quiet_s >= idle_s:
            self._lose(line, f"its machine has said nothing in {format_duration(quiet_s)}")
        elif quiet_s >= idle_s:
            text = f"NO HEARTBEAT for {format_duration(quiet_s)}, and {line.provider} bills on. It is dead or cut off"
            self._alert(f"mute-{line.mark}-{beat.t if beat else 0:.0f}", f"{text}: homing destroy {self.run.id}")
        elif quiet_s >= stale_s:
            text = f"No heartbeat for {format_duration(quiet_s)}: the agent may be dead or cut off, and it bills."
            self._alert(f"stale-{line.mark}-{beat.t if beat else 0:.0f}", text)

    def _go_on(self) -> None:
        run = self.home.ledger.run(self.run.id) or self.run
        if run.is_live:
            return
        lines = self.home.ledger.lines(run.id)
        if not relaunch.is_wanted(self.home, run, lines):
            return
        others = [at for run_id, at in self.made.due.items() if run_id != run.id]
        if min(others, default=math.inf) - self.now < LAUNCH_S:
            text = "It is launched again when the limit of another run has passed, which needs this guard before that."
            self._alert(f"waits-{lines[-1].mark}-limit", text)
            return
        try:
            said = relaunch.relaunch(self.home, run, self.tell)
        except StillBilling:
            raise
        except NotOwner as exc:
            self._alert(f"not-ours-{lines[-1].mark}", exc.what)
        except HomingError as exc:
            after = self.home.ledger.run(run.id)
            if after is None or not after.is_live:  # otherwise another guard was first
                self._alert(f"waits-{lines[-1].mark}-{exc.what}", f"It could not be launched again yet: {exc.what}")
        else:
            if diary.note(self.home, run.id, f"went-on-{lines[-1].mark}", "guard", said):
                self.made.done.append(f"{run.id}: {said}")

    # --- what is done about it ---

    def _lose(self, line: LedgerLine, why: str) -> None:
        """Its work is in the store; what is left of the machine goes, and the run goes on elsewhere."""
        self._note(f"lost-{line.mark}", "lost", f"{why}; it is destroyed.")
        end_line(self.home, line, self.made)
        self.home.ledger.set_run(
            self.run.id, only_live=True, state="failed", reason=f"{LOST}{why}", exit_code=1, ended_at=self.now
        )
        self.made.done.append(f"{self.run.id}: {why}; {line.mark} is destroyed.")

    def _end(self, text: str, key: str, code: int | None = None) -> None:
        here = self._here(self.billing)
        if not here and not self.run.is_live:
            return  # it was said before, and there is nothing to end from here
        if not here:
            text += " Its machine is in another account: only that account's key ends it."
        ended = {"exit_code": code, "ended_at": self.now} if code is not None else {"ended_at": self.now}
        self.made.ends.append(End(self.run, here, text, ended))  # first: nothing that is said or noted may prevent it
        marks = "-".join(line.mark for line in self.billing)
        self._note(f"{key}-{marks}", "guard_ends", text)
        self.tell(f"{self.run.id}: {text}")

    def _here(self, lines: list[LedgerLine]) -> list[LedgerLine]:
        """Those that can be ended from here. The others are told: no wait and no second try shows them to this key."""
        # One that cannot be asked is not another account's.
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
        """Whether it is news. A full disk must keep nobody from ending what bills: then everything is."""
        try:
            return diary.note(self.home, self.run.id, key, kind, text)
        except OSError as exc:
            self.made.problems.append(f"{self.run.id}: its diary cannot be written: {exc}")
            return True

    def _status(self, lines: list[LedgerLine] | None = None) -> Status:
        """What its store tells. One that did not answer a moment ago is not waited for again in this round. `lines`:
        its attempts, where they were just read."""
        told = next((text for text in self.made.problems if text.startswith(unread(self.run))), "")
        if not told:
            return look(self.home, self.run, lines)
        return Status(self.run, self.lines, None, meter.total_spend(self.lines, self.now), None, told, self.now)

    def _describe(self, line: LedgerLine) -> Instance | None:
        if line.instance_id is None:
            return None
        try:
            return self.home.provider_of(line).describe(line.instance_id)
        except (HomingError, OSError) as exc:
            self.made.problems.append(f"{line.mark} could not be looked at: {str(exc).splitlines()[0]}")
            return None


def _where(line: LedgerLine) -> str:
    return f"{line.mark} is in another account, {line.account}, and may bill."


def _usd(amount: Decimal | str) -> str:
    return meter.show_usd(Decimal(amount))
