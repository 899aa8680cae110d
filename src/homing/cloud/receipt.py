"""What a machine has cost, written down when nothing of it is left: never less than its provider bills.

    it ended   when the provider says so, else when its agent said goodbye, else when it was seen gone
    it costs   the largest of rate x time, the provider's own figure, the agent's count and what the ledger holds

Where nobody knows when it ended, or whether it ever was, it costs the most that it can have, and the note says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from decimal import Decimal

from homing.cloud import meter
from homing.cloud.ask import ask_store
from homing.cloud.figures import MOST_USD, MOST_USD_PER_HOUR, read_figure
from homing.cloud.guards import can_end_itself
from homing.cloud.home import Home
from homing.cloud.ledger import AT_MOST, REFUSED, RESTORED, LedgerLine
from homing.cloud.providers.base import Doubling, Instance, Remembering
from homing.cloud.signs import read_document
from homing.cloud.whose import is_elsewhere
from homing.errors import HomingError
from homing.store import run_key
from homing.wire import names
from homing.wire.codec import WireError
from homing.wire.control import Heartbeat

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
    """Closes a line whose machine is gone, or was never seen."""
    provider = None
    if instance is None and line.created_at is not None and not _is_refused(home, line):
        provider = home.provider_of(line)
        instance = provider.remember(line.mark) if isinstance(provider, Remembering) else None
    if instance is None and (provider is None or isinstance(provider, Remembering)):
        # Never asked for, or refused, or not among all that its provider ever made: it never was.
        home.ledger.close(line.mark, at=home.world.now(), spend_usd=Decimal(line.spend_usd), note=note)
        return
    _close(home, line, instance, note)


def _is_refused(home: Home, line: LedgerLine) -> bool:
    """By its provider's word, and nobody has spoken from there: what is taken back after a lost answer may have run."""
    if line.state != REFUSED:
        return False
    with contextlib.suppress(HomingError, WireError, OSError):
        return last_beat(home, line) is None
    return True


def _close(home: Home, line: LedgerLine, instance: Instance | None, note: str) -> None:
    line = _as_written(home, line)
    now, rate = _latest(home, line), Decimal(line.rate_usd_per_hour)
    if instance is not None:
        rate = max(rate, _rate_of(instance))  # a cloud may start one dearer than it offered it
    ended_at, heard = instance.ended_at if instance is not None else None, Decimal(0)
    if ended_at is None:
        beat = None
        with contextlib.suppress(HomingError, WireError, OSError):  # blind: then it counts until now
            beat = last_beat(home, line)
        heard = counted(line, beat, home.ledger.lines(line.run_id), now)
        ended_at = _goodbye(home, line, beat, heard, now)
    until = ended_at if ended_at is not None else now
    count = _most_machines(home, line, instance) if ended_at is None else 1
    ours = count * max(meter.cost(rate, until - at) for at in _beginnings(home, line, instance))
    if heard > ours:  # the clock at home was set back: and from its last word to its end it billed too
        ours = heard + meter.cost(rate, meter.MARGIN_S)
    written = Decimal(line.spend_usd)
    seen = written if ended_at is not None else seen_spend(home, line)
    told = their_spend(home, line, instance)[0] if instance is not None else None
    note_bill(home, line.mark, told)
    theirs = told or Decimal(0)
    spend = max(ours, seen, theirs)
    if ended_at is None:
        known = max(written, heard, theirs)  # for so much it is known to have lived
        most = count * most_usd(home, line)
        if line.note.startswith(RESTORED):
            most = min(most, Decimal(line.limit_usd or most))  # its guards held that, as far as anybody knows
            if line.intent_at > now and most.is_finite():
                spend = most  # this clock was set back since, and nothing else tells how long ago it began
        spend = max(known, min(spend, most))
        if spend - known > meter.cost(rate, meter.MARGIN_S):
            note = AT_MOST + note
    home.ledger.close(line.mark, at=min(until, home.world.now()), spend_usd=spend, note=note)


def _most_machines(home: Home, line: LedgerLine, instance: Instance | None) -> int:
    """Under its mark, where nobody saw one: as many as its launch may have asked for."""
    provider = home.provider_of(line)
    return provider.num_creates if instance is None and isinstance(provider, Doubling) else 1


