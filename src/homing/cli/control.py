"""What the verbs of a run's life share: the home, the run that a person means, and the last look at what bills."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal

from homing.cli import talk
from homing.cli.find_run import find_any, find_run, name_here
from homing.cloud import meter
from homing.cloud.destroy import still_billing
from homing.cloud.home import Home
from homing.cloud.providers.ssh_host import HostKeyUnknown
from homing.config import home as home_path
from homing.errors import HomingError, UsageError
from homing.units import parse_usd
from homing.wire.run import Run
from homing.world import World

__all__ = ["find_any", "find_run", "last_word", "meet_host", "open_home", "parse_limit", "say_problems",
           "still_running", "usd"]  # fmt: skip


@contextmanager
def open_home() -> Iterator[Home]:
    """The home for one verb. What had to be done to read its ledger is said as soon as it is."""
    home = Home(home_path(), World())
    home.ledger.file.tell = lambda text: talk.say(f"warning: {text}")
    yield home


def last_word() -> HomingError | None:
    """Asked for by `main` after every verb: an end that no provider confirmed is said last, and its exit code wins."""
    home = Home(home_path(), World())
    try:
        # What did not end on this computer is shown by `runs`; nobody is charged for it, so it is no alarm.
        lines = [line for line in home.ledger.unconfirmed() if meter.is_charged(line)] if home.has_ledger else []
        return still_billing(home, lines) if lines else None
    except HomingError as exc:  # a ledger that cannot be read: whether something bills is not known
        return exc


def still_running() -> list[str]:
    """For whoever pressed Ctrl-C: each run that goes on all the same, and how to end it."""
    home = Home(home_path(), World())
    try:
        live = home.ledger.live_runs()
    except HomingError:  # said after the verb, by `last_word`
        return []
    return [
        f"{row.name} goes on, as far as is known here. Watch it: homing watch {name_here(row)}"
        f"   End it: homing destroy {name_here(row)}"
        for row in live
    ]


def meet_host(home: Home, run: Run) -> None:
    """First contact with an ssh host: a person compares its fingerprint, once. --yes does not answer this."""
    home.configure(run)
    try:
        home.meet(run)
    except HostKeyUnknown as unknown:
        if not sys.stdin.isatty():
            raise
        talk.say(f"{unknown.what}\n{unknown.why}")
        if not talk.ask("Is this the host's own fingerprint? It is pinned from then on.", yes=False):
            raise
        unknown.host.trust(unknown.line)


def parse_limit(text: str | None, flag: str = "--spend-limit") -> Decimal | None:
    if text is None:
        return None
    try:
        limit = parse_usd(text)
    except ValueError as exc:
        raise UsageError(what=f"{flag}: {exc}.", fix=f"{flag} 12") from exc
    if limit <= 0:
        raise UsageError(what=f"{flag}: a limit of nothing starts nothing.", fix=f"{flag} 12")
    return limit


def usd(amount: Decimal | str) -> str:
    return meter.show_usd(Decimal(amount))


def say_problems(problems: list[str]) -> None:
    for problem in problems:
        talk.say(f"warning: {problem}")
