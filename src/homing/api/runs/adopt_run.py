"""Take over a run from another machine. Implements `homing adopt`.

list_stored(store)            every run with a record in the store, and its owner
adopt_run(store, run, ...)    proposal -> confirmation that names the cost -> lease, ledger, documents -> Adopted
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from homing.api import notices
from homing.api.confirmation import Agrees, refuse
from homing.api.lookup.find_runs import open_home, usd
from homing.cloud.home import Home
from homing.cloud.ledger.ledger import LedgerLine, RunRow
from homing.cloud.ledger.run_lease import newest, stored_runs
from homing.cloud.reconcile.adopt import Proposal, adopt, propose
from homing.cloud.reconcile.run_status import dump_line, has_checkpoint
from homing.store import open_store
from homing.wire.run_record import Lease, RunRecord

__all__ = ["Adopted", "StoredRun", "StoredRuns", "adopt_run", "list_stored"]


@dataclass(frozen=True)
class Adopted:
    run: RunRow
    lines: list[LedgerLine]  # the run's ledger lines after the adoption
    problems: list[str]  # one sentence for each provider or file that could not be read
    has_checkpoint: bool = True  # False if the store has no checkpoint of the run

    def to_dict(self) -> dict[str, Any]:
        row = self.run
        return {
            "run": row.id,
            "name": row.name,
            "state": row.state,
            "store": row.store,
            "spend_limit_usd": row.spend_limit_usd,
            "instances": [dump_line(line) for line in self.lines],
            "problems": self.problems,
        }


@dataclass(frozen=True)
class StoredRun:
    """A run's record in a store, and its lease, which says which homing home directory owns the run."""

    record: RunRecord
    lease: Lease | None
    is_ours: bool

    @property
    def owner(self) -> str:
        return self.lease.owner if self.lease is not None else self.record.owner

    @property
    def host(self) -> str:
        return self.lease.host if self.lease is not None else self.record.host

    def to_dict(self) -> dict[str, Any]:
        record = self.record
        return {
            "run": record.run_id,
            "name": record.run_name,
            "state": record.state,
            "owner": self.owner,
            "is_ours": self.is_ours,
            "num_attempts": len(record.attempts),
            "spend_limit_usd": record.spend_limit_usd,
            "updated_at": record.updated_at,
        }


@dataclass(frozen=True)
class StoredRuns:
    url: str
    runs: list[StoredRun]  # newest first
    at: float

    def to_dict(self) -> dict[str, Any]:
        return {"store": self.url, "runs": [each.to_dict() for each in self.runs]}


def list_stored(store: str, *, home: Home | None = None) -> StoredRuns:
    """Return every run that has a record in the store."""
    with open_home(home) as opened:
        source = open_store(store, opened.world, create=False)
        found = []
        for record in stored_runs(source):
            lease = newest(source, record.run_id)
            owner = lease.owner if lease is not None else record.owner
            found.append(StoredRun(record, lease, owner == opened.owner))
        return StoredRuns(source.url, found, opened.world.now())


def adopt_run(store: str, run: str, *, agrees: Agrees = refuse, home: Home | None = None) -> Adopted | None:
    """Take over a run, by its id or name: its lease, instances, spend and run documents. None if `agrees` declines."""
    with open_home(home) as opened:
        source = open_store(store, opened.world, create=False)
        proposal = propose(source, run, opened)
        if proposal.is_ours:
            notices.say(f"{proposal.record.run_id} already belongs to this homing home directory.")
        elif not agrees(_question(proposal)):
            return None
        row, problems = adopt(proposal, source, opened)
        return Adopted(row, opened.ledger.lines(row.id), problems, has_checkpoint(opened, row))


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
