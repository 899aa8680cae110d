"""One round of the guard at home: what it found and did, and how it ends what it has decided to end.

    decided -> side by side over all providers, one try each -> gone: the run is stopped
                                                             -> not confirmed, or the next limit comes: may bill

Nobody is waited for past the next limit: a provider may take minutes to say nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from homing.cloud.ask import ask_all, patience_s
from homing.cloud.destroy import Problem, end_each, still_billing
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine, RunRow
from homing.cloud.providers.base import Instance, Resource
from homing.errors import HomingError
from homing.wire.codec import WireError

__all__ = ["TROUBLE", "End", "Pass", "end_all", "end_line", "things_of", "told"]

DESTROY_S = 60.0

# What a round outlives: besides what fails, words of a provider that nobody knows (its list, its offers, its log), and
# our own mistakes. The others are still guarded.
TROUBLE = (HomingError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclass
class Pass:
    """What one round found and did, in sentences; `next_at` is when a limit will need the next one at the latest."""

    done: list[str] = field(default_factory=list)
    alerts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    may_bill: list[str] = field(default_factory=list)
    next_at: float = math.inf
    due: dict[str, float] = field(default_factory=dict)  # run id -> when its limit will need a guard
    by: float = math.inf  # when a limit needs this very round, as far as that is known before anybody is asked
    ends: list[End] = field(default_factory=list)  # of those at their limit, which are ended at once
    silent: set[str] = field(default_factory=set)  # marks of those whose provider did not answer in this round
    reached: set[str] = field(default_factory=set)  # names of the providers that listed our instances
    things: dict[str, list[Resource] | HomingError | OSError] = field(
        default_factory=dict
    )  # beside instances, by whose
    owned: dict[str, list[Instance]] = field(default_factory=dict)  # instances, likewise


@dataclass(frozen=True)
class End:
    """That a run's machines end was decided; `lines` are those that can be destroyed from here."""

    run: RunRow
    lines: list[LedgerLine]
    text: str
    columns: dict[str, Any]  # of the run, once they are gone


def end_all(home: Home, made: Pass) -> None:
    """Those at their limits, side by side: a machine that does not go keeps no other past its own."""
    ends, made.ends = made.ends, []
    if not ends:
        return
    problems: Mapping[str, Problem] = {}
    try:
        problems = _end_each(home, [line for end in ends for line in end.lines], made)
    except TROUBLE as exc:
        made.problems.append(told(exc))
    for end in ends:
        try:
            _conclude(home, end, made, problems)
        except TROUBLE as exc:
            made.problems.append(f"{end.run.id}: {told(exc)}")


def end_line(home: Home, line: LedgerLine, made: Pass) -> None:
    problems = _end_each(home, [line], made)
    if problems:
        raise still_billing(home, [line], problems)


def things_of(home: Home, line: LedgerLine, made: Pass) -> list[Resource]:
    """Volumes and the like of whoever has this line; asked once in a round, however many runs want to know."""
    whose = line.provider if home.is_ours(line.mark) else line.mark
    if whose not in made.things:
        provider, patience = home.provider_of(line), patience_s(home.world, made.by)
        made.things[whose] = ask_all({provider.name: provider.list_resources}, home.world, patience)[provider.name]
    answer = made.things[whose]
    if isinstance(answer, (HomingError, OSError)):
        raise answer
    return answer


def owned_by(home: Home, line: LedgerLine, made: Pass) -> list[Instance]:
    """Instances of whoever has this line; listed once in a round, however many runs want to know."""
    whose = line.provider if home.is_ours(line.mark) else line.mark
    if whose not in made.owned:
        made.owned[whose] = home.provider_of(line).list_owned()
    return made.owned[whose]


def _end_each(home: Home, lines: list[LedgerLine], made: Pass) -> dict[str, Problem]:
    """Not waited for longer than the next limit allows: a provider may take minutes to say nothing."""
    return end_each(home, lines, deadline_s=DESTROY_S, by=made.next_at)


def _conclude(home: Home, end: End, made: Pass, problems: Mapping[str, Problem]) -> None:
    """The run is over either way: what is confirmed a moment later must not look as if it had ended by itself. Machines
    that are left are tried again in every round."""
    marks, left = [line.mark for line in end.lines], end.lines
    with contextlib.suppress(HomingError):  # without the ledger nobody knows that they are gone
        left = [line for line in home.ledger.lines(end.run.id) if line.mark in marks and line.destroyed_at is None]
    if left:
        made.may_bill.append(f"{end.run.id}: {still_billing(home, left, problems).why}")
    home.ledger.set_run(end.run.id, only_live=True, state="stopped", reason=end.text, **end.columns)
    if not left:
        made.done.append(f"{end.run.id}: {end.text}")


def told(exc: Exception) -> str:
    is_ours = isinstance(exc, (HomingError, WireError, OSError))
    return ((str(exc) if is_ours else f"{type(exc).__name__}: {exc}") or type(exc).__name__).splitlines()[0]
