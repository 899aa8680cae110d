"""`homing limit`: the limit of a run that lives or may go on, changed everywhere it is guarded."""

from __future__ import annotations

from typing import Annotated

import typer

from homing.cli import talk
from homing.cli.control import find_run, open_home, parse_limit, say_problems, usd
from homing.cli.find_run import name_here
from homing.cli.options import Json, RunRequired
from homing.cloud.limit import Change, change_limit, propose
from homing.cloud.reconcile import refresh
from homing.errors import UsageError
from homing.units import format_duration, parse_duration, parse_usd

__all__ = ["command"]


def command(
    run: RunRequired,
    dollars: Annotated[str | None, typer.Argument(hidden=True)] = None,
    spend: Annotated[
        str | None,
        typer.Option("--spend", "--spend-limit", metavar="DOLLARS", help="The most it may cost, over all attempts."),
    ] = None,
    time: Annotated[
        str | None, typer.Option("--time", metavar="TIME", help="How long its instance may live: 8h, 90m; 0: no limit.")
    ] = None,
    json_: Json = False,
) -> None:
    """Change the limit of a live run: in the ledger, at the provider, and on the instance."""
    if dollars is not None:
        raise UsageError(
            what=f"What is {dollars!r} the limit of?",
            why="A run has two: the dollars that it may cost, --spend, and how long its instance may live, --time.",
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
        is_confirmed = change_limit(home, change, tell=lambda text: talk.say(f"  {text}"))
        talk.emit("limit/1", {**_document(change), "is_confirmed": is_confirmed})
        if not talk.is_json():
            print(_sentence(change))
        if is_confirmed:
            talk.say("The agent has confirmed it.")
        elif not (home.ledger.run(row.id) or row).is_live:
            talk.say("No machine is at work on it: the next one, by its launch or by a guard, begins with this limit.")
        else:
            talk.say("The agent has not confirmed it yet: it obeys as soon as the request reaches it.")
            if change.is_lower:
                talk.say("Until then only the guard at home holds the new limit: homing guard")
        talk.say(f"See it: homing status {name_here(change.run)}")


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
