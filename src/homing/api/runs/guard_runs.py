"""Enforce limits from the user's computer or a server, in a terminal or in cron. Implements `homing guard`.

check -> Checked -> wait until the next limit is due, at most `every_s` -> check ...

The guard works only while the caller iterates over its results.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from homing.api import notices
from homing.api.lookup.find_runs import open_home
from homing.cloud.contact.home_guard import IDLE_S, is_needed, sign_out
from homing.cloud.guard.guard_pass import DEFAULT_EVERY_S, Pass, guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.errors import HomingError, StillBilling, UsageError
from homing.units import counted

__all__ = ["Checked", "guard_runs"]


@dataclass(frozen=True)
class Checked:
    """What one check did and found."""

    at: float
    found: Pass = field(default_factory=Pass)
    error: HomingError | None = None  # why nothing could be checked; the guard continues

    def to_dict(self) -> dict[str, Any]:
        found = self.found
        return {
            "t": self.at,
            "done": found.done,
            "alerts": found.alerts,
            "problems": found.problems,
            "may_bill": found.may_bill,
        }


def guard_runs(
    *, every_s: float = DEFAULT_EVERY_S, once: bool = False, while_billing: bool = False, home: Home | None = None
) -> Iterator[Checked]:
    """Yield checks that destroy instances at their limit, resume preempted runs and report silent ones.

    By default, the checks never end. `once`: check once, and again if a limit is due within `every_s`; at the end,
    raise StillBilling if a resource that should no longer bill may still be billing. `while_billing`: end when nothing
    has billed for 15 minutes.
    """
    if not 1 <= every_s <= 3600:
        raise UsageError(
            what=f"--every: invalid interval: {every_s:g} s.",
            why="It must be between 1 second and 1 hour.",
            fix="For example: --every 60",
        )
    if once and while_billing:
        raise UsageError(what="--once and --while-billing cannot be combined.", fix="homing guard --while-billing")
    return _checks(home, every_s, once=once, while_billing=while_billing)


def _checks(given: Home | None, every_s: float, *, once: bool, while_billing: bool) -> Iterator[Checked]:
    with open_home(given) as home:
        if once:
            yield from _once(home, every_s)
            return
        if while_billing:
            yield from _while_billing(home, every_s)
            return
        while True:
            checked = _unfailing_check(home, every_s)
            yield checked
            wait_for_next(home, checked.found, every_s)


def _once(home: Home, every_s: float) -> Iterator[Checked]:
    checked = _check(home, every_s, is_once=True)
    yield checked
    if checked.found.next_at - home.world.now() < every_s:
        # The next cron call, in `every_s`, is too late for this limit, so this check waits until the limit is due.
        wait_for_next(home, checked.found, every_s)
        # Do not register again: this is still the same cron call.
        checked = Checked(home.world.now(), guard_pass(home, notify=_say))
        yield checked
    if may_bill := checked.found.may_bill:
        raise StillBilling(
            what=f"{counted(len(may_bill), 'resource')} may still be billing but should not be.",
            why="\n".join(may_bill),
            fix="homing runs   then: homing destroy --all   or: homing reconcile",
        )


def _while_billing(home: Home, every_s: float) -> Iterator[Checked]:
    """Guard until nothing has billed for a while.

    Before ending, unregister the guard, so that no new launch relies on it. Then check once more whether it is needed,
    because a launch may have started to rely on it just before.
    """
    needed_at = home.world.monotonic()
    while True:
        checked = _unfailing_check(home, every_s, background_pid=os.getpid())
        yield checked
        try:
            is_over = not is_needed(home) and home.world.monotonic() - needed_at >= IDLE_S
            if is_over:
                sign_out(home)
            if is_needed(home):
                needed_at = home.world.monotonic()
                is_over = False
        except (HomingError, OSError):  # if the state cannot be read, assume that something is billing
            is_over, needed_at = False, home.world.monotonic()
        if is_over:
            return
        wait_for_next(home, checked.found, every_s)


def _unfailing_check(home: Home, every_s: float, *, background_pid: int = 0) -> Checked:
    try:
        return _check(home, every_s, background_pid=background_pid)
    except HomingError as exc:  # the cause, such as a busy ledger or a full disk, may be gone in a minute
        return Checked(home.world.now(), error=exc)


def _check(home: Home, every_s: float, *, is_once: bool = False, background_pid: int = 0) -> Checked:
    made = guard_pass(home, every_s=every_s, is_once=is_once, background_pid=background_pid, notify=_say)
    return Checked(home.world.now(), made)


def _say(text: str) -> None:
    notices.say(f"  {text}")
