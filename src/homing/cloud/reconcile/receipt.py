"""Writes the receipt of an instance that is gone. The recorded cost is never less than what the provider bills.

    end time   the provider's; else from the agent's final heartbeat; else when the instance was found to be gone
    cost       the largest of rate x time, the provider's figure, the agent's count and the ledger's figure

If it is unknown when the instance ended, or whether it existed, the receipt shows the most that the instance could have
cost, and the note says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from decimal import Decimal

from homing.cloud.ask_providers import ask_store
from homing.cloud.check_numbers import MOST_USD, MOST_USD_PER_HOUR, read_figure
from homing.cloud.contact.heartbeats import read_document
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import AT_MOST, REFUSED, RESTORED, LedgerLine
from homing.cloud.providers.base import Doubling, Instance, Remembering, can_end_itself
from homing.cloud.reconcile.renting_account import is_elsewhere
from homing.errors import HomingError
from homing.store import run_key
from homing.wire import file_names
from homing.wire.codec import WireError
from homing.wire.control_files import Heartbeat

__all__ = [
    "at_its_rate",
    "at_their_most",
    "counted",
    "last_beat",
    "left_at_most",
    "most_usd",
    "note_bill",
    "receipt",
    "seen_spend",
    "their_spend",
]

_TIMES_OURS, _LEAST_TERM_S, _SMALL_USD = 20, 7 * 86400.0, Decimal(20)
_MONTH_S = 30 * 86400.0


def receipt(home: Home, line: LedgerLine, instance: Instance | None, note: str) -> None:
    """Close the line of an instance that is gone or was never seen, and record its cost."""
    provider = None
    if instance is None and line.created_at is not None and not _is_refused(home, line):
        provider = home.provider_of(line)
        instance = provider.remember(line.mark) if isinstance(provider, Remembering) else None
    if instance is None and (provider is None or isinstance(provider, Remembering)):
        # The instance never existed: it was never requested, it was refused, or a provider that keeps a record of every
        # instance does not know it.
        home.ledger.close(line.mark, at=home.world.now(), spend_usd=Decimal(line.spend_usd), note=note)
        return
    _close(home, line, instance, note)


def _is_refused(home: Home, line: LedgerLine) -> bool:
    """Return True if the provider refused the create call and no heartbeat contradicts the refusal.

    A heartbeat shows that an instance did run. An earlier create call without a response may have created it.
    """
    if line.state != REFUSED:
        return False
    with contextlib.suppress(HomingError, WireError, OSError):
        return last_beat(home, line) is None
    return True


def _close(home: Home, line: LedgerLine, instance: Instance | None, note: str) -> None:
    line = _as_written(home, line)
    now, rate = _latest(home, line), Decimal(line.rate_usd_per_hour)
    if instance is not None:
        rate = max(rate, _rate_of(instance))  # a provider may start an instance at a higher rate than offered
    ended_at, agent_usd = instance.ended_at if instance is not None else None, Decimal(0)
    if ended_at is None:
        beat = None
        # If the store cannot be read, the instance counts as billing until now.
        with contextlib.suppress(HomingError, WireError, OSError):
            beat = last_beat(home, line)
        agent_usd = counted(line, beat, home.ledger.lines(line.run_id), now)
        ended_at = _goodbye(home, line, beat, agent_usd, now)
    until = ended_at if ended_at is not None else now
    count = _most_machines(home, line, instance) if ended_at is None else 1
    ours = count * max(meter.cost(rate, until - at) for at in _beginnings(home, line, instance))
    if agent_usd > ours:  # this computer's clock was set back; the time after the last heartbeat was billed too
        ours = agent_usd + meter.cost(rate, meter.MARGIN_S)
    written = Decimal(line.spend_usd)
    seen = written if ended_at is not None else seen_spend(home, line)
    reported = their_spend(home, line, instance)[0] if instance is not None else None
    note_bill(home, line.mark, reported)
    billed = reported or Decimal(0)
    spend = max(ours, seen, billed)
    if ended_at is None:
        known = max(written, agent_usd, billed)  # cost of the time during which the instance certainly existed
        most = count * most_usd(home, line)
        if line.note.startswith(RESTORED):
            # As far as we know, the instance's guards enforced the limit recorded in its line.
            most = min(most, Decimal(line.limit_usd or most))
            if line.intent_at > now and most.is_finite():
                spend = most  # our clock was set back after the launch, and nothing else shows when billing began
        spend = max(known, min(spend, most))
        if spend - known > meter.cost(rate, meter.MARGIN_S):
            note = AT_MOST + note
    home.ledger.close(line.mark, at=min(until, home.world.now()), spend_usd=spend, note=note)


def _most_machines(home: Home, line: LedgerLine, instance: Instance | None) -> int:
    """Return how many instances may have had this mark. If none was seen, assume as many as the launch allows."""
    provider = home.provider_of(line)
    return provider.num_creates if instance is None and isinstance(provider, Doubling) else 1


def _latest(home: Home, line: LedgerLine) -> float:
    """Return an upper bound on the current time by the clock of the computer that sent the create call.

    The clocks of two computers are assumed to agree within the margin.
    """
    is_own = home.is_ours(line.mark)
    return home.world.now() + (0.0 if is_own else meter.MARGIN_S)


def _beginnings(home: Home, line: LedgerLine, instance: Instance | None) -> list[float]:
    assert line.created_at is not None, line
    began = [line.created_at]
    their_start = instance.created_at if instance is not None and instance.ended_at is not None else None
    # Use the provider's start time too, because it is by the same clock as the end time. Our clock may be ahead of that
    # clock by more than the instance's lifetime. A start time more than a month before ours must be wrong.
    if their_start is not None and line.created_at - their_start <= _MONTH_S:
        began.append(their_start)
    asked_at = home.ledger.destroy_asked_at(line.mark) if instance is None else None
    if asked_at is not None:
        # A destroy request always follows the create call. If its recorded time is earlier, the clock was set back.
        began.append(asked_at)
    return began


def most_usd(home: Home, line: LedgerLine) -> Decimal:
    """Return the most that the instance can cost under the provider's own limit, which is set by the create call.

    The result is infinite if the provider does not enforce a limit in every case, because then nothing bounds how long
    the instance may have billed.
    """
    run, limit, provider = home.ledger.run(line.run_id), line.limit_usd, home.provider_of(line)
    if run is None or limit is None or not provider.guard or "native_deadline" in provider.cannot:
        return Decimal("Infinity")
    largest, lines = Decimal(limit), home.ledger.lines(run.id)
    if not any(each.attempt > line.attempt for each in lines):
        # Use the largest limit that the attempt ever had, because the limit may have changed while it ran. A later
        # attempt's limit never applied to it.
        largest = max(largest, Decimal(run.spend_limit_usd or limit))
    earlier = [each for each in lines if each.attempt < line.attempt]
    # Leave out attempts that were closed after this one was launched: at the launch, their cost was below the final
    # cost that is recorded now.
    closed = [each for each in earlier if each.destroyed_at is not None and each.destroyed_at <= line.intent_at]
    return largest - sum((Decimal(each.spend_usd) for each in closed), Decimal(0))


def at_their_most(home: Home, lines: Sequence[LedgerLine]) -> list[LedgerLine]:
    """Return the lines, with an upper bound on the cost of open instances that no key on this computer can see.

    Their lines are returned as if closed at the maximum cost. The maximum cost is constant, so a launch, its agent and
    the local guard compute the same total. If the cost has no bound, or the provider cannot be queried, the line stays
    open at its rate.
    """
    return [_at_its_most(home, line) if _is_open(line) and is_elsewhere(home, line) else line for line in lines]


def left_at_most(home: Home, lines: Sequence[LedgerLine]) -> list[LedgerLine]:
    """Return a live run's lines, with attempts left open in other accounts shown as closed at their maximum cost.

    The last launch counted those attempts in the same way (`at_their_most`). The last attempt itself counts at its
    rate, regardless of which key is set here, because the limit applies to it.
    """
    return [
        _at_its_most(home, line)
        if _is_open(line) and line.attempt < lines[-1].attempt and _is_apart(home, line, lines[-1])
        else line
        for line in lines
    ]


def _is_open(line: LedgerLine) -> bool:
    return line.destroyed_at is None and line.created_at is not None


def _is_apart(home: Home, line: LedgerLine, last: LedgerLine) -> bool:
    """Return True if the line is in a different account than the last attempt.

    If the ledger contains both accounts, they are compared without querying the provider. If the
    provider had to be queried and did not answer, both machines would count as running, although the launch counted
    only one.
    """
    is_known = line.provider == last.provider and line.account is not None and last.account is not None
    if is_known and line.account != last.account and line.billing != "yes":
        return True
    return is_elsewhere(home, line)


def _at_its_most(home: Home, line: LedgerLine) -> LedgerLine:
    try:
        most = most_usd(home, line)
    except (HomingError, OSError):
        return line
    if not most.is_finite():
        return line
    usd = max(most, Decimal(line.spend_usd))
    return dataclasses.replace(line, destroyed_at=home.world.now(), spend_usd=str(usd), note=AT_MOST + line.note)


def at_its_rate(home: Home, line: LedgerLine, instance: Instance) -> LedgerLine:
    """If the provider reports a higher rate than the line contains, record it. Return the line with the higher rate.

    The rate must be recorded now, because not every provider still reports it once the machine is gone.
    """
    if _rate_of(instance) <= Decimal(line.rate_usd_per_hour):
        return line
    rate = str(instance.rate_usd_per_hour)
    home.ledger.update(line.mark, rate_usd_per_hour=rate)
    return dataclasses.replace(line, rate_usd_per_hour=rate)


def _as_written(home: Home, line: LedgerLine) -> LedgerLine:
    """Return the line, with a higher spend or rate if another process has recorded one in the ledger."""
    now = next((each for each in home.ledger.lines(line.run_id) if each.mark == line.mark), line)
    spend = str(max(Decimal(line.spend_usd), Decimal(now.spend_usd)))
    rate = str(max(Decimal(line.rate_usd_per_hour), Decimal(now.rate_usd_per_hour)))
    return dataclasses.replace(line, spend_usd=spend, rate_usd_per_hour=rate)


def last_beat(home: Home, line: LedgerLine) -> Heartbeat | None:
    """Return this attempt's last heartbeat, or None if it never sent one. Raises if the store cannot be read."""
    run = home.ledger.run(line.run_id)
    if run is None or line.created_at is None:
        return None
    name, key = f"The store of {run.id}", run_key(run.id, file_names.HEARTBEAT)
    beat = ask_store(run.store, lambda: read_document(home.store_of(run), key, Heartbeat), name, home.world)
    return beat if beat is not None and beat.mark == line.mark else None


