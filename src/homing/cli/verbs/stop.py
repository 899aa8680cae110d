"""`homing stop`: end training at the next step, with a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup.find_runs import usd
from homing.api.lookup.local_runs import Trained
from homing.api.runs.stop_run import StoppedWaiting, stop_run
from homing.cli import output
from homing.cli.options import Json, RunRequired
from homing.cloud.guard.change_limit_or_stop import STOP_TIMEOUT_S
from homing.cloud.ledger.meter import at_most
from homing.errors import UsageError
from homing.units import parse_duration

__all__ = ["command"]


def command(
    run: RunRequired,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Send the stop request and do not wait.")] = False,
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
        raise UsageError(what=f"--timeout: {exc}.", fix="For example: --timeout 10m") from exc
    try:
        stopped = stop_run(run, wait=not no_wait, timeout_s=timeout_s)
    except StoppedWaiting as left:
        output.say(str(left))
        raise typer.Exit(130) from None
    output.emit("stop/1", stopped.to_dict())
    if not stopped.is_stopped:
        output.say(f"Stop requested. Watch it stop: homing watch {stopped.typed}")
    elif isinstance(stopped.run, Trained):
        output.say(f"{stopped.typed} is {stopped.run.state}: {stopped.run.reason} Progress: {stopped.run.where}.")
        output.say(stopped.run.next_words)
    elif (status := stopped.status) is not None:
        spent = at_most(*status.lines) + usd(status.spend_usd)
        output.say(f"{status.run.id} is {status.run.state}: {status.run.reason} Spent {spent}.")
        if stopped.next_words:
            output.say(stopped.next_words)