def _latest(home: Home, line: LedgerLine) -> float:
    """Now, by the clock of the home that timed the create call: two computers agree within the margin, or so we take
    it. What the agent has counted is known without either clock."""
    is_own = home.is_ours(line.mark)
    return home.world.now() + (0.0 if is_own else meter.MARGIN_S)


def _beginnings(home: Home, line: LedgerLine, instance: Instance | None) -> list[float]:
    assert line.created_at is not None, line
    began = [line.created_at]
    their_start = instance.created_at if instance is not None and instance.ended_at is not None else None
    # By the clock that tells its end too: ours may be ahead of it by more than the whole life. Not by a month: then it
    # is no time at which this instance began.
    if their_start is not None and line.created_at - their_start <= _MONTH_S:
        began.append(their_start)
    asked_at = home.ledger.destroy_asked_at(line.mark) if instance is None else None
    if asked_at is not None:
        # Its end was wanted after it was asked for: if that reads earlier, the clock was set back meanwhile.
        began.append(asked_at)
    return began


def most_usd(home: Home, line: LedgerLine) -> Decimal:
    """What the provider's own guard lets it cost, which is set in the create call itself. Infinite where none acts
    whatever became of the machine: it is gone, but nobody can say what ended it, or when."""
    run, limit, provider = home.ledger.run(line.run_id), line.limit_usd, home.provider_of(line)
    if run is None or limit is None or not provider.guard or "native_deadline" in provider.cannot:
        return Decimal("Infinity")
    largest, lines = Decimal(limit), home.ledger.lines(run.id)
    if not any(each.attempt > line.attempt for each in lines):
        # As large as it ever was: a limit may have been changed while it lived. One that a later attempt was launched
        # with never was its own.
        largest = max(largest, Decimal(run.spend_limit_usd or limit))
    earlier = [each for each in lines if each.attempt < line.attempt]
    # One that was closed after that launch counted less in it than it does now.
    closed = [each for each in earlier if each.destroyed_at is not None and each.destroyed_at <= line.intent_at]
    return largest - sum((Decimal(each.spend_usd) for each in closed), Decimal(0))


def at_their_most(home: Home, lines: Sequence[LedgerLine]) -> list[LedgerLine]:
    """These lines to count by: one in another account, which nobody here sees end, as if it had cost the most it can.

    A constant, so that a launch, its agent and the guard at home count the same. Where nothing bounds it, or nobody can
    say, it stays as it is: open, at its rate.
    """
    return [_at_its_most(home, line) if _is_open(line) and is_elsewhere(home, line) else line for line in lines]


def left_at_most(home: Home, lines: Sequence[LedgerLine]) -> list[LedgerLine]:
    """The same of a run that lives: what was left open when its last attempt was launched, as that launch counted it.

    That attempt itself counts by its rate, whatever key is set here: it is what the limit is held over.
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
    """Where the ledger tells, nobody is asked: no answer would count two machines where the launch counted one."""
    is_told = line.provider == last.provider and line.account is not None and last.account is not None
    if is_told and line.account != last.account and line.billing != "yes":
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
    """The line of a machine that is shown, at the rate that it is shown at where that is more: written down, because
    not every provider still tells it when the machine is gone."""
    if _rate_of(instance) <= Decimal(line.rate_usd_per_hour):
        return line
    rate = str(instance.rate_usd_per_hour)
    home.ledger.update(line.mark, rate_usd_per_hour=rate)
    return dataclasses.replace(line, rate_usd_per_hour=rate)


def _as_written(home: Home, line: LedgerLine) -> LedgerLine:
    """With what the ledger holds now: somebody may have seen it alive, and dearer, since this line was read."""
    now = next((each for each in home.ledger.lines(line.run_id) if each.mark == line.mark), line)
    spend = str(max(Decimal(line.spend_usd), Decimal(now.spend_usd)))
    rate = str(max(Decimal(line.rate_usd_per_hour), Decimal(now.rate_usd_per_hour)))
    return dataclasses.replace(line, spend_usd=spend, rate_usd_per_hour=rate)


def last_beat(home: Home, line: LedgerLine) -> Heartbeat | None:
    """What the agent of this attempt last said; None where it never spoke. Raises when blind."""
    run = home.ledger.run(line.run_id)
    if run is None or line.created_at is None:
        return None
    name, key = f"The store of {run.id}", run_key(run.id, names.HEARTBEAT)
    beat = ask_store(run.store, lambda: read_document(home.store_of(run), key, Heartbeat), name, home.world)
    return beat if beat is not None and beat.mark == line.mark else None


def counted(line: LedgerLine, beat: Heartbeat | None, lines: Sequence[LedgerLine], now: float) -> Decimal:
    """Dollars of this attempt, of all in `lines`, by its agent's own count, which no clock at home can set back."""
    try:
        told = Decimal(beat.spend_usd if beat is not None else 0)
    except ArithmeticError:  # damaged: a look must not end by it
        told = Decimal(0)
    if not told.is_finite():
        return Decimal(0)
    before = [each for each in lines if each.attempt < line.attempt]
    return max(Decimal(0), told - sum((_told_of(each, line, now) for each in before), Decimal(0)))


