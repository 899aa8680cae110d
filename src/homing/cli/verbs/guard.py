"""`homing guard`: enforce limits from your own computer or a server, in a terminal or in cron."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from homing.api.runs.guard_runs import Checked, guard_runs
from homing.cli import output
from homing.cli.options import Json
from homing.cloud.guard.guard_pass import DEFAULT_EVERY_S
from homing.errors import NotChecked, UsageError
from homing.units import parse_duration

__all__ = ["command"]


def command(
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Maximum time between checks, such as 60s or 5m.")
    ] = f"{DEFAULT_EVERY_S:g}",
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            help="Check once and exit, for use with cron; if a limit is due before the next check, wait for it.",
        ),
    ] = False,
    while_billing: Annotated[
        bool,
        typer.Option(
            "--while-billing",
            help="Exit once nothing has been billed for 15 minutes; `launch` starts guards with this option.",
        ),
    ] = False,
    json_: Json = False,
) -> None:
    """Destroy instances at their limit or long after their run ended, resume preempted runs, and report silent ones.

    Exit code 6: a resource that should no longer bill may still be billing.
    """
    output.ignore_output_errors()
    try:
        every_s = parse_duration(every)
    except ValueError as exc:
        raise UsageError(what=f"--every: {exc}.", fix="For example: --every 60") from exc
    checks = guard_runs(every_s=every_s, once=once, while_billing=while_billing)
    if not once and not while_billing:
        output.say(f"Guarding: checking every {every_s:g} s. Ctrl-C stops this guard; other guards keep running.")
    for checked in checks:
        with contextlib.suppress(OSError):  # the terminal may have been closed; the guard continues
            _show(checked)
    if while_billing:
        output.say("Nothing is billing, so this guard exits.")
    else:
        output.say("Watch a run: homing watch RUN   List all runs: homing runs")


def _show(checked: Checked) -> None:
    if checked.error is not None:
        output.show_error(checked.error)
        return
    output.emit("guard/1", checked.to_dict())
    if not output.is_json():
        made = checked.found
        for begin, texts in (("", made.done), ("! ", made.alerts), ("MAY STILL BE BILLING: ", made.may_bill)):
            for text in texts:
                print(f"{begin}{text}", flush=True)
        for text in made.problems:
            if isinstance(text, NotChecked):
                continue
            output.say(f"warning: {text}")
