"""`homing ledger`: every instance ever requested, with its cost."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Annotated, Any

import typer

from homing.api.lookup.find_runs import find_run, open_home, usd
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import All, Json, Last
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, Receipts
from homing.cloud.ledger.meter import Bill, compare
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import dump_line
from homing.units import UsdColumn, counted, format_moment

__all__ = ["command"]

_EVERY = 1 << 62  # as many rows as SQLite can number


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Show only this run; default: all runs.")] = None,
    last: Last = 50,
    all_: All = False,
    json_: Json = False,
) -> None:
    """List the newest instances ever requested and every one that may bill, with the total spend.

    Rows are never deleted.
    """
    with open_home() as home:
        problems = refresh(home)
        lines, receipts = _lines(home, run, None if all_ else last)
        now = home.world.now()
        spends = {line.mark: meter.line_spend(line, now) for line in lines}
        hidden = _hidden(lines, receipts)
        total = sum(spends.values(), Decimal(0)) + sum((usd_ * number for usd_, number in hidden.items()), Decimal(0))
        is_at_most, num_left_out = receipts.is_at_most, sum(hidden.values())
        provider_bills = home.ledger.bills(spends)
        bills = [bill for line in lines if (bill := compare(line, provider_bills, now)) is not None]
        by_mark = {bill.mark: bill for bill in bills}
        output.emit(
            "ledger/1",
            {
                "lines": [
                    {**dump_line(line), "spend_usd": str(spends[line.mark]), **_bill_of(by_mark.get(line.mark))}
                    for line in lines
                ],
                "num_left_out": num_left_out,
                "total_usd": str(total),
                "is_at_most": is_at_most,
                "margin_s": meter.MARGIN_S,
                "problems": problems,
            },
        )
        column = UsdColumn.of(
            [*hidden, *spends.values(), *(each for bill in bills for each in (bill.ours_usd, bill.provider_usd))]
        )
        rows: list[tuple[object, ...]] = [
            (
                line.run_id or "(no run)",
                line.attempt,
                line.provider,
                line.offer,
                f"{usd(line.rate_usd_per_hour)}/h",
                format_moment(line.created_at or line.intent_at),
                format_moment(line.destroyed_at),
                line.state,
                meter.billing_word(line),
                meter.at_most(line) + column.show(spends[line.mark]),
                *_shown(column, by_mark.get(line.mark)),
            )
            for line in lines
        ]
        before = sum((column.up(usd_) * number for usd_, number in hidden.items()), Decimal(0))
        if num_left_out:
            earlier = counted(num_left_out, "earlier line")
            rows.insert(0, (f"{earlier}, closed", "", "", "", "", "", "", "", "", column.show(before), "", ""))
        shown_total = ("at most " if is_at_most else "") + column.show(before + column.total(spends.values()))
        total_row = ("total", "", "", "", "", "", "", "", "", shown_total)
        headers = ["run", "attempt", "provider", "offer", "rate", "from", "until", "state", "billing", "dollars"]
        output.table([*headers, "provider bill", "difference"], [*rows, total_row])
        if num_left_out:
            output.say(f"{counted(num_left_out, 'earlier line')} not shown. Show them: homing ledger --all")
        say_problems(problems)
        _say_margin(total)
        if is_at_most:
            output.say(meter.AT_MOST_WORDS)
        _say_bills(column, bills)


def _lines(home: Home, run: str | None, last: int | None) -> tuple[list[LedgerLine], Receipts]:
    """Return the lines to show, oldest first, and the cost of all closed lines of the same runs."""
    most = _EVERY if last is None else last
    if run is None:
        receipts = home.ledger.receipts()  # first, so that a line closed between the two queries is not counted twice
        return home.ledger.last_lines(most), receipts
    row = find_run(home, run)
    if run == row.id:
        lines = home.ledger.lines(row.id)
        closed = [line for line in lines if line.destroyed_at is not None or line.created_at is None]
        is_at_most = any(line.is_at_most for line in lines)
        return lines, Receipts(Counter(line.spend_usd for line in closed), is_at_most)
    # A name means every run of that name: a total without the earlier ones would be wrong.
    receipts = home.ledger.receipts(row.name)
    return home.ledger.last_lines(most, row.name), receipts


def _hidden(lines: list[LedgerLine], receipts: Receipts) -> dict[Decimal, int]:
    """Return the amounts of the closed lines that are not in `lines`, and how many lines have each amount."""
    left = Counter(receipts.amounts)
    left.subtract(line.spend_usd for line in lines if line.destroyed_at is not None or line.created_at is None)
    hidden: Counter[Decimal] = Counter()
    for amount, number in left.items():
        hidden[Decimal(amount)] += max(0, number)
    return {usd_: number for usd_, number in hidden.items() if number}


def _bill_of(bill: Bill | None) -> dict[str, Any]:
    if bill is None:
        return {"provider_usd": None, "difference_usd": None}
    return {"provider_usd": str(bill.provider_usd), "difference_usd": str(bill.difference_usd)}


def _shown(column: UsdColumn, bill: Bill | None) -> tuple[str, str]:
    if bill is None:
        return "", ""
    return column.show(bill.provider_usd), column.show_difference(bill.ours_usd, bill.provider_usd)


def _say_bills(column: UsdColumn, bills: list[Bill]) -> None:
    """Compare our count with the providers' own figures, and warn where they differ by more than the stated margin."""
    if not bills:
        return
    ours, reported = (column.total(bill.ours_usd for bill in bills), column.total(bill.provider_usd for bill in bills))
    summary = f"Counted by homing: {column.show(ours)}, reported by providers: {column.show(reported)}"
    output.say(f"{summary}, over {counted(len(bills), 'instance')} with a provider report.")
    for bill in bills:
        if not bill.is_within_margin:
            output.say(
                f"warning: {bill.mark}: provider reports {usd(bill.provider_usd)}, homing counted {usd(bill.ours_usd)}:"
                f" {_apart(bill)};"
                " the larger amount counts against the limit. See the provider's usage page."
            )


def _apart(bill: Bill) -> str:
    if bill.difference_usd < 0:
        return f"the provider's is {usd(-bill.difference_usd)} higher; ours should never be lower"
    return f"they differ by {usd(bill.difference_usd)}, more than the stated margin of {usd(bill.margin_usd)}"


def _say_margin(total: Decimal) -> None:
    if total:
        output.say(meter.MARGIN_WORDS)
