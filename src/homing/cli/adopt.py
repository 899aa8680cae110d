"""`homing adopt`: go on with a run from another machine. The question names the money."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.control import open_home, say_problems, usd
from homing.cli.options import Json, Yes
from homing.cloud.adopt import Proposal, adopt, propose, stored_runs
from homing.cloud.home import Home
from homing.cloud.lease import newest
from homing.cloud.ledger import RunRow
from homing.cloud.status import billing_lines, dump_line
from homing.store import Store, open_store
from homing.units import format_duration

__all__ = ["command"]


def command(
    store: Annotated[str, typer.Argument(metavar="STORE", help="The store that the run lies in, such as s3://bucket.")],
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Which run, by id or name; all are listed when left out.")
    ] = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Go on with a run from this machine: its lease, its instances, its dollars and its papers."""
    with open_home() as home:
        opened = open_store(store, home.world, create=False)
        if run is None:
            _list(opened, home)
            return
        proposal = propose(opened, run, home)
        if proposal.is_ours:
            talk.say(f"{proposal.record.run_id} is this home's already.")
        elif not talk.ask(_question(proposal), yes=yes):
            talk.say("Nothing was changed.")
            return
        row, problems = adopt(proposal, opened, home)
        talk.emit("adopt/1", _document(home, row, problems))
        say_problems(problems)
        _say_next(home, row)


def _list(store: Store, home: Home) -> None:
    records = stored_runs(store)
    leases = {record.run_id: newest(store, record.run_id) for record in records}
    now = home.world.now()
    rows, documents = [], []
    for record in records:
        lease = leases[record.run_id]
        owner = lease.owner if lease is not None else record.owner
        whose = "this home" if owner == home.owner else f"{owner} on {(lease.host if lease else record.host) or '?'}"
        age = format_duration(max(0.0, now - record.updated_at))
        limit = usd(record.spend_limit_usd) if record.spend_limit_usd else ""
        rows.append((record.run_id, record.state, whose, len(record.attempts), limit, f"{age} ago"))
        documents.append(
            {
                "run": record.run_id,
                "name": record.run_name,
                "state": record.state,
                "owner": owner,
                "is_ours": owner == home.owner,
                "num_attempts": len(record.attempts),
                "spend_limit_usd": record.spend_limit_usd,
                "updated_at": record.updated_at,
            }
        )
    talk.emit("adopt-list/1", {"store": store.url, "runs": documents})
    talk.table(["run", "state", "owner", "attempts", "limit", "written"], rows)
    again = f"Adopt one: homing adopt {shlex.quote(store.url)} RUN"
    talk.say(again if records else f"No run has a record in {store.url}.")


def _question(proposal: Proposal) -> str:
    record = proposal.record
    limit = f" of {usd(record.spend_limit_usd)}" if record.spend_limit_usd else ""
    live = [
        f"{line.provider} {line.instance_id or line.mark} at {usd(line.rate_usd_per_hour)}/h" for line in proposal.live
    ]
    bills = f"it bills: {', '.join(live)}" if live else "nothing of it is known to bill"
    return (
        f"Adopt {record.run_id} from {proposal.owner} on {proposal.host}: {record.state},"
        f" {usd(proposal.spend_usd)}{limit} spent, {bills}?"
    )


def _document(home: Home, row: RunRow, problems: list[str]) -> dict[str, Any]:
    lines = home.ledger.lines(row.id)
    return {
        "run": row.id,
        "name": row.name,
        "state": row.state,
        "store": row.store,
        "spend_limit_usd": row.spend_limit_usd,
        "instances": [dump_line(line) for line in lines],
        "problems": problems,
    }


def _say_next(home: Home, row: RunRow) -> None:
    lines = billing_lines(home.ledger.lines(row.id))
    talk.say(f"{row.id} is this home's now: {row.state}, {len(lines)} billing or maybe billing.")
    if row.is_live:
        talk.say(f"Watch it: homing watch {row.id}   Stop it: homing stop {row.id}   End it: homing destroy {row.id}")
    elif lines:
        talk.say(f"It has ended and its instance may still cost money: homing destroy {row.id}")
    elif row.state == "done":
        talk.say(f"Fetch it: homing fetch {row.id}")
    else:
        talk.say(f"Go on: homing launch {row.id} --resume   Fetch it: homing fetch {row.id}")
