"""The bill of the double against our ledger: each way in which a rehearsal can be bad is seen."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from homing.cloud.ledger.ledger import LedgerLine
from homing.rehearse.rehearsal import Verdict, compare

LIMIT = Decimal("1.00")


def billed(
    number: int, since: float = 0.0, until: float | None = 3600.0, usd: str = "0.36", **more: Any
) -> dict[str, Any]:
    messages = {
        "id": f"i-{number}",
        "mark": f"m-{number}",
        "since": since,
        "until": until,
        "usd": usd,
        "kind": "instance",
    }
    return {**messages, **more}


def line(number: int, usd: str = "0.36", destroyed_at: float | None = 3600.0) -> LedgerLine:
    return LedgerLine(
        mark=f"m-{number}", run_id="r", run_name="r", attempt=number, provider="fake", offer="o",
        rate_usd_per_hour="0.36", limit_usd="1", intent_at=0.0, instance_id=f"i-{number}", created_at=0.0,
        destroyed_at=destroyed_at, state="gone", billing="no", spend_usd=usd,
    )  # fmt: skip


def judge(bill: list[dict[str, Any]], lines: list[LedgerLine], limit: Decimal = LIMIT) -> Verdict:
    return compare(bill, 10_000.0, lines, limit)


def problem_of(bill: list[dict[str, Any]], lines: list[LedgerLine], limit: Decimal = LIMIT) -> str:
    (problem,) = judge(bill, lines, limit).problems
    return problem


def test_a_bill_that_the_ledger_knows_is_good() -> None:
    verdict = judge([billed(1), billed(2, 3600.0, 7200.0)], [line(1), line(2, "0.365")])
    assert verdict.problems == []
    assert (verdict.bill_usd, verdict.ledger_usd) == (Decimal("0.72"), Decimal("0.725"))
    assert [row.billed_s for row in verdict.rows] == [3600.0, 3600.0]


def test_what_still_bills_is_bad_machine_or_disk() -> None:
    assert "still billing" in problem_of([billed(1, until=None)], [line(1)])
    assert "volume v-1" in problem_of([billed(1), billed(1, until=None, id="v-1", kind="volume")], [line(1)])


def test_a_line_that_is_not_closed_is_bad() -> None:
    assert "has not closed m-1" in problem_of([billed(1)], [line(1, destroyed_at=None)])


def test_an_instance_that_the_ledger_does_not_know_is_bad() -> None:
    assert "not in the ledger" in problem_of([billed(1)], [])


def test_a_ledger_that_says_less_or_far_more_than_the_bill_is_bad() -> None:
    assert "less than" in problem_of([billed(1)], [line(1, "0.35")])
    assert "far more than" in problem_of([billed(1)], [line(1, "0.40")])


def test_two_machines_at_one_time_are_bad_also_under_one_mark() -> None:
    assert "at the same time" in problem_of([billed(1), billed(2, 1800.0, 5400.0)], [line(1), line(2)])
    twins = [billed(1, usd="0.18"), billed(1, usd="0.18", id="i-9")]
    verdict = judge(twins, [line(1)])
    assert [row.instances for row in verdict.rows] == [2]
    assert any("at the same time" in problem for problem in verdict.problems)


def test_more_than_the_limit_is_bad_and_the_disk_counts() -> None:
    disk = billed(1, id="v-1", kind="volume", usd="0.10")
    assert "more than the limit" in problem_of([billed(1), disk], [line(1)], Decimal("0.40"))
    assert judge([billed(1)], [line(1)], Decimal("0.40")).problems == []


def test_a_launch_that_was_refused_costs_nothing_and_is_no_problem() -> None:
    assert judge([], [line(1, "0")]).problems == []
