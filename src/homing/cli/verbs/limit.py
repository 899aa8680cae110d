"""`homing limit`: change the limit of a run that is live or may resume, everywhere it is enforced."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.api.lookup.find_runs import find_run, name_here, open_home, parse_limit, usd
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import Json, RunRequired
from homing.cloud.guard.stop_and_limit import Change, change_limit, propose
from homing.cloud.reconcile.reconcile import refresh
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
        typer.Option("--time", metavar="TIME", help="Maximum lifetime of its instance: 8h, 90m; 0: no limit."),
    ] = None,
    json_: Json = False,
) -> None:
    """Change the limit of a live run: in the ledger, at the provider, and on the instance."""
    if dollars is not None:
        raise UsageError(
            what=f"{dollars!r}: spend or time limit?",
            why="A run has two limits: its maximum cost, --spend, and the maximum lifetime of its instance, --time.",
            fix=f"homing limit {run} --spend {_as_dollars(dollars)}",
        )
    spend_usd = parse_limit(spend, "--spend")
    try:
        time_s = None if time is None else parse_duration(time)
    except ValueError as exc:
        raise UsageError(what=f"--time: {exc}.", fix="--time 8h") from exc
    with open_home() as home:
        say_problems(refresh(home))
        flags = f" --spend {spend}" * (spend is not None) + f" --time {time}" * (time is not None)
        row = find_run(home, run, changes=f"limit {{}}{flags}")
        change = propose(home, row, spend_usd, time_s)
        is_confirmed = change_limit(home, change, notify=lambda text: output.say(f"  {text}"))
        output.emit("limit/1", {**_document(change), "is_confirmed": is_confirmed})
        if not output.is_json():
            print(_sentence(change))
        if is_confirmed:
            output.say("The agent confirmed the new limit.")
        elif not (home.ledger.run(row.id) or row).is_live:
            output.say("The run has no instance now; the next one starts with this limit.")
        else:
            output.say("The agent has not confirmed it yet; it applies the limit as soon as the request arrives.")
            if change.is_lower:
                output.say("Until then only the local guard enforces the new limit: homing guard")
        output.say(f"Check it: homing status {name_here(change.run)}")


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


def _document(change: Change) -> dict[str, object]:
    return {
        "run": change.run.id,
        "old_usd": None if change.old_usd is None else str(change.old_usd),
        "new_usd": str(change.new_usd),
        "old_time_s": change.old_time_s,
        "new_time_s": change.new_time_s,
        "spend_usd": str(change.spend_usd),
        "worst_case_usd": str(change.worst_case_usd),
    }
