"""`homing adopt`: take over a run from another machine. The confirmation prompt says how much money is involved."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from homing.api.lookup.find_runs import usd
from homing.api.notices import say_problems
from homing.api.runs.adopt_run import Adopted, StoredRun, adopt_run, list_stored
from homing.cli import output
from homing.cli.options import Json, Yes
from homing.cloud.ledger.meter import billing_lines
from homing.config.home_and_run_files import launch_again
from homing.units import counted, format_duration

__all__ = ["command"]


def command(
    store: Annotated[str, typer.Argument(metavar="STORE", help="The run's store, such as s3://bucket.")],
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run id or name; default: list all runs.")] = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Take over a run from another computer: its lease, instances, spend and run documents."""
    if run is None:
        _list(store)
        return
    adopted = adopt_run(store, run, agrees=lambda question: output.ask(question, yes=yes))
    if adopted is None:
        output.say("Nothing was changed.")
        return
    output.emit("adopt/1", adopted.to_dict())
    say_problems(adopted.problems)
    _say_next(adopted)


def _list(store: str) -> None:
    found = list_stored(store)
    output.emit("adopt-list/1", found.to_dict())
    output.table(
        ["run", "state", "owner", "attempts", "limit", "written"], [_row(each, found.at) for each in found.runs]
    )
    again = f"Adopt one: homing adopt {shlex.quote(found.url)} RUN"
    output.say(again if found.runs else f"No run has a record in {found.url}.")


def _row(stored: StoredRun, now: float) -> tuple[object, ...]:
    record = stored.record
    owned_by = "this home" if stored.is_ours else f"{stored.owner} on {stored.host or '?'}"
    age = format_duration(max(0.0, now - record.updated_at))
    limit = usd(record.spend_limit_usd) if record.spend_limit_usd else ""
    return record.run_id, record.state, owned_by, len(record.attempts), limit, f"{age} ago"


def _say_next(adopted: Adopted) -> None:
    row, lines = adopted.run, billing_lines(adopted.lines)
    output.say(
        f"{row.id} now belongs to this homing home directory ($HOMING_HOME). State: {row.state};"
        f" {counted(len(lines), 'instance')} may be billing."
    )
    if row.is_live:
        output.say(f"Watch it: homing watch {row.id}   Stop it: homing stop {row.id}   End it: homing destroy {row.id}")
    elif lines:
        output.say(f"The run has ended, but its instance may still be billing. End billing: homing destroy {row.id}")
    elif row.state == "done":
        output.say(f"Fetch it: homing fetch {row.id}")
    elif not adopted.has_checkpoint:
        output.say(f"No checkpoint was saved. Start over: {launch_again(row.name)}")
    else:
        output.say(f"Resume: homing launch {row.id} --resume   Fetch it: homing fetch {row.id}")
