"""`homing destroy`: end billing, confirmed by the provider. Asks only if something would be lost."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from homing.api.lookup.find_runs import find_run, name_here, open_home, usd
from homing.api.notices import say_problems
from homing.api.runs.end_runs import (
    destroy_instances,
    destroy_runs,
    ids_of,
    lines_of_instance,
    refresh_or_say,
    runs_to_end,
)
from homing.cli import output
from homing.cli.complete import run_words
from homing.cli.options import Json, Yes
from homing.cloud.artifacts.prune import kept_by, remove_stored, stored_keys
from homing.cloud.destroy import Destroyed, end_finding, open_lines, would_be_lost
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.ledger.meter import at_most
from homing.cloud.reconcile.account_owner import vouch
from homing.cloud.reconcile.inventory import Finding, survey
from homing.cloud.reconcile.run_status import dump_line
from homing.config.paths import run_files
from homing.errors import HomingError, StillBilling, UsageError
from homing.units import counted, format_bytes

__all__ = ["command"]


def command(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Run whose instances to destroy, or the id of one instance or volume.",
            autocompletion=run_words,
        ),
    ] = None,
    is_all: Annotated[
        bool,
        typer.Option("--all", help="Destroy every instance homing created, with or without a run, and its resources."),
    ] = False,
    kept: Annotated[bool, typer.Option("--kept", help="With --all: also destroy kept volumes, after asking.")] = False,
    stored: Annotated[
        bool,
        typer.Option("--stored", help="Also delete what the runs pushed to the store, including models, after asking."),
    ] = False,
    same_account: Annotated[
        bool,
        typer.Option("--same-account", help="Confirm that the current API key belongs to the account that rented it."),
    ] = False,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Destroy instances and end billing, confirmed by the provider.

    An instance that is already gone counts as success.
    """
    output.ignore_output_errors()
    if (run is None) == (not is_all):
        raise UsageError(
            what="No run given." if run is None else "RUN and --all cannot be combined.",
            why="destroy has no default run.",
            fix="homing destroy RUN   or   homing destroy --all",
        )
    if kept and not is_all:
        raise UsageError(
            what="--kept needs --all.",
            why=f"{run} names a single resource.",
            fix="homing destroy --all --kept   or by its id, listed by homing reconcile: homing destroy VOLUME",
        )
    if same_account and run is None:
        raise UsageError(
            what="--same-account needs one run or one instance.",
            why="It treats what the current API key does not list as gone.",
            fix="homing destroy RUN --same-account",
        )
    with open_home() as home:
        if same_account:
            _vouch(home, str(run))
        problems = refresh_or_say(home)
        only = [] if is_all else lines_of_instance(home, str(run))
        if not is_all and not only and (things := _by_thing(home, str(run))):
            _destroy_named(home, things, yes=yes)
            return
        rows = runs_to_end(home, run, only, is_all=is_all)
        say_problems(problems)  # an unreadable ledger raised on the line before
        for row in rows:
            lost = would_be_lost(home, row)
            if lost and not output.ask(f"{row.id}: {lost}. Destroy anyway?", yes=yes):
                output.say(f"Nothing was destroyed. Save first: homing stop {name_here(row)}")
                return
        done = destroy_instances(home, only, rows) if only else destroy_runs(home, rows, is_all)
        left = _destroy_made(home, kept=kept, yes=yes) if is_all else []
        gone = _remove_stored(home, home.ledger.runs() if is_all else rows, yes=yes) if stored else {}
        _show(home, done, [row for row in rows if row.id not in gone], left, gone)


def _destroy_made(home: Home, *, kept: bool, yes: bool) -> list[Finding]:
    """Destroy resources made for instances: volumes, groups, roles, alerts. Return what remains.

    A volume that the user keeps is not a leftover: it is destroyed only with `kept`, not with everything else.
    """
    found = survey(home)
    say_problems(found.problems)
    things = [each for each in found.findings if each.resource is not None]
    spared = [each for each in things if each.kind == "kept" and not kept]
    return spared + _destroy_things(home, [each for each in things if each not in spared], yes=yes)


def _by_thing(home: Home, word: str) -> list[Finding]:
    """Find a volume, key or group of ours by its id. Providers are asked only if no run in any folder has this name."""
    if any(word in (row.id, row.name) for row in home.ledger.runs()) or word in run_files() or Path(word).exists():
        return []
    seen = survey(home)
    found = [each for each in seen.findings if each.resource is not None and word in ids_of(each.id, each.mark)]
    if not found and seen.is_blind:
        raise StillBilling(
            what=f"No run {word!r} found, and it could not be checked whether it is a volume that is billing.",
            why="\n".join(seen.problems),
            fix=f"homing destroy {shlex.quote(word)}   once its provider responds",
        )
    used = next((each for each in found if each.kind == "in use"), None)
    if used is not None:
        raise UsageError(
            what=f"{used.provider} {used.thing} {used.id} is in use.",
            why=f"The instance of {used.run_id or used.mark} is running and uses it.",
            fix=f"homing destroy {used.run_id or used.mark}   (also destroys resources created only for it)",
        )
    return found


