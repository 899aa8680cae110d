"""`homing destroy`: end billing, confirmed by the provider. Asks only if something would be lost."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.complete import run_words
from homing.cli.control import find_run, open_home, say_problems, usd
from homing.cli.find_run import name_here
from homing.cli.options import Json, Yes
from homing.cloud.destroy import Destroyed, destroy_lines, destroy_run, open_lines, would_be_lost
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine, RunRow
from homing.cloud.meter import at_most
from homing.cloud.reconcile import refresh
from homing.cloud.record import write_record
from homing.cloud.status import dump_line
from homing.cloud.stored import kept_by, remove_stored, stored_keys
from homing.cloud.survey import Finding, end, survey
from homing.cloud.whose import vouch
from homing.config import run_files
from homing.errors import HomingError, StillBilling, UsageError
from homing.units import counted, format_bytes

__all__ = ["command"]


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="The run whose instances end, or the id of one instance or volume.",
            autocompletion=run_words,
        ),
    ] = None,
    is_all: Annotated[
        bool,
        typer.Option("--all", help="Every instance of ours, also those no run knows, and what was made for them."),
    ] = False,
    kept: Annotated[
        bool, typer.Option("--kept", help="With --all: also the volumes that are kept by wish. Asks before it.")
    ] = False,
    stored: Annotated[
        bool, typer.Option("--stored", help="Then also what its runs pushed, models included. Asks before it.")
    ] = False,
    same_account: Annotated[
        bool,
        typer.Option("--same-account", help="The key set here is of the account that rented it, though it changed."),
    ] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """End billing, confirmed by the provider; what is gone already is success."""
    talk.go_on_unheard()
    if (run is None) == (not is_all):
        raise UsageError(
            what="Say which run to destroy." if run is None else "RUN and --all exclude each other.",
            why="destroy never guesses.",
            fix="homing destroy RUN   or   homing destroy --all",
        )
    if kept and not is_all:
        raise UsageError(
            what="--kept goes with --all.",
            why=f"{run} names one thing alone.",
            fix="homing destroy --all --kept   or by its id, as homing reconcile lists it: homing destroy VOLUME",
        )
    if same_account and run is None:
        raise UsageError(
            what="--same-account is said of one run or one instance.",
            why="It takes your word that what the key here does not show is gone.",
            fix="homing destroy RUN --same-account",
        )
    with open_home() as home:
        if same_account:
            _vouch(home, str(run))
        problems = _look(home)
        only = [] if is_all else _by_instance(home, str(run))
        if not is_all and not only and (things := _by_thing(home, str(run))):
            _destroy_named(home, things, yes=yes)
            return
        rows = _rows(home, run, only, is_all=is_all)
        say_problems(problems)  # a ledger that cannot even be read was the error of the line before
        for row in rows:
            lost = would_be_lost(home, row)
            if lost and not talk.ask(f"{row.id}: {lost}. Destroy it all the same?", yes=yes):
                talk.say(f"Left as it is. Save first: homing stop {name_here(row)}")
                return
        done = _destroy_only(home, only, rows) if only else _destroy(home, rows, is_all)
        left = _destroy_made(home, kept=kept, yes=yes) if is_all else []
        gone = _remove_stored(home, home.ledger.runs() if is_all else rows, yes=yes) if stored else {}
        _show(home, done, [row for row in rows if row.id not in gone], left, gone)


def _destroy_made(home: Home, *, kept: bool, yes: bool) -> list[Finding]:
    """What was made beside instances: volumes, groups, roles, alerts. Returns what stays.

    What a person keeps is no leftover: it goes where it is asked for, not because everything else does.
    """
    found = survey(home)
    say_problems(found.problems)
    things = [each for each in found.findings if each.resource is not None]
    spared = [each for each in things if each.kind == "kept" and not kept]
    return spared + _destroy_things(home, [each for each in things if each not in spared], yes=yes)


def _by_thing(home: Home, word: str) -> list[Finding]:
    """A volume, key or group of ours by its id. Providers are asked only for a word that no run of any folder has."""
    if any(word in (row.id, row.name) for row in home.ledger.runs()) or word in run_files() or Path(word).exists():
        return []
    seen = survey(home)
    found = [each for each in seen.findings if each.resource is not None and word in _ids(each.id, each.mark)]
    if not found and seen.is_blind:
        raise StillBilling(
            what=f"There is no run {word!r}, and whether it is a volume of ours, and bills, could not be found out.",
            why="\n".join(seen.problems),
            fix=f"homing destroy {shlex.quote(word)}   as soon as its provider answers",
        )
    used = next((each for each in found if each.kind == "in use"), None)
    if used is not None:
        raise UsageError(
            what=f"{used.provider} {used.thing} {used.id} is in use.",
            why=f"The instance of {used.run_id or used.mark} lives, and has it.",
            fix=f"homing destroy {used.run_id or used.mark}   and what was made for it alone goes with it",
        )
    return found


def _destroy_named(home: Home, things: list[Finding], *, yes: bool) -> None:
    agreed = [each for each in things if _agrees(each, yes=yes)]
    stuck = [each for each in agreed if not _is_ended(home, each)]
    left = [each for each in things if each not in agreed or each in stuck]
    talk.emit(
        "destroy/1", {"runs": [], "receipts": [], "kept": {}, "left": [_dump(each) for each in left], "removed": {}}
    )
    _say_left(left)
    if stuck:
        kind = StillBilling if any(each.may_bill for each in stuck) else HomingError
        raise kind(
            what=f"{_called(stuck[0])} is still there.",
            why="Its provider has not confirmed its end; what it said stands above.",
            fix=f"homing destroy {stuck[0].id}",
        )


def _destroy_things(home: Home, things: list[Finding], *, yes: bool) -> list[Finding]:
    """Returns what stays."""
    return [each for each in things if not _agrees(each, yes=yes) or not _is_ended(home, each)]


def _agrees(thing: Finding, *, yes: bool) -> bool:
    question = f"{_called(thing)} is kept by wish ({thing.text}). Destroy it too?"
    return thing.kind != "kept" or talk.ask(question, yes=yes)


def _is_ended(home: Home, thing: Finding) -> bool:
    problem = end(home, thing)
    talk.say(f"warning: {_called(thing)} is still there: {problem}" if problem else f"Destroyed: {_called(thing)}")
    return not problem


def _called(thing: Finding) -> str:
    return f"{thing.provider} {thing.thing} {thing.id}"


def _remove_stored(home: Home, rows: list[RunRow], *, yes: bool) -> dict[str, Any]:
    """What was removed of each run, by its id. Said as soon as it is gone."""
    gone = {}
    for row in rows:
        try:
            keys, spared = stored_keys(home, row)
        except (HomingError, OSError) as exc:
            talk.say(f"warning: {row.store} could not be read: {str(exc).splitlines()[0]}")
            continue
        for each in spared:
            talk.say(f"{each}: it stays.")
        question = f"Remove the {len(keys)} files that {row.id} pushed to {row.store}, its model included? For good."
        if keys and talk.ask(question, yes=yes):
            size = kept_by(home, row)
            remove_stored(home, row, keys)
            gone[row.id] = {"store": row.store, "num_files": len(keys), "num_bytes": size.num_bytes if size else None}
            much = f", {format_bytes(size.num_bytes)}" if size else ""
            talk.say(f"Removed from {row.store}: {counted(len(keys), 'file')} of {row.id}{much}, its model included.")
        elif not keys:
            talk.say(f"{row.store} holds nothing of {row.id}.")
    return gone


def _vouch(home: Home, run: str) -> None:
    """Before anything is looked at: from here on what this key does not show is taken for gone."""
    lines = _by_instance(home, run) or open_lines(home, find_run(home, run, changes="destroy {}"))
    for sentence in vouch(home, lines):
        talk.say(sentence)


def _look(home: Home) -> list[str]:
    """A ledger that cannot be written (a full disk) must not keep a machine billing."""
    try:
        return refresh(home)
    except HomingError as exc:
        return [exc.what]


def _by_instance(home: Home, word: str) -> list[LedgerLine]:
    """Lines that live under this id, as the provider's own page shows it, or under this mark; of any run or of none."""
    return [line for line in open_lines(home, None) if word in _ids(line.instance_id or "", line.mark)]


