"""`homing ledger`: every instance ever asked for, with its dollars."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

import typer

from homing.cli import talk
from homing.cli.control import find_run, open_home, say_problems, usd
from homing.cli.options import Json
from homing.cloud import meter
from homing.cloud.ledger import LedgerLine
from homing.cloud.meter import Bill, compare
from homing.cloud.reconcile import refresh
from homing.cloud.status import dump_line
from homing.units import UsdColumn, format_moment

__all__ = ["command"]


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Only this run; all of them when left out.")] = None,
    json_: Json = False,
) -> None:
    """Every instance ever asked for, from the intent to the receipt; rows are never deleted."""
    with open_home() as home:
        problems = refresh(home)
        if run is not None:
            row = find_run(home, run)
            # A name means every run of that name: a receipt that leaves earlier dollars out is none.
            is_id = run == row.id
            lines = home.ledger.lines(row.id) if is_id else [x for x in home.ledger.lines() if x.run_name == row.name]
        else:
            lines = home.ledger.lines()
        now = home.world.now()
        total = meter.total_spend(lines, now)
        spends = {line.mark: meter.line_spend(line, now) for line in lines}
        bills = [bill for line in lines if (bill := compare(line, home.ledger.bills(), now)) is not None]
        theirs = {bill.mark: bill for bill in bills}
        talk.emit(
            "ledger/1",
            {
                "lines": [
                    {**dump_line(line), "spend_usd": str(spends[line.mark]), **_bill_of(theirs.get(line.mark))}
                    for line in lines
                ],
                "total_usd": str(total),
                "is_at_most": any(line.is_at_most for line in lines),
                "margin_s": meter.MARGIN_S,
                "problems": problems,
            },
        )
        column = UsdColumn.of(
            [*spends.values(), *(each for bill in bills for each in (bill.ours_usd, bill.theirs_usd))]
        )
        rows = [
            (
                line.run_id or "(no run)",
                line.attempt,
                line.provider,
                line.offer,
                f"{usd(line.rate_usd_per_hour)}/h",
                format_moment(line.created_at or line.intent_at),
                format_moment(line.destroyed_at),
                line.state,
                line.billing,
                meter.at_most(line) + column.show(spends[line.mark]),
                *_shown(column, theirs.get(line.mark)),
            )
            for line in lines
        ]
        shown_total = meter.at_most(*lines) + column.show(column.total(spends.values()))
        total_row = ("total", "", "", "", "", "", "", "", "", shown_total)
        headers = ["run", "attempt", "provider", "offer", "rate", "from", "until", "state", "billing", "dollars"]
        talk.table([*headers, "theirs", "apart"], [*rows, total_row])
        say_problems(problems)
        _say_margin(total)
        _say_at_most(lines)
        _say_bills(column, bills)


def _bill_of(bill: Bill | None) -> dict[str, Any]:
    if bill is None:
        return {"provider_usd": None, "difference_usd": None}
    return {"provider_usd": str(bill.theirs_usd), "difference_usd": str(bill.difference_usd)}


def _shown(column: UsdColumn, bill: Bill | None) -> tuple[str, str]:
    if bill is None:
        return "", ""
    return column.show(bill.theirs_usd), column.show_difference(bill.ours_usd, bill.theirs_usd)


def _say_bills(column: UsdColumn, bills: list[Bill]) -> None:
    """Where a provider tells its own figure: both, and aloud those that differ by more than we promise."""
    if not bills:
        return
    ours, theirs = (column.total(bill.ours_usd for bill in bills), column.total(bill.theirs_usd for bill in bills))
    told = f"By our count {column.show(ours)}, by the providers' own {column.show(theirs)}"
    talk.say(f"{told}, over {len(bills)} that tell one.")
    for bill in bills:
        if not bill.is_within_margin:
            talk.say(
                f"warning: {bill.mark}: the provider says {usd(bill.theirs_usd)}, we count {usd(bill.ours_usd)};"
                " the larger one counts against the limit. See the provider's own page of usage."
            )


def _say_at_most(lines: list[LedgerLine]) -> None:
    if any(line.is_at_most for line in lines):
        talk.say(meter.AT_MOST_WORDS)


def _say_margin(total: Decimal) -> None:
    if total:
        talk.say(meter.MARGIN_WORDS)