def counted(line: LedgerLine, beat: Heartbeat | None, lines: Sequence[LedgerLine], now: float) -> Decimal:
    """Return this attempt's cost as counted by its agent, independently of this computer's clock."""
    reported = read_figure(beat.spend_usd, MOST_USD) if beat is not None else None
    if reported is None:  # an implausible figure must neither abort a status check nor become a bill
        return Decimal(0)
    before = [each for each in lines if each.attempt < line.attempt]
    return max(Decimal(0), reported - sum((_counted_before(each, line, now) for each in before), Decimal(0)))


def _counted_before(earlier: LedgerLine, line: LedgerLine, now: float) -> Decimal:
    """Return an upper bound on what the agent of `line` counts as the cost of an earlier attempt.

    If the earlier attempt was left open in a different account, the launch gave the agent the maximum
    cost of that earlier attempt.
    """
    spend = meter.line_spend(earlier, now)
    was_open = earlier.destroyed_at is None or earlier.destroyed_at > line.intent_at
    if was_open and earlier.account != line.account and earlier.limit_usd is not None:
        return max(spend, Decimal(earlier.limit_usd))
    return spend


def _goodbye(home: Home, line: LedgerLine, beat: Heartbeat | None, counted_usd: Decimal, now: float) -> float | None:
    """Return the time by which billing had stopped if the instance reported its own end, otherwise None.

    This is needed because not every provider reports when an instance ended, or keeps that information for as long as
    the user's laptop may be closed.
    """
    if beat is None or beat.state != "ended" or not can_end_itself(home.provider_of(line)):
        return None
    if line.note.startswith(RESTORED):
        # An instance may need several tries to destroy itself. Because the ledger was lost, it is also unknown when the
        # provider last listed the instance.
        return None
    assert line.created_at is not None, line
    rate = Decimal(line.rate_usd_per_hour)
    # Use the longer of two lifetimes: one by the instance's clock, and one derived from the spend that its agent
    # counted. If this computer sent the agent the instance's age, the spend reflects that age.
    lived_s = max(0.0, beat.t - beat.started_at, float(counted_usd / rate * 3600) if rate > 0 else 0.0)
    return min(now, line.created_at + lived_s + meter.MARGIN_S)


