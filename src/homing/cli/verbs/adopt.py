"""`homing adopt`: take over a run from another machine. The confirmation names the money involved."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from homing.api.lookup.find_runs import open_home, usd
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import Json, Yes
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import RunRow
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.ledger.ownership import newest, stored_runs
from homing.cloud.reconcile.adopt import Proposal, adopt, propose
from homing.cloud.reconcile.run_status import dump_line
from homing.store import Store, open_store
from homing.units import counted, format_duration

__all__ = ["command"]


def command(
    store: Annotated[str, typer.Argument(metavar="STORE", help="Store of the run, such as s3://bucket.")],
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Run id or name; default: list all runs.")] = None,
    yes: Yes = False,
    json_: Json = False,
) -> None:
    """Take over a run on this machine: its lease, instances, spend and run documents."""
    with open_home() as home:
        opened = open_store(store, home.world, create=False)
        if run is None:
            _list(opened, home)
            return
        proposal = propose(opened, run, home)
        if proposal.is_ours:
            output.say(f"{proposal.record.run_id} already belongs to this home.")
        elif not output.ask(_question(proposal), yes=yes):
            output.say("Nothing was changed.")
            return
        row, problems = adopt(proposal, opened, home)
        output.emit("adopt/1", _document(home, row, problems))
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
        owned_by = "this home" if owner == home.owner else f"{owner} on {(lease.host if lease else record.host) or '?'}"
        age = format_duration(max(0.0, now - record.updated_at))
        limit = usd(record.spend_limit_usd) if record.spend_limit_usd else ""
        rows.append((record.run_id, record.state, owned_by, len(record.attempts), limit, f"{age} ago"))
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
    output.emit("adopt-list/1", {"store": store.url, "runs": documents})
    output.table(["run", "state", "owner", "attempts", "limit", "written"], rows)
    again = f"Adopt one: homing adopt {shlex.quote(store.url)} RUN"
    output.say(again if records else f"No run has a record in {store.url}.")


def _question(proposal: Proposal) -> str:
    record = proposal.record
    limit = f" of {usd(record.spend_limit_usd)}" if record.spend_limit_usd else ""
    live = [
        f"{line.provider} {line.instance_id or line.mark} at {usd(line.rate_usd_per_hour)}/h" for line in proposal.live
    ]
    bills = f"billing: {', '.join(live)}" if live else "not known to be billing"
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
    output.say(f"{row.id} now belongs to this home: {row.state}, {counted(len(lines), 'instance')} may be billing.")
    if row.is_live:
        output.say(f"Watch it: homing watch {row.id}   Stop it: homing stop {row.id}   End it: homing destroy {row.id}")
    elif lines:
        output.say(f"The run has ended, but its instance may still be billing. End billing: homing destroy {row.id}")
    elif row.state == "done":
        output.say(f"Fetch it: homing fetch {row.id}")
    else:
        output.say(f"Resume: homing launch {row.id} --resume   Fetch it: homing fetch {row.id}")
