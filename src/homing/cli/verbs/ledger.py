"""`homing ledger`: every instance ever requested, with its cost."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

import typer

from homing.api.lookup.find_runs import usd
from homing.api.lookup.read_ledger import Costs, read_ledger
from homing.api.notices import say_problems
from homing.cli import output
from homing.cli.options import All, Json, Last
from homing.cloud.ledger import meter
from homing.cloud.ledger.meter import Bill
from homing.units import UsdColumn, counted, format_moment

__all__ = ["command"]

_HEADERS = ["run", "attempt", "provider", "offer", "rate", "from", "until", "state", "billing", "dollars"]


def command(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Show only this run; default: all runs.")] = None,
    last: Last = 50,
    all_: All = False,
    json_: Json = False,
) -> None:
    """List the newest instances, every instance that may still be billing, and the total spend.

    Rows are never deleted.
    """
    costs = read_ledger(run, last=last, is_all=all_)
    output.emit("ledger/1", costs.to_dict())
    bills = costs.bills
    column = UsdColumn.of(
        [
            *costs.hidden,
            *costs.hidden_made_up,
            *costs.spends.values(),
            *(each for bill in bills for each in (bill.ours_usd, bill.provider_usd)),
        ]
    )
    output.table([*_HEADERS, "provider bill", "difference"], _rows(costs, column))
    if costs.num_left_out:
        output.say(f"{counted(costs.num_left_out, 'earlier line')} not shown. Show them: homing ledger --all")
    if costs.elsewhere:
        said = counted(len(costs.elsewhere), "run of this name was", "runs of this name were")
        output.say(f"{said} started in other folders and not included: {', '.join(costs.elsewhere)}")
    if costs.has_made_up:
        output.say("The dollars of the local provider are made up, and no one is billed for them.")
    say_problems(costs.problems)
    if costs.total_usd:
        output.say(meter.MARGIN_WORDS)
    if costs.is_at_most:
        output.say(meter.AT_MOST_WORDS)
    _say_bills(column, bills)


def _rows(costs: Costs, column: UsdColumn) -> list[tuple[object, ...]]:
    by_mark = {bill.mark: bill for bill in costs.bills}
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
            meter.at_most(line) + column.show(costs.spends[line.mark]),
            *_shown(column, by_mark.get(line.mark)),
        )
        for line in costs.lines
    ]
    earlier, totals = [], []
    for is_real, hidden, name in ((True, costs.hidden, "total"), (False, costs.hidden_made_up, "total, made up")):
        before = sum((column.up(usd_) * number for usd_, number in hidden.items()), Decimal(0))
        if hidden:
            lines = counted(sum(hidden.values()), "earlier line")
            closed = f"{lines}, closed" if is_real else f"{lines}, closed, made up"
            earlier.append((closed, *[""] * 8, column.show(before), "", ""))
        if costs.has_real if is_real else costs.has_made_up:
            sum_usd = before + column.total(costs.shown_usd(is_real=is_real))
            totals.append((name, *[""] * 8, ("at most " if costs.is_at_most else "") + column.show(sum_usd)))
    return [*earlier, *rows, *totals]


def _shown(column: UsdColumn, bill: Bill | None) -> tuple[str, str]:
    if bill is None:
        return "", ""
    return column.show(bill.provider_usd), column.show_difference(bill.ours_usd, bill.provider_usd)


def _say_bills(column: UsdColumn, bills: list[Bill]) -> None:
    """Compare the recorded spend with the providers' figures; warn if they differ by more than the stated margin."""
    if not bills:
        return
    ours, reported = (column.total(bill.ours_usd for bill in bills), column.total(bill.provider_usd for bill in bills))
    summary = f"Counted by homing: {column.show(ours)}, reported by providers: {column.show(reported)}"
    output.say(f"{summary}. These figures cover {counted(len(bills), 'instance')} whose cost a provider has reported.")
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