def seen_spend(home: Home, line: LedgerLine) -> Decimal:
    """Return the current spend of the instance, but never less than what this process has already observed.

    Setting the clock back must not reduce the spend. A process that checks repeatedly, like the guard, measures the
    time with a monotonic clock. A process's first check returns the ledger's figure, because the clock may be wrong.
    """
    spend, at = meter.line_spend(line, home.world.now()), home.world.monotonic()
    before = home.seen_spend.get(line.mark)
    if before is not None:
        spend = max(spend, before[0] + meter.cost(Decimal(line.rate_usd_per_hour), at - before[1]))
    home.seen_spend[line.mark] = (spend, at)
    return Decimal(line.spend_usd) if before is None else spend


def their_spend(home: Home, line: LedgerLine, instance: Instance) -> tuple[Decimal | None, list[str]]:
    """Return the provider's cost figure (None if missing or implausible), and the problems with it.

    A figure far above rate x time cannot be right, and once recorded, it would stay in the ledger permanently. A
    plausible figure may still exceed ours, because of a minimum term, a price increase or a clock that was set back.
    """
    usd, problems = read_figure(instance.spend_usd, MOST_USD), list(instance.problems)
    if usd is None:
        return None, problems
    rate, now = max(Decimal(line.rate_usd_per_hour), _rate_of(instance)), home.world.now()
    began = [at for at in (line.created_at, instance.created_at) if at is not None]
    ours = meter.cost(rate, now - min(began, default=now))
    most = _TIMES_OURS * ours + meter.cost(rate, _LEAST_TERM_S) + _SMALL_USD
    if rate > 0 and usd > most:
        shown, count = meter.show_usd(usd), meter.show_usd(ours)
        problems.append(
            f"The provider reports a cost of {shown}, but the rate implies about {count}. homing ignores the report."
        )
        return None, problems
    return usd, problems


def _rate_of(instance: Instance) -> Decimal:
    """Return the instance's rate. It is validated again, because a rate stays in the ledger permanently."""
    return read_figure(instance.rate_usd_per_hour, MOST_USD_PER_HOUR) or Decimal(0)


def note_bill(home: Home, mark: str, usd: Decimal | None) -> None:
    if usd is not None:
        home.ledger.note_bill(mark, usd, home.world.now())
