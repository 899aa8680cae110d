"""`homing guard`: enforce limits from home, in a terminal, in cron or on a server."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer

from homing.api.lookup.find_runs import open_home
from homing.cli import output
from homing.cli.options import Json
from homing.cloud.contact.home_guard import IDLE_S, is_needed, sign_out
from homing.cloud.guard.guard import DEFAULT_EVERY_S, Pass, guard_pass, wait_for_next
from homing.cloud.home import Home
from homing.errors import HomingError, StillBilling, UsageError
from homing.units import counted, parse_duration

__all__ = ["command"]


def command(
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Maximum time between checks: 30, 60s, 5m.")
    ] = f"{DEFAULT_EVERY_S:g}",
    once: Annotated[
        bool, typer.Option("--once", help="Check once, for cron; waits for a limit that is due before the next check.")
    ] = False,
    while_billing: Annotated[
        bool,
        typer.Option("--while-billing", help="Exit after 15 minutes without billing; `launch` starts guards this way."),
    ] = False,
    json_: Json = False,
) -> None:
    """Destroy instances that reached a limit or ended long ago, resume preempted runs, and report silent ones.

    Exit code 6 if something that should not bill may still bill.
    """
    output.ignore_output_errors()
    try:
        every_s = parse_duration(every)
    except ValueError as exc:
        raise UsageError(what=f"--every: {exc}.", fix="--every 60") from exc
    if not 1 <= every_s <= 3600:
        raise UsageError(
            what=f"--every: invalid interval: {every_s:g} s.", why="It must be 1 second to 1 hour.", fix="--every 60"
        )
    if once and while_billing:
        raise UsageError(what="--once and --while-billing cannot be combined.", fix="homing guard --while-billing")
    with open_home() as home:
        if once:
            _once(home, every_s)
            return
        if while_billing:
            _while_billing(home, every_s)
            return
        output.say(f"Guarding: checking every {every_s:g} s. Ctrl-C stops this guard; the others keep running.")
        while True:
            wait_for_next(home, _unfailing_round(home, every_s), every_s)


def _while_billing(home: Home, every_s: float) -> None:
    """Guard until nothing has billed for a while.

    Signs out first, so that no launch counts on this guard any more, and then checks once more, so that a launch that
    counted on it a moment before is seen and guarded.
    """
    needed_at = home.world.monotonic()
    while True:
        made = _unfailing_round(home, every_s, background_pid=os.getpid())
        try:
            is_over = not is_needed(home) and home.world.monotonic() - needed_at >= IDLE_S
            if is_over:
                sign_out(home)
            if is_needed(home):
                needed_at = home.world.monotonic()
                is_over = False
        except (HomingError, OSError):  # what cannot be read may bill
            is_over, needed_at = False, home.world.monotonic()
        if is_over:
            output.say("Nothing is billing: this guard exits.")
            return
        wait_for_next(home, made, every_s)


def _unfailing_round(home: Home, every_s: float, *, background_pid: int = 0) -> Pass:
    try:
        return _round(home, every_s, background_pid=background_pid)
    except HomingError as exc:  # a busy ledger or a full disk may be fine again in a minute
        with contextlib.suppress(OSError):
            output.show_error(exc)
        return Pass()


def _once(home: Home, every_s: float) -> None:
    made = _round(home, every_s, is_once=True)
    if made.next_at - home.world.now() < every_s:
        # Cron runs again in `every_s`, which would be too late for this limit, so this round waits for it.
        wait_for_next(home, made, every_s)
        made = guard_pass(home, notify=_print_message)  # the same cron call, which has already signed in
        _show(home, made)
    if made.may_bill:
        raise StillBilling(
            what=f"{counted(len(made.may_bill), 'resource')} may still be billing and should not.",
            why="\n".join(made.may_bill),
            fix="homing runs   then: homing destroy --all   or: homing reconcile",
        )
    output.say("Watch a run: homing watch RUN   All of them: homing runs")


def _print_message(text: str) -> None:
    output.say(f"  {text}")


def _round(home: Home, every_s: float, *, is_once: bool = False, background_pid: int = 0) -> Pass:
    made = guard_pass(home, every_s=every_s, is_once=is_once, background_pid=background_pid, notify=_print_message)
    with contextlib.suppress(OSError):  # the terminal or the reader may be gone; the guard continues
        _show(home, made)
    return made


def _show(home: Home, made: Pass) -> None:
    document = {"done": made.done, "alerts": made.alerts, "problems": made.problems, "may_bill": made.may_bill}
    output.emit("guard/1", {"t": home.world.now(), **document})
    if not output.is_json():
        for begin, texts in (("", made.done), ("! ", made.alerts), ("MAY STILL BE BILLING: ", made.may_bill)):
            for text in texts:
                print(f"{begin}{text}", flush=True)
        for text in made.problems:
            output.say(f"warning: {text}")
