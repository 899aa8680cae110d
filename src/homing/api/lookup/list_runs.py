"""All runs, and everything that may still cost money: what `homing runs`, the dashboard and `homing.runs()` show.

ledger + runs trained here -> refresh from the providers -> Listing -> documents (JSON) and rows (tables)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any

from homing.api.lookup.find_runs import open_home, usd
from homing.api.lookup.local_runs import Trained, trained_here
from homing.cloud.artifacts.remove_from_store import kept_by
from homing.cloud.contact.home_guard import guard_on_duty
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine
from homing.cloud.ledger.meter import billing_lines
from homing.cloud.providers.base import Resource
from homing.cloud.reconcile.inventory import billing_things
from homing.cloud.reconcile.lost_ledger import what_is_lost
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import Status, dump_line, look, reached
from homing.errors import NotChecked
from homing.units import counted, format_duration

__all__ = [
    "HEADERS",
    "Listing",
    "billing_words",
    "forgotten_row",
    "forgotten_words",
    "list_runs",
    "run_row",
    "thing_row",
    "trained_row",
]

HEADERS = ["run", "state", "step", "spent", "limit", "age", "instance", "billing"]  # for the rows below


@dataclass(frozen=True)
class Listing:
    """The newest runs, every unfinished run, and everything that may still cost money."""

    runs: list[Status]
    trained: list[Trained]
    billing: list[LedgerLine]
    forgotten: list[LedgerLine]  # ledger lines that may be billing and belong to no known run
    things: list[Resource]  # volumes and other resources that bill
    problems: list[str]
    num_known: int
    lost: list[str]
    at: float

    @property
    def num_left_out(self) -> int:
        return max(0, self.num_known - len(self.runs))

    @property
    def rows(self) -> list[list[str]]:
        return [
            *(run_row(status, self.at) for status in self.runs),
            *(trained_row(each, self.at) for each in self.trained),
            *(forgotten_row(line, self.at) for line in self.forgotten),
            *(thing_row(each, self.at) for each in self.things),
        ]

    def to_dict(self, home: Home) -> dict[str, Any]:
        return {
            "runs": [{**status.to_dict(), "kept": _kept(home, status)} for status in self.runs],
            "num_left_out": self.num_left_out,
            "trained": [asdict(each) for each in self.trained],
            "billing": [dump_line(line) for line in self.billing],
            "forgotten": [dump_line(line) for line in self.forgotten],
            "things": [_dump_thing(each) for each in self.things],
            "problems": self.problems,
            "guard": asdict(found_guard) if (found_guard := guard_on_duty(home)) else None,
        }


def list_runs(*, last: int = 30, is_all: bool = False, home: Home | None = None) -> Listing:
    """Query every provider, update the ledger, and list all runs."""
    with open_home(home) as opened:
        return _list_runs(opened, last, is_all)


def _list_runs(home: Home, last: int, is_all: bool) -> Listing:
    lost = what_is_lost(home)
    problems = [*lost, *refresh(home)]
    things, more = billing_things(home, problems)
    problems += more
    shown = home.ledger.runs() if is_all else home.ledger.unfinished_runs(last)
    lines = home.ledger.lines_of(row.id for row in shown)
    found = [look(home, row, lines[row.id]) for row in shown]
    known, billing = home.ledger.run_ids(), billing_lines(home.ledger.open_lines())
    forgotten = [line for line in billing if line.run_id not in known]
    trained = trained_here(home, known)
    return Listing(found, trained, billing, forgotten, things, problems, len(known), lost, home.world.now())


def _kept(home: Home, status: Status) -> dict[str, object] | None:
    """Return the storage costs of an ended run. This lists the store once for each run."""
    found = kept_by(home, status.run) if not status.run.is_live else None
    return found.to_dict() if found else None


def forgotten_words(line: LedgerLine) -> str:
    return f"{line.instance_id} on {line.provider} was created by homing but belongs to no known run."


def billing_words(billing: list[LedgerLine], things: list[Resource], problems: list[str]) -> list[str]:
    """Return one or two sentences that say what costs money now and how to end it."""
    said, charged = [], [line for line in billing if meter.is_charged(line)]
    if charged:
        rate = sum((Decimal(line.rate_usd_per_hour) for line in charged), Decimal(0))
        said.append(
            f"{counted(len(charged), 'instance')} may still be billing, {usd(rate)}/h. End all: homing destroy --all"
        )
    if things:
        rate = sum((each.rate_usd_per_hour for each in things), Decimal(0))
        said.append(
            f"{counted(len(things), 'other resource')} billed at {usd(rate)}/h until removed. Details: homing reconcile"
        )
    said = said or ["Nothing is billing." if not problems else "Nothing is known to be billing."]
    if unset := sorted({problem.provider for problem in problems if isinstance(problem, NotChecked)}):
        said.append(f"Not checked, because it is not set up here: {', '.join(unset)}. See: homing doctor")
    if num_here := len(billing) - len(charged):
        runs = sorted({line.run_id for line in billing if not meter.is_charged(line)})
        end = runs[0] if len(runs) == 1 and runs[0] else "--all"
        said.append(f"{counted(num_here, 'run')} on this computer, free of charge. End: homing destroy {end}")
    return said


def trained_row(each: Trained, now: float) -> list[str]:
    age = format_duration(max(0.0, now - each.began_at))
    return [each.run, each.state, each.steps, "", "", age, "this computer", "no"]


def run_row(status: Status, now: float) -> list[str]:
    heartbeat = status.reports.heartbeat if status.reports else None
    beat = reached(status, heartbeat) if heartbeat else None
    open_ = billing_lines(status.lines)
    last = open_[-1] if open_ else None
    return [
        status.run.id,
        status.run.state,
        f"{beat.step:,}/{beat.num_steps:,}" if beat and beat.num_steps else "",
        meter.at_most(*status.lines) + usd(status.spend_usd),
        _limit(status),
        format_duration(max(0.0, now - status.run.created_at)),
        f"{last.provider} {last.instance_id or last.mark} {last.state}" if last else "",
        last.billing if last and meter.is_charged(last) else "no",
    ]


def _limit(status: Status) -> str:
    """Return the most that the run can cost. It is less than the spend limit if a time limit is reached first."""
    if status.limit_usd is None or status.most_usd is None:
        return ""
    by_time = " by time" if status.most_usd < status.limit_usd else ""
    return f"{usd(status.most_usd)}{by_time}"


def forgotten_row(line: LedgerLine, now: float) -> list[str]:
    where, age = f"{line.provider} {line.instance_id} {line.state}", format_duration(max(0.0, now - line.intent_at))
    return ["(no run)", "forgotten", "", usd(meter.line_spend(line, now)), "", age, where, line.billing]


def thing_row(thing: Resource, now: float) -> list[str]:
    age_s = max(0.0, now - thing.created_at) if thing.created_at is not None else None
    spent = usd(meter.cost(thing.rate_usd_per_hour, age_s)) if age_s is not None else ""
    kind = "kept" if thing.is_kept else thing.kind
    age = format_duration(age_s) if age_s is not None else ""
    return ["(no run)", kind, "", spent, "", age, f"{thing.provider} {thing.kind} {thing.id}", "yes"]


def _dump_thing(thing: Resource) -> dict[str, object]:
    return {
        "provider": thing.provider,
        "kind": thing.kind,
        "id": thing.id,
        "mark": thing.mark,
        "rate_usd_per_hour": str(thing.rate_usd_per_hour),
        "is_kept": thing.is_kept,
        "detail": thing.detail,
    }
