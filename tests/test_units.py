from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homing import units


@pytest.mark.parametrize(
    ("text", "dollars"),
    [("$12.00", "12.00"), ("12", "12"), (12, "12"), ("1,200.50", "1200.50"), ("3 usd", "3"), (0.36, "0.36")],
)
def test_dollars_are_read_as_people_write_them(text: object, dollars: str) -> None:
    assert units.parse_usd(text) == Decimal(dollars)


@pytest.mark.parametrize("text", ["1,50", "0,07", "1,5", "1,500", "0,070", "1.500,00", "$1,20.50", "12,", "1,2,3.00"])
def test_a_comma_that_may_be_a_point_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"write 1\.50, or 1500"):
        units.parse_usd(text)


@pytest.mark.parametrize("text", ["", "-1", "$-3", "twelve", "nan", "inf", True, "$1.2.3"])
def test_what_is_no_amount_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match=r"such as \$12"):
        units.parse_usd(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("2d", 172800), (45, 45), ("45", 45), ("500ms", 0.5), ("1.5h", 5400)],
)
def test_durations_are_read_as_people_write_them(text: object, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "-5m", "10 parsecs", True, float("inf"), "1h 3x"])
def test_what_is_no_duration_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2B", 2 * 10**9),
        ("131,072", 131072),
        ("1.5M", 1_500_000),
        ("10k", 10_000),
        (512, 512),
        ("1e9", 10**9),
        (1e9, 10**9),
        ("1.5e6", 1_500_000),
        ("1.000M", 10**6),
    ],
)
def test_counts_are_read_as_people_write_them(text: object, count: int) -> None:
    assert units.parse_count(text) == count


@pytest.mark.parametrize("text", ["1.000", 1.0, "10.000", 256.0])
def test_a_point_that_may_mean_thousands_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="write 1, or 1000"):
        units.parse_count(text)


@pytest.mark.parametrize("text", ["", "1.5", "-3", "2X", True, "k", "1,2", 0.5])
def test_what_is_no_count_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="not a count"):
        units.parse_count(text)


def test_sizes_know_thousands_and_powers_of_two() -> None:
    assert units.parse_bytes("100MB") == 100_000_000
    assert units.parse_bytes("1.5GiB") == 3 * 2**29
    with pytest.raises(ValueError, match="not a size"):
        units.parse_bytes("100MBit")


def test_printing_never_turns_a_cost_into_nothing() -> None:
    assert units.format_usd(Decimal("0.0004")) == "$0.0004"
    assert units.format_usd(Decimal("0.0092")) == "$0.0092"
    assert units.format_usd(Decimal("0.01461")) == "$0.0147", "the same digits above a cent, and up"
    assert units.format_usd(Decimal("0.99995")) == "$1.00"
    assert units.format_usd(Decimal("1.831")) == "$1.84"
    assert (units.format_usd(Decimal("0.1000")), units.format_usd(0.36)) == ("$0.10", "$0.36")
    assert units.format_usd(Decimal("1234.5")) == "$1,234.50"
    assert units.format_usd(Decimal(0)) == "$0.00"


def test_a_column_of_dollars_adds_up_as_it_is_read_and_never_says_less() -> None:
    amounts = [Decimal("12.341244"), Decimal("0.00231"), Decimal("0.5")]
    column = units.UsdColumn.of(amounts)
    assert [column.show(amount) for amount in amounts] == ["$12.3413", "$0.0024", "$0.5000"]
    assert column.show(column.total(amounts)) == "$12.8437"
    cents = units.UsdColumn.of([Decimal("1234.5"), Decimal("0.90")])
    assert [cents.show(Decimal("1234.5")), cents.show(cents.total([]))] == ["$1,234.50", "$0.00"]


def test_a_difference_that_is_too_small_to_be_shown_is_said_as_that() -> None:
    column = units.UsdColumn.of([Decimal("0.049401")])
    assert column.show_difference(Decimal("0.049401"), Decimal("0.0494")) == "under $0.0001"
    assert column.show_difference(Decimal("0.0494"), Decimal("0.0494")) == "+$0.0000"
    assert column.show_difference(Decimal("0.0204"), Decimal("0.0301")) == "-$0.0097"


@given(st.lists(st.decimals(0, 10_000, places=7), max_size=20))
def test_a_column_total_is_the_sum_of_the_shown_values_and_not_below_the_real_one(amounts: list[Decimal]) -> None:
    column = units.UsdColumn.of(amounts)
    shown = [units.parse_usd(column.show(amount).replace(",", "")) for amount in amounts]
    total = units.parse_usd(column.show(column.total(amounts)).replace(",", ""))
    assert total == sum(shown)
    assert 0 <= total - sum(amounts) <= column.grain * len(amounts)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.26, "0.3s"), (59.6, "1m00s"), (61, "1m01s"), (7830, "2h10m"), (200000, "2d07h")]
)
def test_durations_print_in_two_units(seconds: float, text: str) -> None:
    assert units.format_duration(seconds) == text


@given(st.integers(min_value=0, max_value=10**15))
def test_a_printed_whole_number_reads_back(number: int) -> None:
    assert units.parse_count(f"{number:,}") == number
    assert units.parse_count(str(number)) == number


def test_counts_print_with_three_figures() -> None:
    assert units.format_count(1_234_567) == "1.23M"
    assert units.format_count(74_918_400) == "74.9M"
    assert units.format_count(12) == "12"
    assert [units.format_count(n) for n in (999, 999_400, 999_700, 999_999_999)] == ["999", "999k", "1M", "1B"]
    assert units.format_bytes(1_117_450_000) == "1.12 GB"


def test_one_thing_is_no_things() -> None:
    said = [units.counted(number, "instance") for number in (0, 1, 1200)]
    assert said == ["0 instances", "1 instance", "1,200 instances"]
    assert units.counted(2, "entry", "entries") == "2 entries"


@pytest.mark.parametrize("text", ["NaN", "sNaN", "Infinity", "-Infinity", "1e30", "1e308", "1e999999", "-1e30"])
def test_showing_what_no_dollars_are_never_raises(text: str) -> None:
    amount = Decimal(text)
    column = units.UsdColumn.of([amount, Decimal("1.5")])
    assert units.format_usd(amount).startswith("$")
    assert column.show(amount).startswith("$")
    assert column.show(Decimal("1.5")) == "$1.50"


def test_showing_what_no_time_is_never_raises() -> None:
    for number in (math.nan, math.inf, -math.inf, 1e308):
        assert units.format_duration(number)
        assert units.format_moment(number) == "?"


@pytest.mark.parametrize("parse", [units.parse_count, units.parse_bytes])
def test_an_enormous_count_is_refused_and_not_worked_out(parse: Callable[[object], int]) -> None:
    with pytest.raises(ValueError, match="the maximum is"):
        parse("1e999999999")


def test_a_time_beyond_a_century_is_refused() -> None:
    with pytest.raises(ValueError, match="the maximum is"):
        units.parse_duration(1e30)
