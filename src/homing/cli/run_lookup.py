"""Helpers shared by the verbs that manage runs: open the home, confirm an SSH host, and report what still bills."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal

from homing.cli import output
from homing.cli.find_run import find_any, find_run, name_here
from homing.cloud.destroy import still_billing
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.providers.ssh.machine import HostKeyUnknown
from homing.config import home as home_path
from homing.errors import HomingError, UsageError
from homing.units import parse_usd
from homing.wire.run_json import Run
from homing.world import World

__all__ = ["find_any", "find_run", "last_word", "meet_host", "open_home", "parse_limit", "say_problems",
           "still_running", "usd"]  # fmt: skip


@contextmanager
def open_home() -> Iterator[Home]:
    """Open the home for one verb. Warn immediately if the ledger had to be repaired or recovered."""
    home = Home(home_path(), World())
    home.ledger.file.notify = lambda text: output.say(f"warning: {text}")
    yield home


def last_word() -> HomingError | None:
    """Return the error for instances that no provider confirmed as destroyed; None if there are none.

    `call` asks for it after every verb; the error is printed last and its exit code wins.
    """
    home = Home(home_path(), World())
    try:
        # `runs` shows what did not end on this computer. It is not charged, so it is not an alarm.
        lines = [line for line in home.ledger.unconfirmed() if meter.is_charged(line)] if home.has_ledger else []
        return still_billing(home, lines) if lines else None
    except HomingError as exc:  # an unreadable ledger: whether something bills is unknown
        return exc


def still_running() -> list[str]:
    """After Ctrl-C: return a line for each run that continues, with the command to end it."""
    home = Home(home_path(), World())
    try:
        live = home.ledger.live_runs()
    except HomingError:  # `last_word` reports it after the verb
        return []
    return [
        f"{row.name} is still running, as far as is known. Watch it: homing watch {name_here(row)}"
        f"   End it: homing destroy {name_here(row)}"
        for row in live
    ]


def meet_host(home: Home, run: Run) -> None:
    """On first contact with an ssh host, ask the user to compare its fingerprint.

    --yes does not answer this question.
    """
    home.configure(run)
    try:
        home.meet(run)
    except HostKeyUnknown as unknown:
        if not sys.stdin.isatty():
            raise
        output.say(f"{unknown.what}\n{unknown.why}")
        if not output.ask("Is this the host's fingerprint? It will be pinned.", yes=False):
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
        raise UsageError(what=f"{flag}: the limit must be more than 0.", fix=f"{flag} 12")
    return limit


def usd(amount: Decimal | str) -> str:
    return meter.show_usd(Decimal(amount))


def say_problems(problems: list[str]) -> None:
    for problem in problems:
        output.say(f"warning: {problem}")
