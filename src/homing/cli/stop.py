"""`homing stop`: end training at the next step, with a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.cli import talk, watch_here
from homing.cli.control import find_any, open_home, usd
from homing.cli.find_run import name_here
from homing.cli.options import Json, RunRequired
from homing.cli.trained_here import Trained
from homing.cloud.home import Home
from homing.cloud.meter import at_most
from homing.cloud.reconcile import refresh
from homing.cloud.stop import STOP_TIMEOUT_S, ask_to_stop, wait_for_stop
from homing.errors import UsageError
from homing.units import parse_duration

__all__ = ["command"]


def command(
    run: RunRequired,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Ask, and do not wait for it.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="How long to wait: 90s, 10m.")
    ] = f"{STOP_TIMEOUT_S:g}",
    json_: Json = False,
) -> None:
    """End training at the next step, with a checkpoint; the instance then ends its own billing."""
    talk.go_on_unheard()
    try:
        timeout_s = parse_duration(timeout)
    except ValueError as exc:
        raise UsageError(what=f"--timeout: {exc}.", fix="--timeout 10m") from exc
    with open_home() as home:
        refresh(home)
        row = find_any(home, run, changes="stop {}")
        if isinstance(row, Trained):
            _stop_here(home, row, timeout_s, is_waiting=not no_wait)
            return
        serial = ask_to_stop(home, row)
        if no_wait:
            talk.emit("stop/1", {"run": row.id, "serial": serial, "is_stopped": False})
            talk.say(f"Asked. See it stop: homing watch {name_here(row)}")
            return
        try:
            status = wait_for_stop(home, row, timeout_s=timeout_s, tell=lambda text: talk.say(f"  {text}"))
        except KeyboardInterrupt:
            talk.say(
                f"No longer waited for; the request stays and is obeyed. See it stop: homing watch {name_here(row)}"
            )
            raise typer.Exit(130) from None
        document = {"run": row.id, "serial": serial, "is_stopped": True, **status.to_dict()}
        talk.emit("stop/1", document)
        spent = at_most(*status.lines) + usd(status.spend_usd)
        talk.say(f"{row.id} is {status.run.state}: {status.run.reason} Spent {spent}.")
        on = f"   Go on: homing launch {name_here(row)} --resume" * (status.run.state != "done")
        talk.say(f"Fetch it: homing fetch {name_here(row)}{on}")


def _stop_here(home: Home, run: Trained, timeout_s: float, *, is_waiting: bool) -> None:
    """Of a run that is trained on this computer: the same wish, laid into its own folder."""
    watch_here.ask_to_stop(home, run)
    if is_waiting:
        try:
            run = watch_here.wait_for_stop(home, run, timeout_s=timeout_s)
        except KeyboardInterrupt:
            talk.say(f"No longer waited for; the request stays and is obeyed. See it stop: homing watch {run.run}")
            raise typer.Exit(130) from None
    talk.emit("stop/1", {**run.to_dict(), "is_stopped": not run.is_live})
    if run.is_live:
        talk.say(f"Asked. See it stop: homing watch {run.run}")
        return
    talk.say(f"{run.run} is {run.state}: {run.reason} It is at {run.where}.")
    talk.say(run.next_words)