def _told_of(earlier: LedgerLine, line: LedgerLine, now: float) -> Decimal:
    """What the agent of `line` counts for an earlier attempt, or more: one that was left open in another account it was
    told at the most that it can cost."""
    spend = meter.line_spend(earlier, now)
    was_open = earlier.destroyed_at is None or earlier.destroyed_at > line.intent_at
    if was_open and earlier.account != line.account and earlier.limit_usd is not None:
        return max(spend, Decimal(earlier.limit_usd))
    return spend


def _goodbye(home: Home, line: LedgerLine, beat: Heartbeat | None, counted_usd: Decimal, now: float) -> float | None:
    """By when a machine that has said goodbye had ended its billing, by its own count; None where none is said.

    Not every provider tells when one ended, or remembers it for long, and a laptop may have been closed for days.
    """
    if beat is None or beat.state != "ended" or not can_end_itself(home.provider_of(line)):
        return None
    if line.note.startswith(RESTORED):
        # An accepted end may take several tries. Who lost the ledger lost with it how long the instance was shown.
        return None
    assert line.created_at is not None, line
    rate = Decimal(line.rate_usd_per_hour)
    # By its clock, and by its dollars, which count what home told it of its age: the larger.
    lived_s = max(0.0, beat.t - beat.started_at, float(counted_usd / rate * 3600) if rate > 0 else 0.0)
    return min(now, line.created_at + lived_s + meter.MARGIN_S)


def seen_spend(home: Home, line: LedgerLine) -> Decimal:
    """What stands in the ledger, and of a process that looks again, never less than has passed before its eyes.

    A clock that is set back takes no dollar back: who looks on, as the guard does, counts by a stop watch and writes it
    down. One look alone writes nothing: its clock may be the one that is wrong.
    """
    spend, at = meter.line_spend(line, home.world.now()), home.world.monotonic()
    before = home.seen_spend.get(line.mark)
    if before is not None:
        spend = max(spend, before[0] + meter.cost(Decimal(line.rate_usd_per_hour), at - before[1]))
    home.seen_spend[line.mark] = (spend, at)
    return Decimal(line.spend_usd) if before is None else spend


def their_spend(home: Home, line: LedgerLine, instance: Instance) -> tuple[Decimal | None, list[str]]:
    """What the provider says it has cost, None where it says nothing that can be right; and what is wrong with it.

    A figure far beyond rate x time is no bill: written down once, it would stand in the ledger for good. What it may
    be above ours: a minimum term, a price that rose, a clock that was set back.
    """
    usd, problems = read_figure(instance.spend_usd, MOST_USD), list(instance.problems)
    if usd is None:
        return None, problems
    rate, now = max(Decimal(line.rate_usd_per_hour), _rate_of(instance)), home.world.now()
    began = [at for at in (line.created_at, instance.created_at) if at is not None]
    ours = meter.cost(rate, now - min(began, default=now))
    most = _TIMES_OURS * ours + meter.cost(rate, _LEAST_TERM_S) + _SMALL_USD
    if rate > 0 and usd > most:
        told, count = meter.show_usd(usd), meter.show_usd(ours)
        problems.append(f"It says {told} so far, and by its rate it can be about {count}: its figure is not counted.")
        return None, problems
    return usd, problems


def _rate_of(instance: Instance) -> Decimal:
    """Checked once more: a rate that is written down stays."""
    return read_figure(instance.rate_usd_per_hour, MOST_USD_PER_HOUR) or Decimal(0)


def note_bill(home: Home, mark: str, usd: Decimal | None) -> None:
    if usd is not None:
        home.ledger.note_bill(mark, usd, home.world.now())
