"""Parses and formats dollars, durations, timestamps, bytes and counts.

A user writes `$12.00`, `30m`, `100MB`, `2B`; the code uses Decimal dollars, seconds, bytes and ints.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_UP, Decimal, InvalidOperation

__all__ = [
    "MOST_S",
    "MOST_USD",
    "UsdColumn",
    "counted",
    "format_bytes",
    "format_count",
    "format_duration",
    "format_moment",
    "format_rate",
    "format_usd",
    "parse_bytes",
    "parse_count",
    "parse_duration",
    "parse_usd",
]

MOST_USD = Decimal(10**9)  # the highest spend limit that a user can set
MOST_S = 36500 * 86400.0
_MOST_COUNT = Decimal(10**24)
_MOST_SHOWN = Decimal(10**15)  # no real dollar amount is this large; larger ones are shown in scientific notation
_CENT = Decimal("0.01")
_DURATION_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_NUMBER = r"(\d+(?:[_,]\d{3})*(?:\.\d+)?|\.\d+|\d+(?:\.\d+)?[eE][+]?\d+)"


def parse_usd(value: object) -> Decimal:
    """Parse `$12`, `12.50`, `$1,200.00`, `12 usd` or 12 into a Decimal. Raise ValueError if negative or not finite.

    An ambiguous comma is rejected as well. If 1,50 were read with a thousands separator, the limit would be a hundred
    times the intended one.
    """
    wrong = f"{value!r} is not a dollar amount, such as $12.00"
    if isinstance(value, bool):
        raise ValueError(wrong)
    text = re.sub(r"(?i)\s*usd$", "", str(value).strip()).removeprefix("$").strip().replace("_", "")
    if "," in text:
        if not re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+\.\d\d", text):
            raise ValueError(f"{wrong}; the comma is ambiguous: write 1.50, or 1500")
        text = text.replace(",", "")
    try:
        amount = Decimal(text)
    except InvalidOperation:
        raise ValueError(wrong) from None
    if not amount.is_finite() or amount < 0:
        raise ValueError(wrong)
    if amount > MOST_USD:
        raise ValueError(f"{value!r} is too large: the maximum is {format_usd(MOST_USD)}")
    return amount


def parse_duration(value: object) -> float:
    """Parse `90s`, `30m`, `1h30m`, `2d` or a number of seconds into seconds."""
    wrong = f"{value!r} is not a duration, such as 90s, 30m or 1h30m"
    if isinstance(value, bool):
        raise ValueError(wrong)
    if isinstance(value, (int, float)):
        seconds = float(value)
    else:
        text = str(value).strip().lower().replace(" ", "")
        if re.fullmatch(r"\d+(\.\d+)?", text):
            seconds = float(text)
        elif re.fullmatch(r"(\d+(\.\d+)?(ms|[smhd]))+", text):
            seconds = sum(float(n) * _DURATION_S[unit] for n, _, unit in re.findall(r"(\d+(\.\d+)?)(ms|[smhd])", text))
        else:
            raise ValueError(wrong)
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError(wrong)
    if seconds > MOST_S:
        raise ValueError(f"{value!r} is too long: the maximum is {format_duration(MOST_S)}")
    return seconds


def parse_count(value: object) -> int:
    """Parse `2B`, `131,072`, `1.5M`, `10k` or 512 into an int. Raise ValueError if that is impossible.

    Fractions are rejected, and so is 1.000, because it may mean 1000.
    """
    return _parse_scaled(value, _COUNT, "a count, such as 131072, 10k, 1.5M or 2B")


def parse_bytes(value: object) -> int:
    """Parse `100MB`, `1.5GiB` or 4096 into a number of bytes."""
    return _parse_scaled(value, _BYTES, "a size, such as 100MB or 1.5GiB")


def _parse_scaled(value: object, scales: dict[str, int], shape: str) -> int:
    wrong = f"{value!r} is not {shape}"
    if isinstance(value, bool):
        raise ValueError(wrong)
    match = re.fullmatch(_NUMBER + r"\s*([a-zA-Z]*)", str(value).strip())
    if not match or match[2].lower() not in scales:
        raise ValueError(wrong)
    plain = Decimal(match[1].replace(",", "").replace("_", ""))
    # checked before multiplying or converting to int, because 1e999999999 would exhaust the memory
    if plain > _MOST_COUNT:
        raise ValueError(f"{wrong}; the maximum is {_MOST_COUNT:.0e}")
    number = plain * scales[match[2].lower()]
    if number != number.to_integral_value():
        raise ValueError(wrong)
    # Accept large whole floats, because YAML parses 1e9 as a float. Assume that a smaller one had a decimal point.
    has_point = number < 1000 if isinstance(value, float) else "." in match[1] and "e" not in match[1].lower()
    if has_point and not match[2]:
        raise ValueError(f"{wrong}; the point is ambiguous: write 1, or 1000")
    return int(number)


def format_usd(amount: Decimal | float) -> str:
    """Format dollars to the cent, or to a hundredth of a cent if the amount is below a dollar and not in whole cents.

    The finer digits let a running total below a dollar grow smoothly. Amounts are always rounded up, so that the amount
    shown is never less than the amount paid.
    """
    amount = Decimal(str(amount))
    if not amount.is_finite() or abs(amount) >= _MOST_SHOWN:
        return _odd_usd(amount)
    is_fine = abs(amount) <= Decimal("0.9999") and amount != amount.quantize(_CENT)
    return f"${amount.quantize(_CENT / 100 if is_fine else _CENT, rounding=ROUND_UP):,}"


def _odd_usd(amount: Decimal) -> str:
    """Format an amount that is not finite or is absurdly large. Never raise: the result is part of a message."""
    return f"${amount:.3e}" if amount.is_finite() else "$?"


@dataclass(frozen=True)
class UsdColumn:
    """Formats a column of dollar amounts so that the column adds up.

    All amounts are rounded up to the same digit before they are summed.
    """

    grain: Decimal

    @classmethod
    def of(cls, amounts: Iterable[Decimal]) -> UsdColumn:
        """Round to the cent if all amounts are whole cents, else to a hundredth of a cent."""
        shown = [amount for amount in amounts if amount.is_finite() and abs(amount) < _MOST_SHOWN]
        return cls(_CENT if all(amount == amount.quantize(_CENT) for amount in shown) else _CENT / 100)

    def up(self, amount: Decimal) -> Decimal:
        if not amount.is_finite() or abs(amount) >= _MOST_SHOWN:
            return amount
        return amount.quantize(self.grain, rounding=ROUND_UP)

    def total(self, amounts: Iterable[Decimal]) -> Decimal:
        return sum((self.up(amount) for amount in amounts), Decimal(0).quantize(self.grain))

    def show(self, amount: Decimal) -> str:
        if not amount.is_finite() or abs(amount) >= _MOST_SHOWN:
            return _odd_usd(amount)
        return f"${self.up(amount):,}"

    def show_difference(self, ours: Decimal, reference: Decimal) -> str:
        """Format the difference between the displayed amounts, or "under $0.01" if it is less than the last digit."""
        if ours != reference and abs(ours - reference) < self.grain:
            return f"under {self.show(self.grain)}"
        difference = self.up(ours) - self.up(reference)
        return f"{'-' if difference < 0 else '+'}{self.show(abs(difference))}"


def format_moment(t: float | None) -> str:
    """Format a time as UTC, to the second; "" for None."""
    try:
        return "" if t is None else datetime.datetime.fromtimestamp(t, tz=datetime.UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ArithmeticError, OSError, ValueError):  # the year is out of range
        return "?"


def format_duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def format_count(number: float) -> str:
    """Format a number for prose to three significant digits: 1234567 -> 1.23M. Tables show all digits."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        # Switch to the next unit as soon as three digits would round up to it: 999,700 is 1M, not 1e+03k.
        if abs(number) >= size * (0.9995 if size > 1000 else 1):
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def counted(number: int, thing: str, things: str = "") -> str:
    """Format a count with its noun: 1 -> "1 instance", 1200 -> "1,200 instances". `things` is an irregular plural."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def format_rate(tokens_per_s: float) -> str:
    return f"{format_count(tokens_per_s)} tok/s"


def format_bytes(size: float) -> str:
    for unit_size, unit in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(size) >= unit_size:
            return f"{size / unit_size:.2f} {unit}"
    return f"{size:.0f} B"
