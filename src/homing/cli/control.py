"""What the verbs of a run's life share: the home, the run that a person means, and the last look at what bills."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

from homing.cli import talk
from homing.cloud import meter
from homing.cloud.destroy import still_billing
from homing.cloud.home import Home
from homing.cloud.ledger import RunRow
from homing.cloud.providers.ssh_host import HostKeyUnknown
from homing.config import home as home_path
from homing.config import run_files, typed_name
from homing.config.paths import RUN_SUFFIXES
from homing.config.source import read_source
from homing.errors import HomingError, UsageError
from homing.units import parse_usd
from homing.wire.run import Run
from homing.world import World

__all__ = ["find_run", "last_word", "meet_host", "named_as_typed", "open_home", "parse_limit", "say_problems", "usd"]


@contextmanager
def open_home() -> Iterator[Home]:
    """The home for one verb."""
    yield Home(home_path(), World())


def last_word() -> HomingError | None:
    """Asked for by `main` after every verb: an end that no provider confirmed is said last, and its exit code wins."""
    home = Home(home_path(), World())
    try:
        lines = home.ledger.unconfirmed() if home.world.exists(home.path / "ledger.sqlite") else []
        return still_billing(home, lines) if lines else None
    except HomingError as exc:  # a ledger that cannot be read: whether something bills is not known
        return exc


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


@contextmanager
def named_as_typed(name: str, typed: str) -> Iterator[None]:
    """The library knows a run by its name, and only here it is known by which words a person finds its file again:
    the command that an error ends with is to be one that works."""
    try:
        yield
    except HomingError as exc:
        verbs = "prep|verify|plan|launch|train"
        named = rf"homing ({verbs}) {re.escape(name)}(?![\w.-]| --resume)"
        exc.fix = re.sub(named, lambda found: f"homing {found[1]} {typed}", exc.fix)
        raise


def find_run(home: Home, name: str | None) -> RunRow:
    """By id or name; a run file's path means the run of that name."""
    is_path = name is not None and (name.endswith(RUN_SUFFIXES) or "/" in name)
    file = Path(name or "") if is_path else run_files().get(name or "")
    inside = _name_in(file) if file is not None else ""
    try:
        return home.ledger.find(inside if is_path else name)
    except UsageError:
        if inside and inside in {row.name for row in home.ledger.runs()}:  # typed by its file's name, which is another
            return home.ledger.find(inside)
        if file is not None and file.is_file():
            raise UsageError(
                what=f"{name} has not been launched yet.",
                why=f"There is its run file, {file}, and no run of it.",
                fix=f"Nothing of it bills. What it would cost, and how to begin: homing plan {typed_name(file)}",
            ) from None
        raise


def _name_in(file: Path) -> str:
    """The run's own name, which the file may give; one that cannot be read is taken by its own."""
    try:
        named = read_source(file).data.get("name")
    except HomingError:
        return file.stem
    return named if isinstance(named, str) and named else file.stem


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
