"""`homing status`: the current state of one run."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup.find_runs import find_any, find_run, name_here, open_home
from homing.api.lookup.local_runs import Trained, look_again, store_here
from homing.api.lookup.status import document_here, look_closely, next_words, rows_here
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import Json, RunName
from homing.cloud.home import Home
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import Status, check_interval
from homing.cloud.watch.run_output import EventFeed
from homing.errors import UsageError
from homing.units import parse_duration

__all__ = ["command"]


def command(
    run: RunName = None,
    watch: Annotated[
        str | None, typer.Option("--watch", metavar="[60]", help="Refresh every N seconds until the run ends.")
    ] = None,
    json_: Json = False,
) -> None:
    """Show the current state of one run: instances, spend, and what is pushed."""
    try:
        every_s = None if watch is None else check_interval(parse_duration(watch), "--watch")
    except ValueError as exc:
        raise UsageError(what=f"--watch: {exc}.", fix="--watch 30") from exc
    with open_home() as home:
        found = find_any(home, run)
        if isinstance(found, Trained):
            _look_here(home, found, every_s)
            return
        status = _look_once(home, found.id)
        while every_s is not None and (status.run.is_live or status.is_billing):
            home.world.sleep(every_s)
            status = _look_once(home, status.run.id)
        if words := next_words(status, name_here(status.run)):
            output.say(words)


def _look_here(home: Home, run: Trained, every_s: float | None) -> None:
    """Show a run of `homing train`, which has a state and a folder but no billed instance."""
    _show_here(home, run)
    while every_s is not None and run.is_live:
        home.world.sleep(every_s)
        run = look_again(home, run)
        _show_here(home, run)
    output.say(run.next_words)


def _show_here(home: Home, run: Trained) -> None:
    feed = EventFeed(store_here(home), run.run)
    for _ in feed.reports():  # consume the reports; only the latest values are shown
        pass
    output.emit("status/1", document_here(home, run, feed))
    output.table(["", ""], rows_here(home, run, feed))


def _look_once(home: Home, run: str | None) -> Status:
    problems = refresh(home)
    found = look_closely(home, find_run(home, run), problems)
    output.emit("status/1", {**found.status.to_dict(), **found.document})
    output.table(["", ""], found.rows)
    say_problems(problems)
    return found.status
