"""End billing: which runs and instances a word means, and destroying them. What `homing destroy` does after asking.

All are tried, also if one fails; the first StillBilling is raised at the end.
"""

from __future__ import annotations

from homing.api import notices
from homing.api.lookup.find_runs import find_run
from homing.cloud.destroy import Destroyed, destroy_lines, destroy_run, open_lines
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.ownership import write_record
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import HomingError, StillBilling

__all__ = [
    "destroy_instances",
    "destroy_runs",
    "ids_of",
    "lines_of_instance",
    "refresh_or_say",
    "runs_to_end",
]


def refresh_or_say(home: Home) -> list[str]:
    """Refresh the ledger. If it cannot be written (a full disk), continue: that must not keep an instance billing."""
    try:
        return refresh(home)
    except HomingError as exc:
        return [exc.what]


def lines_of_instance(home: Home, word: str) -> list[LedgerLine]:
    """Return open ledger lines, of any run or none, with this mark or instance id, as on the provider's page."""
    return [line for line in open_lines(home, None) if word in ids_of(line.instance_id or "", line.mark)]


def ids_of(whole: str, mark: str) -> set[str]:
    return {mark, whole, whole.rpartition("/")[2]} - {""}


def runs_to_end(home: Home, run: str | None, only: list[LedgerLine], *, is_all: bool) -> list[RunRow]:
    """Return the runs affected."""
    if is_all:
        return _runs_with_instances(home)
    if only:
        return [row for row in home.ledger.runs() if row.id in {line.run_id for line in only}]
    return [find_run(home, run, changes="destroy {}")]


def _runs_with_instances(home: Home) -> list[RunRow]:
    with_lines = {line.run_id for line in open_lines(home, None)}
    # A run waiting for its next instance has none now, but a guard or its launch would rent one.
    return [row for row in home.ledger.unfinished_runs() if row.id in with_lines or home.may_go_on(row)]


def destroy_runs(home: Home, rows: list[RunRow], is_all: bool) -> list[Destroyed]:
    """Destroy every run. All are tried; the first StillBilling is raised at the end."""
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
    """Destroy single instances; a run ends with its last one."""
    done = [destroy_lines(home, lines)]
    return done + destroy_runs(home, [row for row in rows if not open_lines(home, row)], is_all=False)