def _destroy_named(home: Home, things: list[Finding], *, yes: bool) -> None:
    agreed = [each for each in things if _agrees(each, yes=yes)]
    stuck = [each for each in agreed if not _is_ended(home, each)]
    left = [each for each in things if each not in agreed or each in stuck]
    output.emit(
        "destroy/1", {"runs": [], "receipts": [], "kept": {}, "left": [_dump(each) for each in left], "removed": {}}
    )
    _say_left(left)
    if stuck:
        kind = StillBilling if any(each.may_bill for each in stuck) else HomingError
        raise kind(
            what=f"{_called(stuck[0])} still exists.",
            why="The provider has not confirmed the deletion; see its response above.",
            fix=f"homing destroy {stuck[0].id}",
        )


def _destroy_things(home: Home, things: list[Finding], *, yes: bool) -> list[Finding]:
    """Destroy the things, asking about kept ones. Return what remains."""
    return [each for each in things if not _agrees(each, yes=yes) or not _is_ended(home, each)]


def _agrees(thing: Finding, *, yes: bool) -> bool:
    question = f"{_called(thing)} is marked to be kept ({thing.text}). Destroy it too?"
    return thing.kind != "kept" or output.ask(question, yes=yes)


def _is_ended(home: Home, thing: Finding) -> bool:
    problem = end_finding(home, thing)
    output.say(f"warning: {_called(thing)} still exists: {problem}" if problem else f"Destroyed: {_called(thing)}")
    return not problem


def _called(thing: Finding) -> str:
    return f"{thing.provider} {thing.thing} {thing.id}"


def _remove_stored(home: Home, rows: list[RunRow], *, yes: bool) -> dict[str, Any]:
    """Remove what the runs pushed to their stores.

    Return what was removed, by run id; each removal is printed immediately.
    """
    gone = {}
    for row in rows:
        try:
            keys, spared = stored_keys(home, row)
        except (HomingError, OSError) as exc:
            output.say(f"warning: {row.store} could not be read: {str(exc).splitlines()[0]}")
            continue
        for each in spared:
            output.say(f"{each}: not removed.")
        question = f"Permanently delete the {len(keys)} files that {row.id} pushed to {row.store}, including its model?"
        if keys and output.ask(question, yes=yes):
            size = kept_by(home, row)
            remove_stored(home, row, keys)
            gone[row.id] = {"store": row.store, "num_files": len(keys), "num_bytes": size.num_bytes if size else None}
            much = f", {format_bytes(size.num_bytes)}" if size else ""
            output.say(
                f"Removed from {row.store}: {counted(len(keys), 'file')} of {row.id}{much}, including its model."
            )
        elif not keys:
            output.say(f"{row.store} has no files of {row.id}.")
    return gone


def _vouch(home: Home, run: str) -> None:
    """Accept the user's word that the account is the same; from here on, what this key does not show counts as gone."""
    lines = lines_of_instance(home, run) or open_lines(home, find_run(home, run, changes="destroy {}"))
    for sentence in vouch(home, lines):
        output.say(sentence)


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
    output.emit("destroy/1", document)
    _say_left(left)
    if not lines:
        output.say("Nothing else was running." if left else "Nothing was running; nothing is billing.")
        return
    dollars = {line.mark: at_most(line) + usd(line.spend_usd) for line in lines}
    output.table(
        ["instance", "provider", "dollars", "note"],
        [(line.instance_id or line.mark, line.provider, dollars[line.mark], line.note) for line in lines],
    )
    output.say("Destroyed with its volumes and keys, confirmed by the provider. Receipt: homing ledger")
    for row in rows:
        found = kept[row.id]
        price = str(found) if found else "size unknown"
        output.say(f"Files of {row.id} remain in {row.store}: {price}")
        output.say(f"  List them: homing store ls runs/{row.id} --store {row.store}")


def _say_left(left: list[Finding]) -> None:
    for each in left:
        rate = f", {usd(each.rate_usd_per_hour)}/h" if each.may_bill else ""
        why = ", marked to be kept" if each.kind == "kept" else ""
        output.say(f"Still exists: {_called(each)}{why}{rate}. Destroy it: homing destroy {each.id}")


def _dump(thing: Finding) -> dict[str, object]:
    rate = str(thing.rate_usd_per_hour)
    found = {"provider": thing.provider, "kind": thing.thing, "id": thing.id, "is_kept": thing.kind == "kept"}
    return {**found, "rate_usd_per_hour": rate}
