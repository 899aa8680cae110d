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
from homing.config.home_and_run_files import begun_elsewhere

__all__ = ["Costs", "read_ledger"]

_EVERY = 1 << 62  # a row limit so high that every row is included


@dataclass(frozen=True)
class Costs:
    """The ledger lines to show, oldest first, and the costs of all lines of the same runs, shown or not.

    The dollars of the `local` provider are made up, so they are summed separately from real ones.
    """

    lines: list[LedgerLine]
    spends: dict[str, Decimal]  # by mark
    hidden: dict[Decimal, int]  # amount -> number of closed lines with that amount that are not in `lines`
    hidden_made_up: dict[Decimal, int]  # likewise, for lines with made-up dollars
    is_at_most: bool
    bills: list[Bill]  # only for lines whose cost a provider has reported
    problems: list[str]
    elsewhere: list[str]  # ids of runs with the same name that were started in other folders and are not included

    @property
    def num_left_out(self) -> int:
        return sum(self.hidden.values()) + sum(self.hidden_made_up.values())

    @property
    def total_usd(self) -> Decimal:
        """The real dollars of all lines."""
        return sum(self.shown_usd(is_real=True), _sum(self.hidden))

    @property
    def made_up_usd(self) -> Decimal:
        """The dollars of runs on this computer, which no one is billed for."""
        return sum(self.shown_usd(is_real=False), _sum(self.hidden_made_up))

    @property
    def has_real(self) -> bool:
        return bool(self.hidden) or any(map(meter.is_charged, self.lines)) or not self.has_made_up

    @property
    def has_made_up(self) -> bool:
        return bool(self.hidden_made_up) or not all(map(meter.is_charged, self.lines))

    def shown_usd(self, *, is_real: bool) -> list[Decimal]:
        """Return the costs of the lines to show, either the real or the made-up ones."""
        return [self.spends[line.mark] for line in self.lines if meter.is_charged(line) == is_real]

    def to_dict(self) -> dict[str, Any]:
        by_mark = {bill.mark: bill for bill in self.bills}
        return {
            "lines": [
                {
                    **dump_line(line),
                    "spend_usd": str(self.spends[line.mark]),
                    "is_made_up": not meter.is_charged(line),
                    **_dump_bill(by_mark.get(line.mark)),
                }
                for line in self.lines
            ],
            "num_left_out": self.num_left_out,
            "total_usd": str(self.total_usd),
            "made_up_usd": str(self.made_up_usd),
            "is_at_most": self.is_at_most,
            "margin_s": meter.MARGIN_S,
            "problems": self.problems,
            "elsewhere": self.elsewhere,
        }


def read_ledger(run: str | None = None, *, last: int = 50, is_all: bool = False, home: Home | None = None) -> Costs:
    """Update the ledger from the providers. Return the newest `last` lines, and all lines that may be billing.

    `run`: an id, or a name, which selects every run of that name from the same folder; None: all runs. `is_all`: return
    all lines.
    """
    with open_home(home) as opened:
        problems = refresh(opened)
        lines, receipts, elsewhere = _lines(opened, run, None if is_all else last)
        now = opened.world.now()
        spends = {line.mark: meter.line_spend(line, now) for line in lines}
        reported = opened.ledger.bills(spends)
        bills = [bill for line in lines if (bill := compare(line, reported, now)) is not None]
        real, made_up = _hidden(lines, receipts, is_real=True), _hidden(lines, receipts, is_real=False)
        is_at_most = any(each.is_at_most for each in receipts.values())
        return Costs(lines, spends, real, made_up, is_at_most, bills, problems, elsewhere)


def _lines(home: Home, run: str | None, last: int | None) -> tuple[list[LedgerLine], dict[str, Receipts], list[str]]:
    """Return the lines to show, oldest first, the costs of all closed lines of the same runs, and the runs left out."""
    most = _EVERY if last is None else last
    if run is None:
        receipts = home.ledger.receipts()  # queried first, so that a line closed between the queries counts only once
        return home.ledger.last_lines(most), receipts, []
    row = find_run(home, run)
    if run == row.id:
        lines = home.ledger.lines(row.id)
        return lines, _receipts(lines), []
    # A name means every run of that name in this folder, because a total without the earlier runs would be wrong. Other
    # folders may have other runs of the same name.
    folder = begun_elsewhere(row.id)
    elsewhere = [each.id for each in home.ledger.runs_called(row.name) if begun_elsewhere(each.id) != folder]
    receipts = home.ledger.receipts(row.name, elsewhere)
    return home.ledger.last_lines(most, row.name, elsewhere), receipts, elsewhere


def _receipts(lines: list[LedgerLine]) -> dict[str, Receipts]:
    found = {}
    for provider in {line.provider for line in lines}:
        own = [line for line in lines if line.provider == provider]
        amounts = Counter(line.spend_usd for line in own if _is_closed(line))
        found[provider] = Receipts(amounts, any(line.is_at_most for line in own))
    return found


def _hidden(lines: list[LedgerLine], receipts: dict[str, Receipts], *, is_real: bool) -> dict[Decimal, int]:
    """Return a dict: amount -> number of closed lines with that amount, not counting those in `lines`."""
    hidden: Counter[Decimal] = Counter()
    for provider, of_provider in receipts.items():
        if (provider not in meter.FREE_PROVIDERS) != is_real:
            continue
        left = Counter(of_provider.amounts)
        left.subtract(line.spend_usd for line in lines if line.provider == provider and _is_closed(line))
        for amount, number in left.items():
            hidden[Decimal(amount)] += max(0, number)
    return {usd: number for usd, number in hidden.items() if number}


def _is_closed(line: LedgerLine) -> bool:
    return line.destroyed_at is not None or line.created_at is None


def _sum(amounts: dict[Decimal, int]) -> Decimal:
    return sum((usd * number for usd, number in amounts.items()), Decimal(0))


def _dump_bill(bill: Bill | None) -> dict[str, Any]:
    if bill is None:
        return {"provider_usd": None, "difference_usd": None}
    return {"provider_usd": str(bill.provider_usd), "difference_usd": str(bill.difference_usd)}
