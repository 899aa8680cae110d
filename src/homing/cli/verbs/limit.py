"""`homing limit`: change the limit of a run that is live or may resume, everywhere it is enforced."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup.find_runs import name_here, parse_limit, usd
from homing.api.runs.limit_run import limit_run
from homing.cli import output
from homing.cli.options import Json, RunRequired
from homing.cloud.guard.change_limit_or_stop import Change
from homing.errors import UsageError
from homing.units import format_duration, parse_duration, parse_usd

__all__ = ["command"]


def command(
    run: RunRequired,
    dollars: Annotated[str | None, typer.Argument(hidden=True)] = None,
    spend: Annotated[
        str | None,
        typer.Option("--spend", "--spend-limit", metavar="DOLLARS", help="Maximum cost of the run, over all attempts."),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time", metavar="TIME", help="Maximum lifetime of the run's instance, such as 8h; 0 means no limit."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Change the limit of a live run: in the ledger, at the provider, and on the instance."""
    if dollars is not None:
        raise UsageError(
            what=f"Is {dollars!r} a spend limit or a time limit?",
            why="A run has two limits: its maximum cost, --spend, and the maximum lifetime of its instance, --time.",
            fix=f"homing limit {run} --spend {_as_dollars(dollars)}",
        )
    spend_usd = parse_limit(spend, "--spend")
    try:
        time_s = None if time is None else parse_duration(time)
    except ValueError as exc:
        raise UsageError(what=f"--time: {exc}.", fix="For example: --time 8h") from exc
    typed = f" --spend {spend}" * (spend is not None) + f" --time {time}" * (time is not None)
    limited = limit_run(run, spend_usd=spend_usd, time_s=time_s, typed=typed)
    output.emit("limit/1", limited.to_dict())
    if not output.is_json():
        print(_sentence(limited.change))
    if limited.is_confirmed:
        output.say("The agent confirmed the new limit.")
    elif not limited.is_live:
        output.say("The run has no instance now; its next instance will start with this limit.")
    else:
        output.say(
            "The agent has not confirmed the new limit yet; it will apply the limit when it receives the request."
        )
        if limited.change.is_lower:
            output.say(
                "Until the agent confirms the new limit, only a guard on your own computer enforces it."
                " To run one: homing guard"
            )
    output.say(f"Check it: homing status {name_here(limited.change.run)}")


def _as_dollars(text: str) -> str:
    try:
        parse_usd(text)
    except ValueError:
        return "20"
    return text.removeprefix("$")


def _sentence(change: Change) -> str:
    said = f"{change.run.id}: {usd(change.old_usd) if change.old_usd is not None else 'none'} -> {usd(change.new_usd)}"
    if change.new_time_s != change.old_time_s:
        said += f", time {_time(change.old_time_s)} -> {_time(change.new_time_s)}"
    return f"{said}. {change.at_most}{usd(change.spend_usd)} spent so far; worst case {usd(change.worst_case_usd)}."


def _time(seconds: float) -> str:
    return format_duration(seconds) if seconds else "no limit"
