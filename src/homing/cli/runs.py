"""`homing runs`: every run, rented or trained here, and whatever may still cost money, ledger or no ledger."""

from __future__ import annotations

from dataclasses import asdict
from decimal import Decimal

from homing.cli import talk
from homing.cli.control import open_home, say_problems, usd
from homing.cli.options import All, Json, Last
from homing.cli.trained_here import Trained, trained_here
from homing.cloud import background_guard, meter
from homing.cloud.guards import guard_on_duty
from homing.cloud.home import Home
from homing.cloud.ledger import LedgerLine
from homing.cloud.lost import what_is_lost
from homing.cloud.providers.base import Resource
from homing.cloud.reconcile import refresh
from homing.cloud.status import Status, billing_lines, dump_line, look, reached
from homing.cloud.stored import kept_by
from homing.cloud.survey import billing_things
from homing.units import counted, format_duration

__all__ = [
    "HEADERS",
    "billing_words",
    "command",
    "forgotten_row",
    "forgotten_words",
    "run_row",
    "thing_row",
    "trained_row",
]

HEADERS = ["run", "state", "step", "spent", "limit", "age", "instance", "billing"]  # of each row below


def command(last: Last = 30, all_: All = False, json_: Json = False) -> None:
    """The newest runs, every one that is not over, and whatever may still cost money."""
    with open_home() as home:
        lost = what_is_lost(home)
        problems = [*lost, *refresh(home)]
        things, more = billing_things(home, problems)
        problems += more
        shown = home.ledger.runs() if all_ else home.ledger.unfinished_runs(last)
        lines = home.ledger.lines_of(row.id for row in shown)
        found = [look(home, row, lines[row.id]) for row in shown]
        known, billing = home.ledger.run_ids(), billing_lines(home.ledger.open_lines())
        forgotten = [line for line in billing if line.run_id not in known]
        trained = trained_here(home, known)
        now, num_left_out = home.world.now(), max(0, len(known) - len(found))
        talk.emit(
            "runs/1",
            {
                "runs": [{**status.to_dict(), "kept": _kept(home, status)} for status in found],
                "num_left_out": num_left_out,
                "trained": [asdict(each) for each in trained],
                "billing": [dump_line(line) for line in billing],
                "forgotten": [dump_line(line) for line in forgotten],
                "things": [_dump_thing(each) for each in things],
                "problems": problems,
                "guard": asdict(found_guard) if (found_guard := guard_on_duty(home)) else None,
            },
        )
        talk.table(
            HEADERS,
            [
                *(run_row(status, now) for status in found),
                *(trained_row(each, now) for each in trained),
                *(forgotten_row(line, now) for line in forgotten),
                *(thing_row(each, now) for each in things),
            ],
        )
        if num_left_out:
            talk.say(
                f"{counted(num_left_out, 'older run')} not shown, all ended and closed. Show them: homing runs --all"
            )
        say_problems(problems)
        for line in forgotten:
            talk.say(f"warning: {forgotten_words(line)}")
        for sentence in billing_words(billing, things, problems):
            talk.say(sentence)
        if guard := background_guard.words(home):
            talk.say(guard)
        if not known and not home.ledger.num_lines() and not lost:
            talk.say(f"Nothing was ever launched from this home, {home.path}; what others rented is not shown here.")


def forgotten_words(line: LedgerLine) -> str:
    return f"{line.instance_id} on {line.provider} carries our mark and belongs to no run we know."


def billing_words(billing: list[LedgerLine], things: list[Resource], problems: list[str]) -> list[str]:
    """What costs money now, and how to end it; one sentence or two."""
    said, charged = [], [line for line in billing if meter.is_charged(line)]
    if charged:
        rate = sum((Decimal(line.rate_usd_per_hour) for line in charged), Decimal(0))
        said.append(f"{len(charged)} billing or maybe billing, {usd(rate)}/h. End all: homing destroy --all")
    if things:
        rate = sum((each.rate_usd_per_hour for each in things), Decimal(0))
        said.append(f"{len(things)} beside instances, {usd(rate)}/h until it is removed: homing reconcile shows it.")
    said = said or ["Nothing bills." if not problems else "Nothing is known to bill."]
    if num_here := len(billing) - len(charged):
        runs = sorted({line.run_id for line in billing if not meter.is_charged(line)})
        end = runs[0] if len(runs) == 1 and runs[0] else "--all"
        said.append(f"{counted(num_here, 'run')} on this computer: nobody charges for that. End: homing destroy {end}")
    return said


def trained_row(each: Trained, now: float) -> list[str]:
    age = format_duration(max(0.0, now - each.began_at))
    return [each.run, each.state, each.steps, "", "", age, "trained here", "no"]


def _kept(home: Home, status: Status) -> dict[str, object] | None:
    """What an ended run still costs in its store. A listing each, so only for those who read JSON."""
    found = kept_by(home, status.run) if talk.is_json() and not status.run.is_live else None
    return found.to_dict() if found else None


def run_row(status: Status, now: float) -> list[str]:
    told = status.signs.heartbeat if status.signs else None
    beat = reached(status, told) if told else None
    open_ = billing_lines(status.lines)
    last = open_[-1] if open_ else None
    return [
        status.run.id,
        status.run.state,
        f"{beat.step:,}/{beat.num_steps:,}" if beat and beat.num_steps else "",
        meter.at_most(*status.lines) + usd(status.spend_usd),
        usd(status.limit_usd) if status.limit_usd is not None else "",
        format_duration(max(0.0, now - status.run.created_at)),
        f"{last.provider} {last.instance_id or last.mark} {last.state}" if last else "",
        last.billing if last and meter.is_charged(last) else "no",
    ]


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
