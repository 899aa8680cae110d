"""`homing guard`: the guard at home, in a terminal, in cron or on a server."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import open_home
from homing.cli.options import Json
from homing.cloud.background_guard import IDLE_S, is_needed
from homing.cloud.guard import DEFAULT_EVERY_S, Pass, guard_pass, wait_for_next
from homing.cloud.guards import sign_out
from homing.cloud.home import Home
from homing.errors import HomingError, StillBilling, UsageError
from homing.units import parse_duration

__all__ = ["command"]


def command(
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="A round at least so often: 30, 60s, 5m.")
    ] = f"{DEFAULT_EVERY_S:g}",
    once: Annotated[
        bool, typer.Option("--once", help="One round, for cron; it waits for a limit that comes before the next one.")
    ] = False,
    while_billing: Annotated[
        bool,
        typer.Option("--while-billing", help="End when nothing has billed for 15 minutes. How `launch` starts one."),
    ] = False,
    json_: Json = False,
) -> None:
    """End what reached its limit or ended long ago, go on with what was taken away, say what is silent.

    Exit code 6 when something may still bill that should not.
    """
    talk.go_on_unheard()
    try:
        every_s = parse_duration(every)
    except ValueError as exc:
        raise UsageError(what=f"--every: {exc}.", fix="--every 60") from exc
    if not 1 <= every_s <= 3600:
        raise UsageError(
            what=f"--every: invalid interval: {every_s:g} s.", why="It may be 1 second to 1 hour.", fix="--every 60"
        )
    if once and while_billing:
        raise UsageError(what="--once and --while-billing exclude each other.", fix="homing guard --while-billing")
    with open_home() as home:
        if once:
            _once(home, every_s)
            return
        if while_billing:
            _while_billing(home, every_s)
            return
        talk.say(f"On guard, a round every {every_s:g} s. Ctrl-C ends it; the other guards stay.")
        while True:
            wait_for_next(home, _unfailing_round(home, every_s), every_s)


def _while_billing(home: Home, every_s: float) -> None:
    """Signs out at its end: from then on no launch may count on it. The last look comes after that, so that a launch
    which counted on it a moment before is seen, and guarded."""
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
            talk.say("Nothing bills: this guard ends.")
            return
        wait_for_next(home, made, every_s)


def _unfailing_round(home: Home, every_s: float, *, background_pid: int = 0) -> Pass:
    try:
        return _round(home, every_s, background_pid=background_pid)
    except HomingError as exc:  # a ledger that is busy or a disk that is full now may be well in a minute
        with contextlib.suppress(OSError):
            talk.show_error(exc)
        return Pass()


def _once(home: Home, every_s: float) -> None:
    made = _round(home, every_s, is_once=True)
    if made.next_at - home.world.now() < every_s:
        # Cron comes again in `every_s`, and that would be too late: this round waits for the limit.
        wait_for_next(home, made, every_s)
        made = guard_pass(home, tell=_tell)  # the same call of cron: it has signed in
        _show(home, made)
    if made.may_bill:
        raise StillBilling(
            what=f"{len(made.may_bill)} of ours may still cost money and should not.",
            why="\n".join(made.may_bill),
            fix="homing runs   then: homing destroy --all   or: homing reconcile",
        )
    talk.say("Watch a run: homing watch RUN   All of them: homing runs")


def _tell(text: str) -> None:
    talk.say(f"  {text}")


def _round(home: Home, every_s: float, *, is_once: bool = False, background_pid: int = 0) -> Pass:
    made = guard_pass(home, every_s=every_s, is_once=is_once, background_pid=background_pid, tell=_tell)
    with contextlib.suppress(OSError):  # its terminal or its reader may be gone; the guard goes on
        _show(home, made)
    return made


def _show(home: Home, made: Pass) -> None:
    document = {"done": made.done, "alerts": made.alerts, "problems": made.problems, "may_bill": made.may_bill}
    talk.emit("guard/1", {"t": home.world.now(), **document})
    if not talk.is_json():
        for begin, texts in (("", made.done), ("! ", made.alerts), ("MAY STILL BILL: ", made.may_bill)):
            for text in texts:
                print(f"{begin}{text}", flush=True)
        for text in made.problems:
            talk.say(f"warning: {text}")
