"""End billing, confirmed by the provider. Implements `homing destroy` and `Run.destroy()`.

find the runs, instances or resources that each argument means -> ask if something would be lost -> destroy -> Ended

If destroying one fails, the others are still destroyed; the first StillBilling is raised at the end.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from homing.api import notices
from homing.api.confirmation import Agrees, refuse
from homing.api.lookup.find_runs import find_run, name_here, open_home
from homing.api.notices import say_problems
from homing.cloud.artifacts.remove_from_store import kept_by, remove_stored, stored_keys
from homing.cloud.destroy import Destroyed, destroy_lines, destroy_run, end_finding, open_lines, would_be_lost
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.run_lease import write_record
from homing.cloud.reconcile.inventory import Finding, survey
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.renting_account import vouch
from homing.cloud.reconcile.run_status import dump_line
from homing.config.home_and_run_files import run_files
from homing.errors import HomingError, StillBilling, UsageError
from homing.store.storage_price import Kept
from homing.units import counted, format_bytes

__all__ = ["Ended", "called", "destroy", "destroy_made", "destroy_named", "find_resources"]


@dataclass(frozen=True)
class Ended:
    """What was destroyed, and what still exists."""

    rows: list[RunRow] = field(default_factory=list)  # runs whose files remain in the store
    lines: list[LedgerLine] = field(default_factory=list)  # the receipts
    kept: dict[str, Kept | None] = field(default_factory=dict)  # files in the store and their price, by run id
    left: list[Finding] = field(default_factory=list)  # resources that still exist
    removed: dict[str, Any] = field(default_factory=dict)  # files removed from the store, by run id
    unasked: list[str] = field(default_factory=list)  # why providers could not be queried
    is_resource: bool = False  # True if the user named a resource such as a volume, not a run or an instance
    error: HomingError | None = None  # set if a named resource still exists, or if not everything could be checked

    def to_dict(self) -> dict[str, Any]:
        return {
            "runs": [row.id for row in self.rows],
            "receipts": [dump_line(line) for line in self.lines],
            "kept": {run_id: found.to_dict() if found else None for run_id, found in self.kept.items()},
            "left": [_dump(each) for each in self.left],
            "removed": self.removed,
        }


def destroy(
    run: str | None = None,
    *,
    is_all: bool = False,
    kept: bool = False,
    stored: bool = False,
    same_account: bool = False,
    agrees: Agrees = refuse,
    home: Home | None = None,
) -> Ended | None:
    """Destroy the instances of a run, one instance, one resource, or everything. None if `agrees` declines.

    `kept`: with `is_all`, also destroy volumes marked to be kept. `stored`: also delete what the runs pushed to their
    stores. `same_account`: the caller vouches that the current API key belongs to the account that rented the instance.
    `agrees` is called before anything that is not in the store is lost, and before a kept volume or stored files are
    deleted.
    """
    _check_arguments(run, is_all=is_all, kept=kept, same_account=same_account)
    with open_home(home) as opened:
        if same_account:
            _vouch(opened, str(run))
        problems = refresh_or_say(opened)
        only = [] if is_all else lines_of_instance(opened, str(run))
        if not is_all and not only and (things := find_resources(opened, str(run))):
            return destroy_named(opened, things, agrees)
        rows = runs_to_end(opened, run, only, is_all=is_all)
        say_problems(problems)  # only now, because the line above raises an error if the ledger is unreadable
        for row in rows:
            lost = would_be_lost(opened, row)
            if lost and not agrees(f"{row.id}: {lost}. Destroy anyway?"):
                notices.say(f"Nothing was destroyed. Save first: homing stop {name_here(row)}")
                return None
        done = destroy_instances(opened, only, rows) if only else destroy_runs(opened, rows, is_all)
        left, unseen = destroy_made(opened, agrees, kept=kept, known=problems) if is_all else ([], list[str]())
        gone = _remove_stored(opened, opened.ledger.runs() if is_all else rows, agrees) if stored else {}
        rows = [row for row in rows if row.id not in gone]
        lines = [line for each in done for line in each.lines]
        kept_files = {row.id: kept_by(opened, row) for row in rows}
        return Ended(rows, lines, kept_files, left, gone, [*problems, *unseen], error=_unchecked(unseen))


def _check_arguments(run: str | None, *, is_all: bool, kept: bool, same_account: bool) -> None:
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
            fix="All kept resources: homing destroy --all --kept   Or one (ids: homing reconcile): homing destroy ID",
        )
    if same_account and run is None:
        raise UsageError(
            what="--same-account needs one run or one instance.",
            why="It treats an instance as gone if the current API key does not list it.",
            fix="homing destroy RUN --same-account",
        )


def refresh_or_say(home: Home) -> list[str]:
    """Refresh the ledger. If it cannot be written, continue: a full disk must not keep an instance billing."""
    try:
        return refresh(home)
    except HomingError as exc:
        return [exc.what]


def lines_of_instance(home: Home, word: str) -> list[LedgerLine]:
    """Return open ledger lines with this mark or instance id (as on the provider's page), even from unknown runs."""
    return [line for line in open_lines(home, None) if word in ids_of(line.instance_id or "", line.mark)]


def ids_of(whole: str, mark: str) -> set[str]:
    return {mark, whole, whole.rpartition("/")[2]} - {""}


def runs_to_end(home: Home, run: str | None, only: list[LedgerLine], *, is_all: bool) -> list[RunRow]:
    """Return the affected runs."""
    if is_all:
        return _runs_with_instances(home)
    if only:
        return [row for row in home.ledger.runs() if row.id in {line.run_id for line in only}]
    return [find_run(home, run, changes="destroy {}")]


def _runs_with_instances(home: Home) -> list[RunRow]:
    with_lines = {line.run_id for line in open_lines(home, None)}
    # Include runs that are waiting for their next instance, because a guard or the launch process would rent it.
    return [row for row in home.ledger.unfinished_runs() if row.id in with_lines or home.may_go_on(row)]


def destroy_runs(home: Home, rows: list[RunRow], is_all: bool) -> list[Destroyed]:
    """Destroy all runs, even if destroying one of them fails. The first StillBilling is raised at the end."""
    done, failed = list[Destroyed](), None
    if is_all:
        try:
            done.append(destroy_lines(home, open_lines(home, None)))
        except StillBilling as exc:
            failed = exc
        # the other runs still need their state and resources updated
        rows = [row for row in rows if not open_lines(home, row)]
    for row in rows:
        try:
            done.append(destroy_run(home, row))
        except StillBilling as exc:
            failed = failed or exc
        if all(line.created_at is None for line in home.ledger.lines(row.id)):
            continue  # aborted before anything was pushed: there may be no store
        try:
            write_record(home, row.id, home.store_of(row))
        except (HomingError, OSError) as exc:
            said = (str(exc) or type(exc).__name__).splitlines()[0]
            notices.say(f"warning: the run's record in the store could not be updated: {said}")
    if failed is not None:
        raise failed
    return done


def destroy_instances(home: Home, lines: list[LedgerLine], rows: list[RunRow]) -> list[Destroyed]:
    """Destroy individual instances; a run ends when its last instance is destroyed."""
    done = [destroy_lines(home, lines)]
    return done + destroy_runs(home, [row for row in rows if not open_lines(home, row)], is_all=False)


def _unchecked(unseen: list[str]) -> StillBilling | None:
    """Return the error for `--all` if providers could not be queried: something there may still be billing."""
    if not unseen:
        return None
    return StillBilling(
        what="Not every provider could be queried, so something may still be billing.",
        why="\n".join(unseen),
        fix="homing destroy --all   once the provider responds again",
    )


def destroy_made(
    home: Home, agrees: Agrees, *, kept: bool, known: list[str] | None = None
) -> tuple[list[Finding], list[str]]:
    """Destroy resources created for instances: volumes, groups, roles, alerts.

    Return what remains, and why providers could not be queried. A volume that the user marked to be kept is not a
    leftover, so it is destroyed only with `kept`. Problems in `known` were already printed.
    """
    found = survey(home)
    say_problems([each for each in found.problems if each not in (known or [])])
    things = [each for each in found.findings if each.resource is not None]
    spared = [each for each in things if each.kind == "kept" and not kept]
    left = spared + _destroy_things(home, [each for each in things if each not in spared], agrees)
    return left, found.problems if found.is_blind else []


def find_resources(home: Home, word: str) -> list[Finding]:
    """Find a volume, key or group by its id. Queries providers only if no run in any folder has this name."""
    if any(word in (row.id, row.name) for row in home.ledger.runs()) or word in run_files() or Path(word).exists():
        return []
    seen = survey(home)
    found = [each for each in seen.findings if each.resource is not None and word in ids_of(each.id, each.mark)]
    if not found and seen.is_blind:
        raise StillBilling(
            what=f"No run {word!r} found, and homing could not check whether {word!r} is a volume"
            " you are still being charged for.",
            why="\n".join(seen.problems),
            fix=f"homing destroy {shlex.quote(word)}   once its provider responds",
        )
    used = next((each for each in found if each.kind == "in use"), None)
    if used is not None:
        raise UsageError(
            what=f"{used.provider} {used.thing} {used.id} is in use.",
            why=f"The running instance of {used.run_id or used.mark} uses it.",
            fix=f"homing destroy {used.run_id or used.mark}   (also destroys resources created only for it)",
        )
    return found


def destroy_named(home: Home, things: list[Finding], agrees: Agrees) -> Ended:
    """Destroy resources by their id, but ask first about any that is marked to be kept.

    If a resource still exists afterwards, the result has an error.
    """
    agreed = [each for each in things if _agrees(each, agrees)]
    stuck = [each for each in agreed if not _is_ended(home, each)]
    left = [each for each in things if each not in agreed or each in stuck]
    if not stuck:
        return Ended(left=left, is_resource=True)
    kind = StillBilling if any(each.may_bill for each in stuck) else HomingError
    error = kind(
        what=f"{called(stuck[0])} still exists.",
        why="The provider has not confirmed the deletion; see its response above.",
        fix=f"homing destroy {stuck[0].id}",
    )
    return Ended(left=left, is_resource=True, error=error)


def _destroy_things(home: Home, things: list[Finding], agrees: Agrees) -> list[Finding]:
    """Destroy the resources, but ask first about those marked to be kept. Return what remains."""
    return [each for each in things if not _agrees(each, agrees) or not _is_ended(home, each)]


def _agrees(thing: Finding, agrees: Agrees) -> bool:
    question = f"{called(thing)} is marked to be kept ({thing.text}). Destroy it too?"
    return thing.kind != "kept" or agrees(question)


def _is_ended(home: Home, thing: Finding) -> bool:
    problem = end_finding(home, thing)
    notices.say(f"warning: {called(thing)} still exists: {problem}" if problem else f"Destroyed: {called(thing)}")
    return not problem


def called(thing: Finding) -> str:
    return f"{thing.provider} {thing.thing} {thing.id}"


def _remove_stored(home: Home, rows: list[RunRow], agrees: Agrees) -> dict[str, Any]:
    """Remove what the runs pushed to their stores.

    Return what was removed, by run id; each removal is printed immediately.
    """
    gone = {}
    for row in rows:
        try:
            keys, spared = stored_keys(home, row)
        except (HomingError, OSError) as exc:
            notices.say(f"warning: {row.store} could not be read: {str(exc).splitlines()[0]}")
            continue
        for each in spared:
            notices.say(f"{each}: not removed.")
        question = f"Permanently delete the {len(keys)} files that {row.id} pushed to {row.store}, including its model?"
        if keys and agrees(question):
            size = kept_by(home, row)
            remove_stored(home, row, keys)
            gone[row.id] = {"store": row.store, "num_files": len(keys), "num_bytes": size.num_bytes if size else None}
            much = f", {format_bytes(size.num_bytes)}" if size else ""
            notices.say(
                f"Removed from {row.store}: {counted(len(keys), 'file')} of {row.id}{much}, including its model."
            )
        elif not keys:
            notices.say(f"{row.store} has no files for {row.id}.")
    return gone


def _vouch(home: Home, run: str) -> None:
    """Trust that the account is the same: treat an instance as gone if the current API key does not list it."""
    lines = lines_of_instance(home, run) or open_lines(home, find_run(home, run, changes="destroy {}"))
    for sentence in vouch(home, lines):
        notices.say(sentence)


def _dump(thing: Finding) -> dict[str, object]:
    rate = str(thing.rate_usd_per_hour)
    found = {"provider": thing.provider, "kind": thing.thing, "id": thing.id, "is_kept": thing.kind == "kept"}
    return {**found, "rate_usd_per_hour": rate}
