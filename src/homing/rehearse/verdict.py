"""Verdict of a rehearsal: the fake cloud's bill against our ledger, and what is left over. Each check can fail.

The bill is authoritative: the fake cloud knows what billed from when to when. The ledger must list every instance on
it, with at least as many dollars, and at most the margin more.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine
from homing.cloud.ledger.mark import shown_mark

__all__ = ["Row", "Verdict", "compare"]

_ROUNDING_USD = Decimal("0.000001")


@dataclass(frozen=True)
class Row:
    """One mark: what the cloud billed for it, and what our ledger says."""

    mark: str
    instances: int  # with this mark, on the bill
    billed_s: float
    bill_usd: Decimal
    ledger_usd: Decimal


@dataclass(frozen=True)
class Verdict:
    rows: list[Row]
    problems: list[str]  # empty: the rehearsal succeeded

    @property
    def bill_usd(self) -> Decimal:
        return sum((row.bill_usd for row in self.rows), Decimal(0))

    @property
    def ledger_usd(self) -> Decimal:
        return sum((row.ledger_usd for row in self.rows), Decimal(0))


def compare(bill: list[dict[str, Any]], now: float, lines: list[LedgerLine], limit_usd: Decimal) -> Verdict:
    """Compare the fake cloud's /double/bill (`now` by its clock) with the ledger."""
    problems = [
        f"{each['kind']} {each['id']} ({each['mark']}) is still billing." for each in bill if each["until"] is None
    ]
    problems += [f"The ledger has not closed {line.mark}: {line.state}." for line in lines if line.destroyed_at is None]
    machines = [each for each in bill if each["kind"] == "instance"]
    rows = []
    for mark in dict.fromkeys([*(shown_mark(line.mark) for line in lines), *(each["mark"] for each in machines)]):
        ours = [each for each in machines if each["mark"] == mark]
        of_mark = [line for line in lines if shown_mark(line.mark) == mark]
        spend = sum((Decimal(line.spend_usd) for line in of_mark), Decimal(0))
        seconds = sum((now if each["until"] is None else each["until"]) - each["since"] for each in ours)
        row = Row(mark, len(ours), seconds, sum((Decimal(each["usd"]) for each in ours), Decimal(0)), spend)
        rows.append(row)
        problems += _disagreement(row, of_mark)
    problems += _overlaps(machines, now)
    total = sum((Decimal(each["usd"]) for each in bill), Decimal(0))
    if total > limit_usd:
        problems.append(f"It cost {meter.show_usd(total)}, more than the limit of {meter.show_usd(limit_usd)}.")
    return Verdict(rows, problems)


def _disagreement(row: Row, lines: list[LedgerLine]) -> list[str]:
    if not lines:
        return [f"{row.mark} was billed {meter.show_usd(row.bill_usd)} and but is not in the ledger."]
    margin = sum((meter.cost(Decimal(line.rate_usd_per_hour), meter.MARGIN_S) for line in lines), Decimal(0))
    if row.ledger_usd < row.bill_usd - _ROUNDING_USD:
        return [f"The ledger has {row.ledger_usd} for {row.mark}, less than the {row.bill_usd} billed."]
    if row.ledger_usd > row.bill_usd + margin and not any(line.is_at_most for line in lines):
        return [f"The ledger has {row.ledger_usd} for {row.mark}, far more than the {row.bill_usd} billed."]
    return []


def _overlaps(machines: list[dict[str, Any]], now: float) -> list[str]:
    """Report machines that billed at the same time: a run has only one at a time."""
    in_order = sorted(machines, key=lambda each: each["since"])
    found = []
    for earlier, later in itertools.pairwise(in_order):
        if (now if earlier["until"] is None else earlier["until"]) > later["since"]:
            found.append(f"{earlier['id']} and {later['id']} billed at the same time.")
    return found
