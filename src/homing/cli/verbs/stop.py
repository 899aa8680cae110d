"""`homing stop`: end training at the next step, with a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup import local_runs
from homing.api.lookup.find_runs import find_any, name_here, open_home, usd
from homing.api.lookup.local_runs import Trained
from homing.cli import output
from homing.cli.options import Json, RunRequired
from homing.cloud.guard.stop_and_limit import STOP_TIMEOUT_S, ask_to_stop, wait_for_stop
from homing.cloud.home import Home
from homing.cloud.ledger.meter import at_most
from homing.cloud.reconcile.reconcile import refresh
from homing.errors import UsageError
from homing.units import parse_duration

__all__ = ["command"]


def command(
    run: RunRequired,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Send the request and do not wait.")] = False,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="Maximum wait: 90s, 10m.")
    ] = f"{STOP_TIMEOUT_S:g}",
    json_: Json = False,
) -> None:
    """End training at the next step, with a checkpoint. The instance then ends its own billing."""
    output.ignore_output_errors()
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
            output.emit("stop/1", {"run": row.id, "serial": serial, "is_stopped": False})
            output.say(f"Stop requested. Watch it stop: homing watch {name_here(row)}")
            return
        try:
            status = wait_for_stop(home, row, timeout_s=timeout_s, notify=lambda text: output.say(f"  {text}"))
        except KeyboardInterrupt:
            output.say(
                f"Stopped waiting; the stop request remains active. Watch it stop: homing watch {name_here(row)}"
            )
            raise typer.Exit(130) from None
        document = {"run": row.id, "serial": serial, "is_stopped": True, **status.to_dict()}
        output.emit("stop/1", document)
        spent = at_most(*status.lines) + usd(status.spend_usd)
        output.say(f"{row.id} is {status.run.state}: {status.run.reason} Spent {spent}.")
        on = f"   Resume: homing launch {name_here(row)} --resume" * (status.run.state != "done")
        output.say(f"Fetch it: homing fetch {name_here(row)}{on}")


def _stop_here(home: Home, run: Trained, timeout_s: float, *, is_waiting: bool) -> None:
    """Stop a run that is trained on this computer: write the same control request into its folder."""
    local_runs.ask_to_stop(home, run)
    if is_waiting:
        try:
            run = local_runs.wait_for_stop(home, run, timeout_s=timeout_s)
        except KeyboardInterrupt:
            output.say(f"Stopped waiting; the stop request remains active. Watch it stop: homing watch {run.run}")
            raise typer.Exit(130) from None
    output.emit("stop/1", {**run.to_dict(), "is_stopped": not run.is_live})
    if run.is_live:
        output.say(f"Stop requested. Watch it stop: homing watch {run.run}")
        return
    output.say(f"{run.run} is {run.state}: {run.reason} It is at {run.where}.")
    output.say(run.next_words)