def _ids(whole: str, mark: str) -> set[str]:
    return {mark, whole, whole.rpartition("/")[2]} - {""}


def _rows(home: Home, run: str | None, only: list[LedgerLine], *, is_all: bool) -> list[RunRow]:
    """The runs that lose something by it."""
    if is_all:
        return _runs_with_instances(home)
    if only:
        return [row for row in home.ledger.runs() if row.id in {line.run_id for line in only}]
    return [find_run(home, run, changes="destroy {}")]


def _runs_with_instances(home: Home) -> list[RunRow]:
    with_lines = {line.run_id for line in open_lines(home, None)}
    # One that waits for its next machine has none now, and a guard or its launch would rent it.
    return [row for row in home.ledger.unfinished_runs() if row.id in with_lines or home.may_go_on(row)]


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


def _show(
    home: Home, done: list[Destroyed], rows: list[RunRow], left: list[Finding], removed: dict[str, Any] | None = None
) -> None:
    lines = [line for each in done for line in each.lines]
    kept = {row.id: kept_by(home, row) for row in rows}
    document = {
        "runs": [row.id for row in rows],
        "receipts": [dump_line(line) for line in lines],
        "kept": {run_id: found.to_dict() if found else None for run_id, found in kept.items()},
        "left": [_dump(each) for each in left],
        "removed": removed or {},
    }
    talk.emit("destroy/1", document)
    _say_left(left)
    if not lines:
        talk.say("Nothing else was running." if left else "Nothing was running; nothing bills.")
        return
    dollars = {line.mark: at_most(line) + usd(line.spend_usd) for line in lines}
    talk.table(
        ["instance", "provider", "dollars", "note"],
        [(line.instance_id or line.mark, line.provider, dollars[line.mark], line.note) for line in lines],
    )
    talk.say("Gone, confirmed by the provider, with its volumes and keys. The receipt stays: homing ledger")
    for row in rows:
        found = kept[row.id]
        price = str(found) if found else "how much could not be seen"
        talk.say(f"What {row.id} pushed lives on in {row.store}: {price}")
        talk.say(f"  See it: homing store ls runs/{row.id} --store {row.store}")


def _say_left(left: list[Finding]) -> None:
    for each in left:
        rate = f", {usd(each.rate_usd_per_hour)}/h" if each.may_bill else ""
        why = ", kept by wish" if each.kind == "kept" else ""
        talk.say(f"Stays: {_called(each)}{why}{rate}. To end it: homing destroy {each.id}")


def _dump(thing: Finding) -> dict[str, object]:
    rate = str(thing.rate_usd_per_hour)
    found = {"provider": thing.provider, "kind": thing.thing, "id": thing.id, "is_kept": thing.kind == "kept"}
    return {**found, "rate_usd_per_hour": rate}
