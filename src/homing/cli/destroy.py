"""`homing destroy`: end billing, confirmed by the provider. Asks only if something would be lost."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import find_run, open_home, say_problems, usd
from homing.cli.options import Json, Yes
from homing.cloud.destroy import Destroyed, destroy_lines, destroy_run, open_lines, would_be_lost
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine, RunRow
from homing.cloud.reconcile import refresh
from homing.cloud.record import write_record
from homing.cloud.status import dump_line
from homing.cloud.stored import kept_by, remove_stored, stored_keys
from homing.cloud.survey import Finding, end, survey
from homing.errors import HomingError, StillBilling, UsageError

__all__ = ["command"]


def command(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="The run whose instances end, or the id of one instance.")
    ] = None,
    is_all: Annotated[
        bool,
        typer.Option("--all", help="Every instance of ours, also those no run knows, and what was made for them."),
    ] = False,
    stored: Annotated[
        bool, typer.Option("--stored", help="Then also what its runs pushed, models included. Asks before it.")
    ] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """End billing, confirmed by the provider; what is gone already is success."""
    if (run is None) == (not is_all):
        raise UsageError(
            what="Say which run to destroy." if run is None else "RUN and --all exclude each other.",
            why="destroy never guesses.",
            fix="homing destroy RUN   or   homing destroy --all",
        )
    with open_home() as home:
        problems = _look(home)
        only = [] if is_all else _by_instance(home, str(run))
        rows = _rows(home, run, only, is_all=is_all)
        say_problems(problems)  # a ledger that cannot even be read was the error of the line before
        for row in rows:
            lost = would_be_lost(home, row)
            if lost and not talk.ask(f"{row.id}: {lost}. Destroy it all the same?", yes=yes):
                talk.say(f"Left as it is. Save first: homing stop {row.name}")
                return
        done = _destroy_only(home, only, rows) if only else _destroy(home, rows, is_all)
        left = _destroy_things(home, yes=yes) if is_all else []
        gone = _remove_stored(home, home.ledger.runs() if is_all else rows, yes=yes) if stored else []
        _show(home, done, [row for row in rows if row.id not in gone], left)


def _destroy_things(home: Home, *, yes: bool) -> list[Finding]:
    """What was made beside instances: volumes, groups, roles, alerts. Returns what stays."""
    found = survey(home)
    say_problems(found.problems)
    left = []
    for each in found.findings:
        if each.resource is None:
            continue
        what = f"{each.provider} {each.thing} {each.id}"
        if each.kind == "kept" and not talk.ask(f"{what} is kept by wish ({each.text}). Destroy it too?", yes=yes):
            left.append(each)
            continue
        problem = end(home, each)
        if problem:
            left.append(each)
            talk.say(f"warning: {what} is still there: {problem}")
        else:
            talk.say(f"Destroyed: {what}")
    return left


def _remove_stored(home: Home, rows: list[RunRow], *, yes: bool) -> list[str]:
    """Ids of the runs whose files are gone."""
    gone = []
    for row in rows:
        try:
            keys = stored_keys(home, row)
        except (HomingError, OSError) as exc:
            talk.say(f"warning: {row.store} could not be read: {str(exc).splitlines()[0]}")
            continue
        question = f"Remove the {len(keys)} files that {row.id} pushed to {row.store}, its model included? For good."
        if keys and talk.ask(question, yes=yes):
            remove_stored(home, row, keys)
            gone.append(row.id)
    return gone


def _look(home: Home) -> list[str]:
    """A ledger that cannot be written (a full disk) must not keep a machine billing."""
    try:
        return refresh(home)
    except HomingError as exc:
        return [exc.what]


def _by_instance(home: Home, word: str) -> list[LedgerLine]:
    """Lines that live under this id, as the provider's own page shows it, or under this mark; of any run or of none."""
    return [line for line in open_lines(home, None) if word in _names(line)]


def _names(line: LedgerLine) -> set[str]:
    whole = line.instance_id or ""
    return {line.mark, whole, whole.rpartition("/")[2]} - {""}


def _rows(home: Home, run: str | None, only: list[LedgerLine], *, is_all: bool) -> list[RunRow]:
    """The runs that lose something by it."""
    if is_all:
        return _runs_with_instances(home)
    if only:
        return [row for row in home.ledger.runs() if row.id in {line.run_id for line in only}]
    return [find_run(home, run)]


def _runs_with_instances(home: Home) -> list[RunRow]:
    with_lines = {line.run_id for line in open_lines(home, None)}
    return [row for row in home.ledger.runs() if row.id in with_lines]


def _destroy(home: Home, rows: list[RunRow], is_all: bool) -> list[Destroyed]:
    """All are tried; the first that may still bill is raised at the end."""
    done, failed = list[Destroyed](), None
    if is_all:
        try:
            done.append(destroy_lines(home, open_lines(home, None)))
        except StillBilling as exc:
            failed = exc
        rows = [row for row in rows if not open_lines(home, row)]  # what is left of the others: their state, and things
    for row in rows:
        try:
            done.append(destroy_run(home, row))
        except StillBilling as exc:
            failed = failed or exc
        if all(line.created_at is None for line in home.ledger.lines(row.id)):
            continue  # cut short before anything was pushed: there may be no store
        try:
            write_record(home, row.id, home.store_of(row))
        except (HomingError, OSError) as exc:
            said = (str(exc) or type(exc).__name__).splitlines()[0]
            talk.say(f"warning: the run's record in the store is not up to date: {said}")
    if failed is not None:
        raise failed
    return done


def _destroy_only(home: Home, lines: list[LedgerLine], rows: list[RunRow]) -> list[Destroyed]:
    """One instance; with its last one a run has ended too."""
    done = [destroy_lines(home, lines)]
    return done + _destroy(home, [row for row in rows if not open_lines(home, row)], is_all=False)


def _show(home: Home, done: list[Destroyed], rows: list[RunRow], left: list[Finding]) -> None:
    lines = [line for each in done for line in each.lines]
    kept = {row.id: kept_by(home, row) for row in rows}
    document = {
        "runs": [row.id for row in rows],
        "receipts": [dump_line(line) for line in lines],
        "kept": {run_id: found.to_dict() if found else None for run_id, found in kept.items()},
        "left": [{"provider": each.provider, "kind": each.thing, "id": each.id} for each in left],
    }
    talk.emit("destroy/1", document)
    for each in left:
        rate = f", {usd(each.rate_usd_per_hour)}/h" if each.may_bill else ""
        talk.say(f"Stays: {each.provider} {each.thing} {each.id}{rate}")
    if not lines:
        talk.say("Nothing was running; nothing bills.")
        return
    talk.table(
        ["instance", "provider", "dollars", "note"],
        [(line.instance_id or line.mark, line.provider, usd(line.spend_usd), line.note) for line in lines],
    )
    talk.say("Gone, confirmed by the provider, with its volumes and keys. The receipt stays: homing ledger")
    for row in rows:
        found = kept[row.id]
        price = str(found) if found else "how much could not be seen"
        talk.say(f"What {row.id} pushed lives on in {row.store}: {price}")
        talk.say(f"  See it: homing store ls runs/{row.id} --store {row.store}")
