"""`homing status`: the current state of one run."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup.status import run_status
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import Json, RunName
from homing.cloud.reconcile.run_status import check_interval
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
    """Show the current state of one run: instances, spend, and what has been pushed."""
    try:
        every_s = None if watch is None else check_interval(parse_duration(watch), "--watch")
    except ValueError as exc:
        raise UsageError(what=f"--watch: {exc}.", fix="For example: --watch 30") from exc
    words = ""
    for seen in run_status(run, every_s=every_s):
        output.emit("status/1", seen.document)
        output.table(["", ""], seen.rows)
        say_problems(seen.problems)
        words = seen.next_words
    if words:
        output.say(words)
