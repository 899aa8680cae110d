"""Every instance ever requested, with its cost: what `homing ledger` shows.

refresh -> the newest lines and those that may be billing -> the spend of each -> Costs, with the providers' own figures
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from homing.api.lookup.find_runs import find_run, open_home
from homing.cloud.home import Home
from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine, Receipts
from homing.cloud.ledger.meter import Bill, compare
from homing.cloud.reconcile.reconcile import refresh
from homing.cloud.reconcile.run_status import dump_line

__all__ = ["Costs", "read_ledger"]

_EVERY = 1 << 62  # a row limit so high that every row is included


@dataclass(frozen=True)
class Costs:
    """The ledger lines to show, oldest first, and the costs of all lines of the same runs, shown or not."""

    lines: list[LedgerLine]
    spends: dict[str, Decimal]  # by mark
    hidden: dict[Decimal, int]  # amount -> number of closed lines with that amount that are not in `lines`
    is_at_most: bool
    bills: list[Bill]  # only for lines whose cost a provider has reported
    problems: list[str]

    @property
    def num_left_out(self) -> int:
        return sum(self.hidden.values())

    @property
    def total_usd(self) -> Decimal:
        hidden = sum((usd * number for usd, number in self.hidden.items()), Decimal(0))
        return sum(self.spends.values(), Decimal(0)) + hidden

    def to_dict(self) -> dict[str, Any]:
        by_mark = {bill.mark: bill for bill in self.bills}
        return {
            "lines": [
                {**dump_line(line), "spend_usd": str(self.spends[line.mark]), **_dump_bill(by_mark.get(line.mark))}
                for line in self.lines
            ],
            "num_left_out": self.num_left_out,
            "total_usd": str(self.total_usd),
            "is_at_most": self.is_at_most,
            "margin_s": meter.MARGIN_S,
            "problems": self.problems,
        }


def read_ledger(run: str | None = None, *, last: int = 50, is_all: bool = False, home: Home | None = None) -> Costs:
    """Update the ledger from the providers. Return the newest `last` lines, and all lines that may be billing.

    `run`: an id, or a name, which selects every run of that name; None: all runs. `is_all`: return all lines.
    """
    with open_home(home) as opened:
        problems = refresh(opened)
        lines, receipts = _lines(opened, run, None if is_all else last)
        now = opened.world.now()
        spends = {line.mark: meter.line_spend(line, now) for line in lines}
        reported = opened.ledger.bills(spends)
        bills = [bill for line in lines if (bill := compare(line, reported, now)) is not None]
        return Costs(lines, spends, _hidden(lines, receipts), receipts.is_at_most, bills, problems)


def _lines(home: Home, run: str | None, last: int | None) -> tuple[list[LedgerLine], Receipts]:
    """Return the lines to show, oldest first, and the costs of all closed lines of the same runs, shown or not."""
    most = _EVERY if last is None else last
    if run is None:
        receipts = home.ledger.receipts()  # queried first, so that a line closed between the queries counts only once
        return home.ledger.last_lines(most), receipts
    row = find_run(home, run)
    if run == row.id:
        lines = home.ledger.lines(row.id)
        closed = [line for line in lines if line.destroyed_at is not None or line.created_at is None]
        is_at_most = any(line.is_at_most for line in lines)
        return lines, Receipts(Counter(line.spend_usd for line in closed), is_at_most)
    # A name means every run of that name, because a total without the earlier runs would be wrong.
    receipts = home.ledger.receipts(row.name)
    return home.ledger.last_lines(most, row.name), receipts


def _hidden(lines: list[LedgerLine], receipts: Receipts) -> dict[Decimal, int]:
    """Return a dict: amount -> number of closed lines with that amount, not counting those in `lines`."""
    left = Counter(receipts.amounts)
    left.subtract(line.spend_usd for line in lines if line.destroyed_at is not None or line.created_at is None)
    hidden: Counter[Decimal] = Counter()
    for amount, number in left.items():
        hidden[Decimal(amount)] += max(0, number)
    return {usd: number for usd, number in hidden.items() if number}


def _dump_bill(bill: Bill | None) -> dict[str, Any]:
    if bill is None:
        return {"provider_usd": None, "difference_usd": None}
    return {"provider_usd": str(bill.provider_usd), "difference_usd": str(bill.difference_usd)}
