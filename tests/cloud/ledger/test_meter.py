"""Dollars so far, and the worst case."""

from __future__ import annotations

import dataclasses
import itertools
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing.cloud.ledger import meter
from homing.cloud.ledger.ledger import LedgerLine

LINE = LedgerLine("m", "r", "moss", 1, "local", "this-computer", "3.60", "12.00", intent_at=1000.0, created_at=1010.0)


def test_an_open_line_costs_from_the_create_call_until_now() -> None:
    assert meter.line_spend(LINE, 1110.0) == Decimal("0.1")


def test_before_the_create_call_nothing_is_spent() -> None:
    assert meter.line_spend(dataclasses.replace(LINE, created_at=None), 5000.0) == 0


def test_a_closed_line_is_a_receipt_and_no_longer_grows() -> None:
    closed = dataclasses.replace(LINE, destroyed_at=1110.0, spend_usd="0.1")
    assert meter.line_spend(closed, 99999.0) == Decimal("0.1")


def test_the_larger_of_the_providers_figure_and_ours_counts() -> None:
    assert meter.line_spend(dataclasses.replace(LINE, spend_usd="5.00"), 1110.0) == Decimal("5.00")


def test_a_clock_set_back_never_makes_the_cost_negative() -> None:
    assert meter.line_spend(LINE, 0.0) == 0


def test_all_attempts_count() -> None:
    closed = dataclasses.replace(LINE, destroyed_at=1110.0, spend_usd="2.00")
    assert meter.total_spend([closed, LINE], 1110.0) == Decimal("2.10")


@given(st.decimals(0, 10_000, places=6))
def test_the_displayed_amount_is_never_below_the_cost(amount: Decimal) -> None:
    shown = Decimal(meter.show_usd(amount).removeprefix("$").replace(",", ""))
    assert shown >= amount
    assert shown - amount < Decimal("0.01" if amount > Decimal("0.9999") else "0.0001")


def test_a_meter_does_not_jump_when_it_passes_a_cent() -> None:
    limit, tick = Decimal("0.10"), Decimal("0.0007")
    shown = [meter.show_spend(number * tick, limit) for number in range(1, 140)]
    assert shown[12:15] == ["$0.0091 of $0.10", "$0.0098 of $0.10", "$0.0105 of $0.10"]
    read = [Decimal(text.split(" ")[0].removeprefix("$")) for text in shown]
    assert {after - before for before, after in itertools.pairwise(read)} == {tick}


def test_a_suggested_limit_is_rounded_up_to_whole_cents() -> None:
    assert [meter.as_limit(Decimal(each)) for each in ("0.0712", "0.0042", "1234.5")] == ["0.08", "0.01", "1234.50"]


def test_the_worst_case_is_the_limit_or_less_with_a_time_limit() -> None:
    assert meter.worst_case(Decimal("2.00"), Decimal("12.00"), 0) == 12
    assert meter.worst_case(Decimal("2.00"), Decimal("12.00"), 3600) == Decimal("2.1")
    assert meter.worst_case(Decimal("2.00"), Decimal("1.00"), 3600) == 1
    assert meter.worst_case(Decimal("2.00"), Decimal("12.00"), 3600, Decimal(5)) == Decimal("7.1")


@pytest.mark.acceptance(128)
@pytest.mark.regression("ledger-margin")
def test_two_counts_of_one_instance_agree_within_the_stated_margin_or_not() -> None:
    line = dataclasses.replace(LINE, created_at=0.0, destroyed_at=3600.0, rate_usd_per_hour="3.60")
    assert meter.compare(line, {}, 0.0) is None
    messages = {"3.60": True, "3.45": True, "3.42": True, "3.30": False, "3.70": False, "3.6099": True, "3.4196": False}
    for reference, is_within in messages.items():
        bill = meter.compare(line, {line.mark: Decimal(reference)}, 9999.0)
        assert bill is not None
        assert bill.difference_usd == Decimal("3.60") - Decimal(reference)
        assert bill.is_within_margin == is_within, reference


def test_a_process_on_this_computer_without_a_rate_is_not_billing() -> None:
    free = dataclasses.replace(LINE, rate_usd_per_hour="0")
    assert meter.billing_word(free) == "no"
    assert meter.billing_word(LINE) == "maybe"
    assert meter.billing_word(dataclasses.replace(free, provider="runpod")) == "maybe"
